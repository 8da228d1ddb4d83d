"""Which channels can be taken out without changing what the others mean.

What: a network without some channels must answer as the whole one does with the same channels silenced, that is, with
every weight that goes set to zero. This law holds of convolutions, linear layers, batch normalisation, sums,
concatenations and depthwise layers. It fails where a network counts its channels: layer and group normalisation over
them, means over them, reshapes into heads, convolutions in groups that lose unequally. What fails it is left whole.
Use when: always; it is what stands between a graph that was misread and a model that is silently wrong.
Costs: a few cuts of copies of the network; more where some channels cannot go, which are found by halving.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from stoker.compressing.pruning.cutting import Ask, CannotPrune, Group, Removed, asked, cut_of, groups_of
from stoker.compressing.pruning.rebuilding import rebuilt, silenced
from stoker.records.pruning import Cut

FEWEST_CHANNELS = 8
"""Layers of fewer channels are left as they are: engines compute eight at once."""

LIMIT = 1e-3
"""The most that answers may differ from the silenced network's, of the largest: sums of fp32 in another order."""

_TRIED = 0.25
"""The share that goes when a group is tried: its first channels, which are not alike in every group of a convolution or
head of an attention, so that what depends on those shows."""


def prunable(model: nn.Module, ask: Ask) -> tuple[Group, ...]:
    """The groups of channels that can go, alone and together.

    Raises:
        CannotPrune: there are none, or the network cannot be followed.
    """
    groups = [group for group, _ in groups_of(copy.deepcopy(model), ask) if group.channels >= FEWEST_CHANNELS]
    sound = _sound(model, ask, groups)
    if not sound:
        raise CannotPrune(
            "no channels can be taken out of it: each layer of 8 channels or more is an output, or is counted on by "
            "others, as by layer normalisation or attention"
        )
    if len(sound) < len(groups) and not _holds(model, ask, sound):
        raise CannotPrune("channels that can go alone cannot go together")
    return sound


def sound_cut(model: nn.Module, ask: Ask, removed: Removed) -> Cut:
    """What is kept of every tensor when these channels go.

    Raises:
        CannotPrune: they cannot, or the rest would not answer as the whole network does without them.
    """
    cut = cut_of(model, ask, removed)
    if not is_sound(model, cut, ask):
        raise CannotPrune("without these channels it computes something else than with them silenced")
    return cut


def is_sound(model: nn.Module, cut: Cut, ask: Ask) -> bool:
    """Whether the cut network answers as the whole one with what was cut silenced."""
    found, wanted = asked(rebuilt(model, cut), ask), asked(silenced(model, cut), ask)
    return all(
        a is not None and b is not None and a.shape == b.shape and _apart(a, b) <= LIMIT
        for a, b in itertools.zip_longest(found, wanted)
    )


def _sound(model: nn.Module, ask: Ask, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Those of the groups that can go, found by halving wherever some cannot."""
    if not groups or _holds(model, ask, groups):
        return tuple(groups)
    if len(groups) == 1:
        return ()
    half = len(groups) // 2
    return (*_sound(model, ask, groups[:half]), *_sound(model, ask, groups[half:]))


def _holds(model: nn.Module, ask: Ask, groups: Sequence[Group]) -> bool:
    removed = {group.root: tuple(range(max(1, round(_TRIED * group.channels)))) for group in groups}
    try:
        sound_cut(model, ask, removed)
    except CannotPrune:
        return False
    return True


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest value; infinite where something is not a number."""
    scale = float(wanted.double().abs().max()) if wanted.numel() else 0.0
    apart = float((found.double() - wanted.double()).abs().max()) / (scale or 1.0) if wanted.numel() else 0.0
    return apart if apart == apart else float("inf")  # noqa: PLR0124 - NaN alone differs from itself
