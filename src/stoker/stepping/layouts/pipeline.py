"""Pipeline: each process holds a few consecutive blocks, and micro-batches go from one to the next and back.

What: `gpipe` makes all forward passes of an update before the first backward pass; `1f1b` begins backward passes as
soon as it can, so that a stage holds activations of at most as many micro-batches as there are stages. Interleaved
(`chunks`), each process holds several stages that do not follow each other, and waits less for more messages.
Use when: a model does not fit, links are too slow for tensor parallel, and an update has several micro-batches for each
stage. Costs: a stage waits for (stages - 1) of (micro-batches + stages - 1) turns; between neighbours the activations
of each micro-batch, and what else later stages read, and back the gradients of floating tensors among it.
Within a stage the model may be divided further, by replicas, shards and a tensor group.
Does not combine with: losses of the form (model, batch), penalties, Muon, modules that two stages call; compilation;
models of which one stage needs what another has and cannot pass on (`stoker.stepping.layouts.stage_flow`). That is
checked by rehearsals, too, forward passes without gradients and with other values for what other stages have: of all
micro-batches of the first update, of the first one of updates 2, 3, 4, 8, 16 and so on, and of an update after new
shapes of inputs were seen (16 times at most); of evaluations likewise. Each costs two forward passes of the stage.
Own sends and turns replace `torch.distributed.pipelining`: its stages take micro-batches of one size alone, where the
last one of a batch is often smaller and padding would change what is learned, and find shapes by a forward pass that
changes running statistics and random draws. The orders of turns are its own.
A parameter that modules of two stages share (an output layer tied to the embedding) is in both, with its moments; its
gradients are summed over both before the update, so that it stays equal.
Each direction has its own process group, so that over NCCL, which orders the sends and receives of a group, a stage
that sends and one that receives never wait for each other. Sends are waited for only at the end of an update.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965; D. Narayanan et al., "PipeDream-2BW", arXiv:2006.09503, section 2
(1F1B with a flush); D. Narayanan et al., arXiv:2104.04473, section 2.2 (interleaved);
https://docs.pytorch.org/docs/stable/distributed.pipelining.html.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss, Optimizer
from stoker.loading.batches import Pass
from stoker.loading.fields import Content
from stoker.records import Layout, Plan, Precision
from stoker.stepping.distributed_tensors import all_local, global_norm
from stoker.stepping.layouts import model_problem, stage_execution
from stoker.stepping.layouts.base import (
    LossOf,
    MeasuresOf,
    StageParallelism,
    Strategy,
    gradients_of,
    is_check_due,
    sum_over,
    whole_loss,
)
from stoker.stepping.layouts.pipeline_cut import PipelineCut, cut_into_stages
from stoker.stepping.layouts.stage_flow import Key
from stoker.stepping.layouts.stage_model import StageEnd, StageModel, Values, is_differentiable
from stoker.stepping.random_draws import GeneratorStates
from stoker.stepping.torch_optimizers import parameter_groups
from stoker.stepping.world import World, broadcast_json

Turn = tuple[Literal["forward", "backward"], int, int]
"""The next pass of a process, its micro-batch, and its stage."""

_LEAST = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""

_MOST_FOR_SHAPES = 16
"""Largest number of updates rehearsed because of new shapes: where lengths vary, every batch has some."""

_ROUNDING = 10.0
"""Multiple of the difference between equal passes above which another one counts as different."""


@dataclass
class _Flight:
    """A micro-batch between its forward and backward pass through a stage.

    `received` came from the stage before, `sent` went to the next one, in order; in the last stage there is a loss.
    """

    received: Mapping[Key, torch.Tensor]
    sent: Sequence[torch.Tensor]
    loss: Loss | None
    counts: bool


def pipeline(plan: Plan, model: nn.Module, world: World, job: Job) -> PipelineParallel:
    """The model, in place, cut down to this process's stage.

    Raises:
        BadJob: it cannot be divided so, or a group of the optimiser has no parameter in some stage.
    """
    where = cut_into_stages(model, plan.layout.stages, plan.layout.chunks)
    if problem := model_problem(model, plan.layout):  # of what a stage is divided into, while the model is whole
        raise BadJob(f"{plan.layout.in_words()}: {problem}")
    if isinstance(job.optimizer, Optimizer) and job.optimizer.groups:
        for stage in range(where.processes):  # in all processes, so that all of them refuse
            named = {
                name: p for name, p in model.named_parameters() if p.requires_grad and stage in where.holders(name)
            }
            try:
                parameter_groups(job.optimizer, named)
            except BadJob as problem_in_stage:
                raise BadJob(
                    f"in stage {stage + 1} of {where.processes}, {problem_in_stage.message}",
                    remedy="Use patterns that match in every stage, or another layout.",
                ) from problem_in_stage
    return PipelineParallel(plan, model, where, world, job)


class PipelineParallel(Strategy):
    """See `stoker.stepping.layouts.base.Strategy`.

    Args:
        plan: how updates are executed.
        model: whole, on its device; it loses the weights of other stages.
        where: its stages.
        world: the processes.
        job: whose model it is.
    """

    def __init__(self, plan: Plan, model: nn.Module, where: PipelineCut, world: World, job: Job) -> None:
        assert world.mesh is not None
        self._world, self._where = world, where
        self._whole = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        self._stage = world.layout.coordinate(world.rank, "stages")
        first = next(model.parameters())
        self._device, self._dtype = first.device, torch.promote_types(first.dtype, torch.float32)
        self._line = world.mesh["stages"].get_group()
        self._stages = range(self._stage, len(where.spans), where.processes)
        self._onward, self._back = open_channels(world, self._device)
        self.model: StageModel = StageModel(model, where, self._stage, self._receive)
        within = stage_execution(world.layout)
        self._carrier = within.of_stage(plan, model, world, job, absent=self.model.absent)
        self.tied = {name: first for name, first in where.tied.items() if where.owners[name] == self._stage}
        self._copies = {id(model.get_parameter(name)) for name in self.tied}
        self._in_several_stages = shared_parameters(model, where, world)
        # The processes that pass the same samples through the stage have the same loss, which one of them gives.
        self._gives_loss = not any(
            place
            for place, axis in zip(world.layout.coordinates(world.rank), world.layout.mesh, strict=True)
            if not (axis.shares_batch or axis.cuts_model)
        )
        self._names: list[str] | None = None
        self._num_updates, self._num_evaluations = 0, 0
        self._kinds: set[Hashable] = set()
        self._new_shapes: torch.Tensor | None = None  # in how many processes the last update had some
        self._left_for_shapes = _MOST_FOR_SHAPES

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        with self._carrier.update():
            return self._accumulate(passes, loss_of)

    def _accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        flights: dict[tuple[int, int], _Flight] = {}
        losses: list[Loss] = []
        self._num_updates += 1
        rehearsed = len(passes) if self._has_new_shapes() else is_check_due(self._num_updates)
        buffers = {name: buffer.clone() for name, buffer in self.model.buffers().items()} if rehearsed else {}
        is_spoilt = has_new_shapes = False
        order = turns(self._world.layout, self._stage, len(passes))
        for place, (turn, number, stage) in enumerate(order):
            self.model.stage = stage
            if turn == "forward":
                rehearsal = self._rehearsal() if number < rehearsed else None
                out, loss = self._passed(passes[number], loss_of)
                sent = self._send(out) if loss is None else ()
                flight = _Flight(self.model.received, sent, loss, passes[number].counts)
                flights[number, stage] = flight
                has_new_shapes = has_new_shapes or self.model.kind not in self._kinds
                self._kinds.add(self.model.kind)
                if rehearsal is not None:
                    again = functools.partial(self._seen, passes[number], loss_of)
                    is_spoilt = rehearsal.differs(_seen(out, loss), again, flight.received) or is_spoilt
                if loss is not None and flight.counts:
                    losses.append(Loss(loss.sum.detach(), loss.count))
            else:
                self._backward(flights.pop((number, stage)), is_last=place == len(order) - 1)
        self._onward.settle()
        self._back.settle()
        self._carrier.finish()
        for parameters, group in self._in_several_stages:
            sum_over(gradients_of(parameters, group), group)
        self._world.mark("summing")
        own = torch.tensor([0.0, 0.0, is_spoilt, has_new_shapes], dtype=torch.float64, device=self._device)
        for loss in losses if self._gives_loss else ():
            own[0] += loss.sum
            own[1] += loss.count
        total = torch.cat([own, self._world.signals.outgoing(own)])
        dist.all_reduce(total)
        self._world.signals.receive(total[len(own) :])
        self._world.mark("agreed")
        num_spoilt, self._new_shapes = total[2], total[3]
        if rehearsed:  # otherwise a GPU is not waited for
            if num_spoilt > 0:
                raise _unlike(_USED_ELSEWHERE)
            self._require_changed_by_owners(buffers)
        return Loss(total[0].to(self._dtype), total[1])

    def _has_new_shapes(self) -> bool:
        """Whether this is the first update, or some process saw inputs of new shapes in the last one."""
        if self._new_shapes is None:
            return True
        has_some = self._left_for_shapes > 0 and bool(self._new_shapes > 0)
        self._left_for_shapes -= has_some
        return has_some

    def set_precision(self, precision: Precision) -> None:
        """As `Strategy.set_precision`."""
        self._carrier.set_precision(precision)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Strategy.clip`."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = [p.grad for p in parameters if p.grad is not None and id(p) not in self._copies]
        square = global_norm(own).to(self._device).double().square()
        dist.all_reduce(square, group=self._line)
        norm = square.sqrt().to(self._dtype)
        if gradients:
            torch._foreach_mul_(all_local(gradients), torch.clamp(max_norm / (norm + _LEAST), max=1.0))
        return norm

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Strategy.whole`, of all of the state."""
        own = self._carrier.whole(tensors)
        whole: dict[str, torch.Tensor] = {}
        for name, owner in self._where.owners.items():
            shape, dtype = self._whole[name]
            is_here = owner == self._stage
            tensor = own[name].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(tensor, src=dist.get_global_rank(self._line, owner), group=self._line)
            whole[name] = tensor
        return whole

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Strategy.measures`; the last stage sends the results to the others."""
        self._num_evaluations += 1
        is_due, is_spoilt = is_check_due(self._num_evaluations), False
        for stage in self._stages:
            self.model.stage = stage
            rehearsal = self._rehearsal() if is_due else None
            out, measured = self._measured(content, size, measure)
            if measured is None:
                self._send(out)
            if rehearsal is not None:
                again = functools.partial(self._measured_again, content, size, measure)
                is_spoilt = rehearsal.differs(out, again, self.model.received) or is_spoilt
        if is_due:
            total = torch.tensor(float(is_spoilt), device=self._device)
            dist.all_reduce(total)
            if total:
                raise _unlike(_USED_ELSEWHERE)
        self._carrier.after_evaluation()
        self._onward.settle()
        return self._shared(measured)

    def _receive(self, key: Key, kind: Hashable | None) -> torch.Tensor:
        """A tensor that the stage before passes on."""
        return self._onward.receive(None if kind is None else (kind, self.model.stage, key))

    def _send(self, made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Pass on to the next stage what the last pass made for it, and what it received for later stages."""
        passed, kind, to = self.model.passed_on(made), self.model.kind, self.model.stage + 1
        for key, tensor in passed.items():
            self._onward.send(tensor, None if kind is None else (kind, to, key))
        return tuple(passed.values())

    def _measured(
        self, content: Content, size: int, measure: MeasuresOf
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Loss] | None]:
        """The output of an evaluation's pass through this stage: activations, or sums and counts of measures."""
        measured: list[dict[str, Loss]] = []

        def work() -> tuple[torch.Tensor, ...]:
            try:
                measured.append(measure(self.model, content, size))
            except StageEnd as end:
                return end.made
            return tuple(number for loss in measured[0].values() for number in _numbers(loss))

        out = self._carrier.forward(work)
        return out, measured[0] if measured else None

    def _measured_again(self, content: Content, size: int, measure: MeasuresOf) -> tuple[torch.Tensor, ...]:
        return self._measured(content, size, measure)[0]

    def _passed(self, one: Pass, loss_of: LossOf) -> tuple[tuple[torch.Tensor, ...], Loss | None]:
        """The output of a pass through this stage: activations, or the loss's sum and the loss."""
        losses: list[Loss] = []

        def work() -> tuple[torch.Tensor, ...]:
            try:
                losses.append(whole_loss(loss_of(one)))
            except StageEnd as end:
                return end.made
            return (losses[0].sum,)

        out = self._carrier.forward(work)
        return out, Loss(out[0], losses[0].count) if losses else None

    def _rehearsal(self) -> _Rehearsal:
        return _Rehearsal(self.model, self._carrier, self._world, self._device)

    def _seen(self, one: Pass, loss_of: LossOf) -> tuple[torch.Tensor, ...]:
        return _seen(*self._passed(one, loss_of))

    def _backward(self, flight: _Flight, *, is_last: bool) -> None:
        """The backward pass of a micro-batch through a stage."""
        if flight.loss is not None:
            ends: list[torch.Tensor] = [flight.loss.sum]
            gradients = [torch.full_like(flight.loss.sum, 1.0 if flight.counts else 0.0)]
        else:
            ends = [tensor for tensor in flight.sent if is_differentiable(tensor)]
            gradients = [self._back.receive_like(tensor) for tensor in ends]
        self._carrier.before_backward(is_last=is_last)
        trained = [place for place, end in enumerate(ends) if end.requires_grad]
        if trained:
            torch.autograd.backward([ends[place] for place in trained], [gradients[place] for place in trained])
        for tensor in filter(is_differentiable, flight.received.values()):
            self._back.send_back(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def _require_changed_by_owners(self, before: Mapping[str, torch.Tensor]) -> None:
        """Raise BadJob, in all processes, if a buffer was changed by passes, but not in the stage that keeps it."""
        if not before:
            return
        flags: list[list[bool]] = []
        for name, buffer in self.model.buffers().items():
            is_changed = not _same(before[name], buffer) and bool(buffer.isfinite().all())
            is_owned = self.model.owns(name)
            flags.append([is_changed and is_owned, is_changed and not is_owned])
        total = torch.tensor(flags, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        for name, (by_owner, by_others) in zip(before, total.tolist(), strict=True):
            if by_others and not by_owner:
                raise _unlike(
                    f"{name} is registered with one stage, but changed by another, which keeps no state of it"
                )

    def _shared(self, measured: dict[str, Loss] | None) -> dict[str, Loss]:
        """The last stage's measures, in all stages."""
        last = dist.get_global_rank(self._line, self._line.size() - 1)
        if self._names is None:
            names = None if measured is None else list(measured)
            self._names = broadcast_json(names, last, self._device, self._line)
        values = torch.zeros(len(self._names or ()), 2, dtype=torch.float64, device=self._device)
        for row, loss in zip(values, (measured or {}).values(), strict=False):
            row[0], row[1] = loss.sum, loss.count
        dist.broadcast(values, src=last, group=self._line)
        return {name: Loss(row[0], row[1]) for name, row in zip(self._names or (), values, strict=True)}


class _Rehearsal:
    """A pass repeated with other values for the weights of other stages; created before the pass that counts."""

    def __init__(self, model: StageModel, carrier: StageParallelism, world: World, device: torch.device) -> None:
        self._model, self._carrier, self._world, self._device = model, carrier, world, device
        self._generators = GeneratorStates(device)

    def differs(
        self,
        out: Sequence[torch.Tensor],
        again: Callable[[], Sequence[torch.Tensor]],
        received: Mapping[Key, torch.Tensor],
    ) -> bool:
        """Whether `again`, the repeated pass, gives another output than `out`.

        The processes of a stage make the same passes, and agree on the answer.
        """
        model = self._model
        now = GeneratorStates(self._device)
        out = [tensor.detach() for tensor in out]

        def passed(values: Values) -> Sequence[torch.Tensor]:
            self._generators.restore()
            with torch.no_grad(), model.rehearsal(values, received):
                return again()

        is_different = False
        for values in ("zeros", "noise"):
            other = passed(values)
            if not self._anywhere(not all(map(_same, other, out))):
                continue
            # Without gradients other kernels may round differently, and on a GPU the order of sums may vary.
            first, second = passed("nan"), passed("nan")
            is_distant = _distance(other, first) > _ROUNDING * _distance(first, second)
            is_different = self._anywhere(is_distant) or is_different
        now.restore()
        self._carrier.after_evaluation()
        return is_different

    def _anywhere(self, value: bool) -> bool:  # noqa: FBT001 - the value is the statement
        return bool(self._world.largest_in_stage(torch.tensor(float(value), device=self._device)) > 0)


def _seen(out: tuple[torch.Tensor, ...], loss: Loss | None) -> tuple[torch.Tensor, ...]:
    """The output of a pass; of the last stage the loss with its count."""
    return out if loss is None else tuple(_numbers(loss))


def _numbers(loss: Loss) -> list[torch.Tensor]:
    """Sum and count."""
    return [torch.as_tensor(v, dtype=torch.float64, device=loss.sum.device).detach() for v in (loss.sum, loss.count)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _distance(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference [1]; infinite where only one is NaN, or shapes differ."""
    return max(map(_distance_of, tensors, others), default=0.0)


def _distance_of(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    is_same = (one == other) | (one.isnan() & other.isnan())
    differences = torch.where(is_same, 0.0, (one.double() - other.double()).abs())
    return float(differences.nan_to_num(math.inf).max()) if differences.numel() else 0.0


_USED_ELSEWHERE = (
    "a stage needs what another one has and does not pass on: the model's pass takes another way than one that is "
    "followed on tensors without values, by numbers that weights compute, by its count of passes, or by what it keeps"
)


def _unlike(why: str) -> BadJob:
    return BadJob(
        f"the model cannot be cut into stages: {why}",
        remedy="Compute masks from the model's inputs, register modules in the order they are called in, or use "
        "another layout, such as shards.",
    )


def turns(layout: Layout, place: int, passes: int) -> Sequence[Turn]:
    """The passes of a process (from 0) in an update, in order; all schedules add up gradients in the same order.

    >>> [f"{turn[0]}{number}" for turn, number, _ in turns(Layout(stages=2), 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    return _turns(layout.stages, layout.chunks, passes, is_gpipe=layout.schedule == "gpipe")[place]


@functools.lru_cache(maxsize=32)
def _turns(processes: int, chunks: int, passes: int, *, is_gpipe: bool) -> tuple[tuple[Turn, ...], ...]:
    """The passes of each process, whose stages take micro-batches in groups of as many as there are processes.

    All processes take forward passes in one order, and backward passes in one order, so that messages arrive in the
    order in which they are needed. Each begins with so many forward passes that its first gradient can be there, and
    then takes both in turn. Narayanan et al. 2021, section 2.2, leave the number of micro-batches no remainder in the
    last group; here that one is smaller, and more forward passes come first if processes would wait for each other.
    """
    groups = [range(start, min(start + processes, passes)) for start in range(0, passes, processes)]
    forward = [(number, chunk) for group in groups for chunk in range(chunks) for number in group]
    backward = [(number, chunk) for group in groups for chunk in reversed(range(chunks)) for number in group]

    def order(place: int, more: int) -> tuple[Turn, ...]:
        ahead = (processes - place - 1) * (1 if chunks == 1 else 2) + (chunks - 1) * processes + more
        first = len(forward) if is_gpipe else min(ahead, len(forward))
        made: list[Turn] = [("forward", number, chunk * processes + place) for number, chunk in forward[:first]]
        for done, (number, chunk) in enumerate(backward):
            if first + done < len(forward):
                later, of_chunk = forward[first + done]
                made.append(("forward", later, of_chunk * processes + place))
            made.append(("backward", number, chunk * processes + place))
        return tuple(made)

    for more in range(len(forward) + 1):
        orders = tuple(order(place, more) for place in range(processes))
        if _can_end(orders, processes * chunks - 1):
            break
    return orders


def _can_end(orders: Sequence[Sequence[Turn]], last: int) -> bool:
    """Whether processes that take their passes in these orders never all wait for each other."""
    done, left = set[Turn](), [list(reversed(order)) for order in orders]
    while any(left):
        before = len(done)
        for order in left:
            while order:
                turn, number, stage = order[-1]
                if turn == "forward":
                    needed: Turn | None = ("forward", number, stage - 1) if stage > 0 else None
                else:
                    needed = ("backward", number, stage + 1) if stage < last else ("forward", number, stage)
                if needed is not None and needed not in done:
                    break
                done.add(order.pop())
        if len(done) == before:
            return False
    return True


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
_MOST_DIMENSIONS = 8


class StageChannel:
    """One direction between neighbouring stages: tensors arrive in the order in which they are sent.

    Args:
        group: the processes of one pipeline, in order.
        step: 1 towards the next stage, -1 back.
        around: another group of them, for messages between the last one and the first; None if there are none.
    """

    def __init__(
        self, group: dist.ProcessGroup, step: int, device: torch.device, around: dist.ProcessGroup | None = None
    ) -> None:
        self._device = device
        self._to = _neighbour(group, around, step)
        self._from = _neighbour(group, around, -step)
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._announced: set[Hashable] = set()
        self._forms: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}

    def send(self, tensor: torch.Tensor, kind: Hashable | None) -> None:
        """Send a tensor; those of one `kind`, as both ends call it, have one shape and dtype. None: any."""
        if kind not in self._announced:
            if tensor.dim() > _MOST_DIMENSIONS or tensor.dtype not in _DTYPES:
                raise _unlike(f"a stage passes on {tensor.dtype} of {tensor.dim()} dimensions, which is not supported")
            padding = [0] * (_MOST_DIMENSIONS - tensor.dim())
            header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]
            self._put(torch.tensor(header, dtype=torch.int64, device=self._device))
        if kind is not None:
            self._announced.add(kind)
        self._put(tensor.detach().contiguous())

    def receive(self, kind: Hashable | None) -> torch.Tensor:
        """The next tensor, which is of `kind`."""
        form = self._forms.get(kind)
        if form is None:
            header = self._take(torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._device))
            number, dims, *sizes = header.tolist()
            form = torch.Size(sizes[:dims]), _DTYPES[number]
        if kind is not None:
            self._forms[kind] = form
        shape, dtype = form
        return self._take(torch.empty(shape, dtype=dtype, device=self._device))

    def receive_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next tensor, which has the shape and dtype of `tensor`."""
        return self._take(torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device))

    def send_back(self, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape and dtype the other end knows."""
        self._put(tensor.detach().contiguous())

    def settle(self) -> None:
        """Wait until everything that was sent is taken."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()

    def _put(self, tensor: torch.Tensor) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        assert self._to is not None, "the last stage has no next one"
        group, rank = self._to
        work = dist.isend(tensor, dst=rank, group=group)
        self._sent.append((work, tensor))  # its memory is kept until it has arrived

    def _take(self, empty: torch.Tensor) -> torch.Tensor:
        assert self._from is not None, "the first stage has none before it"
        group, rank = self._from
        dist.recv(empty, src=rank, group=group)
        return empty


def open_channels(world: World, device: torch.device) -> tuple[StageChannel, StageChannel]:
    """The channel to the next stage, and the one back; collective over the world."""
    assert world.mesh is not None
    # Between the last process and the first messages go by groups of their own: of two processes each sends to the
    # other in one direction, and over NCCL each would wait for the other to receive.
    onward, back, *around = [_own_line(world) for _ in range(2 if world.layout.chunks == 1 else 4)]
    assert onward is not None, "every process is of a line"
    assert back is not None, "likewise"
    onward_around, back_around = around or (None, None)
    return StageChannel(onward, 1, device, onward_around), StageChannel(back, -1, device, back_around)


def shared_parameters(
    model: nn.Module, cut: PipelineCut, world: World
) -> list[tuple[list[nn.Parameter], dist.ProcessGroup]]:
    """The trained parameters here that other stages hold as well, and the processes that do; collective.

    Equal gradients and equal states of optimisers keep them equal: their gradients are summed over the group.
    """
    stage = world.layout.coordinate(world.rank, "stages")
    own: dict[str, str] = {first: first for first in cut.tied.values() if cut.owners[first] == stage}
    own |= {first: name for name, first in cut.tied.items() if cut.owners[name] == stage}
    shared: dict[tuple[int, ...], list[str]] = {}
    for first in dict.fromkeys(cut.tied.values()):
        shared.setdefault(cut.holders(first), []).append(first)
    found: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
    for stages, names in shared.items():
        group = _own_line(world, stages)
        if group is not None:
            parameters = [model.get_parameter(own[first]) for first in names]
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            found += [(trained, group)] if trained else []
    return found


def _own_line(world: World, stages: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """A new group of the processes that hold these stages (None: all) of the same samples; None where this is none."""
    assert world.mesh is not None
    names = [axis.name for axis in world.layout.mesh]
    every = world.mesh.mesh.movedim(names.index("stages"), -1).flatten(0, -2).tolist()
    lines = every if stages is None else [[line[stage] for stage in stages] for line in every]
    patience: timedelta | None = None  # unknown
    with contextlib.suppress(AttributeError, RuntimeError):  # new groups do not inherit the timeout of the world's
        everybody: Any = dist.group.WORLD
        options = everybody._get_backend(torch.device(world.mesh.device_type)).options  # noqa: SLF001 - no public way
        patience = getattr(options, "_timeout", None)
    # Every process makes every group, in the same order.
    groups: list[dist.ProcessGroup] = [dist.new_group(line, timeout=patience) for line in lines]
    return next((group for group, line in zip(groups, lines, strict=True) if world.rank in line), None)


def _neighbour(
    group: dist.ProcessGroup, around: dist.ProcessGroup | None, step: int
) -> tuple[dist.ProcessGroup, int] | None:
    """The group of the messages with the process that many places on, and its number in the world; None: no such."""
    place = group.rank() + step
    if 0 <= place < group.size():
        return group, dist.get_global_rank(group, place)
    return None if around is None else (around, dist.get_global_rank(around, place % around.size()))
