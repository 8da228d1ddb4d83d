"""What a study and its trials say to each other; plain data that travels between processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker.records.codec import JSON

EndingKind = Literal["finished", "stopped", "out of memory", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A trial to be run: its number, its settings, its directory; `on` is where it began, if it goes on.

    `parent` is the directory of the run whose state it begins with; `heard` is after how many samples its last
    evaluation was that the study knows of.
    """

    number: int
    parameters: dict[str, JSON]
    directory: Path
    on: str | None = None
    parent: Path | None = None
    heard: int = 0


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one trial at a time: a device, a share of its memory [bytes], the CPUs it may use (None: all)."""

    on: str = "here"
    memory_bytes: float | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """An evaluation within a trial: metrics on held-out data by their bare names, at `samples` of `total_samples`."""

    samples: int
    total_samples: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a trial ended.

    `metrics` are those of the weights it kept, by their bare names; `stopped` means that it was asked to, and could go
    on. `words` says what went wrong.
    """

    kind: EndingKind
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    wall_s: float = 0.0
    peak_bytes: int = 0
    words: str = ""


Judge = Callable[[Reading], bool]
"""Looks at an evaluation; whether the trial shall stop."""

RunTrial = Callable[[Request, Slot, Judge], Ending]
"""Runs a trial from where it is, in this process; where the judge says so, it stops and returns."""
