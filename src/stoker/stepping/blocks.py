"""The blocks that a model repeats: what activation checkpointing counts in, and what is compiled once for all."""

from __future__ import annotations

import itertools

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_LEAST_ALIKE = 3
"""Fewer blocks of a kind are not worth compiling for themselves: kernels cannot be fused across their borders."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that `model` repeats most, in the order of registration; empty if it repeats none.

    A block is a member of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`; it has parameters, and is not one of
    PyTorch's single layers. Which class it is:

    1. that of the longest run of equal members (of one class, with parameters of the same shapes), runs that lie within
       a block of another run left out: the layers of a transformer rather than the experts in each;
    2. where no two neighbours are equal, the class whose members, two at least, hold the most parameters: the stages of
       a convolutional network;
    3. where there are none either, as in 1 among the attributes of any module: the blocks in a stage of a RegNet.

    All outermost blocks of that class count, those of other widths too: all bottlenecks of a ResNet, encoder and
    decoder layers of a T5.
    """
    members = [_blocks_of(container) for container in model.modules() if isinstance(container, _CONTAINERS)]
    return _equal_blocks(members) or _largest_class(members) or _equal_blocks(list(map(_blocks_of, model.modules())))


def alike_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, if three or more of them come to every kind there is; else none.

    Of one kind are blocks of one class with parameters of the same shapes: they share compiled code.
    """
    blocks = repeated_blocks(model)
    return blocks if len(blocks) >= _LEAST_ALIKE * len({_signature(block) for block in blocks}) else []


def _equal_blocks(families: list[list[nn.Module]]) -> list[nn.Module]:
    """All blocks of the class of the longest run of equal neighbours."""
    longest = max(_outermost_runs(families), key=lambda run: (len(run), _num_parameters(run)), default=None)
    return [] if longest is None else _outermost(families, type(longest[0]))


def _largest_class(families: list[list[nn.Module]]) -> list[nn.Module]:
    """All blocks of the class, two at least, with the most parameters."""
    kinds = dict.fromkeys(type(block) for family in families for block in family)
    alike = (_outermost(families, kind) for kind in kinds)
    return max((blocks for blocks in alike if len(blocks) > 1), key=_num_parameters, default=[])


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    is_layer = type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None
    # A list or dict of modules is passed through by its owner: it has no forward pass of its own to repeat.
    has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return has_forward and not is_layer and next(module.parameters(), None) is not None


def _outermost_runs(families: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Neighbours with equal signatures, two at least; those within a block of another run left out."""
    neighbours = [list(run) for family in families for _, run in itertools.groupby(family, key=_signature)]
    runs = [run for run in neighbours if len(run) > 1]
    return [run for run in runs if not any(_is_within(run[0], other) for other in runs if other is not run)]


def _signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _is_within(block: nn.Module, run: list[nn.Module]) -> bool:
    return any(inner is block for outer in run for inner in outer.modules() if inner is not outer)


def _outermost(families: list[list[nn.Module]], kind: type[nn.Module]) -> list[nn.Module]:
    """Each block of that class once, those within another one left out."""
    kept: list[nn.Module] = []
    inside: set[int] = set()
    for block in itertools.chain.from_iterable(families):  # a module comes before what is in it
        if type(block) is not kind:
            continue
        if id(block) not in inside:
            kept.append(block)
        inside.update(map(id, block.modules()))
    return kept


def _num_parameters(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
