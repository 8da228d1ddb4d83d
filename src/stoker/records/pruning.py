"""Which channels of a network were taken out, and why those: enough to make the smaller network again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.records.artifact import ArtifactSource
from stoker.records.compression import Interval
from stoker.units import Duration

Importance = Literal["taylor", "magnitude"]
"""How channels are ranked: by how much the loss would change without them, or by the size of their weights."""


@dataclass(frozen=True, kw_only=True)
class KeptChannels:
    """What is left of a parameter or buffer of that shape, along one of its dimensions: indices, ascending."""

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
