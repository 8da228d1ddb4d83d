"""Pipeline: each process holds a few consecutive blocks, and micro-batches go from one to the next and back.

What: `gpipe` makes all forward passes of an update before the first backward pass; `1f1b` begins backward passes as
soon as it can, so that a stage holds activations of at most as many micro-batches as there are stages.
Use when: a model does not fit, links are too slow for tensor parallel, and an update has several micro-batches for each
stage. Costs: a stage waits for (stages - 1) of (micro-batches + stages - 1) turns; activations of one micro-batch
between neighbours each way.
Does not combine with: losses of the form (model, batch), penalties, Muon, weights tied between stages, tensor parallel;
compilation; models whose blocks pass more than one tensor on.
Own sends and turns in the place of `torch.distributed.pipelining`: its stages take micro-batches of one size alone,
where the last one of a batch is often smaller and padding would change what is learned, and find shapes by a forward
pass that running statistics and random draws would notice. The orders of turns are its own.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965; D. Narayanan et al., "PipeDream-2BW", arXiv:2006.09503, section 2
(1F1B with a flush); https://docs.pytorch.org/docs/stable/distributed.pipelining.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss, Optimizer
from stoker.loading import Content, Pass
from stoker.records import Plan, Schedule
from stoker.stepping.layouts.base import LossOf, MeasuresOf
from stoker.stepping.layouts.carriers import carrier
from stoker.stepping.layouts.channels import channels
from stoker.stepping.layouts.global_norm import global_norm
from stoker.stepping.layouts.stage_model import StageEnd, StageModel
from stoker.stepping.layouts.stages import Cut, cut
from stoker.stepping.layouts.terms import problem_with_job
from stoker.stepping.local_tensors import all_local
from stoker.stepping.optimizers import parameter_groups
from stoker.stepping.world import World, broadcast_json

Turn = tuple[Literal["forward", "backward"], int]
"""What a stage does next, with which micro-batch."""

_LEAST = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass
class _Flight:
    """A micro-batch on its way: what came in, and what went out; in the last stage that is its loss."""

    received: torch.Tensor | None
    out: torch.Tensor
    loss: Loss | None
    counts: bool


def pipeline(plan: Plan, model: nn.Module, world: World, job: Job) -> Pipeline:
    """The model, in place, cut down to this process's stage.

    Raises:
        BadJob: it cannot be cut so, or the job asks for what does not go along.
    """
    _require_pipeline(job, plan)
    where = cut(model, plan.layout.stages)
    _require_groups(job, model, where)
    whole = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    return Pipeline(model, where, whole, world)


class Pipeline:
    """See `stoker.stepping.layouts.base.Spread`.

    Args:
        model: whole, on its device; it loses the weights of other stages.
        where: its stages.
        whole: shape and dtype of each entry of its state.
        world: the processes.
    """

    def __init__(
        self, model: nn.Module, where: Cut, whole: Mapping[str, tuple[torch.Size, torch.dtype]], world: World
    ) -> None:
        assert world.mesh is not None
        self._world, self._where, self._whole = world, where, whole
        self._stage = world.layout.coordinates(world.rank)[0]
        first = next(model.parameters())
        self._device, self._dtype = first.device, torch.promote_types(first.dtype, torch.float32)
        self._line = world.mesh["stages"].get_group()
        self._onward, self._back = channels(world, self._device)
        self.model = StageModel(model, where, self._stage, self._onward.receive)
        self._carrier = carrier(model, world)
        self._names: list[str] | None = None
        self._is_checked = False

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`."""
        flights: dict[int, _Flight] = {}
        losses: list[Loss] = []
        is_spoilt = False
        for turn, number in turns(self._world.layout.schedule, self._stage, self._world.layout.stages, len(passes)):
            if turn == "forward":
                flight = flights[number] = self._forward(passes[number], loss_of)
                is_spoilt = is_spoilt or (not self._is_checked and self._is_spoilt(flight, passes[number], loss_of))
                if flight.loss is not None and flight.counts:
                    losses.append(Loss(flight.loss.sum.detach(), flight.loss.count))
            else:
                self._backward(flights.pop(number), is_last=number == len(passes) - 1)
        self._onward.settle()
        self._back.settle()
        self._carrier.finish()
        self._world.mark("summing")
        return self._total(losses, is_spoilt=is_spoilt)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Spread.clip`."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = global_norm(gradients).to(self._device).double().square()
        dist.all_reduce(square, group=self._line)
        norm = square.sqrt().to(self._dtype)
        if gradients:
            torch._foreach_mul_(all_local(gradients), torch.clamp(max_norm / (norm + _LEAST), max=1.0))
        return norm

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Spread.whole`, of all of the state."""
        own = self._carrier.whole(tensors)
        found: dict[str, torch.Tensor] = {}
        for name, owner in self._where.owners.items():
            shape, dtype = self._whole[name]
            is_here = owner == self._stage
            tensor = own[name].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(tensor, src=dist.get_global_rank(self._line, owner), group=self._line)
            found[name] = tensor
        return found

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Spread.measures`; the last stage tells the others."""
        found: list[dict[str, Loss]] = []

        def work() -> torch.Tensor:
            try:
                found.append(measure(self.model, content, size))
            except StageEnd as end:
                return end.activations
            return torch.zeros(())

        activations = self._carrier.forward(work)
        self._carrier.after_evaluation()
        if not found:
            self._onward.send(activations, self.model.kind)
        self._onward.settle()
        return self._told(found[0] if found else None)

    def _forward(self, one: Pass, loss_of: LossOf, *, is_sent: bool = True) -> _Flight:
        """Bring a micro-batch through this stage, and send what comes out."""
        found: list[Loss] = []

        def work() -> torch.Tensor:
            try:
                found.append(loss_of(one))
            except StageEnd as end:
                return end.activations
            return found[0].sum

        out = self._carrier.forward(work)
        if not found and is_sent:
            self._onward.send(out, self.model.kind)
        loss = Loss(out, found[0].count) if found else None
        return _Flight(self.model.received, out, loss, one.counts)

    def _is_spoilt(self, flight: _Flight, one: Pass, loss_of: LossOf) -> bool:
        """Whether weights that are elsewhere made what came out of a pass no numbers; else the job did, or nobody."""
        if flight.received is None or _is_finite(flight.out) or not _is_finite(flight.received):
            return False
        with self.model.with_zeros():
            return _is_finite(self._forward(one, loss_of, is_sent=False).out)

    def _backward(self, flight: _Flight, *, is_last: bool) -> None:
        """Bring a micro-batch's gradients back through this stage."""
        if flight.loss is not None:
            gradient = torch.full_like(flight.out, 1.0 if flight.counts else 0.0)
        else:
            gradient = self._back.receive_like(flight.out)
        self._carrier.before_backward(is_last=is_last)
        if flight.out.requires_grad:
            flight.out.backward(gradient)
        if flight.received is not None:
            given = flight.received.grad
            self._back.send_back(torch.zeros_like(flight.received) if given is None else given)

    def _total(self, losses: Sequence[Loss], *, is_spoilt: bool) -> Loss:
        """Sum and count over all processes, told to all of them with the signals."""
        own = torch.zeros(3, dtype=torch.float64, device=self._device)
        for loss in losses:
            own[0] += loss.sum
            own[1] += loss.count
        own[2] = float(is_spoilt)
        total = torch.cat([own, self._world.signals.words(own)])
        dist.all_reduce(total)
        self._world.signals.hear(total[3:])
        self._world.mark("agreed")
        if not self._is_checked and total[2] > 0:
            raise BadJob(
                "the model cannot be cut into stages: something of before its blocks is used by more than the first of "
                "them, or a module that is registered before them is called after them",
                remedy="Register modules in the order they are called in, or use another layout, such as shards.",
            )
        self._is_checked = True
        return Loss(total[0].to(self._dtype), total[1])

    def _told(self, measured: dict[str, Loss] | None) -> dict[str, Loss]:
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


def turns(schedule: Schedule, stage: int, stages: int, passes: int) -> Iterator[Turn]:
    """What a stage (from 0) does in an update, in order; both schedules add gradients up in the same order.

    >>> [f"{turn[0]}{number}" for turn, number in turns("1f1b", 0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = passes if schedule == "gpipe" else min(stages - stage, passes)
    for number in range(ahead):
        yield "forward", number
    for number in range(passes):
        yield "backward", number
        if ahead + number < passes:
            yield "forward", ahead + number


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _require_pipeline(job: Job, plan: Plan) -> None:
    """Raise BadJob for what stages do not go with."""
    problem = problem_with_job(job, plan.layout)
    if problem is None and plan.compile:  # a stage of few blocks would be compiled with the code around them
        problem = "the plan compiles the model, of which no stage has all"
    if problem is not None:
        raise BadJob(problem, remedy="Use another layout, such as replicas or shards, or leave it out.")


def _require_groups(job: Job, model: nn.Module, where: Cut) -> None:
    """Raise BadJob, in all processes, where a group of the optimiser has nothing in some stage."""
    if not isinstance(job.optimizer, Optimizer) or not job.optimizer.groups:
        return
    for stage in range(len(where.spans)):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad and where.owners[name] == stage}
        try:
            parameter_groups(job.optimizer, named)
        except BadJob as problem:
            raise BadJob(f"in stage {stage + 1} of {len(where.spans)}, {problem.message}",
                         remedy="Use patterns that match in every stage, or another layout.") from problem  # fmt: skip
