"""Where a model is cut into stages: at its repeated blocks, so that each stage takes about as long as the others.

Pure of processes: planning asks here too. Whatever is registered before the first block goes with the first stage,
between blocks with the block before it, after the last block with the last stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stoker.errors import BadJob
from stoker.records import Layout
from stoker.stepping.blocks import repeated_blocks


@dataclass(frozen=True)
class Cut:
    """A model in stages.

    `blocks` are the dotted names of its blocks in order, `spans` which of them each stage has, and `owners` the stage
    of each entry of its `state_dict`, in its order.
    """

    blocks: tuple[str, ...]
    spans: tuple[range, ...]
    owners: dict[str, int]


def cut(model: nn.Module, stages: int, costs: Sequence[float] | None = None) -> Cut:
    """Cut `model` into `stages`, the costliest of which costs as little as can be.

    Args:
        model: whole.
        stages: how many.
        costs: of each block in any unit, such as its forecast time [s], the first and the last with what comes before
            and after; by default `costs_of(model)`.

    Raises:
        BadJob: it cannot be cut so.
    """
    if problem := problem_with(model, Layout(stages=stages), costs):
        raise BadJob(problem, remedy="Use another layout, such as shards.")
    blocks = blocks_of(model)
    costs = costs_of(model) if costs is None else costs
    if len(costs) != len(blocks):
        raise ValueError(f"wanted the costs of {len(blocks)} blocks, got {len(costs)}")
    names = {id(module): name for name, module in model.named_modules()}
    spans = balanced(costs, stages)
    return Cut(tuple(names[id(block)] for block in blocks), spans, _owners(model, blocks, spans))


def problem_with(model: nn.Module, layout: Layout, costs: Sequence[float] | None = None) -> str | None:
    """Why the model cannot be cut into the layout's stages, with the numbers; None where it can."""
    if layout.stages == 1:
        return None
    blocks = blocks_of(model)
    name = type(model).__name__
    if len(blocks) < layout.stages:
        have = f"{len(blocks)} blocks in a row" if blocks else "no repeated blocks and is no nn.Sequential"
        return f"{layout.stages} stages need {layout.stages} blocks at least, but {name} has {have}"
    spans = balanced(costs_of(model) if costs is None else costs, layout.stages)
    owners = _owners(model, blocks, spans)
    seen: dict[int, str] = {}
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), parameter_name)
        if owners[first] != owners[parameter_name]:
            return (
                f"{first} and {parameter_name} of {name} are one parameter, but stages {owners[first] + 1} and "
                f"{owners[parameter_name] + 1} of {layout.stages} would each hold it; untied weights would do"
            )
    trained = {owners[parameter_name] for parameter_name, p in model.named_parameters() if p.requires_grad}
    for stage in range(layout.stages):
        if stage not in trained:
            return f"stage {stage + 1} of {layout.stages} of {name} would have nothing to train; fewer stages would do"
    return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What activations pass through one after the other: the model's repeated blocks, or a Sequential's own modules."""
    blocks = repeated_blocks(model)
    return blocks or (list(model.children()) if type(model) is nn.Sequential else [])


def costs_of(model: nn.Module) -> list[float]:
    """What each block costs [scalars in its matrices], which transformers' times are near to; embeddings cost nothing.

    The first and the last block's include what comes before and after.
    """
    blocks = blocks_of(model)
    costs = [0.0] * len(blocks)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for name, block in _places(model, blocks).items():
        parameter = model.get_parameter(name)
        if parameter.dim() > 1 and id(parameter) not in embeddings:
            costs[block] += parameter.numel()
    return [max(cost, 1.0) for cost in costs]


def balanced(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """So many runs of items that follow each other, none empty, whose largest sum is the least there is.

    >>> balanced([1, 1, 1, 3], 2)
    (range(0, 3), range(3, 4))
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # best[end] of the runs so far: the least largest sum of items 0..end, and where the last run begins.
    best = [(sums[end], 0) for end in range(len(sums))]
    begins: list[list[int]] = []
    for runs in range(2, stages + 1):
        best = [
            min(((max(best[at][0], sums[end] - sums[at]), at) for at in range(runs - 1, end)), default=(math.inf, 0))
            for end in range(len(sums))
        ]
        begins.append([begin for _, begin in best])
    ends = [len(costs)]
    for places in reversed(begins):
        ends.append(places[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))


def _owners(model: nn.Module, blocks: Sequence[nn.Module], spans: Sequence[range]) -> dict[str, int]:
    """The stage of each entry of the model's state."""
    stages = [stage for stage, span in enumerate(spans) for _ in span]
    places = _places(model, blocks, of_state=True)
    return {name: stages[places[name]] for name in places}


def _places(model: nn.Module, blocks: Sequence[nn.Module], *, of_state: bool = False) -> dict[str, int]:
    """The block that each parameter, or each entry of the state, goes with."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    wanted = list(model.state_dict()) if of_state else [name for name, _ in model.named_parameters()]
    found: dict[str, int] = {}
    current = 0
    order: dict[str, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        current = max(current, numbers.get(id(module), 0))
        order[name] = current
    for name in wanted:
        owner = name.rpartition(".")[0]
        while owner not in order:  # an entry that a module adds to its state by itself
            owner = owner.rpartition(".")[0]
        found[name] = order[owner]
    return found
