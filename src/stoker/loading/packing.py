"""Several samples in a row of fixed length. Settings, costs and source: `stoker.jobs.lengths`.

Rows are laid out once, by lengths alone: the longest sample first, into the fullest row that has room (best fit
decreasing). Each epoch shares its samples out anew among the places of their length, by keys, and takes the rows in a
keyed order: so an epoch has every sample once, and as many rows as any other. Where no two samples are equally long,
the same ones share a row in every epoch; they do not see one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.lengths import Packed
from stoker.loading.fields import Content, Fields
from stoker.loading.filling import holding
from stoker.loading.keys import Stream, key_of, keys_of_samples
from stoker.loading.order import Indices
from stoker.loading.samples import BadSample, Samples

POSITIONS, SEGMENTS = "position_ids", "segment_ids"
"""What is added to a row: places within each sample from 0, and the samples' numbers in the row from 1."""


class InRows(Samples):
    """Rows of samples, as samples."""

    is_in_memory = False

    def __init__(self, whole: Samples, lengths: Indices, settings: Packed, fields: Fields, seed: int) -> None:
        _require_room(whole, lengths, settings.into)
        if isinstance(fields.target, int):
            raise BadJob(
                f"Job(target={fields.target}) with packed rows, which are (inputs…, {POSITIONS}, {SEGMENTS}, target)",
                remedy="Leave target out: of samples that are tuples the last entry is the target.",
            )
        self.whole = whole
        self.name = f"{whole.name} (packed into {settings.into})"
        self.data_class = whole.data_class
        self._lengths, self._settings, self._fields, self._seed = lengths, settings, fields, seed
        rows = rows_of_lengths(np.sort(lengths)[::-1], settings.into)
        self._places = np.argsort(rows, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self._epoch: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """The share of the rows' tokens that is no padding."""
        return float(self._lengths.sum() / (len(self) * self._settings.into))

    def members(self, row: int, epoch: int) -> Indices:
        """The samples that share a row in an epoch, in their order."""
        if self._epoch[0] != epoch:
            keys = keys_of_samples(key_of(Stream.ORDER, self._seed, epoch, 0), np.arange(len(self._lengths)))
            self._epoch = (epoch, np.lexsort((keys, -self._lengths)))
        return self._epoch[1][self._places[self._starts[row] : self._starts[row + 1]]]

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of rows `indices` [B], each entry [B, into, ...]."""
        return torch.utils.data.default_collate(self.items(indices, epoch))

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """These rows, one by one."""
        return [self._row(self.members(int(row), epoch), epoch) for row in indices]

    def fingerprint(self) -> str:
        """The samples': how they are packed is told by the job's settings."""
        return self.whole.fingerprint()

    def prepare(self, content: Content) -> Content:
        """As the samples' source does."""
        return self.whole.prepare(content)

    def _row(self, members: Indices, epoch: int) -> Any:
        samples = self.whole.items(members, epoch)
        lengths = self._lengths[members].tolist()
        entries = [_entries(sample, self.name) for sample in samples]
        _require_whole(entries, lengths, members.tolist())
        target = _target_key(samples[0], self._fields)
        row: dict[Any, torch.Tensor] = {}
        for key in entries[0]:
            told = zip(entries, lengths, members, strict=True)
            parts = [_cut(entry.get(key), length, key, at) for entry, length, at in told]
            row[key] = self._filled(parts, self._settings.ignored if key == target else self._settings.pad)
        added = {
            POSITIONS: self._filled([torch.arange(length) for length in lengths], 0),
            SEGMENTS: self._filled([torch.full((length,), at) for at, length in enumerate(lengths, 1)], 0),
        }
        if isinstance(samples[0], Mapping):
            return {**row, **added}
        *inputs, last = row.values()
        return (*inputs, *added.values(), last)

    def _filled(self, parts: list[torch.Tensor], fill: float) -> torch.Tensor:
        """The parts one after the other, and `fill` up to the end of the row."""
        joined = torch.cat(parts)
        joined = joined.to(holding(joined.dtype, fill))
        rest = joined.new_full((self._settings.into - len(joined), *joined.shape[1:]), fill)
        return torch.cat([joined, rest])


def rows_of_lengths(lengths: Indices, into: int) -> Indices:
    """The row of each sample [N], rows numbered as they are begun; `lengths` go down, and none is beyond `into`.

    >>> rows_of_lengths(np.array([6, 5, 3, 2, 2, 1]), 8).tolist()
    [0, 1, 1, 0, 2, 2]
    """
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(into + 1)]
    has_room = 0  # bit r is set where a row has room for r more
    num_rows = 0
    for at, length in enumerate(lengths.tolist()):
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                has_room ^= 1 << room
        else:
            row, room = num_rows, into
            num_rows += 1
        rows[at] = row
        left = room - length
        if left:
            open_rows[left].append(row)
            has_room |= 1 << left
    return rows


def _require_room(samples: Samples, lengths: Indices, into: int) -> None:
    too_long = np.flatnonzero(lengths > into)
    if len(too_long):
        longest = int(lengths.argmax())
        raise BadJob(
            f"{len(too_long):,} of {len(lengths):,} samples of {samples.name} are longer than a row of {into}: sample "
            f"{longest} has a length of {lengths[longest]:,}",
            remedy="Cut them in the dataset, or pack into longer rows.",
        )


def _entries(sample: Any, name: str) -> dict[Any, Any]:
    """The entries of a sample by key or place."""
    if isinstance(sample, Mapping) and sample:
        return dict(sample)
    if isinstance(sample, tuple) and len(sample) > 1:
        return dict(enumerate(sample))
    raise BadSample(
        f"a sample of {name} is a {type(sample).__name__}; what is packed are dicts, and tuples of inputs and a target"
    )


def _require_whole(entries: list[dict[Any, Any]], lengths: list[int], members: list[int]) -> None:
    """Refuse to cut what is longer than its length, but for rows of one width, where the rest is padding."""
    widths = [{_width(entry) for entry in sample.values()} for sample in entries]
    if len(set().union(*widths)) == 1:
        return
    for found, length, index in zip(widths, lengths, members, strict=True):
        if max(found) > length:
            raise BadSample(f"sample {index} has an entry {max(found)} long, and a length of {length}: packed are "
                            "entries with one value for each token, and none is cut")  # fmt: skip


def _width(entry: Any) -> int:
    return len(entry) if hasattr(entry, "__len__") and getattr(entry, "shape", True) else 0


def _target_key(sample: Any, fields: Fields) -> Any:
    """The key or place of a sample's target; None where it has none."""
    keys = {key: key for key in sample} if isinstance(sample, Mapping) else tuple(range(len(sample)))
    return fields.target_of(keys)


def _cut(entry: Any, length: int, key: Any, index: int) -> torch.Tensor:
    tensor = torch.as_tensor(entry) if entry is not None else None
    if tensor is None or tensor.dim() == 0 or len(tensor) < length:
        found = "absent" if tensor is None else f"of shape {list(tensor.shape)}"
        raise BadSample(f"entry {key!r} of sample {index} is {found}, and was to be {length} long: packed are entries "
                        "with one value for each token")  # fmt: skip
    return tensor[:length]
