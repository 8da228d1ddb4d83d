"""Which weights go when channels go: Torch-Pruning's dependency graph, and what it did as a record.

What: the channels that a layer gives are taken by others, added to those of a third, normalised by a fourth; all of
them lose the same ones. Torch-Pruning finds who belongs together from the graph of a backward pass. What it cut is not
taken from its own notes but read off a copy of the network whose weights are their own positions: whatever it does to
a tensor, what is left of the positions says which were kept. So the record holds for every layer it knows.
Use when: a network is too slow as such. Channels that go make every engine faster, unlike single weights.
Costs: two copies of the network and two forward passes with autograd.
Source: Fang et al. 2023, "DepGraph: Towards Any Structural Pruning", https://arxiv.org/abs/2301.12900.

Which channels can be taken out without changing what the others mean.

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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.errors import StokerError, first_line
from stoker.records.compression import Cut, KeptChannels, LayerSizes
from stoker.training.pruned_network import rebuild_pruned, silenced

Ask = Callable[[nn.Module], Sequence[torch.Tensor]]
"""Asks a network about example rows: all its outputs, in order."""

Removed = Mapping[str, Sequence[int]]
"""Channels to take out, by the name of the layer that gives them."""


class CannotPrune(StokerError):
    """A network, or a part of it, that channels cannot be taken out of."""


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that go together in all layers that share them; `root` is the first layer that gives them."""

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
    """Who shares channels with whom in `model`, which is left in evaluation mode with every weight trainable.

    Raises:
        CannotPrune: the network cannot be followed.
    """
    library = torch_pruning()
    model.requires_grad_(requires_grad=True)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return library.DependencyGraph().build_dependency(
                model, example_inputs=(), forward_fn=lambda module, _: ask(module), output_transform=_ends,
                verbose=False,
            )  # fmt: skip
    except Exception as error:  # the library's errors have no base, and the model is anybody's code
        raise CannotPrune(f"its layers cannot be followed: {type(error).__name__}: {first_line(error)}") from error


def groups_of(model: nn.Module, ask: Ask) -> tuple[tuple[ChannelGroup, Any], ...]:
    """Groups of channels of `model`, each with the library's own; those that reach an output stay out.

    `model` is changed as by `dependency_graph`: give a copy.
    """
    library, graph = torch_pruning(), dependency_graph(model, ask)
    names = {module: name for name, module in model.named_modules()}
    output = library.ops.OPTYPE.OUTPUT
    found: list[tuple[ChannelGroup, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in graph.get_all_groups():
            if any(dependency.target.type == output for dependency, _ in group):
                continue
            root, channels = group[0].dep.target.module, group[0].idxs
            if root in names:
                found.append((ChannelGroup(names[root], len(channels)), group))
    return tuple(found)


def cut_of(model: nn.Module, ask: Ask, removed: Removed) -> Cut:
    """What is kept of every tensor when these channels go.

    Raises:
        CannotPrune: a layer would lose all, or the network made from the record is not what the library made.
    """
    pruned, marked = copy.deepcopy(model), copy.deepcopy(model)
    _prune(dependency_graph(pruned, ask), removed)
    graph = dependency_graph(marked, ask)
    _mark(marked)
    _prune(graph, removed)
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    kept = tuple(
        part for name, tensor in _tensors(marked).items() for part in _kept(name, shapes.get(name, ()), tensor)
    )
    cut = Cut(kept=kept, layers=_changed_sizes(model, marked))
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
    except Exception as error:  # a pruned network may fail wherever its code counts on a number of channels
        raise CannotPrune(f"without some channels it raises {type(error).__name__}: {first_line(error)}") from error


def _ends(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs with a node of their own in the graph: what a layer returns directly could not be told from it."""
    return [output * 1 for output in outputs if output.requires_grad]


def _prune(graph: Any, removed: Removed) -> None:
    """Take channels out in place, one group after another: what a later group is made of depends on the earlier.

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


def _mark(model: nn.Module) -> None:
    """Give every element its own position in its tensor for a value; exact in float64 up to 2^53 elements."""
    for tensor in _tensors(model).values():
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)


def _kept(name: str, shape: tuple[int, ...], left: torch.Tensor) -> list[KeptChannels]:
    """Which indices of each dimension are left, read off the positions.

    Raises:
        CannotPrune: what is left is not so many whole channels of each dimension.
    """
    if tuple(left.shape) == shape:
        return []
    if left.dim() != len(shape):
        raise CannotPrune(f"{name} had {len(shape)} dimensions, and {left.dim()} after its channels went")
    places = torch.unravel_index(left.detach().flatten().long(), shape)
    found: list[KeptChannels] = []
    for dim, flat in enumerate(places):
        grid = flat.view(left.shape).movedim(dim, 0)
        along = grid.flatten(1)[:, 0] if left.dim() > 1 else grid
        if not bool((grid.flatten(1) == along[:, None]).all() if left.dim() > 1 else (grid == along).all()):
            raise CannotPrune(f"{name} lost other channels in one place than in another")
        if left.shape[dim] != shape[dim]:
            found.append(KeptChannels(tensor=name, shape=shape, dim=dim, kept=tuple(along.tolist())))
    return found


def _changed_sizes(model: nn.Module, pruned: nn.Module) -> tuple[LayerSizes, ...]:
    """Attributes of layers that are numbers, or tuples of them, and have changed."""
    before = dict(model.named_modules())
    found: list[LayerSizes] = []
    for name, layer in pruned.named_modules():
        old, new = _sizes(before[name]), _sizes(layer)
        if changed := {key: size for key, size in new.items() if old.get(key) != size}:
            found.append(LayerSizes(layer=name, sizes=changed))
    return tuple(found)


def _sizes(layer: nn.Module) -> dict[str, int | tuple[int, ...]]:
    public = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    return {
        key: tuple(value) if isinstance(value, tuple) else value
        for key, value in public.items()
        if type(value) is int or (isinstance(value, tuple) and value and all(type(one) is int for one in value))
    }


def _require_equal(small: nn.Module, pruned: nn.Module, ask: Ask) -> None:
    """That the network made from the record is bit for bit what the library made.

    Raises:
        CannotPrune: it is not.
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
"""Layers of fewer channels are left as they are: engines compute eight at once."""

LIMIT = 1e-3
"""The most that answers may differ from the silenced network's, of the largest: sums of fp32 in another order."""

_TRIED = 0.25
"""The share that goes when a group is tried: its first channels, which are not alike in every group of a convolution or
head of an attention, so that what depends on those shows."""


def prunable(model: nn.Module, ask: Ask) -> tuple[ChannelGroup, ...]:
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
    found, wanted = asked(rebuild_pruned(model, cut), ask), asked(silenced(model, cut), ask)
    return all(
        a is not None and b is not None and a.shape == b.shape and _max_difference(a, b) <= LIMIT
        for a, b in itertools.zip_longest(found, wanted)
    )


def _sound(model: nn.Module, ask: Ask, groups: Sequence[ChannelGroup]) -> tuple[ChannelGroup, ...]:
    """Those of the groups that can go, found by halving wherever some cannot."""
    if not groups or _holds(model, ask, groups):
        return tuple(groups)
    if len(groups) == 1:
        return ()
    half = len(groups) // 2
    return (*_sound(model, ask, groups[:half]), *_sound(model, ask, groups[half:]))


def _holds(model: nn.Module, ask: Ask, groups: Sequence[ChannelGroup]) -> bool:
    removed = {group.root: tuple(range(max(1, round(_TRIED * group.channels)))) for group in groups}
    try:
        sound_cut(model, ask, removed)
    except CannotPrune:
        return False
    return True


def _max_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest value; infinite where something is not a number."""
    scale = float(wanted.double().abs().max()) if wanted.numel() else 0.0
    apart = float((found.double() - wanted.double()).abs().max()) / (scale or 1.0) if wanted.numel() else 0.0
    return apart if apart == apart else float("inf")  # noqa: PLR0124 - NaN alone differs from itself
