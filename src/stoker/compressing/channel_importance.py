"""Rank channels by importance per cost, and choose which go at a given share.

What: the first-order Taylor estimate of how much the loss changes without a channel, |weight × gradient| summed over
the weights that go with it (without a loss: the sum of their squares), divided by the multiplications that go with it.
The least important of all layers go together, in numbers that engines compute well.
Use when: a loss and training data are at hand; magnitudes are for networks alone.
Costs: a backward pass over some batches, and one forward pass.
Source: Molchanov et al. 2019, "Importance Estimation for Neural Network Pruning", https://arxiv.org/abs/1906.10771;
over groups as in Torch-Pruning. Dividing by cost is the knapsack's greedy rule, as in Shen et al. 2022,
https://arxiv.org/abs/2110.10811 (HALP), which measures the cost of each layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stoker.compressing.channel_cuts import Ask, CannotPrune, ChannelGroup, asked, groups_of, torch_pruning
from stoker.records.compression import Importance

Gradients = Callable[[nn.Module], Iterator[None]]
"""Leaves the gradient of the loss on one batch after another in a network's parameters, each replacing the last."""

_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)  # noqa: SLF001 - the common base of all convolutions


def scores_of(
    model: nn.Module,
    ask: Ask,
    groups: Collection[ChannelGroup],
    *,
    importance: Importance,
    gradients: Gradients | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Importance per cost of every channel [C] of these groups, by their roots; the higher ones stay.

    Args:
        model: the network; not changed.
        ask: runs it on example rows.
        groups: of `prunable`.
        importance: the ranking; `taylor` takes `gradients`.
        gradients: those of the loss on some batches; their estimates are added up.

    Raises:
        CannotPrune: a group has no weights to be ranked by, or the loss left no gradient.
    """
    own = copy.deepcopy(model)
    costs = multiplications(own, ask)
    roots = {group.root for group in groups}
    ranked = [(group, parts) for group, parts in groups_of(own, ask) if group.root in roots]
    library = torch_pruning().importance
    kind = library.GroupTaylorImportance if importance == "taylor" else library.GroupMagnitudeImportance
    rank = kind(group_reduction="sum", normalizer=None)  # in its own scale: layers are compared with one another
    scores = {group.root: np.zeros(group.channels) for group, _ in ranked}

    def add() -> None:
        for group, parts in ranked:
            estimate = rank(parts)
            if estimate is None or len(estimate) != group.channels:
                raise CannotPrune(f"the channels of {group.root} have no weights to be ranked by")
            scores[group.root] += estimate.double().cpu().numpy()

    if importance == "magnitude":
        add()
    else:
        assert gradients is not None, "Taylor's estimate is of a loss"
        for _ in gradients(own):
            if all(parameter.grad is None for parameter in own.parameters()):
                raise CannotPrune("the loss left no gradient to rank channels by")
            for parameter in own.parameters():
                if parameter.grad is None:  # it took no part in the loss
                    parameter.grad = torch.zeros_like(parameter)
            add()
    return {group.root: scores[group.root] * group.channels / max(_cost(parts, costs), 1.0) for group, parts in ranked}


def multiplications(model: nn.Module, ask: Ask) -> dict[nn.Module, float]:
    """Number of multiplications of each convolution and linear layer for the example rows."""
    counts: dict[nn.Module, float] = {}

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        weight: Any = layer.weight
        moved = inputs[0] if getattr(layer, "transposed", False) else output  # has the weight's first dimension
        counts[layer] = counts.get(layer, 0.0) + moved.numel() / weight.shape[0] * weight.numel()

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, _WEIGHTED)]
    try:
        asked(model, ask)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def _cost(parts: Any, costs: dict[nn.Module, float]) -> float:
    """Number of multiplications that go with all channels of a group, of layers that give and that take them."""
    total = 0.0
    for dependency, places in parts:
        layer = dependency.target.module
        if layer in costs:
            is_output = dependency.handler.__name__ == "prune_out_channels"
            if is_output:
                size = getattr(layer, "out_channels", None) or layer.out_features
            else:
                size = getattr(layer, "in_channels", None) or layer.in_features
            total += costs[layer] * len(places) / size
    return total


MULTIPLE = 8
"""Channels are kept in multiples of this: vector instructions take eight or sixteen at once."""

MOST_REMOVED = 0.875
"""Largest share of its channels that a layer loses."""

Scores = Mapping[str, NDArray[np.float64]]
"""Importance of each channel, by layer; comparable between layers."""


def removed_at(scores: Scores, ratio: float) -> dict[str, tuple[int, ...]]:
    """Channels to remove from each layer, so that about the share `ratio` of all goes; whole layers are absent.

    Args:
        scores: of every channel that can go.
        ratio: share of channels in [0, 1]; fewer go where a layer would keep too few, or no multiple of `MULTIPLE`.

    >>> removed_at({"a": np.arange(16.0), "b": np.arange(100.0, 116.0)}, 0.25)
    {'a': (0, 1, 2, 3, 4, 5, 6, 7)}
    """
    everything = np.sort(np.concatenate(list(scores.values())))
    count = round(ratio * len(everything))
    if count == 0:
        return {}
    threshold = everything[count - 1]
    removed: dict[str, tuple[int, ...]] = {}
    for layer, own in scores.items():
        num_removed = len(own) - _kept(len(own), len(own) - int((own <= threshold).sum()))
        if num_removed:
            removed[layer] = tuple(sorted(np.argsort(own, kind="stable")[:num_removed].tolist()))
    return removed


def _kept(channels: int, important: int) -> int:
    """Number of a layer's channels that stay, of which `important` should: rounded up to a multiple.

    >>> [_kept(64, important) for important in (0, 9, 33, 64)], _kept(12, 9)
    ([8, 16, 40, 64], 12)
    """
    least = max(1, math.ceil((1 - MOST_REMOVED) * channels))
    return min(channels, MULTIPLE * math.ceil(max(important, least) / MULTIPLE))
