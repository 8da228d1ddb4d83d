"""Losses and metrics of a job as sums and counts, from any form the user gave them in; losses of mixed samples.

A loss of the user's own that compares every sample with every target, because PyTorch broadcast an output [B, 1]
against a target [B] to [B, B], is refused: one that returns values by their shape, one that returns their sum or mean
because it is the same for targets in another order. Named losses check shapes themselves. Not seen: a loss of the form
(model, batch). A loss that is meant to compare all pairs says so: `Objective(loss, scope="batch")`.
Source: PyTorch, "Broadcasting semantics", https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
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
from stoker.stepping.step_failures import ran_out_of_memory
from stoker.stepping.torch_compile import Compilation, compiled_function

_WITHOUT_VALUES = ContextVar("_WITHOUT_VALUES", default=False)

_SHAPING = ("View", "UnsafeView", "Reshape", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Clone", "Alias")
"""Operations, by the beginnings of their names in a graph, that leave values as they are."""
_WANTS_CLASSES = re.compile("expected (target dtype to be|scalar type) Long")

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
        self._takes_probabilities = _takes_probabilities(job.objective.loss)
        self._device, self._dtype = device, dtype
        self._own = OwnLoss(self.fields) if job.objective.loss == "own" else None
        ignored = ignored_target(job.objective.loss)
        self.ignored = ignored if isinstance(ignored, int) else IGNORED_TARGET
        """The label that the loss leaves out, and accuracies with it."""
        self._own_step = job.step
        _require_nothing_to_train(job.objective.loss)
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
            _require_probabilities(target)
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
                count_of = functools.partial(_weight_of, weight=placed.weight, ignored=placed.ignore_index)
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
                count_of = functools.partial(_weight_of, weight=settings.get("weight"), ignored=ignored_target(given))
                summed = functools.partial(given, reduction="sum")
                return _Measure(name, summed, takes_model=False, count_of=count_of, is_arithmetic=True)
            return _Measure(name, given, takes_model(given))
        if given == "own":
            return _Measure(name, _own_loss, takes_model=False)
        function, counted = _SUMS.get(given, named[given]), _COUNTS.get(given)
        if given.endswith("cross_entropy") and self.label_smoothing:
            function = functools.partial(function, label_smoothing=self.label_smoothing)
        if function in _LEAVING_OUT:
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
        return Loss(in_chunks(lambda: scores(self.fields.call(model, content)), target), _num_valid(target))

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
        except (IndexError, RuntimeError, ValueError) as error:
            if ran_out_of_memory(error):
                raise
            message, remedy = _misfit(measure.name, output, target, error)
            raise BadJob(message, remedy=remedy) from error
        except (AttributeError, TypeError) as error:
            if not measure.takes_scores or (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
                raise
            raise _no_tensor(measure.name, output, target) from error
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
            remedy="Return the loss alone: metrics=[…] shows further values." if isinstance(value, Mapping) else None,
        )


def _needs_graph(error: BaseException | None) -> bool:
    """Whether a derivative was asked for of what had no graph."""
    seen = 0
    while error is not None and seen < 8:
        if "does not require grad" in str(error):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within the block, losses do the same operations whatever the values of their targets."""
    token = _WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


def is_by_label(loss: object) -> bool:
    """Whether a loss takes each score for the logit of a label by itself, not of one class among others."""
    is_named = loss == "binary_cross_entropy" or loss is F.binary_cross_entropy_with_logits
    return is_named or isinstance(loss, nn.BCEWithLogitsLoss)


def _takes_probabilities(loss: object) -> bool:
    """Whether a loss `is_by_label` and PyTorch's own: a subclass may leave out what is no probability."""
    is_changed = isinstance(loss, nn.Module) and (
        type(loss).forward is not nn.BCEWithLogitsLoss.forward or "forward" in vars(loss)
    )
    return is_by_label(loss) and not is_changed


def _require_probabilities(target: torch.Tensor) -> None:
    """Raise BadJob for targets of a binary cross-entropy beyond 0 and 1: the loss would have no lower bound."""
    low, high = map(float, target.float().aminmax()) if target.numel() else (0.0, 0.0)
    if low < 0 or high > 1:
        raise BadJob(
            f"loss: targets go from {low:g} to {high:g}, and a binary cross-entropy compares with probabilities",
            remedy='Give 0 or 1: of labels -1 and 1 as by (labels + 1) / 2. For several classes loss="cross_entropy".',
        )


def normalised_twice(loss: object, output: Any) -> str | None:
    """A notice for a loss that normalises scores itself and is given probabilities; None if it is not.

    Decided by the operation that made `output`, which has its graph. Logarithms of probabilities do no harm: their
    log-softmax is the same again.
    """
    of_classes = loss in ("cross_entropy", "token_cross_entropy") or loss is F.cross_entropy
    of_classes = of_classes or isinstance(loss, nn.CrossEntropyLoss)
    if not (of_classes or is_by_label(loss)):
        return None
    node = getattr(scores(output), "grad_fn", None)
    while node is not None and node.name().startswith(_SHAPING) and node.next_functions:
        node = node.next_functions[0][0]
    function = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}.get("" if node is None else node.name())
    if function is None:
        return None
    return (
        f"the model ends in {function}, and the loss normalises scores itself: gradients are small, and it cannot get "
        f"near 0. Return what goes into {function}, and apply it where probabilities are wanted"
    )


def counted_as_wrong(job: Job, output: Any, target: Any) -> str | None:
    """A notice for labels that are no class of the model's, as of pixels that a function of the user's own leaves out.

    Accuracies know what is left out by the loss's `ignore_index` alone, and would count them as errors.
    """
    given = [metric.metric if isinstance(metric, Named) else metric for metric in job.metrics]
    output, names = scores(output), [name for name in given if isinstance(name, str) and name in _ACCURACIES]
    if not names or ignored_target(job.objective.loss) is not None or not isinstance(target, torch.Tensor):
        return None
    if not isinstance(output, torch.Tensor) or output.dim() < 2 or target.is_floating_point():
        return None
    classes = output.shape[-1] if names[0] == "token_accuracy" else output.shape[1]
    odd = target[((target < 0) | (target >= classes)) & (target != IGNORED_TARGET)]
    if not odd.numel():
        return None
    share, label = f"{100 * odd.numel() / target.numel():.2g} % of the labels looked at", int(odd[0])
    return (
        f"{share} are none of the model's {classes} classes, such as {label}, and {names[0]} counts them as wrong. If "
        f"the loss leaves them out, let it say which: loss=nn.CrossEntropyLoss(ignore_index={label}), or an attribute "
        "ignore_index of the function"
    )


def require_scalar(loss: Loss, name: str) -> Loss:
    """The loss, whose sum must be a scalar tensor."""
    if getattr(loss.sum, "shape", None) != ():
        raise BadJob(
            f"{name} returned stoker.Loss(sum, count) with a sum of {_shape(loss.sum)}, wanted a scalar tensor"
        )
    return loss


def _require_nothing_to_train(loss: object) -> None:
    """Refuse a loss that is, or is a method of, a module with weights to train: they would never be updated."""
    owner = loss.__self__ if inspect.ismethod(loss) else loss
    trained = [name for name, p in owner.named_parameters() if p.requires_grad] if isinstance(owner, nn.Module) else []
    if trained:
        more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
        raise BadJob(
            f"Job(loss=…): {type(owner).__name__} has parameters to train ({trained[0]}{more}), and what is trained "
            "are those of a copy of the model",
            remedy="Give a loss of the form loss(model, batch), which is handed that copy, with all such weights in "
            "the model; or, if they are to stay as they are, call requires_grad_(False).",
        )


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


def _cross_entropy(output: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> Loss:
    """Classes in dimension 1, as in PyTorch; a target of -100 is not counted."""
    return Loss(_sum_of_cross_entropy(output, target, label_smoothing), _num_targets(target))


def _sum_of_cross_entropy(output: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum", label_smoothing=label_smoothing)


def _sum_of_token_cross_entropy(
    output: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    return _sum_of_cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing)


def _num_targets(target: torch.Tensor) -> torch.Tensor | int:
    """Number of labels that are not ignored, or of distributions over classes, which are in dimension 1."""
    return target.numel() // target.shape[1] if target.is_floating_point() else _num_valid(target)


def _weight_of(target: torch.Tensor, *, weight: torch.Tensor | None, ignored: int) -> torch.Tensor | float:
    """The divisor of the mean of PyTorch's cross-entropies: the class weights of the targets that are not ignored.

    Targets that are probabilities count as one each, whatever the weights.
    Source: PyTorch 2.13, aten/src/ATen/native/LossNLL.cpp; label smoothing divides by the same.
    """
    if target.is_floating_point():
        return _num_targets(target)
    if weight is None:
        return _num_valid(target) if ignored == IGNORED_TARGET else (target != ignored).sum()
    is_valid = target != ignored
    return (weight[target.masked_fill(~is_valid, 0).long()] * is_valid).sum()


def _num_valid(target: torch.Tensor) -> torch.Tensor | int:
    """Number of targets that are not ignored; an int where that is known without waiting for a device."""
    if target.device.type == "cpu" and target.numel() and not _WITHOUT_VALUES.get() and int(target.min()) >= 0:
        return target.numel()
    return (target != IGNORED_TARGET).sum()


def _token_cross_entropy(output: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> Loss:
    """Classes in the last dimension; counts valid tokens."""
    return _cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing)


def _accuracy(output: torch.Tensor, target: torch.Tensor, ignored: int = IGNORED_TARGET) -> Loss:
    """Labels of `ignored`, which the job's loss leaves out, are not counted."""
    _require_classes(output, target)
    valid = target != ignored
    largest, choice = output.max(1)  # a row with a NaN chooses nothing: the NaN counts as the largest
    return Loss(((choice == target) & valid & ~largest.isnan()).sum().float(), valid.sum())


def _top5_accuracy(output: torch.Tensor, target: torch.Tensor, ignored: int = IGNORED_TARGET) -> Loss:
    _require_classes(output, target)
    valid = target != ignored
    hits = (output.topk(5, dim=1).indices == target.unsqueeze(1)).any(1) & ~output.amax(1).isnan()
    return Loss((hits & valid).sum().float(), valid.sum())


def _token_accuracy(output: torch.Tensor, target: torch.Tensor, ignored: int = IGNORED_TARGET) -> Loss:
    return _accuracy(output.flatten(0, -2), target.flatten(), ignored)


def _binary_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype).view_as(output), reduction="none")


def _binary_accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits above 0 against targets above one half; a NaN is on no side."""
    return (((output > 0) == (target.view_as(output) > 0.5)) & ~output.isnan()).float()


def _mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _require_same_shape(output, target)
    return F.mse_loss(output, target.to(output.dtype), reduction="none")


def _l1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _require_same_shape(output, target)
    return F.l1_loss(output, target.to(output.dtype), reduction="none")


LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "token_cross_entropy": _token_cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse": _mse,
    "l1": _l1,
}
_SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": _sum_of_cross_entropy,
    "token_cross_entropy": _sum_of_token_cross_entropy,
}
_COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "cross_entropy": _num_targets,
    "token_cross_entropy": lambda target: _num_valid(target.flatten()),
}
"""Those of `LOSSES` that are a sum and a count, in these two parts: counting looks at values."""
METRICS: dict[str, Callable[..., Any]] = {
    "accuracy": _accuracy,
    "top5_accuracy": _top5_accuracy,
    "token_accuracy": _token_accuracy,
    "binary_accuracy": _binary_accuracy,
    "mse": _mse,
    "l1": _l1,
}
_ACCURACIES = ("accuracy", "top5_accuracy", "token_accuracy")
_LEAVING_OUT = tuple(METRICS[name] for name in _ACCURACIES)
"""Metrics that do not count the labels that the job's loss ignores."""


def _require_same_shape(output: torch.Tensor, target: torch.Tensor) -> None:
    """PyTorch would broadcast one to the other, and compare every sample with every target."""
    if output.shape != target.shape:
        raise ValueError("output and target differ in shape")


def _require_classes(output: torch.Tensor, target: torch.Tensor) -> None:
    """Classes in dimension 1, at least two, and a label for everything else."""
    if output.dim() < 2 or output.shape[1] < 2 or output.shape[:1] + output.shape[2:] != target.shape:
        raise ValueError("wanted scores [B, classes, ...] with labels [B, ...]; for one logit there is binary_accuracy")


def _no_tensor(name: str, output: Any, target: Any) -> BadJob:
    """The error for a loss or metric that compares two tensors and is given something else."""
    if not isinstance(output, torch.Tensor):
        has = f" with the entries {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        return BadJob(
            f"{name} compares a tensor of scores with targets, and the model returned a {type(output).__name__}{has}",
            remedy="Return the scores alone, or in a dict under 'logits'; or give loss=… a function of "
            "(output, target) that picks them out.",
        )
    shown = target[0] if isinstance(target, list | tuple) and target else target
    return BadJob(
        f"{name} needs targets as numbers, and they are a {type(target).__name__} of {type(shown).__name__}s, "
        f"such as {shown!r}",
        remedy="Number the classes in the dataset, as by classes.index(label); loss=… may be a function of your own.",
    )


def _misfit(name: str, output: Any, target: Any, error: Exception) -> tuple[str, str | None]:
    """How output and target do not match, with their shapes or the label that is out of range; and a remedy."""
    shapes = f"output {_shape(output)}, target {_shape(target)}"
    raised = f"{name} raised {type(error).__name__}: {str(error).splitlines()[0]} ({shapes})"
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return raised, None
    if output.shape != target.shape and output.numel() == target.numel():
        remedy = "Give both one shape, as by output.squeeze(1) in the model, and targets as floats."
        if not target.is_floating_point():
            remedy += (
                ' For one logit a sample, labels 0 and 1, there is loss="binary_cross_entropy", for numbers "mse".'
            )
        return raised, remedy
    if not target.is_floating_point() and target.numel() and output.dim() > 1:
        classes = output.shape[-1] if "token" in name else output.shape[1]
        labels = target[target != IGNORED_TARGET]
        low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        if high >= classes or low < 0:
            odd = low if low < 0 else high
            remedy = (
                f"Number the classes from 0, or let the model return more scores than {classes}. If {odd} stands for "
                f"no label, loss=nn.CrossEntropyLoss(ignore_index={odd}) leaves it out."
            )
            return (
                f"{name}: labels go from {low} to {high}, but the model's output has {classes} classes ({shapes})",
                remedy,
            )
        if target.dim() == 2 and target.shape[1] == 1 < classes:
            return raised, "Give labels without that dimension, as by labels.squeeze(1)."
    if "multi-target not supported" in str(error):
        return raised, "Give labels without that dimension, as whole numbers: labels.squeeze(1).long()."
    if _WANTS_CLASSES.search(str(error)):
        kind = str(target.dtype).removeprefix("torch.")
        return (
            f"{name}: a cross-entropy compares with class numbers, and targets are {kind} ({shapes})",
            "Give class numbers as int64 (labels.long(), .astype('int64')); to learn numbers themselves, loss=\"mse\".",
        )
    return raised, None


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


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


_SAME_RELATIVE = 1e-5
"""Means of the same pairs, added up in another order, differ by no more than this [relative]."""


def require_by_sample(name: str, value: torch.Tensor, output: Any, target: Any) -> None:
    """Refuse more values than there are samples or targets.

    Raises:
        BadJob: `value` has the shape that output and target are broadcast to.
    """
    shape = value.shape
    if shape in (getattr(target, "shape", None), getattr(output, "shape", None)):
        return
    if _broadcast_shape(output, target) == shape:
        raise _crossed(f"{name} gave {list(shape)} values for {len(output)} samples", output, target)


def require_own_targets(name: str, function: Callable[..., Any], output: Any, target: Any) -> None:
    """Raise BadJob for a mean that does not depend on which sample each target belongs to, but does in one shape.

    Looked at are the model's outputs, and the targets themselves as outputs: the mean of |output - target| over all
    pairs is that of any pairing where all targets are larger than all outputs.
    """
    if _broadcast_shape(output, target) is None or output.numel() != target.numel():
        return
    for seen in (output, target.reshape(output.shape).to(output.dtype)):
        flat, others = seen.reshape(target.shape), target.roll(1, 0)
        try:
            pairs = ((seen, target), (seen, others), (flat, target), (flat, others))
            losses = [function(*pair) for pair in pairs]
            values = [torch.as_tensor(loss.sum if isinstance(loss, Loss) else loss).detach() for loss in losses]
        except Exception:  # noqa: BLE001 - it takes no other shapes, and so brings them into one itself
            return
        if any(value.dim() for value in values):
            return
        is_same, is_same_flat = (torch.isclose(a, b, rtol=_SAME_RELATIVE) for a, b in (values[:2], values[2:]))
        if is_same and not is_same_flat:
            what = f"{name} gave {float(values[0]):.6g}, whichever sample each target belongs to"
            raise _crossed(what, output, target)


def _broadcast_shape(output: Any, target: Any) -> torch.Size | None:
    """The shape that both are broadcast to, where that pairs samples with other samples; else None."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or output.dim() == target.dim():
        return None
    try:
        both = torch.broadcast_shapes(output.shape, target.shape)
    except RuntimeError:
        return None
    return None if both in (output.shape, target.shape) else both


def _crossed(what: str, output: torch.Tensor, target: torch.Tensor) -> BadJob:
    return BadJob(
        f"{what}: an output {list(output.shape)} against a target {list(target.shape)} compares every sample with "
        "every target",
        remedy='Give both one shape, as by output.squeeze(1); one of pairs says so: Objective(loss, scope="batch").',
    )
