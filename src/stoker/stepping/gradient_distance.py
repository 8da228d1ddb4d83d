"""The distance between two gradients, without a copy of either: a large model's take a good part of its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker.stepping.distributed_tensors import as_real


def gradient_distance(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The norm of the difference over the norm of the expected tensors, over all of them together [1]; 0 of none.

    Raises:
        ValueError: there are more of one than of the other.
    """
    if not expected:
        return 0.0
    pairs = [
        (ours.float(), theirs.float())
        for ours, theirs in zip(map(as_real, tensors), map(as_real, expected), strict=True)
    ]
    differences = torch.stack([(ours - theirs).norm() for ours, theirs in pairs])
    return float(differences.norm() / torch.stack([theirs.norm() for _, theirs in pairs]).norm().clamp_min(1e-30))
