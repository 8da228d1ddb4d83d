"""How important each channel is, for what it costs.

What: the first-order Taylor estimate of how much the loss changes without a channel, |weight × gradient| summed over
the weights that go with it, or the sum of their squares where there is no loss to ask. Divided by the multiplications
that go with the channel: of two channels that matter alike, the dearer goes.
Use when: a loss and training data are at hand; magnitudes are for networks alone.
Costs: a backward pass over some batches, and one forward pass.
Source: Molchanov et al. 2019, "Importance Estimation for Neural Network Pruning", https://arxiv.org/abs/1906.10771;
over groups as in Torch-Pruning. Dividing by cost is the knapsack's greedy rule, as in Shen et al. 2022,
https://arxiv.org/abs/2110.10811 (HALP), which measures the cost of each layer.

Which channels go at a given share: the least important of all layers together, in numbers that engines like.
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
"""Leaves the gradient of the loss on one batch after another in a network's parameters, each in place of the last."""

Rank = Callable[[Any], torch.Tensor | None]
"""Ranks the channels of one of the library's groups."""

_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)  # noqa: SLF001 - the one class that all convolutions have in common


def scores_of(
    model: nn.Module,
    ask: Ask,
    groups: Collection[ChannelGroup],
    *,
    importance: Importance,
    gradients: Gradients | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Importance for its cost of every channel [C] of these groups, by their roots; higher stays.

    Args:
        model: the network; it stays as it is.
        ask: asks it about example rows.
        groups: of `prunable`.
        importance: the ranking; `taylor` takes `gradients`.
        gradients: those of the loss on some batches; what they say is added up.

    Raises:
        CannotPrune: a group has nothing to be ranked by, or the loss left no gradient.
    """
    own = copy.deepcopy(model)
    costs = multiplications(own, ask)
    wanted = {group.root for group in groups}
    found = [(group, parts) for group, parts in groups_of(own, ask) if group.root in wanted]
    rank, scores = _ranker(importance), {group.root: np.zeros(group.channels) for group, _ in found}
    if importance == "magnitude":
        _add(scores, found, rank)
    else:
        assert gradients is not None, "Taylor's estimate is of a loss"
        for _ in gradients(own):
            _require_gradients(own)
            _add(scores, found, rank)
    return {group.root: scores[group.root] * group.channels / max(_cost(parts, costs), 1.0) for group, parts in found}


def _add(scores: dict[str, NDArray[np.float64]], found: list[tuple[ChannelGroup, Any]], rank: Rank) -> None:
    """Add what the ranking says now.

    Raises:
        CannotPrune: a group has nothing to be ranked by.
    """
    for group, parts in found:
        ranked = rank(parts)
        if ranked is None or len(ranked) != group.channels:
            raise CannotPrune(f"the channels of {group.root} have no weights to be ranked by")
        scores[group.root] += ranked.double().cpu().numpy()


def _ranker(importance: Importance) -> Rank:
    """Torch-Pruning's ranking, left in its own scale: layers are compared with one another."""
    library = torch_pruning().importance
    kind = library.GroupTaylorImportance if importance == "taylor" else library.GroupMagnitudeImportance
    made: Rank = kind(group_reduction="sum", normalizer=None)
    return made


def _require_gradients(model: nn.Module) -> None:
    """Zeros where a parameter took no part in the loss.

    Raises:
        CannotPrune: none did.
    """
    if all(parameter.grad is None for parameter in model.parameters()):
        raise CannotPrune("the loss left no gradient to rank channels by")
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def multiplications(model: nn.Module, ask: Ask) -> dict[nn.Module, float]:
    """How many each convolution and linear layer does for the example rows."""
    counts: dict[nn.Module, float] = {}

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        weight: Any = layer.weight
        moved = inputs[0] if getattr(layer, "transposed", False) else output  # what the first dimension is of
        counts[layer] = counts.get(layer, 0.0) + moved.numel() / weight.shape[0] * weight.numel()

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, _WEIGHTED)]
    try:
        asked(model, ask)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def _cost(parts: Any, costs: dict[nn.Module, float]) -> float:
    """Multiplications that go when all channels of a group do, each layer's counted where it gives or takes them."""
    total = 0.0
    for dependency, places in parts:
        layer = dependency.target.module
        if layer in costs:
            is_output = dependency.handler.__name__ == "prune_out_channels"
            sizes = (getattr(layer, "out_channels", None) or layer.out_features,
                     getattr(layer, "in_channels", None) or layer.in_features)  # fmt: skip
            total += costs[layer] * len(places) / sizes[0 if is_output else 1]
    return total


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
