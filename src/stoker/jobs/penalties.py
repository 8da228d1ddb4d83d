"""Penalties on weights, for `Job(penalty=…)`: once per update, whatever the micro-batches.

`weight_decay` of an optimiser is another thing: of SGD it is the gradient of L2, of AdamW it is decoupled.
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
    """`weight` times the sum of squares ("l2") or sizes ("l1") of trained weights.

    Of all that have two or more dimensions: biases and the gains of norms are left out; or, with `of`, of all whose
    names match one of these shell patterns.
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
            BadSetting: nothing of the model is meant.
        """
        meant = [parameter for name, parameter in model.named_parameters() if self._is_meant(name, parameter)]
        if not meant:
            which = f"names like {', '.join(self.of)}" if self.of else "two or more dimensions"
            raise BadSetting(f"no trained weight of {type(model).__name__} has {which}")
        total = sum(one.square().sum() if self.kind == "l2" else one.abs().sum() for one in meant)
        penalty: torch.Tensor = self.weight * total  # type: ignore[assignment]  # a sum of tensors is one
        return penalty

    def _is_meant(self, name: str, parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad:
            return False
        return any(fnmatchcase(name, one) for one in self.of) if self.of else parameter.dim() >= 2


def l2(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of squared weights, as `tf.keras.regularizers.L2`; without biases and norms.

    SGD's `weight_decay=2 * weight` moves all weights, biases included, in the same way.
    """
    return Penalty(weight, "l2", tuple(of))


def l1(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of the weights' sizes, which drives small ones to 0; without biases and norms."""
    return Penalty(weight, "l1", tuple(of))
