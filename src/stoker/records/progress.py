"""The position of a run, its events, and the manifest of its checkpoints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from stoker.records.codec import JSON, digest, from_json, loads
from stoker.records.layout import ONE_PROCESS, Layout
from stoker.records.plan import Forecast, Plan

EventKind = Literal[
    "planned",
    "started",
    "resumed",
    "progress",
    "evaluated",
    "checkpointed",
    "noted",
    "warned",
    "stopped",
    "finished",
    "replanned",
    "settled",
    "recovered",
    "skipped",
    "logged",
]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far training is: `samples` in all, of them `cursor` in epoch number `epoch`; `updates` made."""

    schema: ClassVar[int] = 1
    epoch: int = 0
    cursor: int = 0
    samples: int = 0
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened; `at` is seconds since 1970 (UTC).

    Fields by kind (seconds, bytes and counts are in the names; `samples` is the position in samples):

    - planned: run, device, plan, forecast, explanation, took_s, is_settled
    - started: run, samples, total_samples, total_updates, environment, data, level
    - resumed: samples, updates, checkpoint
    - progress: samples, total_samples, updates, epoch, loss, lr, samples_per_s, eta_s, wall_s, split_s, resident_bytes
    - evaluated: split (valid, of several sets valid/NAME, or test), samples, metrics, took_s, best
    - checkpointed: samples, bytes, blocked_s, write_s, path, best
    - noted, warned: message
    - stopped: reason, samples
    - replanned: samples, old, new, why, free_bytes
    - settled: samples, plan, why, forecast, explanation, took_updates, speedup, timed
    - recovered: samples, what, why; where one process of several was lost or came back also took_s
    - skipped: samples, updates, why, in_a_row, indices
    - logged: samples, scalars, images, texts (see `stoker.log`)
    - finished: run, metrics, samples, updates, wall_s, ended_early, report, peak_bytes, bottleneck, profile

    Where there is something to tell, progress also has grad_norm (before clipping), lrs (of all groups of parameters),
    trying (the plan in force in words, while plans are tried) and, on a GPU, allocated_bytes (the most so far under the
    plan in force); evaluated has decided (what it changed, in words), and more where another validation set follows;
    stopped after a slice has slices_left (None: unknown).
    """

    schema: ClassVar[int] = 1
    kind: EventKind
    at: float
    fields: dict[str, JSON] = field(default_factory=dict)


_LAST_DATE_S = 253_402_300_799
"""The last second that a date can name: the end of the year 9999 [s since 1970]."""
MOST = 2**63 - 1
"""The largest count of samples, updates or bytes that a record may hold."""
_COUNTS = (
    "samples",
    "total_samples",
    "updates",
    "total_updates",
    "bytes",
    "in_a_row",
    "resident_bytes",
    "allocated_bytes",
)
_NUMBERS = ("loss", "lr", "samples_per_s", "eta_s", "wall_s", "took_s", "blocked_s", "write_s", "grad_norm")
_TEXTS = ("trying", "message", "reason", "split", "why", "what", "level", "run", "path", "checkpoint", "report")
_TABLES = ("metrics", "split_s")
_RECORDS = {"plan": Plan, "forecast": Forecast, "old": Plan, "new": Plan}


def read_event(text: str | bytes) -> Event:
    """An event from a line of a log, perhaps of another machine: what a reader counts with is what it should be.

    Raises:
        ValueError: it is no event, or a field is of the wrong type or out of its bounds; the field is named.
    """
    event = loads(text, Event)
    if not 0 <= event.at <= _LAST_DATE_S:
        raise ValueError(f"Event.at: {event.at} is no time")
    for name, value in event.fields.items():
        if value is not None and (expected := _misfit(name, value)) is not None:
            shown = json.dumps(value)
            raise ValueError(f"Event.fields.{name}: wanted {expected}, found {shown[:80]}")
    for name, record in _RECORDS.items():
        if isinstance(event.fields.get(name), dict):
            from_json(event.fields[name], record)
    return event


def _misfit(name: str, value: JSON) -> str | None:
    """The expected type of an event's field that has another one; None where it is right."""
    if name in _COUNTS:
        return None if isinstance(value, int) and 0 <= value <= MOST else "a count"
    if name in _NUMBERS:
        return None if is_number(value) else "a number"
    if name in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if name in _TABLES:
        is_table = isinstance(value, dict) and all(item is None or is_number(item) for item in value.values())
        return None if is_table else "numbers by name"
    if name == "lrs":
        return None if isinstance(value, list) and all(map(is_number, value)) else "a list of numbers"
    return None


def is_number(value: JSON) -> bool:
    """True if a JSON value is a number that a float can hold; "nan", "inf" and "-inf" are."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float) or value in ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file of a checkpoint: its size [bytes] and SHA-256 (hex)."""

    schema: ClassVar[int] = 1
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """A block of a tensor: it begins at `offsets` of the tensor, has the sizes `sizes`, and is stored in `file`.

    There it has the tensor's name; of several blocks in one file, the ones after the first have a number behind it, as
    `name#1`.
    """

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int = 0

    def key(self, name: str) -> str:
        """The name of this block of the tensor `name` in its file."""
        return f"{name}#{self.number}" if self.number else name


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint that several processes wrote; together the pieces are all of it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The contents of a checkpoint; written last, so that a checkpoint without one does not exist."""

    schema: ClassVar[int] = 4
    spec_digest: str
    position: Position
    stoker_version: str
    torch_version: str
    files: tuple[FileDigest, ...]
    skeleton: dict[str, JSON]
    """The optimiser's and the loop's state with tensors replaced by their names in the weight files."""
    layout: Layout = ONE_PROCESS
    """The layout of the processes that wrote it."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """The location of each tensor that several processes wrote; one process writes `model.x` to `model.safetensors`."""
    checksum: str = ""
    """SHA-256 (hex) of everything above."""

    def __post_init__(self) -> None:
        position = self.position
        for name in ("epoch", "cursor", "samples", "updates"):
            if not 0 <= getattr(position, name) <= MOST:
                raise ValueError(f"position.{name} must be from 0 to 2^63 - 1, got {getattr(position, name)}")
        for file in self.files:
            if not 0 <= file.num_bytes <= MOST or not _SHA256.fullmatch(file.sha256) or not _is_inside(file.name):
                raise ValueError(f"{file.name!r}, {file.num_bytes} bytes, SHA-256 {file.sha256!r} is no file of it")
        for name, tensor in self.tensors.items():
            if not _is_tensor(tensor):
                raise ValueError(f"{name!r} is no tensor of it: {tensor}")

    def with_checksum(self) -> CheckpointManifest:
        """The same, with the checksum of what it holds."""
        return replace(self, checksum=self._checksum())

    @property
    def is_sound(self) -> bool:
        """True if its content matches its checksum."""
        return self.checksum == self._checksum()

    def _checksum(self) -> str:
        return digest(replace(self, checksum=""))

    def state_digest(self) -> str:
        """SHA-256 (hex) of the training state; equal for two runs that are equal bit for bit.

        It is all that the next update is computed from. Times are left out, and which evaluation was the best: that
        decides nothing which is trained; so are strides, since files hold values in the order of their indices. The
        digests of files are taken as they are stated.
        """
        skeleton = dict(self.skeleton)
        progress = skeleton.pop("progress", None)
        return digest(
            {
                "spec": self.spec_digest,
                "position": self.position,
                "files": {file.name: file.sha256 for file in self.files},
                "skeleton": _without_strides(skeleton),
                "progress": [] if progress is None else [item for item in progress["of"] if item[0] not in _NO_STATE],
            }
        )


_NO_STATE = frozenset({"wall_s", "save_every_s", "save_s", "best"})
"""Entries that are kept with a state, and no part of it."""


def _without_strides(packed: JSON) -> JSON:
    """A packed tree, in which tensors have only their names."""
    if isinstance(packed, list):
        return [_without_strides(item) for item in packed]
    if isinstance(packed, dict):
        is_tensor = packed.get("is") == "tensor"
        return {name: _without_strides(item) for name, item in packed.items() if not (is_tensor and name == "strides")}
    return packed


_SHA256 = re.compile("[0-9a-f]{64}")


def _is_inside(name: str) -> bool:
    """Whether a file's name leads to a place in the checkpoint's own directory."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _is_tensor(tensor: StoredTensor) -> bool:
    """Whether shapes are sizes, and every piece is within the tensor."""
    dims = len(tensor.shape)
    return all(0 <= size <= MOST for size in tensor.shape) and all(
        len(piece.offsets) == len(piece.sizes) == dims
        and piece.number >= 0
        and _is_inside(piece.file)
        and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        )
        for piece in tensor.pieces
    )


def by_measure(evaluated: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The results of one evaluation, given by split, under the names by which settings ask for them.

    >>> by_measure({"valid": {"loss": 0.5}})
    {'loss': 0.5}
    >>> by_measure({"valid/seen": {"loss": 0.5}, "valid/unseen": {"loss": 0.75}})
    {'loss': 0.5, 'seen/loss': 0.5, 'unseen/loss': 0.75}
    """
    results = dict(next(iter(evaluated.values())))
    for split, metrics in evaluated.items() if len(evaluated) > 1 or "valid" not in evaluated else ():
        results |= {f"{split.removeprefix('valid/')}/{name}": value for name, value in metrics.items()}
    return results


def is_validation(event: Event) -> bool:
    """Whether an `evaluated` event is of a validation set: `valid`, or `valid/NAME` of several."""
    return str(event.fields.get("split", "valid")).partition("/")[0] == "valid"
