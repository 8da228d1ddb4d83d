"""Losses and metrics of a job as sums and counts, from any form the user gave them in; losses of mixed samples."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob, first_line
from stoker.jobs import Job, Loss
from stoker.jobs.metrics import Named, is_stateful, metric_name
from stoker.loading.fields import Content
from stoker.loading.lengths import IGNORED_TARGET, ignored_target
from stoker.loading.mixing import MixedTarget
from stoker.stepping.chunked_loss import ChunkedLoss
from stoker.stepping.foreign_models import OwnLoss, in_full_precision, scores
from stoker.stepping.loss_checks import (
    misfit,
    no_tensor,
    require_by_sample,
    require_nothing_to_train,
    require_own_targets,
    require_probabilities,
    require_scalar,
    takes_probabilities,
    what_is_given,
)
from stoker.stepping.named_losses import COUNTS, LEAVING_OUT, LOSSES, METRICS, SUMS, num_valid, weight_of
from stoker.stepping.step_failures import ran_out_of_memory, suggest
from stoker.stepping.torch_compile import Compilation, compiled_function

_MEAN_SETTINGS = {"weight", "ignore_index", "label_smoothing"}
"""Arguments of PyTorch's functions with which they give a mean over targets, by weight."""

Result = TypeVar("Result")

Compared = Callable[[], tuple[Any, Any]]
"""Returns the scores and the target of a batch, after a pass through the model if none has given them yet.

Raises what the model raises if it cannot be called with the job's inputs.
"""

Observer = Callable[[Compared, Content], None]
"""Called with each evaluated batch, and with a function that returns its scores and target."""

Entries = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""From output and target to the loss of each entry [B, ...], 0 where it is not counted, and whether it is (0 or 1)."""

LossForm = Literal["sum and count", "value per sample", "scalar"]


@dataclass(frozen=True)
class _Measure:
    """A loss or metric by name. Its function takes (model, batch) if `takes_model`, else (output, target).

    With `takes_scores` it is given the logits of an output that has them under a name. `count_of` counts a target where
    the function gives the sum alone. With `is_arithmetic` it is nothing but operations on the tensors that it is given.
    One that `is_named` looks at shapes itself.
    """

    name: str
    function: Callable[..., Any]
    takes_model: bool
    takes_scores: bool = False
    count_of: Callable[[torch.Tensor], torch.Tensor | float] | None = None
    is_arithmetic: bool = False
    is_named: bool = False


class TrainingObjective:
    """The loss and the metrics of a job.

    A function whose first parameter is called `model` gets (model, batch), any other (output, target). What comes back
    is a Loss, a tensor with one value per sample or token (summed and counted), or a scalar mean over samples. The loss
    "own" is what the model returns as its mean loss.
    Losses that are modules are copied; their own tensors, such as class weights, go to `device` and `dtype`.
    `in_chunks` replaces `token_cross_entropy` wherever nothing else needs the logits.

    Raises:
        BadJob: the loss is a module with parameters of its own to train, or a method of one; or samples are mixed and
            it takes the model.
    """

    def __init__(
        self,
        job: Job,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        in_chunks: ChunkedLoss | None = None,
    ) -> None:
        self.in_chunks = in_chunks
        """The loss in chunks of tokens, if the plan has it."""
        self.fields = job.fields
        self.label_smoothing = job.objective.label_smoothing
        self._is_of_batch = job.objective.scope == "batch"
        self._takes_probabilities = takes_probabilities(job.objective.loss)
        self._device, self._dtype = device, dtype
        self._own = OwnLoss(self.fields) if job.objective.loss == "own" else None
        ignored = ignored_target(job.objective.loss)
        self.ignored = ignored if isinstance(ignored, int) else IGNORED_TARGET
        """The label that the loss leaves out, and accuracies with it."""
        self._own_step = job.step
        require_nothing_to_train(job.objective.loss)
        losses = () if job.objective.loss is None else (self._measure("loss", job.objective.loss, LOSSES),)
        summed = (metric for metric in job.metrics if not is_stateful(metric))  # the others are evaluation's
        self._all = (*losses, *(self._measure(metric_name(m), m, METRICS) for m in summed))
        self._stateful = tuple(metric_name(metric) for metric in job.metrics if is_stateful(metric))
        self._needs_output = bool(self._stateful) or not all(measure.takes_model for measure in self._all)
        self._observer: Observer | None = None
        self._compiled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._of_model = Compilation(())
        self._entries: Entries | None = None
        self._differentiates = False
        if (job.mix is not None or job.objective.selective_backprop is not None) and losses:
            self._entries = entries_of(job, losses[0].function, takes_model=losses[0].takes_model)

    @property
    def loss_object(self) -> object:
        """The loss as it is called here, of a module a copy; in its place the step of the job's own, if it has one."""
        if self._own_step is not None:
            return self._own_step
        loss = self._measured("loss")
        return None if loss is None else loss.function

    def left_out(self, content: Content) -> str | None:
        """A notice of entries of a batch that neither the model nor the loss is given; None where all are used."""
        loss = self._measured("loss")
        if loss is None or loss.takes_model or self._own is not None or not (places := self.fields.left_out(content)):
            return None
        entries, are = (f"entry {places[0]}", "is") if len(places) == 1 else (f"entries {places}", "are")
        return (
            f"{entries} of the samples' {len(content)} {are} not used: of a tuple the first goes into the model, the "
            f"last is the target. Name others, as by Fields(inputs=(0, {places[0]})); if this is meant, by "
            "Fields(inputs=0)"
        )

    def compile(self, of_model: Compilation) -> None:
        """Compile the loss from here on, if its arithmetic is PyTorch's or a named loss's; else it runs as it is.

        So does that of a model which cannot be compiled: the update is then the one that is not compiled, to the bit.

        Of logits in half precision no copy in full precision is then made, nor of their softmax: of a language model's
        these are most of an update's memory.
        """
        loss = self._measured("loss")
        if loss is not None and loss.is_arithmetic:
            self._of_model = of_model
            self._compiled = compiled_function(lambda output, target: loss.function(in_full_precision(output), target))

    def uncompile(self) -> None:
        """Let the loss run as it is again."""
        self._compiled = None

    @contextlib.contextmanager
    def observed_by(self, observer: Observer | None) -> Iterator[None]:
        """Within the block, whatever is measured is shown to `observer` as well."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def loss(self, model: Callable[..., Any], content: Content, size: int) -> Loss:
        """The loss of one micro-batch of `size` samples.

        Raises:
            BadJob: the function returned something else than a loss, or targets do not fit the output.
        """
        if self.in_chunks is not None:
            return self._chunked(self.in_chunks, model, content)
        value = self._loss_value(model, content)
        if isinstance(value, Loss):
            return Loss(in_full_precision(value.sum), value.count)
        return self._as_sum(value, size, "loss")

    def sample_losses(self, model: Callable[..., Any], content: Content, size: int) -> torch.Tensor:
        """The loss of each sample [B] of a micro-batch of `size`, summed over what a sample counts.

        Raises:
            BadJob: the loss does not have a first dimension of samples.
        """
        loss, output, target = self._measured("loss"), self._output(model, content), self._target_of(content, "loss")
        if loss is None or self._entries is None:
            raise AssertionError("a job that compares samples has a loss of each")
        values, _ = self._entries(in_full_precision(scores(output) if loss.takes_scores else output), target)
        if len(values) != size:
            raise BadJob(
                f"selective backprop compares the losses of {size} samples, and the loss gives {list(values.shape)} "
                "values",
                remedy="Return values with a first dimension of samples, or leave selective_backprop out.",
            )
        return values.reshape(size, -1).sum(1)

    def form(self, model: Callable[..., Any], content: Content) -> LossForm:
        """The form of the loss function's result; a scalar must be probed before it may be accumulated."""
        value = self._loss_value(model, content)
        if isinstance(value, Loss):
            return "sum and count"
        return "scalar" if isinstance(value, torch.Tensor) and value.dim() == 0 else "value per sample"

    def require_by_sample(self, model: Callable[..., Any], content: Content) -> None:
        """Raise BadJob for a loss of the user's own that compares every sample with every target undeclared.

        And for a binary cross-entropy of targets that are no probabilities, such as labels of -1 and 1.
        """
        loss, target = self._measured("loss"), self.fields.target_of(content)
        if loss is None or loss.takes_model or not isinstance(target, torch.Tensor):
            return
        if self._takes_probabilities:
            require_probabilities(target)
        if not (loss.is_named or loss.function is _own_loss or self._is_of_batch):
            require_own_targets("loss", loss.function, in_full_precision(self._output(model, content)), target)

    def run(self, model: Callable[..., Any], content: Content) -> None:
        """Pass a batch through the model as the loss does, for what the model records itself."""
        loss = self._measured("loss")
        own = loss.function if loss is not None and loss.takes_model else None
        self._without_graph(lambda: self._output(model, content) if own is None else own(model, content))

    def measures(self, model: Callable[..., Any], content: Content, size: int) -> dict[str, Loss]:
        """The loss, if there is one, and every metric of one batch of `size` samples; one pass where that is enough."""

        def compute() -> dict[str, Loss]:
            if self.in_chunks is not None and len(self._all) == 1 and self._observer is None:
                return {"loss": self._chunked(self.in_chunks, model, content)}
            output = self._needed_output(model, content) if self._needs_output else None
            if self._observer is not None:
                self._observer(functools.partial(self._compared, model, output, content), content)
            values = {measure.name: self._value(measure, model, output, content) for measure in self._all}
            for name, value in values.items():
                if name != "loss" and size > 1 and isinstance(value, torch.Tensor) and value.dim() == 0:
                    raise BadJob(
                        f"metric {name} returned a scalar, which cannot be added up over batches",
                        remedy="Return one value per sample, or stoker.Loss(sum, count).",
                    )
            return {name: self._as_sum(value, size, name) for name, value in values.items()}

        losses = self._without_graph(compute)
        return {name: Loss(loss.sum.detach(), loss.count) for name, loss in losses.items()}

    def _without_graph(self, compute: Callable[[], Result]) -> Result:
        """The result of `compute`, without a graph unless a loss or a model takes derivatives itself."""
        if torch.is_grad_enabled() or not self._differentiates:
            try:
                return compute()
            except Exception as error:
                if torch.is_grad_enabled() or not _needs_graph(error):
                    raise
            self._differentiates = True
        with torch.enable_grad():
            return compute()

    def _measure(self, name: str, given: str | Callable[..., Any], named: dict[str, Callable[..., Any]]) -> _Measure:
        given = given.metric if isinstance(given, Named) else given
        if isinstance(given, nn.Module):
            placed = copy.deepcopy(given).to(device=self._device, dtype=self._dtype)
            is_of_torch = type(given).__module__.startswith("torch.nn")
            count_of, is_replaced = None, "forward" in vars(given)  # of this object alone
            is_plain = not is_replaced and type(placed).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
            if is_plain and isinstance(placed, nn.CrossEntropyLoss | nn.NLLLoss) and placed.reduction == "mean":
                placed.reduction = "sum"
                count_of = functools.partial(weight_of, weight=placed.weight, ignored=placed.ignore_index)
            return _Measure(
                name,
                placed,
                takes_model(given.forward),
                takes_scores=is_of_torch,
                count_of=count_of,
                is_arithmetic=is_of_torch and not is_replaced,
            )
        if not isinstance(given, str):
            settings = given.keywords if isinstance(given, functools.partial) and not given.args else {}
            function = given.func if isinstance(given, functools.partial) and not given.args else given
            if function in (F.cross_entropy, F.nll_loss) and settings.keys() <= _MEAN_SETTINGS:
                count_of = functools.partial(weight_of, weight=settings.get("weight"), ignored=ignored_target(given))
                summed = functools.partial(given, reduction="sum")
                return _Measure(name, summed, takes_model=False, count_of=count_of, is_arithmetic=True)
            return _Measure(name, given, takes_model(given))
        if given == "own":
            return _Measure(name, _own_loss, takes_model=False)
        function, counted = SUMS.get(given, named[given]), COUNTS.get(given)
        if given.endswith("cross_entropy") and self.label_smoothing:
            function = functools.partial(function, label_smoothing=self.label_smoothing)
        if function in LEAVING_OUT:
            function = functools.partial(function, ignored=self.ignored)
        return _Measure(
            name,
            function,
            takes_model=False,
            takes_scores=True,
            count_of=counted,
            is_arithmetic=named is LOSSES,
            is_named=True,
        )

    def _output(self, model: Callable[..., Any], content: Content) -> Any:
        """The model's output; it is given its labels as well where it computes its loss itself."""
        return self.fields.call(model, content) if self._own is None else self._own.call(model, content)

    def _needed_output(self, model: Callable[..., Any], content: Content) -> Any:
        """As `_output`; where only a metric needs it, the error names that metric."""
        try:
            return self._output(model, content)
        except Exception as error:
            is_for_loss = any(measure.name == "loss" and not measure.takes_model for measure in self._all)
            if is_for_loss or ran_out_of_memory(error):
                raise
            asking = [*(measure.name for measure in self._all if not measure.takes_model), *self._stateful]
            raise BadJob(
                f"metric {asking[0]} is given the model's output, and calling the model as named losses do "
                f"raised {type(error).__name__}: {first_line(error)}",
                remedy="Name what goes into the model: Fields(inputs=[0, 1]), or by name; or give a metric of the "
                "form metric(model, batch).",
            ) from error

    def _chunked(self, in_chunks: ChunkedLoss, model: Callable[..., Any], content: Content) -> Loss:
        """The token cross-entropy of a batch, without all of its logits at once."""
        target = self._target_of(content, "loss")
        return Loss(in_chunks(lambda: scores(self.fields.call(model, content)), target), num_valid(target))

    def _target_of(self, content: Content, name: str) -> Any:
        target = self.fields.target_of(content)
        if target is None:
            raise BadJob(
                f"{name} needs a target, but samples have none",
                remedy="Give samples as (input, target), or a loss of the form loss(model, batch).",
            )
        return target

    def _measured(self, name: str) -> _Measure | None:
        return next((measure for measure in self._all if measure.name == name), None)

    def _loss_value(self, model: Callable[..., Any], content: Content) -> Any:
        """The loss function's result."""
        loss = self._measured("loss")
        if loss is None:
            raise BadJob("the job has a step of its own and no loss", remedy="Give Job(loss=…) as well.")
        output = None if loss.takes_model else self._output(model, content)
        return self._value(loss, model, output, content)

    def _value(self, measure: _Measure, model: Callable[..., Any], output: Any, content: Content) -> Any:
        """The result of the measure's function."""
        if measure.takes_model:
            return measure.function(model, content)
        if self._own is not None and measure.function is _own_loss:
            return self._own.of(model, output, content)
        target = self._target_of(content, measure.name)
        if measure.takes_scores:
            output, target = (scores(output), target) if self._own is None else self._own.aligned(model, output, target)
        function = measure.function
        compiled = self._compiled if measure.name == "loss" and self._of_model.problem is None else None
        if compiled is not None and type(output) is type(target) is torch.Tensor:
            function = compiled
        else:
            output = in_full_precision(output)
        try:
            if self._entries is not None and isinstance(target, MixedTarget):
                return mixed_loss(self._entries, output, target)
            value = function(output, target)
            if measure.count_of is not None:
                return Loss(value, measure.count_of(target))
        except (LookupError, RuntimeError, ValueError, AttributeError, TypeError) as error:
            problem = _explained(measure, output, target, error)
            if problem is error:
                raise
            raise problem from error
        if isinstance(value, torch.Tensor) and value.dim() and not self._is_of_batch:
            require_by_sample(measure.name, value, output, target)
        return value

    def _compared(self, model: Callable[..., Any], output: Any, content: Content) -> tuple[Any, Any]:
        """Scores and target as a named metric compares them; `output` is the model's if it has been computed."""
        output = output if self._needs_output else self._output(model, content)
        target = self.fields.target_of(content)
        if self._own is None or target is None:
            compared = scores(output)
        else:
            compared, target = self._own.aligned(model, output, target)
        compared = in_full_precision(compared)
        return (compared.detach() if isinstance(compared, torch.Tensor) else compared), target

    def _as_sum(self, value: Any, size: int, name: str) -> Loss:
        if isinstance(value, Loss):
            return require_scalar(value, name)
        value = in_full_precision(value)  # the largest sum in fp16 is 65,504, and bf16 has 8 bits
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dim() == 0:
                return Loss(value * size, size)
            return Loss(value.sum(), value.numel())
        raise BadJob(
            f"{name} returned a {type(value).__name__}, wanted a float tensor or stoker.Loss(sum, count)"
            if not isinstance(value, torch.Tensor)
            else f"{name} returned a {value.dtype} tensor, wanted floating point",
            remedy=_remedy_for(value),
        )


def _remedy_for(value: Any) -> str:
    """What to return in place of a value that is no loss."""
    if isinstance(value, Mapping | tuple | list):
        return "Return the loss alone: metrics=[…] shows further values."
    if isinstance(value, torch.Tensor):
        return "Return numbers, as by .float()."
    return "Return a tensor with one value per sample, or stoker.Loss(sum, count)."


def _explained(measure: _Measure, output: Any, target: Any, error: Exception) -> Exception:
    """What a loss or metric raised, in words if its cause is known; else as it is, which names the user's line."""
    if ran_out_of_memory(error):
        return error
    if isinstance(error, IndexError | RuntimeError | ValueError):
        message, remedy = misfit(measure.name, output, target, error)
        return BadJob(message, remedy=remedy)
    if measure.takes_scores and not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return no_tensor(measure.name, output, target)
    if given := what_is_given(measure.name, output, target):
        suggest(error, given)
    return error


def _needs_graph(error: BaseException | None) -> bool:
    """Whether a derivative was asked for of what had no graph."""
    seen = 0
    while error is not None and seen < 8:
        if "does not require grad" in str(error):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def takes_model(function: Callable[..., Any]) -> bool:
    """Whether a loss or metric has the form (model, batch), decided by its first parameter's name."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in: no signature to read
        return False
    return bool(parameters) and parameters[0] == "model"


def _own_loss(_output: Any, _target: Any) -> Any:
    """Stands for the loss in the model's output, which `OwnLoss` finds."""
    raise AssertionError("never called")


def mixed_loss(entries: Entries, output: Any, target: MixedTarget) -> Loss:
    """Sum and count of share * loss(output, first target) + (1 - share) * loss(output, second target).

    Entries that are not counted, such as labels of -100, count in the same proportion, so that sum and count add up
    over micro-batches and processes. Source: as `jobs/regularization.py`.
    """
    (first, counted), (second, also) = entries(output, target.first), entries(output, target.second)
    share = target.share.to(first.dtype).view(-1, *[1] * (first.dim() - 1))
    total = (first * share).sum() + (second * (1 - share)).sum()
    # An entry that counts in both counts once, without the rounding of share + (1 - share).
    return Loss(total, (also + share * (counted - also)).sum())


def entries_of(job: Job, loss: Callable[..., Any], *, takes_model: bool) -> Entries:
    """The job's loss entry by entry; `loss` is its function.

    Raises:
        BadJob: it is of the form (model, batch), which would see two targets.
    """
    what = "Job(mix=…) mixes" if job.mix is not None else "Objective(selective_backprop=…) compares"
    if takes_model:
        raise BadJob(
            f"{what} the losses of samples, and a loss of the form loss(model, batch) gives one for all",
            remedy="Give a loss of the form loss(output, target) with one value per sample, or leave that out.",
        )
    if job.objective.loss == "cross_entropy":
        return functools.partial(_cross_entropy_entries, label_smoothing=job.objective.label_smoothing)
    if job.objective.loss == "token_cross_entropy":
        return functools.partial(_token_cross_entropy_entries, label_smoothing=job.objective.label_smoothing)

    def entries(output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = loss(output, target)
        if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dim() > 0:
            return values, torch.ones_like(values)
        given = f"a tensor of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise BadJob(
            f"{what} the losses of samples, and the loss gives {given} for a batch",
            remedy='Return one value per sample (in PyTorch: reduction="none"), or leave that out.',
        )

    return entries


def _cross_entropy_entries(
    output: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    values = F.cross_entropy(output, target, reduction="none", label_smoothing=label_smoothing)
    if target.is_floating_point():
        return values, torch.ones_like(values)
    return values, (target != IGNORED_TARGET).to(values.dtype)


def _token_cross_entropy_entries(
    output: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    values, counted = _cross_entropy_entries(output.flatten(0, -2), target.flatten(), label_smoothing)
    return values.view(target.shape), counted.view(target.shape)
