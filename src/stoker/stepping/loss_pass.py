"""The loss pass: the mean loss of an optimiser batch, with the gradient of that mean left in the parameters.

A loss is a sum and a count: micro-batches add up sums, and gradients are divided once, by the count of the whole batch.
Generators are seeded before each micro-batch, from seed, update and the micro-batch's first sample, so that draws do
not depend on how many processes share a batch, nor on what was drawn before. A penalty on the weights enters once an
update.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stoker.errors import BadJob, RunFailed
from stoker.jobs import Job, Loss
from stoker.loading.batches import Batch, Pass
from stoker.loading.fields import Content
from stoker.loading.order import (
    RandomStream,
    extended,
    key_of,
    python_generators,
    restore_python_generators,
    seed_torch,
)
from stoker.records import Plan
from stoker.stepping.activation_checkpointing import not_repeatable
from stoker.stepping.autograd_engine import backward
from stoker.stepping.batch_norm import CoupledBatchNorm
from stoker.stepping.buffers import SMALL_BYTES, Buffers
from stoker.stepping.frozen_parameters import GradualUnfreezing
from stoker.stepping.layouts.base import Strategy, noted
from stoker.stepping.layouts.compatibility import add_penalty
from stoker.stepping.loss_scale import LossScale
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.precision import NO_CONDITIONS, products_in
from stoker.stepping.selective_backprop import selected
from stoker.stepping.step_failures import NotFinite, not_finite
from stoker.stepping.torch_compile import is_double_backward
from stoker.stepping.uncompiled import uncompiled
from stoker.stepping.world import ALONE, World
from stoker.units import format_bytes

Conditions = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context of a forward pass, such as autocast."""


class BatchPass(abc.ABC):
    """A form of the pass of a batch, forward and backward."""

    @abc.abstractmethod
    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """Leave the gradient of the batch's mean loss in the parameters; returns that mean, detached."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check for silent errors before a checkpoint.

        Raises:
            RunFailed: there was one.
        """

    @abc.abstractmethod
    def renew(self) -> None:
        """Forget what was recorded for other trained parameters than the present ones."""


class AutogradPass(BatchPass):
    """The model's own pass under autograd: a batch in one piece, or in as many micro-batches as it takes.

    Args:
        job: what is learned.
        plan: how it is executed.
        objective: the job's loss.
        strategy: the model over the processes of `world`.
        parameters: those that the optimiser moves.
        norms: the model's batch norms.
        conditions: the context of a forward pass.
        scale: of losses under fp16; None: gradients are made of the losses themselves.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - each is a part of its own
        self,
        job: Job,
        plan: Plan,
        objective: TrainingObjective,
        strategy: Strategy,
        world: World,
        parameters: list[nn.Parameter],
        norms: CoupledBatchNorm,
        conditions: Conditions,
        scale: LossScale | None = None,
    ) -> None:
        self.scale = scale
        self.micro_batch = plan.micro_batch
        """Most samples that go through the model at once [samples]."""
        self._is_compiled, self._device = plan.compile, torch.device(plan.device)
        self._objective, self._strategy, self._world = objective, strategy, world
        self._parameters, self._norms, self._conditions = parameters, norms, conditions
        self._key = key_of(RandomStream.MICRO_BATCH, job.seed)
        self._reciprocals: dict[float, torch.Tensor] = {}

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `BatchPass`."""
        factor = 1.0 if self.scale is None else self.scale.value
        if self._objective.in_chunks is not None:
            self._objective.in_chunks.scale = factor
        if self._world is ALONE and batch.size <= self.micro_batch and self.scale is None:
            whole = self.loss(self.whole(batch, update), batch.size)
            self._strategy.before_backward(is_last=True)
            backward(whole.sum, self._reciprocal(whole))  # the mean's gradient, for one node less
            return (whole.sum.detach() / whole.count).detach()

        if not self._strategy.is_checked:
            self._strategy.check(self.whole(batch, update), self._objective)

        def loss_of(part: Pass) -> Loss:
            self._seed(update, part.first)  # before the cut: a user's augmentation may draw
            self._norms.counts = part.counts
            loss = self.loss(batch.cut(part.start, part.stop), part.size)
            return noted(loss if factor == 1 else Loss(loss.sum * factor, loss.count), self._world)

        loss = self._strategy.accumulate(batch.passes(self.micro_batch), loss_of)
        # Divided once, by the count of the whole batch.
        divisor = loss.count if factor == 1 else loss.count * factor
        self._strategy.divide(self._parameters, divisor)
        return torch.as_tensor(loss.sum / divisor).detach()

    @property
    def loss_object(self) -> object:
        """The loss as it is called here."""
        return self._objective.loss_object

    def gradient_norm(self) -> float:
        """The global norm of the gradients that are in the parameters, over all processes; waits for the device."""
        return float(self._strategy.clip(self._parameters, math.inf))

    def check(self) -> None:
        """Nothing is recorded that could be wrong."""

    def renew(self) -> None:
        """Nothing is recorded."""

    def loss(self, content: Content, size: int) -> Loss:
        """The loss of one micro-batch of `size` samples; random draws go on from where the generators are."""
        self._norms.micro_batch = size
        # A compiled model is compiled for the plan's micro-batch alone.
        is_ragged = self._is_compiled and size != self.micro_batch
        content = self._strategy.part_of(content)
        with self._conditions(), uncompiled() if is_ragged else NO_CONDITIONS:
            return self._objective.loss(self._strategy.model, content, size)

    def loss_of(self, content: Content, size: int, update: int, first: int) -> Loss:
        """The loss of one micro-batch that starts at sample `first` of its batch; random draws are keyed by both."""
        self._seed(update, first)
        return self.loss(content, size)

    def sample_losses(self, batch: Batch, update: int) -> torch.Tensor:
        """The loss of each sample [B]; random draws of an augmentation are keyed as in the pass for gradients."""
        losses: list[torch.Tensor] = []
        for part in batch.passes(self.micro_batch):
            self._seed(update, part.first)
            content = batch.cut(part.start, part.stop)
            with self._conditions():
                losses.append(self._objective.sample_losses(self._strategy.model, content, part.size))
        return torch.cat(losses)

    def whole(self, batch: Batch, update: int) -> Content:
        """The whole batch; generators are seeded first, since a user's augmentation may draw from them."""
        self._seed(update, 0)
        return batch.cut(0, batch.size)

    def forget_constants(self) -> None:
        """Drop cached constants, which updates of other micro-batches do not reuse."""
        self._reciprocals.clear()

    def _seed(self, update: int, first: int) -> None:
        seed_torch(extended(self._key, update, first, 0), self._device)

    def _reciprocal(self, loss: Loss) -> torch.Tensor:
        """1 / count, as a scalar like the sum; kept, since counts that are plain numbers recur."""
        if isinstance(loss.count, torch.Tensor):
            return loss.count.to(loss.sum.dtype).reciprocal()
        kept = self._reciprocals.get(loss.count)
        if kept is None or kept.dtype != loss.sum.dtype:
            kept = self._reciprocals[loss.count] = torch.full_like(
                loss.sum.detach(), 1 / loss.count if loss.count else math.inf
            )
        return kept


class LossPass:
    """From a batch to its mean loss and the gradient of loss and penalty, over the parameters trained at that update.

    Args:
        job: what is learned.
        plan: how it is executed.
        model: on its device.
        parameters: those that the optimiser moves.
        thawing: parameters that are frozen at first.
        ordinary: the pass by autograd.
        planned: the pass that the plan asks for: `ordinary`, or a captured one.
    """

    repeats_captured = True
    """Off while every pass has to go through the model's own modules."""
    on_gradients: Callable[[], None] | None = None
    """Is called once, when the next gradients are in the parameters."""
    penalty: torch.Tensor | float = 0.0
    """The job's penalty at the last gradients."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        model: nn.Module,
        parameters: list[nn.Parameter],
        thawing: GradualUnfreezing,
        ordinary: AutogradPass,
        planned: BatchPass,
    ) -> None:
        self.ordinary, self._planned, self._thawing, self._is_compiled = ordinary, planned, thawing, plan.compile
        self._buffers = Buffers(model) if ordinary.scale is not None else None
        self._selective, self._model = job.objective.selective_backprop, model
        moved = set(map(id, parameters))
        left_out = [p for p in model.parameters() if p.requires_grad and id(p) not in moved]
        self._with_gradients = [*parameters, *left_out]
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and id(p) not in moved}
        self._products = functools.partial(products_in, plan.precision, torch.device(plan.device))
        penalty = job.objective.penalty
        # Without a penalty it is `float()`, which is 0.
        self._add_penalty = float if penalty is None else functools.partial(add_penalty, penalty, model)

    @property
    def in_force(self) -> BatchPass:
        """The form of the pass that runs now."""
        return self._planned if self.repeats_captured else self.ordinary

    def gradients(self, batch: Batch, update: int) -> torch.Tensor:
        """Leave the gradient of the batch's mean loss (and penalty) in the parameters; returns the mean loss.

        Raises:
            BadJob: the model has thawed parameters that were frozen when training began.
            DoesNotFit: a checkpointed block cannot be computed again.
            RunFailed: the loss takes derivatives of a compiled pass, a captured pass is not repeatable, or under fp16 a
                buffer cannot be put back.
            NotFinite: under fp16, the loss is not finite, or the gradient at any scale.
        """
        if self._thawing.at(update):
            self._planned.renew()
        try:
            with self._products():
                if self._selective is not None:
                    batch = selected(batch, update, self._selective, self._model, self.ordinary.sample_losses)
                scale = self.ordinary.scale
                mean = self.in_force(batch, update) if scale is None else self._scaled(scale, batch, update)
                self.penalty = self._add_penalty()
        except CheckpointError as problem:
            raise not_repeatable(problem) from problem
        except RuntimeError as problem:
            if not self._is_compiled or not is_double_backward(problem):
                raise
            raise RunFailed(
                "the plan is compiled, and the loss takes derivatives of what the model computes, which compiled "
                "passes do not allow",
                remedy="Use a plan with compile false.",
            ) from problem
        self._thawing.forget_gradients()
        self._require_frozen()
        if self.on_gradients is not None:
            look, self.on_gradients = self.on_gradients, None
            look()
        return mean

    def _require_frozen(self) -> None:
        """Refuse a model that thaws its own parameters: the optimiser does not have them."""
        if thawed := [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise BadJob(
                f"the model has set requires_grad of {thawed[0]}{f' and {len(thawed) - 1} more' * (len(thawed) > 1)}, "
                "frozen when training began, and the optimiser does not have them: they would not be trained",
                remedy="Leave them trainable where the model is made, and say when they thaw: "
                f'Job(freeze={{"{thawed[0]}": stoker.epochs(2)}}).',
            )

    def _scaled(self, scale: LossScale, batch: Batch, update: int) -> torch.Tensor:
        """The pass at a scale of the loss at which no gradient overflows.

        Raises:
            NotFinite: the loss is not finite, or the gradient at any scale.
            RunFailed: the gradient overflowed, and a buffer cannot be put back.
        """
        assert self._buffers is not None
        before = scale.state()
        try:
            while True:
                self._buffers.keep()
                generators = python_generators()
                mean = self.in_force(batch, update)
                if not math.isfinite(mean):
                    raise not_finite("loss", float(mean), update)
                norm = self.ordinary.gradient_norm()
                if math.isfinite(norm):
                    scale.passed()
                    return mean
                if not scale.overflowed(update):
                    raise not_finite("gradient's norm", norm, update)
                if not self._buffers.restore():
                    raise RunFailed(
                        f"gradients of update {update + 1} overflowed fp16 at a loss scale of {2 * scale.value:g}, and "
                        f"it cannot be made again: it was the first one to change a buffer of more than "
                        f"{format_bytes(SMALL_BYTES)}",
                        remedy="Change the buffer in every update, or use bf16 or fp32; the last checkpoint is intact.",
                    )
                restore_python_generators(generators)
                self.forget_gradients()
        except NotFinite:
            scale.load(before)  # no scale mends it, and the next update may be in order
            raise

    @contextlib.contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Within the context a batch makes one pass, through the model's own modules and without a loss scale."""
        before = self.repeats_captured, self.ordinary.scale
        self.repeats_captured, self.ordinary.scale = False, None
        try:
            yield
        finally:
            self.repeats_captured, self.ordinary.scale = before

    def check(self) -> None:
        """Check for silent errors before a checkpoint.

        Raises:
            RunFailed: the captured pass no longer equals an ordinary one.
        """
        with self._products():
            self._planned.check()

    def forget_gradients(self) -> None:
        """Drop all gradients: as the optimiser's `zero_grad`, in a tenth of its time.

        Those of parameters that a user's optimiser leaves out too: they would grow from update to update.
        """
        for parameter in self._with_gradients:
            parameter.grad = None
