"""A model cut into pipeline stages at its repeated blocks, and the forward pass of one stage.

Each stage takes about as long as the others. Modules registered before the first block belong to the first stage, those
between blocks to the block before, those after the last block to the last stage. `cut_into_stages` needs no process:
planning asks too.

`StageModel` is a model of which this process holds one stage. Names of modules and weights stay the whole model's.
Modules of other stages stay without their weights: blocks before the stage return their input, the stage's first block
takes the output of the stage before, and the first block of the next stage ends the pass. The code between blocks runs
in every stage, so that values computed from the samples alone (masks, rotations of positions) exist everywhere; values
computed with absent weights are NaN, and show in the result if anything else than the next block uses them. A
comparison can hide that (`(embedding != 0).any(-1)`), so some passes are rehearsed with zeros and with noise in place
of those weights (`StageModel.rehearsal`): the output must be the same.

Blocks must be called in their order. A block of a later stage before this stage's end, or one of an earlier stage after
its beginning, is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading.fields import map_tensors
from stoker.records import Layout, Plan
from stoker.records.profile import ModelParts
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.stepping.layouts.base import LayoutExecution, Strategy
from stoker.stepping.random_draws import seed_stage_draws
from stoker.stepping.world import World


@dataclass(frozen=True)
class PipelineCut:
    """A model in stages.

    `blocks` are the dotted names of its blocks in order, `spans` the range of them in each stage, and `owners` the
    stage of each entry of its `state_dict`, in its order. `tied` are entries that are one parameter with an entry of
    another stage: the first name of that parameter for each other one.
    """

    blocks: tuple[str, ...]
    spans: tuple[range, ...]
    owners: dict[str, int]
    tied: dict[str, str]

    def holders(self, first: str) -> tuple[int, ...]:
        """The stages that hold a tied parameter, by its first name, in order."""
        return tuple(sorted({self.owners[first], *(self.owners[n] for n, f in self.tied.items() if f == first)}))


def cut_into_stages(model: nn.Module, stages: int) -> PipelineCut:
    """Cut `model` into `stages`, so that the cost of the costliest, by `block_costs`, is minimal.

    Args:
        model: whole.
        stages: number of stages.

    Raises:
        BadJob: it cannot be cut so.
    """
    if problem := stage_problem(model, Layout(stages=stages)):
        raise BadJob(problem, remedy="Use another layout, such as shards.")
    blocks = blocks_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    spans = balanced_spans(block_costs(model), stages)
    owners = _owners(model, blocks, spans)
    return PipelineCut(tuple(names[id(block)] for block in blocks), spans, owners, _tied(model, owners))


def stage_problem(model: nn.Module, layout: Layout) -> str | None:
    """Why the model cannot be cut into the layout's stages, with the numbers; None where it can."""
    if layout.stages == 1:
        return None
    blocks = blocks_of(model)
    name = type(model).__name__
    if len(blocks) < layout.stages:
        have = f"{len(blocks)} blocks in a row" if blocks else "no repeated blocks and is no nn.Sequential"
        return f"{layout.stages} stages need {layout.stages} blocks at least, but {name} has {have}"
    spans = balanced_spans(block_costs(model), layout.stages)
    owners = _owners(model, blocks, spans)
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


def _owners(model: nn.Module, blocks: Sequence[nn.Module], spans: Sequence[range]) -> dict[str, int]:
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


Values = Literal["nan", "zeros", "noise"]
"""Values in place of weights that other stages hold."""

_Kept = dict[tuple[int, str, str], torch.Tensor]
"""Tensors that modules keep as attributes, by the number of the block, the module's name in it and the attribute's."""


class StageEnd(BaseException):
    """Raised at the end of this stage, with its activations; not an error, and not to be caught as one."""

    def __init__(self, activations: torch.Tensor) -> None:
        super().__init__("the end of a pipeline's stage")
        self.activations = activations


class StageModel:
    """Stage number `stage` of `model`, which loses all other stages' weights, in place.

    Args:
        model: whole, on its device.
        cut: where it is cut.
        stage: this process's, from 0.
        receive: returns the activations of the stage before, for inputs of that kind.
    """

    def __init__(
        self, model: nn.Module, cut: PipelineCut, stage: int, receive: Callable[[Hashable | None], torch.Tensor]
    ) -> None:
        self.model = model
        self.received: torch.Tensor | None = None
        self.kind: Hashable | None = None
        self._cut, self._stage, self._receive = cut, stage, receive
        self._own = cut.spans[stage]
        self._device = next(model.parameters()).device
        self._blocks = [model.get_submodule(name) for name in cut.blocks]
        self._missing: list[torch.Tensor] = []
        self.absent: set[str] = set()
        """Names of the parameters that other stages hold."""
        self._again: torch.Tensor | None = None
        self._take_away_weights()
        model.register_load_state_dict_post_hook(self._forget_others)
        self._is_changed = False

    @property
    def is_last(self) -> bool:
        """Whether passes end with the model's output."""
        return self._stage == len(self._cut.spans) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in the last stage.

        Raises:
            StageEnd: in any other stage, with the input of the next one.
            BadJob: the blocks are not called in their order.
        """
        if not self._is_changed:  # at the first call, after all wrappers of blocks have been installed
            self._change_blocks()
        self.received = None
        shapes: list[tuple[int, ...]] = []  # of all tensor inputs, however deep in dicts and tuples
        map_tensors((args, kwargs), lambda tensor: shapes.append(tuple(tensor.shape)))
        self.kind = tuple(shapes) or None
        output = self.model(*args, **kwargs)
        skipped = self._own.start if self._stage and self.received is None else self._own.stop
        if not self.is_last or skipped == self._own.start:
            raise self._unlike(f"{self._cut.blocks[skipped]} is not called in every pass")
        return output

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that its state has in some stage, by name."""
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._cut.owners}

    def owns(self, name: str) -> bool:
        """Whether an entry of the state is kept in this stage."""
        return self._cut.owners[name] == self._stage

    def kept_by_blocks(self) -> _Kept:
        """The tensors that modules of this stage's blocks keep as attributes, such as experts' balance losses."""
        return {
            (number, name, attribute): value
            for number in self._own
            for name, module in self._blocks[number].named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }

    @contextlib.contextmanager
    def rehearsal(self, values: Values, received: torch.Tensor | None, changed: _Kept) -> Iterator[None]:
        """Within the context, passes leave the model unchanged and use `values` for the weights of other stages.

        Args:
            values: in place of absent weights, and of the attributes that absent blocks would have.
            received: the input from the stage before, of the pass that is repeated.
            changed: the attributes that the pass changed in this stage's blocks; absent ones of their class get them.
        """
        kept = [(module, dict(vars(module)), dict(module._buffers)) for module in self.model.modules()]  # noqa: SLF001 - no public way to exchange a buffer
        clones = {id(buffer): buffer.clone() for buffer in self.model.buffers()}
        self._again = received
        try:
            for module, _, buffers in kept:
                copies = {name: None if buffer is None else clones[id(buffer)] for name, buffer in buffers.items()}
                module._buffers.update(copies)  # noqa: SLF001 - as above
            for missing in self._missing:
                _fill(missing, values)
            for (number, name, attribute), value in changed.items() if values != "nan" else ():
                for other, block in enumerate(self._blocks):
                    if other not in self._own and type(block) is type(self._blocks[number]):
                        vars(block.get_submodule(name))[attribute] = _fill(torch.empty_like(value), values)
            yield
        finally:
            for module, attributes, buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.update(buffers)  # noqa: SLF001 - as above
            self._again = None
            for missing in self._missing:
                _fill(missing, "nan")

    def _take_away_weights(self) -> None:
        """Replace other stages' parameters by NaN in almost no memory; their buffers leave the state."""
        for name, owner in self._cut.owners.items():
            if owner == self._stage:
                continue
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            held = getattr(module, leaf, None)
            if isinstance(held, nn.Parameter):
                delattr(module, leaf)
                # Elements share memory along the diagonals, so that noise differs along each dimension.
                length = 1 + sum(max(size - 1, 0) for size in held.shape)
                missing = _fill(torch.empty(length, dtype=held.dtype, device=held.device), "nan")
                setattr(module, leaf, missing.as_strided(held.shape, (1,) * held.dim()))
                self._missing.append(missing)
                self.absent.add(name)
            elif isinstance(held, torch.Tensor):
                delattr(module, leaf)
                module.register_buffer(leaf, held, persistent=False)

    def _forget_others(self, _model: nn.Module, keys: Any) -> None:
        """Allow loading weights with entries of other stages: batch norm adds a counter that a dict lacks."""
        owner = self._cut.owners.get
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if owner(name, self._stage) == self._stage]

    def _change_blocks(self) -> None:
        """Make the first block take the received input, and other stages' blocks return theirs or end the pass."""
        self._is_changed = True
        for number, block in enumerate(self._blocks):
            if number in self._own:
                if self._stage > 0:
                    take = self._begin if number == self._own.start else functools.partial(self._go_on, number)
                    block.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
            elif number < self._own.start:
                block.forward = functools.partial(self._hand_on, number)
            else:
                block.forward = functools.partial(self._end, number)

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs of the first block, with the output of the stage before as its first argument."""
        if self.received is not None:
            raise self._unlike(f"{self._cut.blocks[self._own.start]} is called twice in a pass")
        given = self._receive(self.kind) if self._again is None else self._again.detach().clone()
        self.received = given.requires_grad_(torch.is_grad_enabled())
        if block.training:
            seed_stage_draws(self._stage, self._device)
        if args:
            return (self.received, *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: self.received}

    def _go_on(self, number: int, _block: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Refuse a call of a later block of this stage before its first one."""
        if self.received is None:
            raise self._out_of_order(number, before=self._own.start)

    def _hand_on(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in place of a block of a stage before."""
        if self.received is not None:
            raise self._out_of_order(self._own.start, before=number)
        return _first_tensor(args, kwargs)

    def _end(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """End the pass with the first argument of the first block of the next stage."""
        if number != self._own.stop:
            raise self._out_of_order(number, before=self._own.stop)
        if self._stage > 0 and self.received is None:
            raise self._out_of_order(number, before=self._own.start)
        raise StageEnd(_first_tensor(args, kwargs))

    def _out_of_order(self, number: int, *, before: int) -> BadJob:
        names = self._cut.blocks
        return self._unlike(
            f"{names[number]} is called before {names[before]}, in another order than registered, "
            "or one of them is skipped or called again"
        )

    def _unlike(self, why: str) -> BadJob:
        return BadJob(
            f"{type(self.model).__name__} cannot be cut into {len(self._cut.spans)} stages: {why}",
            remedy="Call the blocks one after the other, each once in every pass, or use another layout, such as "
            "shards.",
        )


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block's first argument."""
    return args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))


def _fill(tensor: torch.Tensor, values: Values) -> torch.Tensor:
    """The tensor, filled; noise comes from a generator of its own, and is different each time."""
    if values == "zeros" or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()
    if values == "nan":
        return tensor.fill_(math.nan)
    return tensor.copy_(torch.randn(tensor.shape, generator=_NOISE, dtype=torch.float32))


_NOISE = torch.Generator().manual_seed(0)


class StageExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; what is within each stage is divided further."""
        from stoker.stepping.layouts.pipeline import pipeline  # noqa: PLC0415 - its parts take long to import

        return pipeline(plan, model, world, job)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """As `LayoutExecution.model_problem`."""
        return stage_problem(model, layout)

    def divided_parts(self, parts: ModelParts, model: nn.Module, layout: Layout) -> ModelParts:
        """As `LayoutExecution.divided_parts`: the blocks that stages consist of, and where it is cut."""
        cut = cut_into_stages(model, layout.stages)
        return parts.in_blocks(cut.blocks, tuple(span.start for span in cut.spans[1:])).with_tied(cut.tied)


EXECUTION = StageExecution()
