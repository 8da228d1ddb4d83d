"""The blocks that a model repeats: the unit of activation checkpointing, compilation, sharding and pipeline stages."""

from __future__ import annotations

import itertools

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_LEAST_ALIKE = 3
"""Fewer blocks of a kind are not worth separate compilation: kernels cannot be fused across their borders."""


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
    families = [_blocks_of(container) for container in model.modules() if isinstance(container, _CONTAINERS)]
    if equal := _equal_blocks(families):
        return equal
    kinds = dict.fromkeys(type(block) for family in families for block in family)
    of_kinds = (_outermost(families, kind) for kind in kinds)
    if largest := max((blocks for blocks in of_kinds if len(blocks) > 1), key=_num_parameters, default=None):
        return largest
    return _equal_blocks(list(map(_blocks_of, model.modules())))


def alike_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, if there are on average three or more of each kind; else none.

    Blocks of one kind have one class and parameters of the same shapes: they share compiled code.
    """
    blocks = repeated_blocks(model)
    return blocks if len(blocks) >= _LEAST_ALIKE * len({_signature(block) for block in blocks}) else []


def _equal_blocks(families: list[list[nn.Module]]) -> list[nn.Module]:
    """All blocks of the class of the longest run of equal neighbours, runs within a block of another run left out."""
    neighbours = [list(run) for family in families for _, run in itertools.groupby(family, key=_signature)]
    runs = [run for run in neighbours if len(run) > 1]

    def is_outermost(run: list[nn.Module]) -> bool:
        around = (block for other in runs if other is not run for block in other)
        return not any(inner is run[0] for block in around for inner in block.modules() if inner is not block)

    longest = max(filter(is_outermost, runs), key=lambda run: (len(run), _num_parameters(run)), default=None)
    return [] if longest is None else _outermost(families, type(longest[0]))


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    """Children that can be blocks: they have parameters and a forward pass, and are no single layers of PyTorch."""
    blocks: list[nn.Module] = []
    for child in container.children():
        is_layer = type(child).__module__.startswith("torch.nn") and next(child.children(), None) is None
        # A list or dict of modules has no forward pass of its own: its owner passes through it.
        has_forward = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if has_forward and not is_layer and next(child.parameters(), None) is not None:
            blocks.append(child)
    return blocks


def _signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _outermost(families: list[list[nn.Module]], kind: type[nn.Module]) -> list[nn.Module]:
    """Each block of that class once, without those inside another one."""
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
