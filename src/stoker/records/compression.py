"""A compression search: its trials and their gates; and the cut of a pruned network, to make it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.artifact import ArtifactSource, EngineName, ServingPrecision, Tolerance
from stoker.units import Duration

TrialOutcome = Literal["reference", "chosen", "passed", "rejected", "left out"]
"""`reference` is the model given; `passed` every gate asked of it, but another was faster; `left out` was not made."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A measured value and the ends of its interval, which are bounds on one side each at the stated confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A check of a candidate: what was found and the limit that it is held against, in the unit that `what` names."""

    what: str
    passed: bool
    found: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class CompressionTrial:
    """One candidate: how it was made, what it weighs, how long it takes, what it costs of the metric, its gates.

    `latency_s` is by rows of a batch, as text (JSON knows no other keys) [s]: of the original the median over rounds,
    of others the original's divided by how much faster they were in rounds together, so that it agrees with `pace`.
    `speed_up` is against `rival`, the fastest so far that is neither pruned nor in 8 bits, in rounds with it, over all
    batch sizes; above 1 is faster. `pace` is how much faster than the model given that makes it. A drop of the metric
    is positive where the candidate is worse; `drop` is on rows that nothing was chosen by, `selection_drop` on those
    that the search looked at. None: not measured, because the candidate was rejected before.
    """

    name: str
    how: str
    engine: EngineName
    precision: ServingPrecision
    outcome: TrialOutcome
    reason: str
    num_bytes: int | None = None
    latency_s: dict[str, float] = field(default_factory=dict)
    speed_up: Interval | None = None
    rival: str = ""
    pace: float | None = None
    selection_drop: float | None = None
    drop: Interval | None = None
    gates: tuple[Gate, ...] = ()
    tolerance: Tolerance | None = None
    on_front: bool = False
    """Whether no other trial that lost at most as much of the metric was both smaller and faster."""
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Which rows were used for what: numbers of rows, and the key of the permutation that dealt them out."""

    calibration: int
    selection: int
    acceptance: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A whole search: what was asked, on which rows and machine, and every trial.

    `max_drop` is in the metric's own unit. `baseline` is the original's metric on the rows of acceptance.
    """

    schema: ClassVar[int] = 1
    source: ArtifactSource
    metric: str
    lower_is_better: bool
    max_drop: float
    confidence: float
    baseline: float
    rows: RowSplit
    batch_sizes: tuple[int, ...]
    threads: int
    proved_on: str
    trials: tuple[CompressionTrial, ...]
    chosen: str
    notes: tuple[str, ...] = ()
    took_s: float
    made_at: str
    libraries: dict[str, str] = field(default_factory=dict)


Importance = Literal["taylor", "magnitude"]
"""How channels are ranked: by how much the loss would change without them, or by the size of their weights."""


@dataclass(frozen=True, kw_only=True)
class KeptChannels:
    """The kept part of a parameter or buffer of that shape, along one of its dimensions: indices, ascending."""

    tensor: str
    shape: tuple[int, ...]
    dim: int
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes that a layer keeps as attributes, such as `out_channels`, as they are after the cut."""

    layer: str
    sizes: dict[str, int | tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A smaller network, as what is kept of a larger one: with that one's code, all it takes to make it again.

    A tensor that is cut along two dimensions comes up twice. What is not named is kept whole.
    """

    kept: tuple[KeptChannels, ...]
    layers: tuple[LayerSizes, ...]


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """A cut that was chosen for its speed here, and how what is left is trained on.

    `source` is the run whose weights were cut. `speed_up` was measured against the whole network, over all
    `batch_sizes`, in `engine_precision`; `target` was asked for. `ratio` is the share of channels that were to go, and
    `importance` says by which ranking. `run` is the run that trained what was left for `until`; empty before it is
    made. `before` are the cuts that had made the source's own model, where that was a pruned one.
    """

    schema: ClassVar[int] = 1
    source: ArtifactSource
    target: float
    ratio: float
    importance: Importance
    speed_up: Interval
    engine_precision: str
    batch_sizes: tuple[int, ...]
    threads: int
    proved_on: str
    until: Duration
    cut: Cut
    run: str = ""
    before: tuple[Cut, ...] = ()
