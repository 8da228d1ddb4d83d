"""Losses that compare every sample with every target because PyTorch stretched one of the two over the other.

What: an output [B, 1] against a target [B] gives [B, B]. A loss of one's own that returns it is known by its shape; one
that returns their sum or mean, by being the same for targets in another order. Use when: the function is the user's;
named losses look at shapes themselves. Costs: a comparison of shapes; sums and means are looked at once, before
training. Does not see: a loss of the form (model, batch), whose outputs nobody else has.
A loss that is meant to compare all pairs says so: `loss_scope="batch"`.
Source: PyTorch, "Broadcasting semantics", https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.jobs import Loss

_SAME = 1e-5
"""Means of the same pairs, added up in another order, differ by no more than this [relative]."""


def require_by_sample(name: str, value: torch.Tensor, output: Any, target: Any) -> None:
    """Refuse values that are more than samples and targets together make.

    Raises:
        BadJob: `value` has the shape that output and target get when each is stretched over the other.
    """
    shape = value.shape
    if shape in (getattr(target, "shape", None), getattr(output, "shape", None)):
        return
    if _stretched(output, target) == shape:
        found = f"{name} gave {list(shape)} values for {len(output)} samples"
        raise _crossed(found, output, target)


def require_own_targets(name: str, function: Callable[..., Any], output: Any, target: Any) -> None:
    """Refuse a mean that is the same whichever sample each target belongs to, and is another one in one shape.

    Raises:
        BadJob: it is so.
    """
    if _stretched(output, target) is None or output.numel() != target.numel():
        return
    flat, others = output.reshape(target.shape), target.roll(1, 0)
    try:
        pairs = ((output, target), (output, others), (flat, target), (flat, others))
        found = [_number(function(*pair)).detach() for pair in pairs]
    except Exception:  # noqa: BLE001 - it takes them in no other shapes, and so brings them into one itself
        return
    if any(one.dim() for one in found):
        return
    is_same, is_same_flat = (torch.isclose(a, b, rtol=_SAME) for a, b in (found[:2], found[2:]))
    if is_same and not is_same_flat:
        raise _crossed(f"{name} gave {float(found[0]):.6g}, whichever sample each target belongs to", output, target)


def _number(value: Any) -> torch.Tensor:
    """A loss, or the sum of one that comes with its count."""
    return torch.as_tensor(value.sum if isinstance(value, Loss) else value)


def _stretched(output: Any, target: Any) -> torch.Size | None:
    """The shape of both stretched over each other, where this sets samples beside other samples; else None."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or output.dim() == target.dim():
        return None
    try:
        both = torch.broadcast_shapes(output.shape, target.shape)
    except RuntimeError:
        return None
    return None if both in (output.shape, target.shape) else both


def _crossed(found: str, output: torch.Tensor, target: torch.Tensor) -> BadJob:
    return BadJob(
        f"{found}: an output {list(output.shape)} against a target {list(target.shape)} compares every sample with "
        "every target",
        remedy='Give both one shape, as by output.squeeze(1); a loss of all pairs says so: loss_scope="batch".',
    )
