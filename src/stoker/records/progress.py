"""Where a run is, and what happened in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.codec import JSON
from stoker.records.layout import ONE_PROCESS, Layout

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
    "recovered",
    "skipped",
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

    - planned: run, device, plan, forecast, explanation, took_s
    - started: run, samples, total_samples, total_updates, environment, data, level
    - resumed: samples, updates, checkpoint
    - progress: samples, total_samples, updates, epoch, loss, lr, samples_per_s, eta_s, wall_s, split_s, resident_bytes
    - evaluated: split (valid or test), samples, metrics, took_s, best
    - checkpointed: samples, bytes, blocked_s, write_s, path, best
    - noted, warned: message
    - stopped: reason, samples
    - replanned: samples, old, new, why, free_bytes
    - recovered: samples, what, why; where one process of several was lost or came back also took_s
    - skipped: samples, updates, why, in_a_row, indices
    - finished: run, metrics, samples, updates, wall_s, ended_early, report, peak_bytes, bottleneck, profile

    Where there is something to tell, progress also has grad_norm (before clipping) and lrs (of all groups of
    parameters), and evaluated has decided (what it changed, in words).
    """

    schema: ClassVar[int] = 1
    kind: EventKind
    at: float
    fields: dict[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file of a checkpoint: its size [bytes] and SHA-256 (hex)."""

    schema: ClassVar[int] = 1
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """A block of a tensor: it begins at `offsets` of the tensor, has the sizes `sizes`, and lies in `file`.

    There it has the tensor's name; of several blocks in one file, the ones after the first have a number behind it, as
    `name#1`.
    """

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int = 0

    def key(self, name: str) -> str:
        """What this block of the tensor `name` is called in its file."""
        return f"{name}#{self.number}" if self.number else name


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint that several processes wrote; together the pieces are all of it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint holds; written last, so that a checkpoint without one does not exist.

    Version 2 keeps an optimiser's state under the names of parameters; version 1 had their numbers.
    """

    schema: ClassVar[int] = 2
    spec_digest: str
    position: Position
    stoker_version: str
    torch_version: str
    files: tuple[FileDigest, ...]
    skeleton: dict[str, JSON]
    """The optimiser's and the loop's state with tensors replaced by their names in the weight files."""
    layout: Layout = ONE_PROCESS
    """Of the processes that wrote it."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """Where each tensor lies that several processes wrote; of one process, `model.x` lies in `model.safetensors`."""
