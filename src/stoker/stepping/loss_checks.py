"""Mistakes in a job's loss, and in how its outputs and targets go together: found early, named with the remedy.

A loss of the user's own that compares every sample with every target, because PyTorch broadcast an output [B, 1]
against a target [B] to [B, B], is refused: one that returns values by their shape, one that returns their sum or mean
because it is the same for targets in another order. Named losses check shapes themselves. Not seen: a loss of the form
(model, batch). A loss that is meant to compare all pairs says so: `Objective(loss, scope="batch")`.
Source: PyTorch, "Broadcasting semantics", https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.jobs.metrics import Named
from stoker.loading.lengths import IGNORED_TARGET, ignored_target
from stoker.stepping.foreign_models import scores
from stoker.stepping.named_losses import ACCURACIES

_SHAPING = ("View", "UnsafeView", "Reshape", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Clone", "Alias")
"""Operations, by the beginnings of their names in a graph, that leave values as they are."""
_WANTS_CLASSES = re.compile("expected (target dtype to be|scalar type) Long")
_MOST_ENTRIES = 8
"""Entries of a dict that an error names."""
_SAME_RELATIVE = 1e-5
"""Means of the same pairs, added up in another order, differ by no more than this [relative]."""


def is_by_label(loss: object) -> bool:
    """Whether a loss takes each score for the logit of a label by itself, not of one class among others."""
    is_named = loss == "binary_cross_entropy" or loss is F.binary_cross_entropy_with_logits
    return is_named or isinstance(loss, nn.BCEWithLogitsLoss)


def takes_probabilities(loss: object) -> bool:
    """Whether a loss `is_by_label` and PyTorch's own: a subclass may leave out what is no probability."""
    is_changed = isinstance(loss, nn.Module) and (
        type(loss).forward is not nn.BCEWithLogitsLoss.forward or "forward" in vars(loss)
    )
    return is_by_label(loss) and not is_changed


def require_probabilities(target: torch.Tensor) -> None:
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
    if (function := _normalised_by(output)) is None:
        return None
    return (
        f"the model ends in {function}, and the loss normalises scores itself: gradients are small, and it cannot get "
        f"near 0. Return what goes into {function}, and apply it where probabilities are wanted"
    )


def _normalised_by(output: Any) -> str | None:
    """What made probabilities of the model's output, softmax or sigmoid, by the graph that it has; None: nothing."""
    node = getattr(scores(output), "grad_fn", None)
    while node is not None and node.name().startswith(_SHAPING) and node.next_functions:
        node = node.next_functions[0][0]
    return {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}.get("" if node is None else node.name())


def counted_as_positive(job: Job, output: Any) -> str | None:
    """A notice for `binary_accuracy` of probabilities: it compares logits with 0, below which none of them is."""
    loss, given = job.objective.loss, [metric.metric if isinstance(metric, Named) else metric for metric in job.metrics]
    is_of_torch = isinstance(loss, nn.BCELoss) and type(loss).forward is nn.BCELoss.forward
    are_probabilities = is_of_torch or loss is F.binary_cross_entropy or _normalised_by(output)
    if "binary_accuracy" not in given or not are_probabilities:
        return None
    return (
        "the model returns probabilities, and binary_accuracy counts logits above 0 as positive, so that every sample "
        'is. Return what goes into sigmoid, with loss="binary_cross_entropy"; or give a metric of your own, such as '
        "lambda output, target: ((output > 0.5) == (target > 0.5)).float()"
    )


def counted_as_wrong(job: Job, output: Any, target: Any) -> str | None:
    """A notice for labels that are no class of the model's, as of pixels that a function of the user's own leaves out.

    Accuracies know what is left out by the loss's `ignore_index` alone, and would count them as errors.
    """
    given = [metric.metric if isinstance(metric, Named) else metric for metric in job.metrics]
    output, names = scores(output), [name for name in given if isinstance(name, str) and name in ACCURACIES]
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


def require_nothing_to_train(loss: object) -> None:
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


def no_tensor(name: str, output: Any, target: Any) -> BadJob:
    """The error for a loss or metric that compares two tensors and is given something else."""
    written = (
        f", as in {_by_entry(output, target)}" if isinstance(output, Mapping) or isinstance(target, Mapping) else ""
    )
    if not isinstance(output, torch.Tensor):
        has = f" with the entries {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        return BadJob(
            f"{name} compares a tensor of scores with targets, and the model returned a {type(output).__name__}{has}",
            remedy="Return the scores alone, or in a dict under 'logits'; or give loss=… a function of "
            f"(output, target) that picks them out{written}.",
        )
    if isinstance(target, Mapping):
        return BadJob(
            f"{name} compares with one tensor of targets, and they are {_shape(target)}",
            remedy=f"Give loss=… a function that picks them out{written}; or samples with one of them as the target.",
        )
    shown = target[0] if isinstance(target, list | tuple) and target else target
    return BadJob(
        f"{name} needs targets as numbers, and they are a {type(target).__name__} of {type(shown).__name__}s, "
        f"such as {shown!r}",
        remedy="Number the classes in the dataset, as by classes.index(label); loss=… may be a function of your own.",
    )


def what_is_given(name: str, output: Any, target: Any) -> str | None:
    """What a loss or metric of (output, target) is given where one is a dict, and how to write it; else None."""
    if not (isinstance(output, Mapping) or isinstance(target, Mapping)):
        return None
    return (
        f"{name} is given {_shape(output)} as the output, and {_shape(target)} as the target: take the entries by name "
        f"where there are some, as in {_by_entry(output, target)}."
    )


def _by_entry(output: Any, target: Any) -> str:
    """A loss of the first entries that output and target share, or of their first ones, in code."""
    dicts = [value for value in (output, target) if isinstance(value, Mapping)]
    keys = [key for key in dicts[0] if all(key in value for value in dicts)]
    chosen = [next(iter([*keys, *value]), "…") if isinstance(value, Mapping) else None for value in (output, target)]
    compared = target if chosen[1] is None else target.get(chosen[1])
    is_amount = isinstance(compared, torch.Tensor) and compared.is_floating_point()
    named = [
        name if key is None else f"{name}[{key!r}]" for name, key in zip(("output", "target"), chosen, strict=True)
    ]
    more = " + …" if any(len(value) > 1 for value in dicts) else ""
    function = "mse_loss" if is_amount else "cross_entropy"
    return f"def loss(output, target): return F.{function}({', '.join(named)}, reduction='none'){more}"


def misfit(name: str, output: Any, target: Any, error: Exception) -> tuple[str, str | None]:
    """How output and target do not match, with their shapes or the label that is out of range; and a remedy."""
    shapes = f"output {_shape(output)}, target {_shape(target)}"
    raised = f"{name} raised {type(error).__name__}: {str(error).splitlines()[0]} ({shapes})"
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return raised, what_is_given(name, output, target)
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
    if output.shape == target.shape and (name in ACCURACIES or "class probabilities" in str(error)):
        return raised, "Give class numbers in place of rows of zeros and ones, as by labels.argmax(1)."
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
    if isinstance(value, Mapping):
        entries = ", ".join(f"{key!r} {_shape(entry)}" for key, entry in itertools.islice(value.items(), _MOST_ENTRIES))
        return f"a dict of {entries}{', …' if len(value) > _MOST_ENTRIES else ''}"
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


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


def _broadcast_shape(output: Any, target: Any) -> tuple[int, ...] | None:
    """The shape that both are broadcast to, where that pairs samples with other samples; else None.

    By NumPy, whose rules are PyTorch's: `torch.broadcast_shapes` imports symbolic shapes, and sympy with 432 modules.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or output.dim() == target.dim():
        return None
    try:
        both = np.broadcast_shapes(output.shape, target.shape)
    except ValueError:
        return None
    return None if both in (output.shape, target.shape) else both


def _crossed(what: str, output: torch.Tensor, target: torch.Tensor) -> BadJob:
    return BadJob(
        f"{what}: an output {list(output.shape)} against a target {list(target.shape)} compares every sample with "
        "every target",
        remedy='Give both one shape, as by output.squeeze(1); one of pairs says so: Objective(loss, scope="batch").',
    )
