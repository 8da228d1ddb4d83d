"""Cut channels out of a network, as a record of what every tensor keeps; and which channels can go at all.

What: layers that share channels lose the same ones; Torch-Pruning finds them in the graph of a backward pass. What it
cut is read off a copy whose weights are their own positions, so the record holds for every layer that it knows.
A cut is sound if the smaller network answers as the whole one does with the cut weights set to zero. That holds for
convolutions, linear layers, batch normalisation, sums, concatenations and depthwise layers. It fails where a network
counts its channels (layer or group normalisation, means over channels, reshapes into heads, grouped convolutions that
lose unequally): such layers stay whole, and are found by halving.
Use when: a network is too slow as a whole. Unlike single weights, removed channels make every engine faster.
Costs: a few copies of the network and forward passes with autograd.
Source: Fang et al. 2023, "DepGraph: Towards Any Structural Pruning", https://arxiv.org/abs/2301.12900.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.artifacts.golden import difference
from stoker.errors import StokerError, first_line
from stoker.exporting.torch_export import as_array
from stoker.records.compression import Cut, KeptChannels, LayerSizes
from stoker.training.pruned_network import rebuild_pruned, silenced

Ask = Callable[[nn.Module], Sequence[torch.Tensor]]
"""Runs a network on example rows: all its outputs, in order."""

Removed = Mapping[str, Sequence[int]]
"""Channels to remove, by the name of the layer whose outputs they are."""


class CannotPrune(StokerError):
    """Channels cannot be removed from a network, or from a part of it."""


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that several layers share; `root` is the first layer whose outputs they are."""

    root: str
    channels: int


def torch_pruning() -> Any:
    """The library.

    Raises:
        CannotPrune: it is not installed.
    """
    try:
        import torch_pruning as library  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotPrune("torch-pruning is not installed", remedy="pip install 'stoker[compress]'") from error
    return library


def dependency_graph(model: nn.Module, ask: Ask) -> Any:
    """Torch-Pruning's graph of shared channels; leaves `model` in evaluation mode with every weight trainable.

    Raises:
        CannotPrune: the network cannot be traced.
    """
    library = torch_pruning()
    model.requires_grad_(requires_grad=True)

    def ends(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Times 1: an output needs its own node in the graph, not its layer's.
        return [output * 1 for output in outputs if output.requires_grad]

    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return library.DependencyGraph().build_dependency(
                model, example_inputs=(), forward_fn=lambda module, _: ask(module), output_transform=ends, verbose=False
            )
    except Exception as error:  # the library's errors have no common base, and user code may raise anything
        raise CannotPrune(f"its layers cannot be followed: {type(error).__name__}: {first_line(error)}") from error


def groups_of(model: nn.Module, ask: Ask) -> tuple[tuple[ChannelGroup, Any], ...]:
    """Groups of channels of `model`, each with the library's own group; those that reach an output are left out.

    `model` is changed as by `dependency_graph`: pass a copy.
    """
    library, graph = torch_pruning(), dependency_graph(model, ask)
    names = {module: name for name, module in model.named_modules()}
    output = library.ops.OPTYPE.OUTPUT
    groups: list[tuple[ChannelGroup, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in graph.get_all_groups():
            if any(dependency.target.type == output for dependency, _ in group):
                continue
            root, channels = group[0].dep.target.module, group[0].idxs
            if root in names:
                groups.append((ChannelGroup(names[root], len(channels)), group))
    return tuple(groups)


def cut_of(model: nn.Module, ask: Ask, removed: Removed) -> Cut:
    """Indices that every tensor keeps when these channels go.

    Raises:
        CannotPrune: a layer would lose all, or the network rebuilt from the record is not the one the library made.
    """
    pruned, marked = copy.deepcopy(model), copy.deepcopy(model)
    _prune(dependency_graph(pruned, ask), removed)
    graph = dependency_graph(marked, ask)
    for tensor in _tensors(marked).values():  # positions are exact in float64 up to 2^53 elements
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
    _prune(graph, removed)
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    kept = tuple(
        part for name, tensor in _tensors(marked).items() for part in _kept(name, shapes.get(name, ()), tensor)
    )
    before, layers = dict(model.named_modules()), list[LayerSizes]()
    for name, layer in marked.named_modules():
        old = _sizes(before[name])
        if changed := {key: size for key, size in _sizes(layer).items() if old.get(key) != size}:
            layers.append(LayerSizes(layer=name, sizes=changed))
    cut = Cut(kept=kept, layers=tuple(layers))
    _require_equal(rebuild_pruned(model, cut), pruned, ask)
    return cut


def asked(model: nn.Module, ask: Ask) -> tuple[torch.Tensor, ...]:
    """A network's outputs, in evaluation mode.

    Raises:
        CannotPrune: it raised.
    """
    model.eval()
    try:
        with torch.no_grad():
            return tuple(ask(model))
    except Exception as error:  # a pruned network may fail wherever its code relies on a number of channels
        raise CannotPrune(f"without some channels it raises {type(error).__name__}: {first_line(error)}") from error


def _prune(graph: Any, removed: Removed) -> None:
    """Remove channels in place, one group after another: the members of a later group depend on the earlier.

    Raises:
        CannotPrune: a layer would lose all, or the library cannot.
    """
    for root, channels in removed.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                layer = graph.model.get_submodule(root)
                prune = graph.get_pruner_of_module(layer).prune_out_channels
                group = graph.get_pruning_group(layer, prune, list(channels))
                is_possible = graph.check_pruning_group(group)
                if is_possible:
                    group.prune()
        except Exception as error:  # as above
            raise CannotPrune(f"{root} cannot be cut: {type(error).__name__}: {first_line(error)}") from error
        if not is_possible:
            raise CannotPrune(f"{root}, or a layer that shares its channels, would lose all of them")


def _kept(name: str, shape: tuple[int, ...], left: torch.Tensor) -> list[KeptChannels]:
    """Kept indices of each dimension, read off the positions that are left.

    Raises:
        CannotPrune: the rest is not a number of whole channels in each dimension.
    """
    if tuple(left.shape) == shape:
        return []
    if left.dim() != len(shape):
        raise CannotPrune(f"{name} had {len(shape)} dimensions, and {left.dim()} after its channels went")
    places = torch.unravel_index(left.detach().flatten().long(), shape)
    kept: list[KeptChannels] = []
    for dim, flat in enumerate(places):
        grid = flat.view(left.shape).movedim(dim, 0).reshape(left.shape[dim], -1)
        along = grid[:, 0]
        if not bool((grid == along[:, None]).all()):
            raise CannotPrune(f"{name} lost other channels in one place than in another")
        if left.shape[dim] != shape[dim]:
            kept.append(KeptChannels(tensor=name, shape=shape, dim=dim, kept=tuple(along.tolist())))
    return kept


def _sizes(layer: nn.Module) -> dict[str, int | tuple[int, ...]]:
    """Public attributes that are integers or tuples of them."""
    public = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    return {
        key: tuple(value) if isinstance(value, tuple) else value
        for key, value in public.items()
        if type(value) is int or (isinstance(value, tuple) and value and all(type(item) is int for item in value))
    }


def _require_equal(small: nn.Module, pruned: nn.Module, ask: Ask) -> None:
    """Refuse a record from which the library's network cannot be rebuilt bit for bit.

    Raises:
        CannotPrune: it differs.
    """
    ours, theirs = _tensors(small), _tensors(pruned)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    answers = itertools.zip_longest(asked(small, ask), asked(pruned, ask))
    if not same or not all(a is not None and b is not None and torch.equal(a, b) for a, b in answers):
        raise CannotPrune(
            "the pruned network cannot be made again from the channels it keeps: it is not the same bit for bit"
        )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


FEWEST_CHANNELS = 8
"""Layers of fewer channels stay whole: engines compute eight at once."""

LIMIT = 1e-3
"""Largest allowed difference from the silenced network's answers, of the largest value: fp32 sums in another order."""

_TRIED = 0.25
"""Share of a group's channels that is removed to try it: the first ones, so that groups of a convolution and heads of
an attention lose unequally, and a network that depends on them shows it."""


def prunable(model: nn.Module, ask: Ask) -> tuple[ChannelGroup, ...]:
    """The groups of channels that can go, alone and together.

    Raises:
        CannotPrune: there are none, or the network cannot be traced.
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
    """The cut without these channels, if it is sound.

    Raises:
        CannotPrune: they cannot go, or the rest would not answer as the whole network does with them silenced.
    """
    cut = cut_of(model, ask, removed)
    if not is_sound(model, cut, ask):
        raise CannotPrune("without these channels it computes something else than with them silenced")
    return cut


def is_sound(model: nn.Module, cut: Cut, ask: Ask) -> bool:
    """Whether the cut network answers as the whole one with the cut weights silenced."""
    small, whole = (
        {str(index): as_array(output) for index, output in enumerate(asked(network, ask))}
        for network in (rebuild_pruned(model, cut), silenced(model, cut))
    )
    return small.keys() == whole.keys() and difference(small, whole) <= LIMIT


def _sound(model: nn.Module, ask: Ask, groups: Sequence[ChannelGroup]) -> tuple[ChannelGroup, ...]:
    """The groups that can go, found by halving where some cannot."""
    if not groups or _holds(model, ask, groups):
        return tuple(groups)
    if len(groups) == 1:
        return ()
    half = len(groups) // 2
    return (*_sound(model, ask, groups[:half]), *_sound(model, ask, groups[half:]))


def _holds(model: nn.Module, ask: Ask, groups: Sequence[ChannelGroup]) -> bool:
    """Whether some channels of all these groups can go together."""
    removed = {group.root: tuple(range(max(1, round(_TRIED * group.channels)))) for group in groups}
    try:
        sound_cut(model, ask, removed)
    except CannotPrune:
        return False
    return True
