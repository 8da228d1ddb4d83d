"""A model cut into pipeline stages at its repeated blocks, which each take about as long as the others.

Modules registered before the first block belong to the first stage, those between blocks to the block before, those
after the last block to the last stage. Needs no process: planning asks too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stoker.errors import BadJob
from stoker.records import Layout
from stoker.stepping.activation_checkpointing import repeated_blocks


@dataclass(frozen=True)
class PipelineCut:
    """A model in stages.

    `blocks` are the dotted names of its blocks in order, `spans` the range of them in each stage, and `homes` the
    stage of each entry of its `state_dict`, in its order. `owners` are the `processes` of a pipeline that hold them.
    `tied` are entries that are one parameter with an entry of another process: the first name of that parameter for
    each other one.
    """

    blocks: tuple[str, ...]
    spans: tuple[range, ...]
    homes: dict[str, int]
    processes: int
    tied: dict[str, str]

    @property
    def first_blocks(self) -> list[int]:
        """The number of the first block of each stage."""
        return [span.start for span in self.spans]

    @functools.cached_property
    def owners(self) -> dict[str, int]:
        """The place in the pipeline of the process that holds each entry of the state."""
        return {name: home % self.processes for name, home in self.homes.items()}

    def holders(self, first: str) -> tuple[int, ...]:
        """The stages that hold a tied parameter, by its first name, in order."""
        return tuple(sorted({self.owners[first], *(self.owners[n] for n, f in self.tied.items() if f == first)}))


def cut_into_stages(model: nn.Module, stages: int, chunks: int = 1) -> PipelineCut:
    """Cut `model` into stages, so that the cost of the costliest, by `block_costs`, is minimal.

    Args:
        model: whole.
        stages: number of processes of a pipeline.
        chunks: number of stages in each.

    Raises:
        BadJob: it cannot be cut so.
    """
    if problem := stage_problem(model, Layout(stages=stages, chunks=chunks)):
        raise BadJob(problem, remedy="Use another layout, such as shards.")
    blocks = blocks_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    spans = balanced_spans(block_costs(model), stages * chunks)
    homes = _homes(model, blocks, spans)
    tied = _tied(model, {name: home % stages for name, home in homes.items()})
    return PipelineCut(tuple(names[id(block)] for block in blocks), spans, homes, stages, tied)


def stage_problem(model: nn.Module, layout: Layout) -> str | None:
    """Why the model cannot be cut into the layout's stages, with the numbers; None where it can."""
    if layout.stages == 1:
        return None
    blocks = blocks_of(model)
    name = type(model).__name__
    if len(blocks) < layout.num_stages:
        have = f"{len(blocks)} blocks in a row" if blocks else "no repeated blocks and is no nn.Sequential"
        stages = f"{layout.stages} stages" + (f" of {layout.chunks} chunks" if layout.chunks > 1 else "")
        return f"{stages} need {layout.num_stages} blocks at least, but {name} has {have}"
    spans = balanced_spans(block_costs(model), layout.num_stages)
    owners = {key: home % layout.stages for key, home in _homes(model, blocks, spans).items()}
    for other, first in _tied(model, owners).items():
        one, two = (parameter_name.rpartition(".")[0] for parameter_name in (first, other))
        if model.get_submodule(one) is model.get_submodule(two):
            return (
                f"{one} and {two} of {name} are one module, but stages {owners[first] + 1} and {owners[other] + 1} of "
                f"{layout.stages} would each call it; two modules that share their weights would do"
            )
    trained = {
        owners[parameter_name]
        for parameter_name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    for stage in range(layout.stages):
        if stage not in trained:
            return f"stage {stage + 1} of {layout.stages} of {name} would have nothing to train; fewer stages would do"
    return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that activations pass through in turn: the model's repeated blocks, or a Sequential's children."""
    blocks = repeated_blocks(model)
    return blocks or (list(model.children()) if type(model) is nn.Sequential else [])


def block_costs(model: nn.Module) -> list[float]:
    """Cost of each block [scalars in its matrices], nearly proportional to a transformer's times; embeddings are free.

    The first and the last block's include the modules before and after.
    """
    blocks = blocks_of(model)
    costs = [0.0] * len(blocks)
    for name, block in _places(model, blocks, [n for n, _ in model.named_parameters(remove_duplicate=False)]).items():
        parameter, module = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() > 1 and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            costs[block] += parameter.numel()
    return [max(cost, 1.0) for cost in costs]


def balanced_spans(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """The split of items into consecutive runs, none empty, whose largest sum is minimal.

    >>> balanced_spans([1, 1, 1, 3], 2)
    (range(0, 3), range(3, 4))
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # best[end] of the runs so far: the least largest sum of items 0..end, and where the last run begins.
    best = [(sums[end], 0) for end in range(len(sums))]
    begins: list[list[int]] = []
    for runs in range(2, stages + 1):
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), cut) for cut in range(runs - 1, end)), default=(math.inf, 0)
            )
            for end in range(len(sums))
        ]
        begins.append([begin for _, begin in best])
    ends = [len(costs)]
    for begins_of_last in reversed(begins):
        ends.append(begins_of_last[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))


def _homes(model: nn.Module, blocks: Sequence[nn.Module], spans: Sequence[range]) -> dict[str, int]:
    """The stage of each entry of the model's state."""
    stages = [stage for stage, span in enumerate(spans) for _ in span]
    places = _places(model, blocks, list(model.state_dict()))
    return {name: stages[places[name]] for name in places}


def _tied(model: nn.Module, owners: dict[str, int]) -> dict[str, str]:
    """The first name of each parameter that has another one in another stage, by that."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if owners[first.setdefault(id(parameter), name)] != owners[name]:
            tied[name] = first[id(parameter)]
    return tied


def _places(model: nn.Module, blocks: Sequence[nn.Module], names: Sequence[str]) -> dict[str, int]:
    """The block that each parameter, or each entry of the state, belongs to, by its name."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    places: dict[str, int] = {}
    current = 0
    order: dict[str, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        current = max(current, numbers.get(id(module), 0))
        order[name] = current
    for name in names:
        owner = name.rpartition(".")[0]
        while owner not in order:  # an entry that a module adds to its state by itself
            owner = owner.rpartition(".")[0]
        places[name] = order[owner]
    return places
