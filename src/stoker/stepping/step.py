"""The training step, made here only: (Job, Plan) -> Step.

A Step is put together once from a loss pass (`loss_pass`), a parallel strategy (`layouts`), an update rule
(`update_rule`) and the weights that are saved (`weight_averaging`). An update: accumulate, reduce, divide by the global
count, check finite, clip the global norm once, step, average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss, Optimizer
from stoker.jobs.regularization import mixes_of
from stoker.loading.batches import Batch, InputPipeline, Split
from stoker.loading.fields import Content
from stoker.loading.order import RandomStream, generators_kept, key_of, seed_generators
from stoker.loading.samples import Samples
from stoker.loading.transforms import for_evaluation
from stoker.records import Coupling, Plan, Precision
from stoker.records.codec import JSON
from stoker.stepping.activation_checkpointing import checkpoint
from stoker.stepping.batch_norm import couple_batch_norms
from stoker.stepping.capture import CapturedPass
from stoker.stepping.captured_updates import LENGTH, CapturedUpdates
from stoker.stepping.chunked_loss import in_chunks
from stoker.stepping.diloco import OuterOptimizer, SiteUpdate, SiteWeights
from stoker.stepping.dropout import has_dropout
from stoker.stepping.fp8_linear import prepare_linears
from stoker.stepping.frozen_parameters import GradualUnfreezing, thawing_updates
from stoker.stepping.fused_update import FusedUpdate, fused_update
from stoker.stepping.gradient_clipping import GradientClipping
from stoker.stepping.layouts import parallelize
from stoker.stepping.layouts.compatibility import require_legal, require_no_closure
from stoker.stepping.loss_pass import AutogradPass, LossPass
from stoker.stepping.loss_scale import LossScale
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.model import build_model, in_evaluation, place_model
from stoker.stepping.muon import MuonOptimizer, products_dtype
from stoker.stepping.optimizer_offload import (
    HostState,
    MasterWeights,
    OffloadedProcess,
    OffloadedUpdate,
    require_offload,
)
from stoker.stepping.own_step import OwnStep
from stoker.stepping.precision import autocasting, products_in, require_precision
from stoker.stepping.python_state import own_values, plain_changes, put_plain, python_state, unchanged, undo_changes
from stoker.stepping.stochastic_depth import skip_blocks
from stoker.stepping.torch_compile import Compilation, compile_in_place
from stoker.stepping.torch_optimizers import (
    FLUSH_EVERY,
    ScheduledRates,
    build_optimizer,
    factor_at,
    flush_denormals,
    needs_closure,
    suit_layout,
    use_implementation,
)
from stoker.stepping.uncompiled import uncompiled
from stoker.stepping.update_rule import UpdateRule
from stoker.stepping.weight_averaging import AveragedWeights, KeptAverage, ModelWeights, SavedWeights, average_of
from stoker.stepping.world import ALONE, World


class OptimizerUpdate(UpdateRule):
    """An update by the optimiser's step, in the order of the contract."""

    def __init__(
        self, loss_pass: LossPass, clipping: GradientClipping, optimizer: torch.optim.Optimizer, *, is_ours: bool
    ) -> None:
        self._pass, self._clipping, self._optimizer = loss_pass, clipping, optimizer
        self._step = fused_update(optimizer) if is_ours else ScheduledRates(optimizer)
        self._flushes = is_ours  # the state of a user's own optimiser is not touched
        self._together: CapturedUpdates | None = None

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `UpdateRule`."""
        self.is_moving = False
        loss = self._pass.gradients(batch, update)  # accumulated, reduced, divided
        self._clipping(loss, update)
        self.is_moving = True
        self._step()
        self._flush_after(update)
        return loss

    def together(self, batches: Sequence[Batch], first: int, rates: Sequence[Sequence[float]]) -> list[float]:
        """As `UpdateRule`; by `CapturedUpdates`."""
        captured = self._pass.in_force
        if not (isinstance(captured, CapturedPass) and isinstance(self._step, FusedUpdate)):
            return []
        if self._together is None or self._together.captured is not captured:
            self._together = CapturedUpdates(captured, self._step, self._optimizer)
        self.is_moving = True
        losses = self._together(batches, first, rates)
        if losses:
            self._flush_after(first + len(losses) - 1)
        return losses

    def _flush_after(self, update: int) -> None:
        if update % FLUSH_EVERY == FLUSH_EVERY - 1 and self._flushes:
            flush_denormals(self._optimizer)


class ClosureUpdate(UpdateRule):
    """An update by an optimiser that computes the loss within its step, as often as it likes: L-BFGS.

    Its closure passes the whole batch each time, in all its micro-batches, and checks and clips each gradient.
    """

    def __init__(self, loss_pass: LossPass, clipping: GradientClipping, optimizer: torch.optim.Optimizer) -> None:
        self._pass, self._clipping, self._step = loss_pass, clipping, ScheduledRates(optimizer)

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `UpdateRule`."""
        self.is_moving = True
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            self._pass.forget_gradients()
            losses.append(self._pass.gradients(batch, update))
            self._clipping(losses[-1], update)
            return losses[-1] + self._pass.penalty  # the value of that gradient: a line search compares both

        self._step(closure)
        return losses[0]


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
        fewer_draws: False lets PyTorch draw for dropout, as it does in compiled code, to compare with that.

    Raises:
        BadJob: the plan would change what is learned, or asks for what the model or the device does not have.
        DoesNotFit: the plan is compiled, and this machine has no compiler.
    """

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
        fewer_draws: bool = True,
    ) -> None:
        require_legal(job, plan, coupling)
        self.job, self.plan, self.coupling, self.dtype, self.dropout = job, plan, coupling, dtype, dropout
        self.device, self.world = torch.device(plan.device), world
        require_precision(plan.precision, self.device)
        require_offload(job, plan)
        built, self._host = build_model(job) if model is None else model, None
        if plan.is_offloaded:  # before the model is on the device, which may not hold its weights in fp32
            self._host = HostState(built, plan, dtype, sums_gradients=plan.micro_batch < job.batch_size)
        self.model = place_model(built, plan, dtype)
        skip_blocks(self.model, job.objective.stochastic_depth)
        self._has_dropout, self._fewer_draws = has_dropout(self.model), fewer_draws
        if "fp8" in job.numerics and dtype is None:  # before checkpoints and layouts wrap blocks
            prepare_linears(self.model)
        # Before stages lose blocks.
        checkpoint(
            self.model,
            plan.checkpointed_blocks,
            self._conditions,
            checkpointing=plan.checkpointing,
            offloaded_from=self.device if plan.activation_offload else None,
        )
        thawing = thawing_updates(job, self.model)
        # A given dtype takes the place of the plan's precision.
        computed = plan if dtype is None else dataclasses.replace(plan, precision="fp32")
        self._strategy = parallelize(computed, self.model, world, job, is_local_sgd=job.sync is not None)
        if self._host is not None:
            self._strategy = OffloadedProcess(self.model, self._host)
        outer = self._outer = None if job.sync is None else OuterOptimizer(job.sync, job, coupling, self.model, world)
        self.optimizer = build_optimizer(job, self.model, plan, self.named_parameters())
        self._thawing = GradualUnfreezing(job, self.model, self.optimizer, thawing, is_alone=world is ALONE)
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rate_factor = 1.0  # in addition to the schedule's: set by reductions on a plateau
        chunked = in_chunks(job, self.model, plan.loss_chunks)
        self.objective = TrainingObjective(job, device=self.device, dtype=dtype, in_chunks=chunked)
        average = average_of(job, self.model, self.optimizer, coupling, plan)
        require_no_closure(self.optimizer, plan.layout)
        sharing = world.data if outer is None and plan.layout.data_size > 1 else None
        self._norms = couple_batch_norms(self.model, coupling, plan.micro_batch, sharing)
        self.compilation: Compilation | None = None
        if plan.compile:
            self._compile()
        self._python = python_state(self.model, self.objective.loss_object, self.optimizer, with_tensors=False)
        self.loss_scale = LossScale(job.batch_size)
        """The scale of losses, while the plan's precision is fp16."""
        self._compose()
        self.on_composed: Callable[[], object] = lambda: None
        """Called after another plan has rebuilt the passes."""
        self._saved: SavedWeights = self._model_weights()
        self.split: Callable[[], Split] = functools.partial(world.split, coupling)
        """This process's part of each batch."""
        if outer is not None:
            self._saved, self.split = SiteWeights(self.model, outer), outer.split
        elif average is not None:
            self._saved = AveragedWeights(self.model, average)

    def _compose(self) -> None:
        """Put together what the plan asks for around the model and its optimiser: loss pass, clipping, update rule."""
        job, plan = self.job, self.plan
        self._at_once: int | None = None
        self.loss_pass = self._loss_pass(plan, self.loss_scale)
        self.clipping = GradientClipping(job, plan, self._strategy, self._moved)
        self.rule: UpdateRule
        self.gradients: Callable[[Batch, int], torch.Tensor] = self.loss_pass.gradients
        """Leaves the gradient of a batch's mean loss (and penalty) in the parameters; returns the mean loss."""
        if job.step is not None:
            whole = self.loss_pass.ordinary.whole
            own = OwnStep(job.step, self.model, self.optimizer, plan, whole, self._conditions)
            self.rule, self.gradients = own, own.gradients
        elif needs_closure(self.optimizer):
            if job.objective.selective_backprop is not None:
                raise BadJob(
                    f"Objective(selective_backprop=…) chooses samples once an update, and "
                    f"{type(self.optimizer).__name__} computes the loss again within its step",
                    remedy="Leave selective_backprop out, or take an optimiser such as stoker.SGD.",
                )
            self.rule = ClosureUpdate(self.loss_pass, self.clipping, self.optimizer)
        elif isinstance(self._strategy, OffloadedProcess):
            self._strategy.host.sum_gradients(is_on=plan.micro_batch < job.batch_size)
            self.rule = OffloadedUpdate(self.loss_pass, self.clipping, self.optimizer, self._strategy)
        else:
            is_ours = isinstance(job.optimizer, Optimizer)
            self.rule = OptimizerUpdate(self.loss_pass, self.clipping, self.optimizer, is_ours=is_ours)
        if self._outer is not None:
            self.rule = SiteUpdate(self.rule, self._outer)

    @property
    def _moved(self) -> list[nn.Parameter]:
        """The parameters that the optimiser moves, as gradients are made of them."""
        if self._host is not None:
            return [one.parameter for one in self._host.offloaded]
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def _drops(self) -> bool:
        """Whether dropout takes fewer draws than PyTorch's own, which the compiler does not know."""
        return self._has_dropout and self._fewer_draws and not self.plan.compile

    def _loss_pass(self, plan: Plan, scale: LossScale) -> LossPass:
        """The loss pass under a plan, with a scale of the loss if it is fp16."""
        ordinary = AutogradPass(
            self.job,
            plan,
            self.objective,
            self._strategy,
            self.world,
            self._moved,
            self._norms,
            functools.partial(self._conditions_in, plan.precision),
            scale if plan.precision == "fp16" and self.dtype is None else None,
        )
        planned = CapturedPass(ordinary, self.model, self._moved) if plan.captured else ordinary
        return LossPass(self.job, plan, self.model, self._moved, self._thawing, ordinary, planned)

    def gradients_under(self, plan: Plan, batch: Batch, update: int) -> list[torch.Tensor]:
        """The gradients of a batch's mean loss in another arithmetic, from the present weights; nothing is left behind.

        The gradients that are in the parameters stay there. Buffers are the caller's to restore.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        own = [parameter.grad for parameter in parameters]
        self.forget_gradients()
        try:
            self._loss_pass(plan, LossScale(self.job.batch_size)).gradients(batch, update)
            return [parameter.grad for parameter in parameters if parameter.grad is not None]
        finally:
            self.forget_gradients()
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def _conditions(self) -> contextlib.AbstractContextManager[None]:
        """The context of a forward pass."""
        return self._conditions_in(self.plan.precision)

    def _conditions_in(self, precision: Precision) -> contextlib.AbstractContextManager[None]:
        """The context of a forward pass in another precision; of parts of samples, the strategy's own within it."""
        conditions = autocasting(precision, self.device, dtype=self.dtype, draws=self.dropout, drops=self._drops)
        if not self.plan.layout.cuts_samples:
            return conditions
        return self._of_part(conditions)

    @contextlib.contextmanager
    def _of_part(self, conditions: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with conditions, self._strategy.conditions():
            yield

    def change_to(self, plan: Plan, coupling: Coupling | None = None) -> None:
        """Make the next updates under another plan, around the same weights, averages and optimiser state.

        What it may change: micro-batch, precision, memory format, threads, the optimiser's implementation, whether
        passes are captured or compiled. The state stays bit for bit what it was, as if loaded into a new step.
        `coupling` takes the place of the present one, where that was not known before.

        Raises:
            BadJob: the plan would change what is learned.
            ValueError: it differs in what is built once.
        """
        coupling, old = coupling or self.coupling, self.plan
        built = [
            "device",
            "checkpointed_blocks",
            "checkpointing",
            "activation_offload",
            "loss_chunks",
            "layout",
            "optimizer_states",
            "optimizer_offload",
        ]
        if self._host is not None:
            built += ["precision", "memory_format"]
        if differing := [name for name in built if getattr(plan, name) != getattr(old, name)]:
            raise ValueError(f"{', '.join(differing)} of a plan cannot be changed within a step")
        require_legal(self.job, plan, coupling)
        require_precision(plan.precision, self.device)
        self.plan, self.coupling = plan, coupling
        if self._outer is None:
            self.split = functools.partial(self.world.split, coupling)
        composed = ("micro_batch", "precision", "memory_format", "optimizer_implementation", "captured", "compile")
        if all(getattr(plan, name) == getattr(old, name) for name in composed):
            return
        looks_at_norm = self.clipping.looks_at_norm
        if plan.precision != old.precision and self.dtype is None:
            self._strategy.set_precision(plan.precision)
        if plan.memory_format != old.memory_format:
            formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
            self.model.to(memory_format=formats[plan.memory_format])  # type: ignore[call-overload]  # missing from the stubs
            if self.average is not None:
                self.average.take_strides()
        if isinstance(self.optimizer, MuonOptimizer):
            self.optimizer.products_in = products_dtype(plan.precision, self.optimizer.matrices)
        if plan.memory_format != old.memory_format or plan.optimizer_implementation != old.optimizer_implementation:
            is_ours = isinstance(self.job.optimizer, Optimizer)
            use_implementation(self.optimizer, plan.optimizer_implementation, is_ours=is_ours)
            suit_layout(self.optimizer, plan.layout, is_ours=is_ours)
        if plan.compile and not old.compile:
            self._compile()
        elif self.compilation is not None and not plan.compile:
            self.compilation.undo()
            self.objective.uncompile()
            self.compilation = None
        self._compose()
        self.clipping.looks_at_norm = looks_at_norm
        self.on_composed()

    def _compile(self) -> None:
        strategy = self._strategy
        self.compilation = compile_in_place(self.model, self.device, strategy.hooked_blocks, strategy.exchanging)
        self.objective.compile(self.compilation)

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
        loss = self.rule(batch, update)
        self.loss_pass.forget_gradients()
        self._saved.follow(batch, update, loss)
        return loss

    def updates(self, batches: Sequence[Batch], first: int, progresses: Sequence[float]) -> list[float]:
        """Make updates from number `first` on in one call, where that gives the same bits as `update` of each.

        Returns the mean losses of those that were made; `update` makes the others, and has their errors.
        """
        rates = []
        for progress in progresses:
            self.set_rates(progress)
            rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
        return self.rule.together(batches, first, rates)

    @property
    def updates_at_once(self) -> int:
        """How many updates `updates` may make in one call; 1 where it makes none."""
        if self._at_once is None:
            self._at_once = self._most_at_once()
        return self._at_once

    def _most_at_once(self) -> int:
        job, plan = self.job, self.plan
        if not (plan.captured and plan.loader == "memory" and self.device.type == "cpu" and self.world is ALONE):
            return 1
        is_plain = type(self._saved) is ModelWeights and next(self.model.buffers(), None) is None
        is_more = (
            self.clipping.is_clipping
            or job.objective.penalty
            or job.freeze
            or job.augment
            or job.mix
            or job.objective.selective_backprop
        )
        return LENGTH if is_plain and not is_more else 1

    @property
    def is_moving(self) -> bool:
        """Whether the weights may have begun to move in the update under way: then it cannot be rolled back."""
        return self.rule.is_moving

    def forget_gradients(self) -> None:
        """Drop all gradients, also those of parameters that a user's optimiser leaves out."""
        self.loss_pass.forget_gradients()

    def set_rates(self, progress: float) -> float:
        """Set the learning rates for `progress`; returns the rate of the first group [1]."""
        factor = factor_at(self.job.schedule, progress) * self.rate_factor * self.rule.rate_factor
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self.optimizer.param_groups[0]["lr"])

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

    def loss_of(self, content: Content, size: int, update: int, first: int) -> Loss:
        """The loss of one micro-batch that starts at sample `first` of its batch; random draws are keyed by both."""
        return self.loss_pass.ordinary.loss_of(content, size, update, first)

    def ordinary(self) -> contextlib.AbstractContextManager[None]:
        """Within the context a batch makes one pass, through the model's own modules and without a loss scale."""
        return self.loss_pass.uncaptured()

    def check(self) -> None:
        """Check for silent errors before a checkpoint.

        Raises:
            RunFailed: the captured pass no longer equals an ordinary one.
        """
        self.loss_pass.check()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Callable[[Content, int], dict[str, Loss]]]:
        """A function from (batch, size) to its measures, with the averaged weights if there are any.

        Generators are forked, and plain Python values put back: how often and in which batches a job is evaluated does
        not change its training.
        """
        with (
            generators_kept(self.device),
            unchanged(self.model, self.objective.loss_object),
            self.with_kept_weights(),
            torch.no_grad(),
            products_in(self.plan.precision, self.device),
            uncompiled() if self.plan.compile else contextlib.nullcontext(),
            in_evaluation(self.model),
        ):
            seed_generators(key_of(RandomStream.EVALUATION, self.job.seed), self.device)

            def measure(content: Content, size: int) -> dict[str, Loss]:
                with self._conditions():
                    return self._strategy.measures(content, size, self.objective.measures)

            yield measure

    def python_changes(self) -> dict[str, JSON]:
        """The plain values of model, loss and optimiser that changed since this step was made, or were restored."""
        return plain_changes(self.model, self.objective.loss_object, self._python, self.optimizer)

    def put_python(self, kept: Mapping[str, JSON]) -> None:
        """Restore the values of `python_changes`, which lists them from now on.

        A process that goes on with a loss of its own has them from the start, where a fresh one does not.
        """
        put_plain(self.model, self.objective.loss_object, kept, self.optimizer)
        for holder, values in kept.items():
            for key in values:
                self._python.values.pop((holder, key), None)

    def put_own_python(self, kept: Mapping[str, JSON]) -> None:
        """Make the model's attributes what they were when `python_changes` was `kept`; loss and globals stay."""
        undo_changes(self.model, None, self._python, with_shared=False)
        self.put_python(own_values(kept))

    @property
    def average(self) -> KeptAverage | None:
        """The average of the model's weights, if the job keeps one."""
        return self._saved.average

    @property
    def outer(self) -> OuterOptimizer | None:
        """What moves the shared weights of sites that make updates of their own, if this is one."""
        return self._saved.outer

    def kept_weights(self) -> dict[str, torch.Tensor]:
        """The weights to save: the average's, those that sites share, or the model's."""
        return self._saved.weights()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, as the optimiser has them: on the host where its state is there.

        A tied parameter has the name that it has first in the whole model, also in a stage that has it as another one.
        """
        if self._host is not None:
            return self._host.masters
        tied = self._strategy.tied
        return {tied.get(name, name): parameter for name, parameter in self.model.named_parameters()}

    @property
    def names_kept_elsewhere(self) -> frozenset[str]:
        """Names of parameters whose optimiser's state another stage writes into checkpoints."""
        return frozenset(self._strategy.tied.values())

    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's own weights and buffers in full precision, by name, as checkpoints have them."""
        return self.model.state_dict() if self._host is None else self._host.weights()

    def load_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `model_state` gives; of spread tensors the parts of this process."""
        if self._host is None:
            self.model.load_state_dict(dict(state))
        else:
            self._host.load(state)

    def _model_weights(self) -> ModelWeights:
        return ModelWeights(self.model) if self._host is None else MasterWeights(self.model, self._host)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights and buffers, put together over all processes; collective.

        For sites that make updates of their own these are the shared ones, as of the last exchange.
        """
        return self._saved.whole(self._strategy)

    def with_kept_weights(self) -> contextlib.AbstractContextManager[None]:
        """Within the context, the model has the weights that are saved."""
        return self._saved.in_model()

    def begin_at_weights(self) -> None:
        """Initialise an average, or the weights that sites share, with the model's weights."""
        self._saved.begin_at_model()

    def keep_model_weights(self) -> None:
        """From now on the weights to save are the model's own."""
        self._saved, self._at_once = self._model_weights(), None

    def settle(self) -> None:
        """End training: sites that make updates of their own exchange for the last time.

        Raises:
            RuntimeError: another site does not answer, or is gone.
            RunFailed: a site's weights are not finite.
        """
        self._saved.settle()
