"""A run on disk, its report, and examples of what its weights compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.bottleneck import Bottleneck, KernelTable, RankTimes
from stoker.records.device import Device, Environment
from stoker.records.estimate import Basis
from stoker.records.job_spec import JobSpec
from stoker.records.plan import Decision
from stoker.records.profile import Coupling
from stoker.records.progress import MOST, Event

RunStatus = Literal["unfinished", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's record. `metrics` has keys such as `test/accuracy`; `wall_s` is training time over all its processes.

    `ended_early` is why a finished run ended before its time, as its job's `stop` says.
    """

    schema: ClassVar[int] = 1
    name: str
    status: RunStatus
    created_at: str
    spec_digest: str
    total_samples: int
    forked_from: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    updates: int = 0
    wall_s: float = 0.0
    failure: str | None = None
    ended_early: str | None = None

    def __post_init__(self) -> None:
        for name in ("total_samples", "samples", "updates"):
            if not 0 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be from 0 to 2^63 - 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a report shows: the plan's forecast and the run's events."""

    schema: ClassVar[int] = 1
    run: Run
    spec: JobSpec
    decision: Decision | None
    device: Device | None
    environment: Environment | None
    coupling: Coupling | None
    events: tuple[Event, ...]
    bottleneck: Bottleneck | None = None
    kernels: KernelTable | None = None
    ranks: tuple[RankTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing `stoker verify` looked at. `level` is the level of the exactness contract that was shown to hold."""

    schema: ClassVar[int] = 1
    question: str
    answer: str
    passed: bool
    level: Literal["bit-equal", "same mathematics", "same law", "none"]
    evidence: str


Quantity = Literal["total_s", "peak_bytes", "compile_s"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Forecast and measurement of one finished run, from which the next plan on this device learns.

    `basis` is that of the forecast: trials of the plan (*measured here*), or traces alone. `compile_s` is
    measured in trials: its `run` is the job's name, and its forecast the one before earlier calibrations correct it.
    """

    schema: ClassVar[int] = 1
    device_model: str
    torch_version: str
    run: str
    quantity: Quantity
    forecast: float
    measured: float
    at: str
    basis: Basis = "measured here"


@dataclass(frozen=True, kw_only=True)
class Started:
    """The working directory and the job file, both absolute, on the machine that began the run."""

    schema: ClassVar[int] = 1
    folder: str
    job_file: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample, what was wanted and what came out, as text.

    `index` is its place in the set, `name` what the data call it, such as its file; empty where they do not. `loss` is
    its own, where that is known. `picture` is a PNG in base64; `values` are the first of the numbers that a sample
    without a picture has. `output_picture` and `target_picture` are there where output and target are pictures too, as
    those of an autoencoder.
    """

    schema: ClassVar[int] = 1
    index: int
    target: str
    output: str
    loss: float | None = None
    picture: str | None = None
    values: tuple[float, ...] = ()
    name: str = ""
    output_picture: str | None = None
    target_picture: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExampleSet:
    """Samples of one split: those with the largest losses, and the first ones; of classifiers also how they confuse.

    `confusion` counts samples: a row for each class that was wanted, a column for each that was found; None where
    samples have no classes, or too many. `classes` are their names, in order; empty where they have none. `scale` is
    the value that is black and the one that is white, in all pictures.
    """

    schema: ClassVar[int] = 1
    split: str
    num_samples: int
    worst: tuple[Example, ...] = ()
    first: tuple[Example, ...] = ()
    confusion: tuple[tuple[int, ...], ...] | None = None
    classes: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ExampleSets:
    """The examples of all splits that were evaluated at a run's end."""

    schema: ClassVar[int] = 1
    sets: tuple[ExampleSet, ...] = ()
