"""What stands for random transforms when a model is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoker.loading.transforms.draw import Draw


@dataclass(frozen=True)
class _InEvaluation:
    """A transform's stand-in, called like the transform."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
        """The inputs; nothing is drawn."""
        return self.change(x)


def for_evaluation(transforms: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """The transforms as they are in evaluation: those with a method `in_evaluation` by that, all others left out."""
    return tuple(_InEvaluation(one.in_evaluation) for one in transforms if hasattr(one, "in_evaluation"))
