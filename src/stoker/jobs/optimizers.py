"""Optimisers as settings; PyTorch's implementations do the work (built in `stepping/optimizers.py`).

`groups` gives parameters whose names match a shell pattern their own settings, the first match deciding:

>>> AdamW(lr=1e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}).groups["*.bias"]
{'weight_decay': 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Groups = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all optimisers have: a learning rate and settings for groups of parameters by name pattern."""

    lr: float
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, got {self.weight_decay}")
        known = {f.name for f in fields(self)} - {"groups"}
        for pattern, settings in self.groups.items():
            if unknown := sorted(set(settings) - known):
                raise ValueError(f"group {pattern!r} has no setting {unknown[0]!r}; it may set {sorted(known)}")

    def settings(self) -> dict[str, Any]:
        """Arguments of PyTorch's optimiser of the same name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent; weight decay is added to the gradient (L2), as in `torch.optim.SGD`."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980); weight decay is L2, as in `torch.optim.Adam`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
