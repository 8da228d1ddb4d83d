"""Tensor parallel: processes that pass the same samples hold a part of each large matrix.

What: attention heads and hidden features are divided among the processes of a group; each layer that ends such a
division adds up their results. With `sequence`, layers between (norms, dropout, residuals) are divided along the
sequence. Token embedding and output layer are divided by the vocabulary, and `token_cross_entropy` is computed without
putting logits together. Parameters are DTensors, applied by PyTorch's `parallelize_module`.
Use when: a layer, or the activations of one sample, are too large for a device. Costs: two sums of a block's
activations in each direction, which nothing hides, so the group should be joined by the fastest links; with `sequence`
as many bytes in twice as many messages, and activations between layers divided as well.
With stages each stage is divided like this, and processes at the same place of their groups exchange activations, with
`sequence` those of their own tokens.
Does not combine with: penalties on weights; Muon, which needs whole matrices; `loss_chunks`, of which the divided
output layer has no need. In bf16, sums over the group are made in bf16.
Source: M. Shoeybi et al., arXiv:1909.08053; V. Korthikanti et al., arXiv:2205.05198 (sequence).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.loading.batches import Pass
from stoker.loading.fields import Content
from stoker.records import Plan, Precision
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts import data_execution
from stoker.stepping.layouts.base import LossOf, MeasuresOf, StageParallelism, Strategy, sum_over, whole_loss
from stoker.stepping.layouts.tensor_layers import split_matrices
from stoker.stepping.world import World, gather_json

_LARGEST_DIFFERENCE = {"fp32": 1e-4}
"""Largest relative difference of a gradient that must be equal in all processes, by precision; rounding stays far
below, but a branch that begins at zero has small gradients for long."""

_LARGEST_DIFFERENCE_ELSE = 1e-2

_MOST_IN_A_ROW = 16
"""Largest number of updates in a row whose gradients are compared because some were always zero: some remain so."""


def tensor_parallel(plan: Plan, model: nn.Module, world: World, job: Job) -> TensorParallel:
    """The model, in place, divided over the tensor groups of a world, and then over the data-parallel processes.

    Raises:
        BadJob: no plan fits the model, the group's size does not divide it, or the plan divides the loss too.
    """
    group = GroupUpdate(plan, model, world, job)
    return TensorParallel(data_execution(plan.layout).within_tensor_group(plan, model, world), group)


def tensor_stage(plan: Plan, model: nn.Module, world: World, job: Job, *, absent: Collection[str]) -> TensorStage:
    """As `tensor_parallel`, of the stage of this process; `absent` are parameters that other stages hold.

    Raises:
        BadJob: as `tensor_parallel`.
    """
    group = GroupUpdate(plan, model, world, job, absent=absent)
    return TensorStage(data_execution(plan.layout).of_stage(plan, model, world, job, absent=absent), group)


class TensorParallel(Strategy):
    """See `stoker.stepping.layouts.base.Strategy`.

    Args:
        inner: the data parallelism of the divided model.
        group: which divided it, before `inner` had it.
    """

    def __init__(self, inner: Strategy, group: GroupUpdate) -> None:
        self.model = inner.model
        self._inner, self._group = inner, group

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        with self._group.loss_divided():
            loss = self._inner.accumulate(passes, lambda one: whole_loss(loss_of(one)))
        self._group.sum_gradients()
        return loss

    def set_precision(self, precision: Precision) -> None:
        """As `Strategy.set_precision`."""
        self._group.set_precision(precision)
        self._inner.set_precision(precision)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Strategy.measures`; metrics see all logits."""
        return self._inner.measures(content, size, measure)


class TensorStage:
    """A stage of a pipeline, divided over a tensor group, see `stoker.stepping.layouts.base.StageParallelism`."""

    def __init__(self, inner: StageParallelism, group: GroupUpdate) -> None:
        self._inner, self._group = inner, group
        self.forward, self.before_backward = inner.forward, inner.before_backward
        self.after_evaluation, self.whole = inner.after_evaluation, inner.whole

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """See StageParallelism: logits stay divided in the last stage."""
        with self._group.loss_divided(), self._inner.update():
            yield

    def set_precision(self, precision: Precision) -> None:
        """See StageParallelism."""
        self._group.set_precision(precision)
        self._inner.set_precision(precision)

    def finish(self) -> None:
        """See StageParallelism."""
        self._inner.finish()
        self._group.sum_gradients()


class GroupUpdate:
    """What a tensor group does in an update besides the passes; it divides the model in place.

    Args:
        plan: its layout divides the matrices.
        model: on its device, whole but for what `absent` names.
        world: the processes.
        job: its loss decides whether logits stay divided.
        absent: names of parameters that other stages hold.

    Raises:
        BadJob: no plan fits the model, the group's size does not divide it, or the plan divides the loss too.
    """

    def __init__(self, plan: Plan, model: nn.Module, world: World, job: Job, *, absent: Collection[str] = ()) -> None:
        if plan.loss_chunks > 1:
            raise BadJob(
                f"the plan has loss_chunks {plan.loss_chunks}, but a tensor group has divided logits already",
                remedy="Use the plan with loss_chunks 1.",
            )
        assert world.mesh is not None
        self._world = world
        self._divided = split_matrices(model, world.mesh["tensor"], sequence=plan.layout.sequence, absent=absent)
        objective, is_divided = job.objective, self._divided.output is not None
        is_smoothed = objective.label_smoothing > 0  # which PyTorch's divided cross-entropy lacks
        self._is_loss_divided = objective.loss == "token_cross_entropy" and not is_smoothed and is_divided
        self.set_precision(plan.precision)
        self._num_updates, self._left_in_a_row = 0, _MOST_IN_A_ROW
        self._known: set[str] = set()  # parameters that have had a gradient
        self._seen: set[str] = set()  # those that have had one other than zero

    def set_precision(self, precision: Precision) -> None:
        """Expect gradients that are as equal as rounding in that precision allows."""
        self._largest_difference = _LARGEST_DIFFERENCE.get(precision, _LARGEST_DIFFERENCE_ELSE)

    @contextlib.contextmanager
    def loss_divided(self) -> Iterator[None]:
        """Within the context, logits stay divided by vocabulary, if the loss supports that."""
        if not self._is_loss_divided or self._divided.output is None:
            yield
            return
        self._divided.output.keeps_divided = True
        try:
            with loss_parallel():
                yield
        finally:
            self._divided.output.keeps_divided = False

    def sum_gradients(self) -> None:
        """Place gradients like their parameters: summed where each process did a part of the work.

        Gradients that are equal in all of them are averaged, so that rounding on a GPU cannot make processes diverge.

        Raises:
            BadJob: those gradients are not equal, in some stage.
        """
        group, size = self._divided.group, self._divided.group.size()
        for parameter in self._divided.parameters():  # PyTorch's own styles leave sums that are still to be made
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        equal = _gradients(self._divided.replicated())
        if equal:  # where the sequence is divided too, a model may have none
            torch._foreach_mul_(equal, 1 / size)
        before = [gradient.clone() for gradient in equal] if self._is_check_due() else None
        sum_over([*_gradients(self._divided.partial()), *equal], group)
        if before is not None:
            self._check(before, equal)

    def _is_check_due(self) -> bool:
        """Whether this update's gradients are compared between processes; the same in all stages.

        While some gradient was zero in all updates so far, gradients upstream of a branch that begins at zero (LoRA's
        B, adaLN-zero) are equal whatever the branch adds later. So updates are compared until every gradient was seen
        other than zero, at most _MOST_IN_A_ROW in a row after another parameter has got one; and updates 1, 2, 4, 8
        and so on.
        """
        self._num_updates += 1
        names = {name for name, p in self._divided.named() if p.grad is not None}
        if not names <= self._known:
            self._known |= names
            self._left_in_a_row = _MOST_IN_A_ROW
        is_power = self._num_updates & (self._num_updates - 1) == 0
        is_due = is_power or self._most_in_any_stage(self._left_in_a_row) > 0
        self._left_in_a_row -= self._left_in_a_row > 0
        return is_due

    def _check(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Raise BadJob, in all processes, if a gradient that should be equal in all of them is not."""
        size, num = self._divided.group.size(), len(before)
        gradients = {name: local(p.grad) for name, p in self._divided.named() if p.grad is not None}
        differences = [_largest(own * size - mean) for own, mean in zip(before, after, strict=True)]
        largest_of_each = (*differences, *map(_largest, after), *map(_largest, gradients.values()))
        values = torch.zeros(len(largest_of_each), device=self._world.device)
        for place, value in enumerate(largest_of_each):
            values[place] = value
        self._world.largest_in_stage(values)  # over shards too: those of one gradient agree on it
        difference, largest, of_all = values.split([num, num, len(gradients)])
        wrong = (difference > self._largest_difference * largest).nonzero()
        if self._most_in_any_stage(len(wrong)):
            names = [name for name, p in self._divided.named_replicated() if p.grad is not None]
            found = gather_json(names[int(wrong[0])] if len(wrong) else None, self._world.device)
            raise BadJob(
                f"the processes of a tensor group compute different gradients of {next(filter(None, found))!r} (update "
                f"{self._num_updates} in this session), of which each has a part of the work",
                remedy='Say "summed" of its module in the model\'s tensor_plan, or "region" of the one around it.',
            )
        self._seen |= {name for name, value in zip(gradients, of_all.tolist(), strict=True) if value > 0}
        if self._seen >= self._known:
            self._left_in_a_row = 0

    def _most_in_any_stage(self, count: int) -> int:
        """The largest count of any stage; the processes of one stage have the same."""
        if self._world.layout.stages == 1:
            return count
        largest = torch.tensor(count, device=self._world.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().max() if tensor.numel() else tensor.new_zeros(())


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [local(p.grad) for p in parameters if p.grad is not None]
