"""Which channels go at a given share: the least important of all layers together, in numbers that engines like."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

MULTIPLE = 8
"""Channels are kept in multiples of this: vector instructions take eight or sixteen at once."""

MOST_REMOVED = 0.875
"""The most that any layer loses of its channels."""

Scores = Mapping[str, NDArray[np.float64]]
"""How important each channel is, by the layer that gives them; comparable between layers."""


def removed_at(scores: Scores, ratio: float) -> dict[str, tuple[int, ...]]:
    """The channels to take out of each layer, so that about the share `ratio` of all goes; layers that stay are absent.

    Args:
        scores: of every channel that can go.
        ratio: share of channels in [0, 1]; fewer go where layers would keep too few, or no multiple of `MULTIPLE`.

    >>> removed_at({"a": np.arange(16.0), "b": np.arange(100.0, 116.0)}, 0.25)
    {'a': (0, 1, 2, 3, 4, 5, 6, 7)}
    """
    everything = np.sort(np.concatenate(list(scores.values())))
    count = round(ratio * len(everything))
    if count == 0:
        return {}
    threshold = everything[count - 1]
    found: dict[str, tuple[int, ...]] = {}
    for layer, own in scores.items():
        wanted = len(own) - int((own <= threshold).sum())
        going = len(own) - _kept(len(own), wanted)
        if going:
            found[layer] = tuple(sorted(int(at) for at in np.argsort(own, kind="stable")[:going]))
    return found


def _kept(channels: int, wanted: int) -> int:
    """How many of a layer's channels stay where `wanted` are worth it: the next multiple, and no less than the least.

    >>> [_kept(64, wanted) for wanted in (0, 9, 33, 64)], _kept(12, 9)
    ([8, 16, 40, 64], 12)
    """
    least = max(1, math.ceil((1 - MOST_REMOVED) * channels))
    return min(channels, MULTIPLE * math.ceil(max(wanted, least) / MULTIPLE))
