"""The losses and metrics that a job gives by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from stoker.jobs import Loss
from stoker.loading.lengths import IGNORED_TARGET

_WITHOUT_VALUES = ContextVar("_WITHOUT_VALUES", default=False)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within the block, losses do the same operations whatever the values of their targets."""
    token = _WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


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
    return target.numel() // target.shape[1] if target.is_floating_point() else num_valid(target)


def weight_of(target: torch.Tensor, *, weight: torch.Tensor | None, ignored: int) -> torch.Tensor | float:
    """The divisor of the mean of PyTorch's cross-entropies: the class weights of the targets that are not ignored.

    Targets that are probabilities count as one each, whatever the weights.
    Source: PyTorch 2.13, aten/src/ATen/native/LossNLL.cpp; label smoothing divides by the same.
    """
    if target.is_floating_point():
        return _num_targets(target)
    if weight is None:
        return num_valid(target) if ignored == IGNORED_TARGET else (target != ignored).sum()
    is_valid = target != ignored
    return (weight[target.masked_fill(~is_valid, 0).long()] * is_valid).sum()


def num_valid(target: torch.Tensor) -> torch.Tensor | int:
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
    if output.shape[1] < 5:
        raise ValueError(f"it takes scores of 5 classes or more, and there are {output.shape[1]}")
    valid = target != ignored
    hits = (output.topk(5, dim=1).indices == target.unsqueeze(1)).any(1) & ~output.amax(1).isnan()
    return Loss((hits & valid).sum().float(), valid.sum())


def _token_accuracy(output: torch.Tensor, target: torch.Tensor, ignored: int = IGNORED_TARGET) -> Loss:
    return _accuracy(output.flatten(0, -2), target.flatten(), ignored)


def _binary_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, _as_shaped(target, output).to(output.dtype), reduction="none")


def _binary_accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits above 0 against targets above one half; a NaN is on no side."""
    return (((output > 0) == (_as_shaped(target, output) > 0.5)) & ~output.isnan()).float()


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
SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": _sum_of_cross_entropy,
    "token_cross_entropy": _sum_of_token_cross_entropy,
}
COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "cross_entropy": _num_targets,
    "token_cross_entropy": lambda target: num_valid(target.flatten()),
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
ACCURACIES = ("accuracy", "top5_accuracy", "token_accuracy")
LEAVING_OUT = tuple(METRICS[name] for name in ACCURACIES)
"""Metrics that do not count the labels that the job's loss ignores."""


def _as_shaped(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Labels [B] as [B, 1], or the reverse; of [B, C, H, W] and [B, H, W, C] entries would not belong together.

    Outputs [B, N] have no order but that of their targets, such as images; those of one channel have one order.
    """
    is_ordered = output.dim() > 2 and output.shape[1] > 1
    is_flat = 2 in (output.dim(), target.dim()) and output.shape[:1] == target.shape[:1]
    is_same = [size for size in target.shape if size != 1] == [size for size in output.shape if size != 1]
    if not is_same and (is_ordered or not is_flat or output.numel() != target.numel()):
        raise ValueError("output and target differ in shape")
    return target.reshape(output.shape)


def _require_same_shape(output: torch.Tensor, target: torch.Tensor) -> None:
    """PyTorch would broadcast one to the other, and compare every sample with every target."""
    if output.shape != target.shape:
        raise ValueError("output and target differ in shape")


def _require_classes(output: torch.Tensor, target: torch.Tensor) -> None:
    """Classes in dimension 1, at least two, and a label for everything else."""
    if output.dim() < 2 or output.shape[1] < 2 or output.shape[:1] + output.shape[2:] != target.shape:
        raise ValueError("wanted scores [B, classes, ...] with labels [B, ...]; for one logit there is binary_accuracy")
