"""The training step, made here only: (Job, Plan) -> Step.

An update: accumulate, divide by the global count, check finite, clip the global norm once, step, average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stoker.errors import RunFailed
from stoker.jobs import Job, Loss, Optimizer
from stoker.jobs.regularization import mixes_of
from stoker.loading.batches import Batch, InputPipeline, Pass, Split
from stoker.loading.fields import Content
from stoker.loading.order import (
    RandomStream,
    extended,
    generator_states,
    key_of,
    restore_generators,
    seed_generators,
    seed_torch,
)
from stoker.loading.samples import Samples
from stoker.loading.transforms import for_evaluation
from stoker.records import Coupling, Plan
from stoker.records.codec import JSON
from stoker.stepping.activation_checkpointing import checkpoint, not_repeatable
from stoker.stepping.batch_norm import GroupedBatchNorm, SyncBatchNorm
from stoker.stepping.capture import CapturedPass
from stoker.stepping.chunked_loss import in_chunks
from stoker.stepping.diloco import OuterOptimizer, samples_here
from stoker.stepping.distributed_tensors import all_local, norm_of
from stoker.stepping.frozen_parameters import GradualUnfreezing
from stoker.stepping.fused_update import fused_update
from stoker.stepping.layouts import parallelize
from stoker.stepping.layouts.base import noted
from stoker.stepping.layouts.compatibility import add_penalty, require_legal, require_no_closure
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.model import build_model, in_evaluation, place_model
from stoker.stepping.own_step import OwnStep
from stoker.stepping.precision import autocasting, products_in, require_precision
from stoker.stepping.python_state import plain_changes, put_plain, python_state
from stoker.stepping.step_failures import not_finite
from stoker.stepping.torch_compile import compile_in_place, is_double_backward, uncompiled
from stoker.stepping.torch_optimizers import FLUSH_EVERY, build_optimizer, factor_at, flush_denormals, needs_closure
from stoker.stepping.weight_averaging import average_of
from stoker.stepping.world import ALONE, World


class Step:
    """A model, its optimiser and its average, moved from update to update as the plan says.

    Args:
        job: what is learned.
        plan: how it is executed; must be legal under `coupling`.
        coupling: the coupling of the job's samples.
        dtype: weights and inputs in this dtype (float64, for proofs); None leaves the job's own.
        dropout: False silences dropout, and all other draws of PyTorch inside the model and the loss, for proofs.
        model: a module to use in place of a newly built one.
        world: the processes that train together, as the plan's layout says.

    Raises:
        BadJob: the plan would change what is learned, or asks for what the model or the device does not have.
        DoesNotFit: the plan is compiled, and this machine has no compiler.
    """

    repeats_captured = True
    """Off while ordinary passes are profiled."""
    _penalty: torch.Tensor | float = 0.0
    """The job's penalty at the last gradients."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        coupling: Coupling,
        *,
        dtype: torch.dtype | None = None,
        dropout: bool = True,
        model: nn.Module | None = None,
        world: World = ALONE,
    ) -> None:
        require_legal(job, plan, coupling)
        self.job, self.plan, self.coupling, self.dtype, self.dropout = job, plan, coupling, dtype, dropout
        self.device = torch.device(plan.device)
        require_precision(plan.precision, self.device)
        model = build_model(job) if model is None else model
        self.model = place_model(model, plan, dtype)
        checkpoint(self.model, plan.checkpointed_blocks, self._precision)  # before stages lose blocks
        self.world, self._spread = world, parallelize(plan, self.model, world, job, is_apart=job.sync is not None)
        self.outer = None if job.sync is None else OuterOptimizer(job.sync, job, coupling, self.model, world)
        self.optimizer = build_optimizer(job, self.model, plan)
        self._thawing = GradualUnfreezing.of(job, self.model, self.optimizer, is_alone=world is ALONE)
        chunked = in_chunks(job, self.model, plan.loss_chunks)
        self.objective = TrainingObjective(job, device=self.device, dtype=dtype, in_chunks=chunked)
        self.average = average_of(job, self.model, self.optimizer, coupling, plan)
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rate_factor = 1.0  # in addition to the schedule's: set by reductions on a plateau
        self.gradient_norm: torch.Tensor | None = None  # of the last update that measured it, before clipping
        self.looks_at_norm = False
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        optimised = set(map(id, self._parameters))
        left_out = [p for p in self.model.parameters() if p.requires_grad and id(p) not in optimised]
        self._with_gradients = [*self._parameters, *left_out]
        self._needs_closure = needs_closure(self.optimizer)
        require_no_closure(self.optimizer, plan.layout)
        self.is_moving = False
        self._update = fused_update(self.optimizer) if isinstance(job.optimizer, Optimizer) else self.optimizer.step
        self._reciprocals: dict[float, torch.Tensor] = {}
        self._key = key_of(RandomStream.MICRO_BATCH, job.seed)
        self._groups: GroupedBatchNorm | None = None
        self._synced: SyncBatchNorm | None = None
        sharing = world.data if self.outer is None and plan.layout.data_size > 1 else None
        if coupling.kind == "batch_norm" and sharing is not None:
            self._synced = SyncBatchNorm(self.model, sharing)
        elif coupling.kind == "batch_norm" and coupling.group is not None and plan.micro_batch > coupling.group:
            self._groups = GroupedBatchNorm(self.model, coupling.group)
        self.compilation = compile_in_place(self.model, self.device) if plan.compile else None
        self._captured = self._capture() if plan.captured else None
        self._python = python_state(self.model, self.objective.loss_object, with_tensors=False)
        own = job.step
        self.own = None if own is None else OwnStep(own, self.model, self.optimizer, plan, self._precision)

    def pipeline(self, samples: Samples, *, augmented: bool) -> InputPipeline:
        """How raw batches of `samples` become this step's inputs."""
        return InputPipeline(
            device=self.device,
            fields=self.objective.fields,
            prepare=samples.prepare,
            augment=self.job.augment if augmented else for_evaluation(self.job.augment),
            mix=mixes_of(self.job.mix) if augmented else (),
            seed=self.job.seed,
            channels_last=self.plan.memory_format == "channels_last",
            dtype=self.dtype,
        )

    def update(self, batch: Batch, update: int, progress: float) -> torch.Tensor:
        """Make update number `update` (from 0) on one optimiser batch.

        `progress` is the share of the run done before it, in [0, 1): it sets the learning rate.
        Returns the mean loss of the batch before the update, a detached scalar on the device.

        Raises:
            NotFinite: the loss or, where clipped, the gradient is not finite; the weights are unchanged. On a GPU it is
                looked at only where the job skips such updates (and there the gradient always).
            DoesNotFit: a checkpointed block cannot be computed again.
        """
        self.set_rates(progress)
        self.is_moving = self._needs_closure or self.own is not None
        if self.own is not None:
            loss = self.own.update(self._whole(batch, update), update)
        elif self.outer is not None and not samples_here(batch):
            loss = self.outer.last_loss  # this site has no sample of a ragged batch
        elif self._needs_closure:
            loss = self._step_with_closure(batch, update)
        else:
            loss = self.gradients(batch, update)
            self._check_and_clip(loss, update)
            self.is_moving = True
            self._update()
            # The state of a user's own optimiser is not touched.
            if update % FLUSH_EVERY == FLUSH_EVERY - 1 and isinstance(self.job.optimizer, Optimizer):
                flush_denormals(self.optimizer)
        self.forget_gradients()
        if self.average is not None:
            self.average.update(update)
        if self.outer is not None:
            self.is_moving = True
            self.outer.after(update, samples_here(batch), loss)
        return loss

    @property
    def is_replicated(self) -> bool:
        """Whether every process holds the same whole state: not where sites update on their own between exchanges."""
        return self.plan.layout.is_replicated and self.job.sync is None

    def settle(self) -> None:
        """End training: sites that make updates of their own exchange for the last time.

        Raises:
            RuntimeError: another site does not answer, or is gone.
            RunFailed: a site's weights are not finite.
        """
        if self.outer is not None:
            self.outer.settle()

    def gradients(self, batch: Batch, update: int) -> torch.Tensor:
        """Leave the gradient of the batch's mean loss (and penalty) in the parameters; returns the mean loss."""
        if self.own is not None:
            return self.own.gradients(self._whole(batch, update))
        if self._thawing is not None and self._thawing.at(update) and self._captured is not None:
            self._captured = self._capture()
        try:
            with products_in(self.plan.precision, self.device):
                return self._gradients(batch, update)
        except CheckpointError as problem:
            raise not_repeatable(problem) from problem
        except RuntimeError as problem:
            if self.compilation is None or not is_double_backward(problem):
                raise
            raise RunFailed(
                "the plan is compiled, and the loss takes derivatives of what the model computes, which compiled "
                "passes do not allow",
                remedy="Use a plan with compile false.",
            ) from problem

    def _gradients(self, batch: Batch, update: int) -> torch.Tensor:
        mean: torch.Tensor | None = None
        if self._captured is not None and self.repeats_captured and batch.size == self.plan.micro_batch:
            mean = self._captured(self._whole(batch, update), update)
        if mean is None:
            mean = self._passed(batch, update)
        if self.job.penalty is not None:
            self._penalty = add_penalty(self.job.penalty, self.model)
        if self._thawing is not None:
            self._thawing.forget_gradients()
        return mean.detach()

    def _capture(self) -> CapturedPass:
        """A pass to be captured, over the parameters that are trained now."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return CapturedPass(lambda content: self._loss(content, self.plan.micro_batch), self.model, trained)

    def _passed(self, batch: Batch, update: int) -> torch.Tensor:
        """The mean loss by autograd, its gradient left in the parameters, over as many micro-batches as it takes."""
        if self.world is ALONE and batch.size <= self.plan.micro_batch:
            whole = self._loss(self._whole(batch, update), batch.size)
            whole.sum.backward(self._reciprocal(whole))  # the mean's gradient, for one node less
            return whole.sum.detach() / whole.count

        def loss_of(part: Pass) -> Loss:
            self._seed(update, part.first)  # before the cut: a user's augmentation may draw
            if self._synced is not None:
                self._synced.counts = part.counts
            return noted(self._loss(batch.cut(part.start, part.stop), part.size), self.world)

        loss = self._spread.accumulate(batch.passes(self.plan.micro_batch), loss_of)
        # Divided once, by the count of the whole batch.
        torch._foreach_div_(all_local([p.grad for p in self._parameters if p.grad is not None]), loss.count)
        return torch.as_tensor(loss.sum / loss.count)

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

    def loss_of(self, content: Content, size: int, update: int, first: int) -> Loss:
        """The loss of one micro-batch that starts at sample `first` of its batch; random draws are keyed by both."""
        self._seed(update, first)
        return self._loss(content, size)

    def cut_to(self, micro_batch: int) -> None:
        """From the next update on, pass at most that many samples through the model at once; no more than before.

        Raises:
            BadJob: that would change what is learned.
        """
        plan = dataclasses.replace(self.plan, micro_batch=micro_batch, captured=False)
        require_legal(self.job, plan, self.coupling)
        self.plan = plan
        self._captured = None  # recorded for the earlier number of samples

    @contextlib.contextmanager
    def ordinary(self) -> Iterator[None]:
        """Within the context nothing is captured: every pass goes through the model's own modules."""
        captured, self._captured = self._captured, None
        try:
            yield
        finally:
            self._captured = captured

    def check(self) -> None:
        """Check for silent errors before a checkpoint.

        Raises:
            RunFailed: the captured pass no longer equals an ordinary one.
        """
        if self._captured is not None:
            with products_in(self.plan.precision, self.device):
                self._captured.check()

    def forget_constants(self) -> None:
        """Drop cached constants, which updates of other micro-batches do not reuse."""
        self._reciprocals.clear()

    def forget_gradients(self) -> None:
        """Drop all gradients: as the optimiser's `zero_grad`, in a tenth of its time.

        Those of parameters that a user's optimiser leaves out too: they would grow from update to update.
        """
        for parameter in self._with_gradients:
            parameter.grad = None

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Callable[[Content, int], dict[str, Loss]]]:
        """A function from (batch, size) to its measures, with the averaged weights if there are any.

        Generators are forked: evaluation's draws do not change training's.
        """
        devices, states = [self.device.index or 0] if self.device.type == "cuda" else [], generator_states()
        with (
            torch.random.fork_rng(devices=devices),
            self.with_kept_weights(),
            torch.no_grad(),
            products_in(self.plan.precision, self.device),
            uncompiled() if self.plan.compile else contextlib.nullcontext(),
            in_evaluation(self.model),
        ):
            seed_generators(key_of(RandomStream.EVALUATION, self.job.seed), self.device)

            def measure(content: Content, size: int) -> dict[str, Loss]:
                with self._precision():
                    return self._spread.measures(content, size, self.objective.measures)

            try:
                yield measure
            finally:
                restore_generators(states)

    def python_changes(self) -> dict[str, JSON]:
        """The plain values in attributes of the model and the loss that have changed since this step was made."""
        return plain_changes(self.model, self.objective.loss_object, self._python)

    def put_python(self, kept: Mapping[str, JSON]) -> None:
        """Restore the values of `python_changes`."""
        put_plain(self.model, self.objective.loss_object, kept)

    def split(self) -> Split:
        """This process's part of each batch."""
        return self.world.split(self.coupling) if self.outer is None else self.outer.split()

    def kept_weights(self) -> dict[str, torch.Tensor]:
        """The weights to save: the average's, those that sites share, or the model's."""
        if self.outer is not None:
            return self.outer.weights()
        return self.average.weights if self.average is not None else self.model.state_dict()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights and buffers, put together over all processes; collective.

        For sites that make updates of their own these are the shared ones, as of the last exchange.
        """
        if self.outer is not None:
            return self.outer.weights()
        return self._spread.whole(self.model.state_dict())

    def begin_at_weights(self) -> None:
        """Initialise an average, or the weights that sites share, with the model's weights."""
        if self.average is not None:
            self.average.load(self.model.state_dict())
        if self.outer is not None:
            self.outer.begin_at_weights()

    def set_rates(self, progress: float) -> float:
        """Set the learning rates for `progress`; returns the rate of the first group [1]."""
        of_site = 1.0 if self.outer is None else self.outer.rate_factor
        factor = factor_at(self.job.schedule, progress) * self.rate_factor * of_site
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def _whole(self, batch: Batch, update: int) -> Content:
        """The whole batch; generators are seeded first, since a user's augmentation may draw from them."""
        self._seed(update, 0)
        return batch.cut(0, batch.size)

    def _seed(self, update: int, first: int) -> None:
        seed_torch(extended(self._key, update, first, 0), self.device)

    def _loss(self, content: Content, size: int) -> Loss:
        if self._groups is not None:
            self._groups.micro_batch = size
        # A compiled model is compiled for the plan's micro-batch alone.
        is_compiled = not self.plan.compile or size == self.plan.micro_batch
        with self._precision(), contextlib.nullcontext() if is_compiled else uncompiled():
            return self.objective.loss(self._spread.model, content, size)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return autocasting(self.plan.precision, self.device, dtype=self.dtype, draws=self.dropout)

    def _check_and_clip(self, loss: torch.Tensor, update: int) -> None:
        skips = self.job.on_non_finite == "skip"
        is_watched = skips or self.device.type == "cpu"  # a GPU is waited for only if needed
        if is_watched and not math.isfinite(loss):
            raise not_finite("loss", float(loss), update)
        if self.job.clip_norm is not None:
            norm = self._spread.clip(self._parameters, self.job.clip_norm)
        elif skips:
            norm = self._spread.clip(self._parameters, math.inf)
        else:
            if self.looks_at_norm and self.is_replicated:  # where each process has it all, no message is needed
                self.gradient_norm = norm_of(self._parameters)
            return
        if self.looks_at_norm:
            self.gradient_norm = norm.detach()
        if is_watched and not math.isfinite(norm):
            raise not_finite("gradient's norm", float(norm), update)

    def _step_with_closure(self, batch: Batch, update: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            self.forget_gradients()
            losses.append(self.gradients(batch, update))
            self._check_and_clip(losses[-1], update)
            return losses[-1] + self._penalty  # the value that the gradient belongs to: a line search compares both

        self.optimizer.step(closure)  # type: ignore[arg-type]  # closures give tensors, as PyTorch's own do
        return losses[0]

    @contextlib.contextmanager
    def with_kept_weights(self) -> Iterator[None]:
        """Within the context, the model has the weights that are saved."""
        if self.average is None and self.outer is None:
            yield
            return
        live = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.kept_weights())
        try:
            yield
        finally:
            self.model.load_state_dict(live)
