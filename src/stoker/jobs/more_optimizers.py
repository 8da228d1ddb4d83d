"""All optimisers as settings (`stoker.optimizers`): here the adaptive ones beside Adam, and the schedule-free ones.

All but the schedule-free are PyTorch's own of the same name, with its defaults; a rate has to be given where PyTorch's
default is no better than another.

>>> RMSprop(lr=1e-3).settings()["alpha"], Adadelta().lr
(0.99, 1.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.errors import BadSetting
from stoker.jobs.optimizers import SGD, Adam, AdamW, Muon, Optimizer

__all__ = [
    "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "Optimizer", "RAdam",
    "RMSprop", "ScheduleFree", "ScheduleFreeAdamW", "ScheduleFreeSGD",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RMSprop(Optimizer):
    """Gradients divided by the root of their mean square; as in `torch.optim.RMSprop`.

    Source: Tieleman and Hinton 2012, lecture 6.5 of "Neural Networks for Machine Learning"; `centered` subtracts the
    mean (Graves 2013, https://arxiv.org/abs/1308.0850).
    """

    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of their squares; as in `torch.optim.Adagrad`.

    `lr_decay` counts updates, beside any schedule. Source: Duchi, Hazan and Singer 2011,
    https://jmlr.org/papers/v12/duchi11a.html.
    """

    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class Adadelta(Optimizer):
    """Updates in the units of the weights (Zeiler 2012, https://arxiv.org/abs/1212.5701); as in `torch.optim`."""

    most_usual_lr: ClassVar[float] = 100.0
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Adamax(Optimizer):
    """Adam with the infinity norm in place of the second moment (Kingma and Ba 2015, section 7.1)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class NAdam(Optimizer):
    """Adam with Nesterov's momentum (Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False


@dataclass(frozen=True, kw_only=True)
class RAdam(Optimizer):
    """Adam that warms up by itself (Liu et al. 2020, https://arxiv.org/abs/1908.03265)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = False


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """A second moment by rows and columns: state grows with the sides of a matrix, not its area.

    As in `torch.optim.Adafactor`: without momentum, weight decay decoupled. The size of an update is relative to the
    matrix's own, so that whole matrices are needed: shards and tensor parallel are refused.
    Source: Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    d: float = 1.0

    is_elementwise: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Optimizer):
    """What the schedule-free optimisers have in common: no schedule, and an average that is what is kept.

    Gradients are taken between the weights that move and their average, at the share `beta` of the way to the average;
    evaluated, exported and kept is the average. It takes the place of a rate that falls: beside it go a constant rate
    and `schedules.warmup`, no other schedule, no `ema` and no `swa`. Batch norms get running statistics of their own at
    the average, as with `stoker.SWA`.
    Source: Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682; an update counts in the
    average by the square of the largest rate so far, as in the authors' code (`weight_lr_power=2`, `r=0`).
    """

    beta: float = 0.9

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups", "beta"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < 1:
            raise BadSetting(f"beta is a share of the way to the average, in (0, 1), got {self.beta}")


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeSGD(ScheduleFree):
    """Schedule-free SGD; `beta` is in momentum's place, and rates are larger than SGD's. See `ScheduleFree`."""

    most_usual_lr: ClassVar[float] = 100.0


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW: as much state as AdamW; weight decay is decoupled, at the point of the gradient.

    See `ScheduleFree`. The second moment's decay is `beta2`.
    """

    weight_decay: float = 0.0
    beta2: float = 0.999
    eps: float = 1e-8
