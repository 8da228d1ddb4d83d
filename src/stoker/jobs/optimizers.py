"""Optimisers as settings; PyTorch's implementations do the work (built in `stepping/optimizers.py`).

`groups` gives parameters whose names match a shell pattern their own settings, the first match deciding:

>>> AdamW(lr=1e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}).groups["*.bias"]
{'weight_decay': 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

Groups = Mapping[str, Mapping[str, float]]

UNSAID = {"unsaid": True}
"""Metadata of a setting that came later: at its default it is left out of a JobSpec, so that older ones stay theirs."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all optimisers have: a learning rate and settings for groups of parameters by name pattern."""

    lr: float
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups"})
    """Fields that a group has no setting of its own for."""

    is_elementwise: ClassVar[bool] = True
    """Whether each weight moves by its own gradient and state alone; else no process may hold a part of a tensor."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, got {self.weight_decay}")
        known = {f.name for f in fields(self)} - self._of_all
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
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980); weight decay is L2, as in `torch.optim.Adam`.

    `amsgrad` divides by the largest second moment so far (Reddi et al. 2018, https://arxiv.org/abs/1904.09237), which
    is one more tensor of state for each weight.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = field(default=False, metadata=UNSAID)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = field(default=False, metadata=UNSAID)


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices and convolutions, `rest` for the other parameters.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; see `stepping/muon.py`.

    Matrices are parameters of two or more dimensions (a convolution's are [out channels, the rest]), except those of
    embeddings, those that match `beside`, and the last one the model registered, which is taken for the output layer.
    A schedule's factor goes for both parts. `groups` are groups of matrices; `rest` has its own.

    Args:
        lr: learning rate of matrices. Updates have singular values near 1 before `adjust`, whatever the gradient's
            size, so that rates are larger than Adam's: 0.02 is usual.
        rest: the optimiser of all other parameters.
        momentum: decay of the sum of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, as in AdamW; of matrices only.
        steps: Newton-Schulz steps; 5 as published, 3 are enough for small convolutional networks.
        adjust: a factor of the rate by shape: "original", sqrt(max(1, rows/columns)); "match_rms_adamw",
            0.2*sqrt(max(rows, columns)), with which AdamW's rates can be used (Liu et al. 2025,
            https://arxiv.org/abs/2502.16982); "none".
        normalize: scale each matrix to the norm sqrt(rows) before each update. For layers followed by a normalisation,
            to which the scale is nothing: it keeps the rate's meaning while weights would grow.
        beside: name patterns of matrices that `rest` is to have as well.

    Raises:
        ValueError: a setting is out of range.
        TypeError: `rest` is no optimiser of Stoker's, or Muon again.
    """

    rest: Optimizer
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    adjust: Literal["original", "match_rms_adamw", "none"] = "original"
    normalize: bool = False
    beside: Sequence[str] = ()

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups", "rest", "steps", "adjust", "beside"})
    is_elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rest: object = self.rest
        if not isinstance(rest, SGD | Adam | AdamW):
            raise TypeError(f"rest is stoker.SGD, Adam or AdamW, got a {type(rest).__name__}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum lies in [0, 1), got {self.momentum}")
        if self.steps < 1:
            raise ValueError(f"steps are Newton-Schulz steps, 1 or more, got {self.steps}")
        if self.adjust not in ("original", "match_rms_adamw", "none"):
            raise ValueError(f'adjust is "original", "match_rms_adamw" or "none", got {self.adjust!r}')

    def settings(self) -> dict[str, Any]:
        """Arguments of `stoker.stepping.muon.Muon` that are the matrices' own."""
        return {name: value for name, value in super().settings().items() if name not in ("rest", "beside")}
