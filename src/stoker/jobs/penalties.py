"""Penalties on weights, for `Job(penalty=…)`: added once per update, for any micro-batches.

An optimiser's `weight_decay` differs: for SGD it is the gradient of L2, for AdamW it is decoupled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Penalty:
    """`weight` times the sum of squares ("l2") or absolute values ("l1") of trained weights.

    All weights with two or more dimensions count, which leaves out biases and the gains of norms; or, with `of`, those
    whose names match one of these shell patterns.
    """

    weight: float
    kind: Literal["l1", "l2"]
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (is_number(self.weight) and 0 <= self.weight < math.inf):
            raise BadSetting(f"a penalty's weight is finite and not negative, got {self.weight!r}")

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """The penalty of the model's weights, a scalar.

        Raises:
            BadSetting: no weight of the model counts.
        """
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.of:
            counted = [weight for name, weight in trained if any(fnmatchcase(name, pattern) for pattern in self.of)]
        else:
            counted = [weight for _, weight in trained if weight.dim() >= 2]
        if not counted:
            which = f"names like {', '.join(self.of)}" if self.of else "two or more dimensions"
            raise BadSetting(f"no trained weight of {type(model).__name__} has {which}")
        total = sum(weight.square().sum() if self.kind == "l2" else weight.abs().sum() for weight in counted)
        penalty: torch.Tensor = self.weight * total  # type: ignore[assignment]  # a sum of tensors is one
        return penalty


def l2(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of squared weights, as `tf.keras.regularizers.L2`; without biases and norms.

    SGD's `weight_decay=2 * weight` moves all weights, biases included, in the same way.
    """
    return Penalty(weight, "l2", tuple(of))


def l1(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of the weights' sizes, which drives small ones to 0; without biases and norms."""
    return Penalty(weight, "l1", tuple(of))
