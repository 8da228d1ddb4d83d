"""Samples of different lengths: padded in a batch, bucketed, or packed into rows.

Settings, costs and sources of bucketing and packing: `stoker.jobs.lengths`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.fields import Fields
from stoker.jobs.lengths import Bucketed, Packed, bucketed, packed
from stoker.loading.fields import Content
from stoker.loading.order import (
    EpochOrder,
    Indices,
    KeyedPermutation,
    RandomStream,
    key_of,
    keys_of_samples,
    require_within,
)
from stoker.loading.samples import BadSample, Samples
from stoker.loading.transforms import ProgressiveResizing

__all__ = ["Bucketed", "Packed", "Padded", "bucketed", "has_one_shape", "packed", "padded", "segment_mask"]

IGNORED_TARGET = -100
"""A class index that stands for "no target here", as in PyTorch."""


@dataclass(frozen=True)
class Padded:
    """A `collate` for samples whose tensors differ in their first dimension: padded to the longest of the batch.

    Args:
        pad: fill value, or one for each entry by its key (for tuples: its place; default 0). Targets that are class
            numbers, and no input of the model as well, get what the job's loss ignores, if it is a cross-entropy of
            stoker's or PyTorch's (-100, or its `ignore_index`) or has an `ignore_index`; otherwise, and to have them
            counted, state it: `{"labels": 0}`.
        to: fixed length of every batch, so that all have one shape, which is also the forecast's.
        multiple_of: pad to a multiple of this.
        mask: for samples that are dicts, the name of an entry to add: 1 where a sample has a value, 0 where it is
            padded.

    Raises:
        BadJob: `to` or `multiple_of` is no positive whole number.
    """

    pad: float | Mapping[Any, float] = 0
    _: KW_ONLY
    to: int | None = None
    multiple_of: int = 1
    mask: str | None = None

    def __post_init__(self) -> None:
        settings: tuple[tuple[str, object], ...] = (("to", self.to), ("multiple_of", self.multiple_of))
        for name, value in settings:
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise BadJob(f"padded({name}=…) is a whole number, 1 or more, got {value!r}")

    def __call__(self, items: list[Any]) -> Content:
        """The batch: for each entry with a length, a tensor [B, longest, ...]; others as PyTorch collates them."""
        first = items[0]
        if isinstance(first, Mapping):
            batch = {key: self._entry([item[key] for item in items], key) for key in first}
            return batch if self.mask is None else {**batch, self.mask: self._mask(items)}
        if self.mask is not None:
            raise BadJob("padded(mask=…) names an entry, and samples are no dicts", remedy="Give samples as dicts.")
        if isinstance(first, tuple):
            columns = zip(*items, strict=True)
            return tuple(self._entry(list(column), place) for place, column in enumerate(columns))
        return self._entry(items, 0)

    def _entry(self, values: list[Any], key: Any) -> Any:
        if not all(_has_length(value) for value in values):
            return torch.utils.data.default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        fill = self.pad.get(key, 0) if isinstance(self.pad, Mapping) else self.pad
        # An empty list has neither the type nor the further dimensions of the others.
        typed = [tensor for tensor, value in zip(tensors, values, strict=True) if not isinstance(value, list) or value]
        typed = typed or tensors
        rest = {tuple(tensor.shape[1:]) for tensor in typed}
        if len(rest) > 1:
            raise ValueError(f"samples differ beyond their first dimension: {', '.join(map(str, sorted(rest)))}")
        dtype = dtype_holding(functools.reduce(torch.promote_types, [tensor.dtype for tensor in typed]), fill)
        padded_BT = typed[0].new_full((len(tensors), self._longest(tensors), *rest.pop()), fill, dtype=dtype)
        for row, tensor in enumerate(tensors):
            if len(tensor):
                padded_BT[row, : len(tensor)] = tensor
        return padded_BT

    def _longest(self, tensors: list[torch.Tensor]) -> int:
        longest = max(map(len, tensors))
        if self.to is None:
            return -(-longest // self.multiple_of) * self.multiple_of
        if longest > self.to:
            raise ValueError(f"a sample is {longest} long, and samples are padded to {self.to}")
        return self.to

    def _mask(self, items: list[Any]) -> torch.Tensor:
        """1 where a sample has a value, 0 where it is padded, int64 [B, longest], by its first entry with a length."""
        key = next((key for key, value in items[0].items() if _has_length(value)), None)
        if key is None:
            raise BadJob("padded(mask=…): no entry of a sample has a length")
        masks = [torch.ones(len(item[key]), dtype=torch.int64) for item in items]
        longest = self._longest(masks)
        return torch.stack([torch.cat([mask, mask.new_zeros(longest - len(mask))]) for mask in masks])


padded = Padded


@dataclass(frozen=True)
class _IgnoredInTargets:
    """`padded`, but class numbers that are targets alone are padded with `ignored`, unless its `pad` names them."""

    padded: Padded
    fields: Fields
    ignored: int

    def __call__(self, items: list[Any]) -> Content:
        """The batch, as `Padded` makes it."""
        first, pad = items[0], self.padded.pad
        keys: Any = {key: key for key in first} if isinstance(first, Mapping) else None
        keys = tuple(range(len(first))) if isinstance(first, tuple) else keys
        target = self.fields.target_of(keys)
        if target is None or (isinstance(pad, Mapping) and target in pad) or self._is_input(target):
            return self.padded(items)
        values = [torch.as_tensor(item[target]) for item in items if _has_length(item[target])]
        if any(value.is_floating_point() and len(value) for value in values):
            return self.padded(items)
        fills = pad if isinstance(pad, Mapping) else dict.fromkeys(keys, pad)
        return dataclasses.replace(self.padded, pad={**fills, target: self.ignored})(items)

    def _is_input(self, target: Any) -> bool:
        """Whether the model is given the target too, of which an embedding takes no -100."""
        inputs = self.fields.inputs
        return target == inputs or (isinstance(inputs, Sequence) and not isinstance(inputs, str) and target in inputs)


def collate_of(job: Job) -> Callable[[list[Any]], Any] | None:
    """The job's collate function; one that pads does it with what the job's loss ignores in targets."""
    collate, ignored = job.fields.collate, ignored_target(job.objective.loss)
    if not isinstance(collate, Padded) or not isinstance(ignored, int):
        return collate
    return _IgnoredInTargets(collate, job.fields, ignored)


def ignored_target(loss: Any) -> Any:
    """The class number that a loss leaves out where it is the target; None where it has none that is known."""
    if isinstance(loss, str):
        return IGNORED_TARGET if loss in ("cross_entropy", "token_cross_entropy") else None
    function = loss.func if isinstance(loss, functools.partial) else loss
    if function in (F.cross_entropy, F.nll_loss):
        return getattr(loss, "keywords", {}).get("ignore_index", IGNORED_TARGET)
    return getattr(loss, "ignore_index", None)


def has_one_shape(job: Job, train: Samples) -> bool:
    """Whether all whole batches of the job have one shape, judged by its settings."""
    if isinstance(job.batch, TokenBatch) and not isinstance(job.sampling, Packed):
        return False
    resizes = any(isinstance(transform, ProgressiveResizing) for transform in job.augment)
    if resizes or job.objective.selective_backprop is not None:
        return False
    if train.is_in_memory or isinstance(job.sampling, Packed):
        return True
    pads_as_it_comes = isinstance(job.fields.collate, Padded) and job.fields.collate.to is None
    return not (pads_as_it_comes or isinstance(job.sampling, Bucketed))


def segment_mask(segment_ids_BT: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Attention mask of packed rows: bool [B, 1, T, T], true for two tokens of one sample.

    Padding attends to padding, so that no row of scores is empty. Pass it to
    `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)`.

    Args:
        segment_ids_BT: the samples' numbers in their row, 0 for padding.
        causal: whether a token attends only to itself and earlier ones.
    """
    mask_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    if causal:
        num_tokens = segment_ids_BT.shape[1]
        mask_BTT = mask_BTT & torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=mask_BTT.device).tril()
    return mask_BTT[:, None]


def _has_length(value: Any) -> bool:
    return isinstance(value, list) or (hasattr(value, "shape") and len(value.shape) > 0)


def dtype_holding(dtype: torch.dtype, fill: float) -> torch.dtype:
    """The type for values of `dtype` padded with `fill`: `dtype`, or int64 where `fill` is outside its range.

    Bytes padded with -100 would become 156, which a loss counts.

    Raises:
        BadJob: `fill` is a fraction, NaN or infinite, and values are whole numbers.

    >>> dtype_holding(torch.uint8, -100), dtype_holding(torch.float32, -100), dtype_holding(torch.int32, 0)
    (torch.int64, torch.float32, torch.int32)
    """
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if not float(fill).is_integer():
        raise BadJob(f"samples of {dtype} cannot be filled up with {fill}", remedy="Give a whole number to pad with.")
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return dtype if low <= fill <= high else torch.int64


_AT_ONCE = 256
"""Samples that are read together to measure their lengths."""


def lengths_of(samples: Samples, length_of: Any, what: str) -> Indices:
    """The length of each of `samples` [N] by `length_of`: an array, a function of a sample, or None.

    None is the first dimension of a sample's first entry. A function reads every sample, as in the first epoch.

    Raises:
        BadJob: there are not as many as samples, or one is not a whole number of at least 1; `what` names the data.
    """
    if length_of is None or callable(length_of):
        measure = first_dimension if length_of is None else length_of
        measured: list[int] = []
        for start in range(0, len(samples), _AT_ONCE):
            indices = np.arange(start, min(start + _AT_ONCE, len(samples)), dtype=np.int64)
            measured += [measure(item) for item in samples.items(indices, 0)]
        lengths = np.array(measured)
    else:
        lengths = np.asarray(length_of)
    if len(lengths) != len(samples):
        raise BadJob(
            f"there are {len(lengths):,} lengths for {len(samples):,} samples of {what}",
            remedy="Give one for each sample of data, held-out ones included.",
        )
    if lengths.dtype.kind not in "iu":
        raise BadJob(f"the lengths of {what} are no whole numbers, but {lengths.dtype}")
    short = np.flatnonzero(lengths < 1)
    if len(short):
        raise BadJob(
            f"sample {short[0]} of {what} has a length of {lengths[short[0]]}",
            remedy="Leave empty samples out of the data.",
        )
    return lengths.astype(np.int64)


def first_dimension(sample: Any) -> int:
    """First dimension of a sample's first entry, such as its number of tokens; a text has none.

    Raises:
        BadJob: it has none.
    """
    entry = sample
    if isinstance(sample, Mapping):
        entry = next(iter(sample.values()))
    elif isinstance(sample, tuple):
        entry = sample[0]
    try:
        if isinstance(entry, str | bytes | Mapping):
            raise TypeError(type(entry))
        return len(entry)
    except TypeError as problem:
        raise BadJob(
            f"the first entry of a sample is a {type(entry).__name__}, which has no length",
            remedy="Say how long samples are with length_of=…, a function of a sample or one number for each.",
        ) from problem


class BucketedOrder:
    """The keyed permutation of an epoch, each window of it sorted by length and cut into batches in a keyed order.

    Any position costs one window. Batches begin at multiples of `batch`. The rest of an epoch comes last, and is cut
    out of its sorted window at a keyed place, so that it is not always the longest.
    """

    def __init__(self, lengths: Indices, batch: int, window: int, seed: int) -> None:
        self.size = len(lengths)
        self._lengths, self._batch, self._in_window, self._seed = lengths, batch, window * batch, seed
        self._order = EpochOrder(self.size, seed)
        self._window: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`."""
        require_within(self.size, start, stop)
        parts = [np.empty(0, np.int64)]
        for number in range(start // self._in_window, -(-stop // self._in_window)):
            first = number * self._in_window
            parts.append(self._window_of(epoch, number)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def _window_of(self, epoch: int, number: int) -> Indices:
        if self._window[:2] != (epoch, number):
            first = number * self._in_window
            chosen = self._order.indices(epoch, first, min(first + self._in_window, self.size))
            by_length = chosen[np.argsort(self._lengths[chosen], kind="stable")]
            key = key_of(RandomStream.ORDER, self._seed, epoch, number)
            num_whole, left = divmod(len(by_length), self._batch)
            cut = self._batch * (key % (num_whole + 1))
            rest, whole = by_length[cut : cut + left], np.delete(by_length, np.s_[cut : cut + left])
            order = KeyedPermutation(num_whole, key)(np.arange(num_whole)) if num_whole else np.empty(0, np.int64)
            batches = whole.reshape(num_whole, self._batch)[order].reshape(-1)
            self._window = (epoch, number, np.concatenate([batches, rest]))
        return self._window[2]


POSITIONS, SEGMENTS = "position_ids", "segment_ids"
"""Entries added to a row: positions within each sample from 0, and the samples' numbers in the row from 1."""


class PackedSamples(Samples):
    """Rows of fixed length, each holding several samples.

    Rows are laid out once, by lengths alone, see `rows_of_lengths`. In each epoch keys assign the samples to places of
    their length, so every epoch has each sample once and the same number of rows. Where no two samples have the same
    length, the same ones share a row in every epoch; they do not attend to each other.
    """

    is_in_memory = False

    def __init__(self, whole: Samples, lengths: Indices, settings: Packed, fields: Fields, seed: int) -> None:
        too_long = np.flatnonzero(lengths > settings.into)
        if len(too_long):
            longest = int(lengths.argmax())
            raise BadJob(
                f"{len(too_long):,} of {len(lengths):,} samples of {whole.name} are longer than a row of "
                f"{settings.into}: sample {longest} has a length of {lengths[longest]:,}",
                remedy="Cut them in the dataset, or pack into longer rows.",
            )
        if isinstance(fields.target, int):
            raise BadJob(
                f"Fields(target={fields.target}) with packed rows of (inputs…, {POSITIONS}, {SEGMENTS}, target)",
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
        """Share of the rows' tokens that are not padding [0 to 1]."""
        return float(self._lengths.sum() / (len(self) * self._settings.into))

    def members(self, row: int, epoch: int) -> Indices:
        """The samples that share a row in an epoch, in their order."""
        if self._epoch[0] != epoch:
            keys = keys_of_samples(key_of(RandomStream.ORDER, self._seed, epoch, 0), np.arange(len(self._lengths)))
            self._epoch = (epoch, np.lexsort((keys, -self._lengths)))
        return self._epoch[1][self._places[self._starts[row] : self._starts[row + 1]]]

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of rows `indices` [B], each entry [B, into, ...]."""
        return torch.utils.data.default_collate(self.items(indices, epoch))

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """These rows, one by one."""
        return [self._row(self.members(int(row), epoch), epoch) for row in indices]

    def fingerprint(self) -> str:
        """The samples': how they are packed is part of the job's settings."""
        return self.whole.fingerprint()

    def prepare(self, content: Content) -> Content:
        """As the samples' source does."""
        return self.whole.prepare(content)

    def _row(self, members: Indices, epoch: int) -> Any:
        samples = self.whole.items(members, epoch)
        lengths = self._lengths[members].tolist()
        entries = [_entries(sample, self.name) for sample in samples]
        _require_whole(entries, lengths, members.tolist())
        is_named = isinstance(samples[0], Mapping)
        keys = list(entries[0])
        target = self._fields.target_of({key: key for key in keys} if is_named else tuple(keys))
        row: dict[Any, torch.Tensor] = {}
        for key in keys:
            members_of_row = zip(entries, lengths, members, strict=True)
            parts = [_cut(entry.get(key), length, key, index) for entry, length, index in members_of_row]
            row[key] = self._filled(parts, self._settings.ignored if key == target else self._settings.pad)
        added = {
            POSITIONS: self._filled([torch.arange(length) for length in lengths], 0),
            SEGMENTS: self._filled([torch.full((length,), number) for number, length in enumerate(lengths, 1)], 0),
        }
        if is_named:
            return {**row, **added}
        *inputs, last = row.values()
        return (*inputs, *added.values(), last)

    def _filled(self, parts: list[torch.Tensor], fill: float) -> torch.Tensor:
        """The parts concatenated, and `fill` up to the end of the row."""
        joined = torch.cat(parts)
        joined = joined.to(dtype_holding(joined.dtype, fill))
        rest = joined.new_full((self._settings.into - len(joined), *joined.shape[1:]), fill)
        return torch.cat([joined, rest])


def rows_of_lengths(lengths: Indices, into: int) -> Indices:
    """The row of each sample [N] by best fit decreasing; `lengths` descend, and none exceeds `into`.

    Each sample goes into the fullest row that has room, else a new one; rows are numbered as they are begun.

    >>> rows_of_lengths(np.array([6, 5, 3, 2, 2, 1]), 8).tolist()
    [0, 1, 1, 0, 2, 2]
    """
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(into + 1)]
    has_room = 0  # bit r is set if a row has room for r more
    num_rows = 0
    for index, length in enumerate(lengths.tolist()):
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                has_room ^= 1 << room
        else:
            row, room = num_rows, into
            num_rows += 1
        rows[index] = row
        left = room - length
        if left:
            open_rows[left].append(row)
            has_room |= 1 << left
    return rows


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
    """Raise BadSample for entries longer than their sample, unless all have one width: then the rest is padding."""

    def width(entry: Any) -> int:
        return len(entry) if hasattr(entry, "__len__") and getattr(entry, "shape", True) else 0

    widths = [{width(entry) for entry in sample.values()} for sample in entries]
    if len(set().union(*widths)) == 1:
        return
    for of_sample, length, index in zip(widths, lengths, members, strict=True):
        if max(of_sample) > length:
            raise BadSample(
                f"sample {index} has an entry {max(of_sample)} long, and a length of {length}: packed are entries with "
                "one value for each token, and none is cut"
            )


def _cut(entry: Any, length: int, key: Any, index: int) -> torch.Tensor:
    tensor = torch.as_tensor(entry) if entry is not None else None
    if tensor is None or tensor.dim() == 0 or len(tensor) < length:
        state = "absent" if tensor is None else f"of shape {list(tensor.shape)}"
        raise BadSample(
            f"entry {key!r} of sample {index} is {state}, and was to be {length} long: packed are entries with one "
            "value for each token"
        )
    return tensor[:length]
