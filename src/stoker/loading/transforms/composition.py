"""Transforms applied to some samples only, and the transforms that remain in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob, BadSetting
from stoker.jobs.numeric_settings import require_probability
from stoker.loading.order import Indices
from stoker.loading.transforms.base import Draw

Transform = Callable[..., Any]


@dataclass(frozen=True)
class Sometimes:
    """Apply a transform with probability `p`; it must keep the shape and the type of its inputs."""

    transform: Transform
    p: float = 0.5

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The inputs, some transformed."""
        chosen = np.flatnonzero(draw.numbers() < self.p)
        return _applied(self.transform, x, chosen, draw.of(chosen, 0))


@dataclass(frozen=True)
class OneOf:
    """Apply one of several transforms to each sample, all equally likely.

    Each must keep the shape and the type of its inputs. A list is applied in order; an empty one changes nothing.

    >>> from stoker.loading.transforms import AlternatingFlip, Draw
    >>> some = OneOf([AlternatingFlip(), []])
    >>> images = torch.arange(8.0).view(4, 1, 1, 2)
    >>> some(images, Draw(0, 0, np.arange(4), torch.device("cpu"))).flatten(1).tolist()
    [[1.0, 0.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    transforms: Sequence[Transform | Sequence[Transform]]

    def __post_init__(self) -> None:
        if len(self.transforms) == 0:
            raise BadSetting("OneOf takes a list of transforms, got an empty one")

    def __call__(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The inputs, each transformed in one way."""
        choices = np.floor(draw.numbers(0, len(self.transforms)))
        for branch, branch_transforms in enumerate(self.transforms):
            chosen = np.flatnonzero(choices == branch)
            part = draw.of(chosen, branch)
            for transform in branch_transforms if isinstance(branch_transforms, Sequence) else (branch_transforms,):
                x = _applied(transform, x, chosen, part)
        return x


def _applied(transform: Transform, x: torch.Tensor, chosen: Indices, draw: Draw) -> torch.Tensor:
    """`x` with the samples `chosen` transformed; raises BadJob if that changes their shape or type."""
    if len(chosen) == 0:
        return x
    rows = torch.from_numpy(chosen).to(x.device)
    part = x.index_select(0, rows)
    changed = transform(part, draw)
    if changed.shape != part.shape or changed.dtype != part.dtype:
        raise BadJob(
            f"{type(transform).__name__} makes {changed.dtype} {list(changed.shape)} of {part.dtype} "
            f"{list(part.shape)}, and only some samples of a batch would get it",
            remedy="Put it into the list of transforms by itself.",
        )
    return x.index_copy(0, rows, changed)


@dataclass(frozen=True)
class _InEvaluation:
    """A deterministic replacement, called like the transform."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
        """The inputs; nothing is drawn."""
        return self.change(x)


def for_evaluation(transforms: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """The transforms used in evaluation: `in_evaluation` of those that have it; all others are left out."""
    return tuple(_InEvaluation(each.in_evaluation) for each in transforms if hasattr(each, "in_evaluation"))
