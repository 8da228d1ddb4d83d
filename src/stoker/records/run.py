"""A job's identity, its run on disk, the run's report, and examples of what its weights compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records import codec
from stoker.records.bottleneck import Bottleneck, KernelTable, RankTimes
from stoker.records.codec import JSON
from stoker.records.device import Device, Environment
from stoker.records.launch import Launch
from stoker.records.plan import Basis, Decision
from stoker.records.plan_schedule import PlanSchedule
from stoker.records.profile import Coupling
from stoker.records.progress import MOST, Event

DataClass = Literal["indexed", "seekable", "stream"]
DATA_GUARANTEES: dict[DataClass, str] = {
    "indexed": "the order is computed from (seed, epoch, position): training resumes at any sample, at once",
    "seekable": "one reader in each process; its own state is kept with each checkpoint, and resumes there, at once",
    "stream": "one reader in each process; it has no state, and what was read before is read again on resume",
}
"""What each class of data promises of a resume."""
RunStatus = Literal["unfinished", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job's identity.

    Two jobs with equal digests learn the same thing. `entry` is the job file's name (None for a job made in Python),
    `entry_digest` the SHA-256 of what is executed of that file and the local modules it imports, `parameters` the job
    function's arguments, `settings` everything the Job resolved to, `weights_digest` the SHA-256 of the initial
    weights. `functions` are digests of the parts that `entry_digest` is made of, for naming what changed.
    """

    schema: ClassVar[int] = 2
    name: str
    entry: str | None
    entry_digest: str | None
    parameters: dict[str, JSON]
    settings: dict[str, JSON]
    data_class: DataClass
    data_fingerprint: str
    num_train: int
    weights_digest: str
    functions: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 (hex) of the whole spec; `functions` are in `entry_digest`."""
        return codec.digest({name: value for name, value in codec.to_json(self).items() if name != "functions"})

    def differences(self, other: JobSpec) -> tuple[str, ...]:
        """The differences, one line each: `batch: 512 here, 256 there`; none if the digests are equal."""
        return tuple(
            f"{name.removeprefix('settings.').removeprefix('functions.')}: {mine} here, {theirs} there"
            for name, mine, theirs in self._unequal(other)
        )

    def changes(self, before: JobSpec) -> tuple[str, ...]:
        """The changes since `before`, one line each, for people: `parameter lr: 0.1 -> 0.2`, `function loss in a.py`.

        Nothing where the digests are equal.
        """
        unequal = self._unequal(before)
        names_functions = any(name.startswith("functions.") for name, _, _ in unequal)
        lines = []
        for name, now, then in unequal:
            kind, _, rest = name.partition(".")
            if kind == "functions":
                verb = " is new" if then == _ABSENT else " is no longer used" if now == _ABSENT else " changed"
                lines.append(f"{rest}{verb}")
            elif name.endswith(".source"):
                if not names_functions:  # else it is among them
                    lines.append(f"the code of {rest.removesuffix('.source')} changed")
            elif name in _CONTENT:
                lines.append(f"{_CONTENT[name]} changed")
            else:
                label = f"parameter {rest}" if kind == "parameters" else rest if kind == "settings" else name
                lines.append(f"{label}: {then} -> {now}")
        return tuple(lines)

    def is_same_but_for_closures(self, other: JobSpec) -> bool:
        """Whether all that differs are values that functions hold, such as a run's name with the time of its start."""
        return all(".closure." in name for name, _, _ in self._unequal(other))

    def _unequal(self, other: JobSpec) -> list[tuple[str, JSON, JSON]]:
        """(dotted name, here, there) of all that differs; parts of the code instead of the digest of all of it."""
        mine, theirs = dict(leaves(codec.to_json(self))), dict(leaves(codec.to_json(other)))
        names = [*mine, *(name for name in theirs if name not in mine)]
        # By digest: a difference here is exactly what made the two specs differ.
        same = {n for n in mine if n in theirs and codec.digest(mine[n]) == codec.digest(theirs[n])}
        named_by_parts = ("entry_digest", "functions") if self.functions != other.functions else ()
        return [
            (name, mine.get(name, _ABSENT), theirs.get(name, _ABSENT))
            for name in names
            if name not in same and name not in named_by_parts
        ]


_ABSENT = "absent"
_CONTENT = {
    "entry_digest": "the code of the job file, or of a module in its folder,",
    "data_fingerprint": "the content of the training data",
    "weights_digest": "the initial weights (the model, or the seed)",
}
"""Fields that are compared by digest, with their names for users."""


def leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """The scalars of a JSON document with their dotted paths; a list counts as one unless it holds a dict.

    >>> dict(leaves({"lr": 0.1, "augment": [{"name": "flip", "p": [0, 1]}]}))
    {'lr': 0.1, 'augment[0].name': 'flip', 'augment[0].p': [0, 1]}
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


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
    """Everything that a report shows: the plan's forecast, which update ran under which plan, and the run's events.

    `launch` is where it was executed elsewhere; None: where its directory is.
    """

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
    schedule: PlanSchedule | None = None
    launch: Launch | None = None


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
    """A sample, its target and what came out, as text.

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

    `confusion` counts samples: a row for each class of the targets, a column for each of the outputs; None where
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
