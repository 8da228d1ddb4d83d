"""A model cut into pipeline stages at its repeated blocks, and the forward pass of one stage.

Each stage takes about as long as the others. Modules registered before the first block belong to the first stage, those
between blocks to the block before, those after the last block to the last stage. `cut_into_stages` needs no process:
planning asks too.

`StageModel` is a model of which this process holds one stage. Names of modules and weights stay the whole model's.
Modules of other stages stay without their weights. The code between blocks runs in every stage, so that values computed
from the samples alone (masks, rotations of positions) exist everywhere; a module of an earlier stage returns what that
stage has passed on (`stoker.stepping.layouts.stage_flow` says what), and the first block of the next stage ends the
pass. Everything else that other stages compute or hold is NaN, and shows in the result if anything uses it. A
comparison can hide that, and a pass with other values can take another way than the one that was followed, so some
passes are rehearsed with zeros and with noise in its place (`StageModel.rehearsal`): the output must be the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading.fields import Content, map_tensors
from stoker.records import Layout, Plan
from stoker.records.profile import ModelParts
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.stepping.layouts.base import LayoutExecution, PassOf, Strategy
from stoker.stepping.layouts.stage_flow import (
    FollowedPass,
    Key,
    PartCall,
    StageFlow,
    StageFollower,
    outline_of,
    parts_of,
    tensors_in,
    with_tensors,
)
from stoker.stepping.random_draws import seed_stage_draws
from stoker.stepping.world import World


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


Values = Literal["nan", "zeros", "noise"]
"""Values in place of what other stages compute, or hold."""


class StageEnd(BaseException):
    """Raised at the end of this stage, with the tensors that it made for later ones; not an error."""

    def __init__(self, made: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the end of a pipeline's stage")
        self.made = made


@dataclass(frozen=True)
class _PresentPass:
    """The pass that is under way: its flow, how often each part was called, and what this stage made for later ones."""

    flow: StageFlow
    counts: Counter[str] = field(default_factory=Counter)
    made: dict[Key, torch.Tensor] = field(default_factory=dict)
    stand_ins: list[torch.Tensor] = field(default_factory=list)


class StageModel:
    """The stages of `model` that process number `place` of a pipeline holds; it loses all other weights, in place.

    Args:
        model: whole, on its device.
        cut: where it is cut.
        place: of this process in the pipeline, from 0.
        receive: returns a tensor that the stage before passes on, by its key, for inputs of that kind.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: PipelineCut,
        place: int,
        receive: Callable[[Key, Hashable | None], torch.Tensor],
    ) -> None:
        self.model = model
        self.stage = place
        """The stage that passes go through, one of this process's."""
        self.received: dict[Key, torch.Tensor] = {}
        self.kind: Hashable | None = None
        self.flow = StageFlow({}, ())
        self._cut, self._place, self._receive = cut, place, receive
        self._device = next(model.parameters()).device
        self._follower = StageFollower(outline_of(model), cut.blocks)
        self._flows: dict[Hashable, StageFlow] = {}
        self._parts = parts_of(model, [model.get_submodule(name) for name in cut.blocks])
        self._begins = {cut.blocks[span.start]: stage for stage, span in enumerate(cut.spans)}
        self._pass: _PresentPass | None = None
        self._now: PartCall | None = None
        self._missing: list[torch.Tensor] = []
        self.absent: set[str] = set()
        """Names of the parameters that other processes hold."""
        self._again: Mapping[Key, torch.Tensor] | None = None
        self._values: Values = "nan"
        self._held = {name for name, part in self._parts.items() if next(part.parameters(), None) is not None}
        self._take_away_weights()
        model.register_load_state_dict_post_hook(self._forget_others)
        self._is_changed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in the last stage.

        Raises:
            StageEnd: in any other stage, with the tensors that it passes on.
            BadJob: the model cannot be cut so.
        """
        if not self._is_changed:  # at the first call, after all wrappers of blocks have been installed
            self._change_parts()
        if self._again is None:
            self._follow(args, kwargs)
        given: Mapping[Key, torch.Tensor] = {}
        if self.stage > 0:
            keys = self.flow.passed[self.stage - 1]
            given = {key: self._receive(key, self.kind) for key in keys} if self._again is None else self._again
        self.received = {key: self._as_input(tensor) for key, tensor in given.items()}
        self._pass = _PresentPass(self.flow)
        try:
            return self.model(*args, **kwargs)
        finally:
            self._pass = self._now = None

    def passed_on(self, made: Sequence[torch.Tensor]) -> dict[Key, torch.Tensor]:
        """What the last pass gives to the next stage, of what the stage made and what it received."""
        own = iter(made)
        return {key: self.received[key] if key in self.received else next(own) for key in self.flow.passed[self.stage]}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that its state has in some stage, by name."""
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._cut.owners}

    def owns(self, name: str) -> bool:
        """Whether an entry of the state is kept in this process."""
        return self._cut.owners[name] == self._place

    @contextlib.contextmanager
    def rehearsal(self, values: Values, received: Mapping[Key, torch.Tensor]) -> Iterator[None]:
        """Within the context, passes leave the model unchanged and use `values` for what other stages have.

        Args:
            values: in place of absent weights, and of what other stages compute and do not pass on to this one.
            received: the input from the stage before, of the pass that is repeated.
        """
        kept = [(module, dict(vars(module)), dict(module._buffers)) for module in self.model.modules()]  # noqa: SLF001 - no public way to exchange a buffer
        clones = {id(buffer): buffer.clone() for buffer in self.model.buffers()}
        self._again, self._values = received, values
        try:
            for module, _, buffers in kept:
                copies = {name: None if buffer is None else clones[id(buffer)] for name, buffer in buffers.items()}
                module._buffers.update(copies)  # noqa: SLF001 - as above
            for missing in self._missing:
                _fill(missing, values)
            yield
        finally:
            for module, attributes, buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.update(buffers)  # noqa: SLF001 - as above
            self._again, self._values = None, "nan"
            for missing in self._missing:
                _fill(missing, "nan")

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find what stages pass on for such inputs, unless that is known and does not depend on numbers in them."""
        forms: list[tuple[tuple[int, ...], torch.dtype]] = []  # of all tensor inputs, however deep in dicts and tuples
        map_tensors((args, kwargs), lambda tensor: forms.append((tuple(tensor.shape), tensor.dtype)))
        self.kind = (self.model.training, *forms) if forms else None
        flow = None if self.kind is None else self._flows.get(self.kind)
        if flow is None:
            followed = self._follower.follow(lambda outline: outline(*args, **kwargs), self.model)
            flow = followed.flow(self._cut.first_blocks, self._cut.homes)
            if flow.reads_inputs:
                self.kind = None
            else:
                self._flows[self.kind] = flow
        self.flow = flow

    def _as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor if self._again is None else tensor.detach().clone()
        return tensor.requires_grad_(torch.is_grad_enabled() and is_differentiable(tensor))

    def _take_away_weights(self) -> None:
        """Replace other stages' parameters by NaN in almost no memory; their buffers leave the state."""
        for name, owner in self._cut.owners.items():
            if owner == self._place:
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
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if owner(name, self._place) == self._place]

    def _change_parts(self) -> None:
        """Let parts be executed in their stage alone, and elsewhere return what that stage passes on."""
        self._is_changed = True
        for name, part in self._parts.items():
            part.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True, with_kwargs=True)
            part.register_forward_hook(functools.partial(self._leave, name))
            homes = {home for entry, home in self._cut.homes.items() if entry.startswith(f"{name}.")}
            if len(self._cut.spans) > self._cut.processes or homes != {self._place} or name not in self._held:
                part.forward = functools.partial(self._forward, part.forward)

    def _enter(self, name: str, part: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Begin a part's call; the first block of the next stage ends the pass."""
        if self._pass is None or self._now is not None:
            return
        stage = self._begins.get(name)
        if stage == self.stage + 1:
            keys = self.flow.passed[self.stage]
            raise StageEnd(tuple(self._pass.made[key] for key in keys if key not in self.received))
        number = self._pass.counts[name]
        self._pass.counts[name] += 1
        self._now = self.flow.calls.get((name, number))
        if self._now is None and name in self._held:
            raise self._unlike(f"{name} is called where it was not when a pass was followed without values")
        if stage == self.stage and stage > 0 and part.training:
            seed_stage_draws(stage, self._device)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A part's result: its own in its stage, in later ones what they received, or what stands in for it."""
        call = self._now
        if call is None or call.home == self.stage:
            return forward(*args, **kwargs)
        assert self._pass is not None
        inputs, places, stand_ins = tensors_in((args, kwargs)), itertools.count(), self._pass.stand_ins

        def result(like: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if place in call.same:
                return inputs[call.same[place]]
            key = call.name, call.number, place
            if key in self.received:
                received = self.received[key]
                return received.clone() if place in call.rewritten else received
            for tensor in inputs:  # which nothing reads, either: its memory is there
                if tensor.shape == like.shape and any(tensor is other for other in stand_ins):
                    return tensor
            stand_ins.append(_fill(torch.empty_like(like, device=self._device), self._values))
            return stand_ins[-1]

        return with_tensors(call.output, result)

    def _leave(self, name: str, _part: nn.Module, _args: Any, output: Any) -> None:
        """End a part's call; keep what later stages read."""
        call = self._now
        if call is None or call.name != name:
            return
        self._now = None
        if call.home != self.stage or self._pass is None or not call.readers:
            return
        tensors = tensors_in(output)
        for place, last in call.readers.items():
            if last > self.stage:
                tensor = tensors[place].clone() if place in call.rewritten else tensors[place]
                self._pass.made[call.name, call.number, place] = tensor

    def _unlike(self, why: str) -> BadJob:
        return BadJob(
            f"{type(self.model).__name__} cannot be cut into {len(self._cut.spans)} stages: {why}",
            remedy="Call the blocks one after the other, each once in every pass, or use another layout, such as "
            "shards.",
        )


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a stage that receives such a tensor sends its gradient back."""
    return tensor.is_floating_point() or tensor.is_complex()


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

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, _KnownModel] = WeakKeyDictionary()

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; what is within each stage is divided further."""
        from stoker.stepping.layouts.pipeline import pipeline  # noqa: PLC0415 - its parts take long to import

        return pipeline(plan, model, world, job)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """As `LayoutExecution.model_problem`."""
        return stage_problem(model, layout)

    def data_problem(self, job: Job, model: nn.Module, content: Content, layout: Layout) -> str | None:
        """As `LayoutExecution.data_problem`: stages need what others have and do not pass on."""
        try:
            known = self._known.setdefault(model, _KnownModel())
            known.passed(model, layout, functools.partial(_passed_through, job, content))
        except BadJob as error:
            return error.message
        return None

    def divided_parts(
        self, parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None
    ) -> ModelParts:
        """As `LayoutExecution.divided_parts`: the blocks that stages consist of, the cuts, and what is passed on."""
        known = self._known.setdefault(model, _KnownModel())
        cut = known.cut(model, layout)
        passed = () if call is None else known.passed(model, layout, call)
        parts = parts.in_blocks(cut.blocks, tuple(span.start for span in cut.spans[1:])).with_tied(cut.tied)
        return dataclasses.replace(parts, passed=passed)


class _KnownModel:
    """What is known of a model: its cuts, a pass of it, and what stages pass on there, by their number."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, int], PipelineCut] = {}
        self._followed: FollowedPass | None = None
        self._passed: dict[int, tuple[float, ...] | BadJob] = {}

    def cut(self, model: nn.Module, layout: Layout) -> PipelineCut:
        """As `cut_into_stages`."""
        key = layout.stages, layout.chunks
        if key not in self._cuts:
            self._cuts[key] = cut_into_stages(model, *key)
        return self._cuts[key]

    def passed(self, model: nn.Module, layout: Layout, call: PassOf) -> tuple[float, ...]:
        """What each stage but the last passes on, in sizes of the largest block's output in it.

        Raises:
            BadJob: as `FollowedPass.flow`.
        """
        if layout.num_stages not in self._passed:
            cut = self.cut(model, layout)
            if self._followed is None:
                self._followed = StageFollower(outline_of(model), cut.blocks).follow(call)
            try:
                flow = self._followed.flow(cut.first_blocks, cut.homes)
            except BadJob as error:
                self._passed[layout.num_stages] = error
            else:
                sizes = [
                    max((flow.num_bytes_of((cut.blocks[number], 0, 0)) for number in span), default=0)
                    for span in cut.spans
                ]
                self._passed[layout.num_stages] = tuple(
                    flow.num_bytes(stage) / sizes[stage] if sizes[stage] else 1.0 for stage in range(len(cut.spans) - 1)
                )
        result = self._passed[layout.num_stages]
        if isinstance(result, BadJob):
            raise result
        return result


def _passed_through(job: Job, content: Content, model: nn.Module) -> Any:
    return job.fields.call(model, content)


EXECUTION = StageExecution()
