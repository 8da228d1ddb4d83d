"""Optimisers as settings (`stoker.optimizers`); PyTorch's implementations do the work (`stepping/torch_optimizers.py`).

All but Muon and the schedule-free ones are PyTorch's own of the same name, with its defaults; a learning rate has to be
given where PyTorch's default is arbitrary. `groups` gives parameters their own settings, by a shell pattern of names or
a function of name and parameter; the first match decides:

>>> AdamW(lr=1e-3, weight_decay=0.1, groups={"*.bias": {"weight_decay": 0.0}}).groups["*.bias"]
{'weight_decay': 0.0}
>>> decayed = AdamW(lr=1e-3, groups={lambda name, parameter: parameter.dim() >= 2: {"weight_decay": 0.1}})
>>> RMSprop(lr=1e-3).settings()["alpha"], Adadelta().lr
(0.99, 1.0)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any, ClassVar, Literal, Self

from stoker.errors import BadSetting, nearest
from stoker.jobs.numeric_settings import is_number, is_whole, plain_number

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "ScheduleFree",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
]

Group = str | Callable[[str, Any], Any]
"""A shell pattern of names, or a function of name and parameter."""
Groups = Mapping[Group, Mapping[str, float]]

_SHARES = ("alpha", "rho", "beta2")
_NOT_NEGATIVE = (
    "weight_decay",
    "momentum",
    "dampening",
    "eps",
    "lr_decay",
    "initial_accumulator_value",
    "momentum_decay",
)
_FLAGS = ("nesterov", "amsgrad", "centered", "decoupled_weight_decay", "normalize")
"""Settings by their range; others are checked in their class."""

_NAMES_ELSEWHERE = {"learning_rate": "lr", "wd": "weight_decay"}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base of all optimisers: a learning rate, and settings for groups of parameters by name pattern or predicate.

    Args:
        lr: learning rate [1], before the schedule's factor.
        weight_decay: its factor [1]; 0: none.
        groups: settings of some parameters in place of these, by a pattern of names or by a function
            `(name, parameter) -> bool`.

    Raises:
        BadSetting: a setting is out of its range, or unknown.
    """

    lr: float
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups"})
    """Fields that a group cannot set."""

    most_usual_lr: ClassVar[float] = 1.0
    """A learning rate above this is probably a mistake: normalised updates move weights by about the rate."""

    is_elementwise: ClassVar[bool] = True
    """Whether each weight depends on its own gradient and state alone; else tensors cannot be sharded."""

    def __new__(cls, *_: object, **given: Any) -> Self:
        """An instance, if all names of settings are known: the error of a dataclass names no other."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        if not takes_any and (unknown := sorted(set(given) - set(known))):
            raise BadSetting(f"{cls.__name__} has no setting {unknown[0]!r}. {_nearest_setting(unknown[0], known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        known = [f.name for f in fields(self) if f.name not in self._of_all]
        for name in known:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
            require_valid_setting(name, getattr(self, name))
        object.__setattr__(self, "groups", _plain_parameter_groups(self.groups))
        for pattern, settings in self.groups.items():
            if unknown := sorted(set(settings) - {*known}):
                raise BadSetting(
                    f"group {group_name(pattern)} has no setting {unknown[0]!r}. {_nearest_setting(unknown[0], known)}"
                )
            for name, value in settings.items():
                require_valid_setting(name, value, of=f" of group {group_name(pattern)}")

    def doubt(self, factor: float = 1.0) -> str | None:
        """A warning of an unusually high learning rate, or None; `factor` is the highest of its schedule."""
        rates = [self.lr, *(float(settings.get("lr", 0.0)) for settings in self.groups.values())]
        highest = factor * max(rates)
        if highest <= self.most_usual_lr:
            return None
        name = type(self).__name__
        return (
            f"the learning rate of {name} goes up to {highest:g}, and is hardly ever above {self.most_usual_lr:g}: is "
            "that meant? `stoker lr-range` finds one"
        )

    def settings(self) -> dict[str, Any]:
        """Arguments of PyTorch's optimiser of the same name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}


def _nearest_setting(name: str, known: Iterable[str]) -> str:
    """As `nearest`, also of the names that Keras, Hugging Face and others have for the same setting."""
    return nearest(_NAMES_ELSEWHERE.get(name, name), [setting for setting in known if setting != "self"])


def require_valid_setting(name: str, value: object, *, of: str = "") -> None:
    """Refuse a setting that no optimiser can have; `of` is the group in the message.

    Raises:
        BadSetting: it is out of range, or of another type.
    """
    if name == "lr":
        expected, is_right = "positive and finite", is_number(value) and 0 < value < math.inf
    elif name in _NOT_NEGATIVE:
        expected, is_right = "finite and not negative", is_number(value) and 0 <= value < math.inf
    elif name in _SHARES:
        expected, is_right = "a number in [0, 1)", _is_share(value)
    elif name == "betas":
        expected = "two numbers in [0, 1), such as (0.9, 0.999)"
        is_right = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_share, value))
    elif name in _FLAGS:
        expected, is_right = "True or False", isinstance(value, bool)
    elif name == "beta2_decay":
        expected, is_right = "finite and not positive", is_number(value) and -math.inf < value <= 0
    elif name == "d":
        expected, is_right = "finite and at least 1", is_number(value) and 1 <= value < math.inf
    else:
        return
    if not is_right:
        raise BadSetting(f"{name}{of} must be {expected}, got {value!r}")


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value < 1


def group_name(group: Group) -> str:
    """A group in messages: its pattern in quotes, or its function with its file and line."""
    if isinstance(group, str):
        return repr(group)
    code = getattr(group, "__code__", None)
    name: str = getattr(group, "__qualname__", type(group).__qualname__)
    return name if code is None else f"{name} ({PurePath(code.co_filename).name}, line {code.co_firstlineno})"


def _plain_parameter_groups(groups: object) -> Groups:
    """Settings by pattern or predicate, with Python's own numbers."""
    if not (isinstance(groups, Mapping) and all(isinstance(settings, Mapping) for settings in groups.values())):
        expected = 'settings by a pattern of names, such as {"*.bias": {"weight_decay": 0.0}}, or by a predicate'
        raise BadSetting(f"groups are {expected}, got {groups!r}")
    for group in groups:
        if not (isinstance(group, str) or _takes_name_and_parameter(group)):
            expected = "a pattern of names, or a function of a name and its parameter"
            raise BadSetting(f"the key of a group is {expected}, got {group!r}")
    return {
        pattern: {name: plain_number(value) for name, value in settings.items()} for pattern, settings in groups.items()
    }


def _takes_name_and_parameter(group: object) -> bool:
    if not callable(group):
        return False
    try:
        inspect.signature(group).bind("name", None)
    except TypeError:
        return False
    except ValueError:
        return True  # built in, without a signature: it may take them
    return True


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent; weight decay is added to the gradient (L2), as in `torch.optim.SGD`.

    Args:
        momentum: share of the last direction that is kept, from 0 to below 1.
        dampening: share of the gradient that does not enter the momentum.
        nesterov: look ahead along the momentum.
        lr, weight_decay, groups: see `Optimizer`.

    Raises:
        BadSetting: a setting is out of its range, or `nesterov` has no momentum.
    """

    most_usual_lr: ClassVar[float] = 100.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise BadSetting(
                f"nesterov looks ahead along the momentum, and wants momentum above 0 and no dampening; "
                f"got momentum={self.momentum}, dampening={self.dampening}"
            )


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980); weight decay is L2, as in `torch.optim.Adam`.

    `amsgrad` divides by the largest second moment so far (Reddi et al. 2018, https://arxiv.org/abs/1904.09237), which
    is one more tensor of state for each weight.

    Args:
        betas: decays of the first and the second moment, from 0 to below 1.
        eps: added to the root of the second moment.
        amsgrad: divide by the largest second moment so far.
        lr, weight_decay, groups: see `Optimizer`.

    Raises:
        BadSetting: a setting is out of its range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101).

    Args:
        betas: decays of the first and the second moment, from 0 to below 1.
        eps: added to the root of the second moment.
        amsgrad: divide by the largest second moment so far; see `Adam`.
        lr, weight_decay, groups: see `Optimizer`.

    Raises:
        BadSetting: a setting is out of its range.
    """

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices and convolutions; `rest` trains the other parameters.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; see `stepping/muon.py`.

    Matrices are parameters of two or more dimensions (a convolution's are [out channels, all others]), except those of
    embeddings, those that match `exclude`, and the last one the model registered, which is taken for the output layer.
    A schedule's factor applies to both parts. `groups` are groups of matrices; `rest` has its own.

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
            which do not depend on the scale: it keeps the rate's meaning while weights would grow.
        exclude: name patterns of matrices that `rest` trains as well.

    Raises:
        BadSetting: a setting is out of range, or `rest` is not SGD, Adam or AdamW.
    """

    rest: Optimizer
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    adjust: Literal["original", "match_rms_adamw", "none"] = "original"
    normalize: bool = False
    exclude: Sequence[str] = ()

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups", "rest", "steps", "adjust", "exclude"})
    is_elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rest: object = self.rest
        if not isinstance(rest, SGD | Adam | AdamW):
            raise BadSetting(f"rest is stoker.SGD, Adam or AdamW, got a {type(rest).__name__}")
        if not _is_share(self.momentum):
            raise BadSetting(f"momentum must be in [0, 1), got {self.momentum}")
        if not is_whole(self.steps) or self.steps < 1:
            raise BadSetting(f"steps are Newton-Schulz steps, 1 or more, got {self.steps}")
        if self.adjust not in ("original", "match_rms_adamw", "none"):
            raise BadSetting(f'adjust is "original", "match_rms_adamw" or "none", got {self.adjust!r}')
        patterns: object = self.exclude
        if not (isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)):
            raise BadSetting(f'exclude is a list of name patterns, such as ["head.*"], got {patterns!r}')

    def settings(self) -> dict[str, Any]:
        """Arguments of `stoker.stepping.muon.Muon` for the matrices."""
        return {name: value for name, value in super().settings().items() if name not in ("rest", "exclude")}


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

    `lr_decay` is per update, in addition to any schedule. Source: Duchi, Hazan and Singer 2011,
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
    matrix's, so that whole matrices are needed: sharding and tensor parallel are refused.
    Source: Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    d: float = 1.0

    is_elementwise: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Optimizer):
    """Base of the schedule-free optimisers: no schedule; the average of the weights is evaluated, exported and kept.

    Gradients are taken between the moving weights and their average, at the share `beta` of the way to the average. The
    average replaces a falling rate: it goes with a constant rate and `schedules.warmup`, no other schedule, no
    `average`. Batch norms get their own running statistics at the average, as with `stoker.SWA`.
    Source: Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682; an update counts in the
    average by the square of the largest rate so far, as in the authors' code (`weight_lr_power=2`, `r=0`).
    """

    beta: float = 0.9

    _of_all: ClassVar[frozenset[str]] = frozenset({"groups", "beta"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.beta) and 0 < self.beta < 1):
            raise BadSetting(f"beta is a share of the way to the average, in (0, 1), got {self.beta}")


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeSGD(ScheduleFree):
    """Schedule-free SGD; `beta` replaces momentum, and rates are larger than SGD's. See `ScheduleFree`."""

    most_usual_lr: ClassVar[float] = 100.0


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW: as much state as AdamW; weight decay is decoupled, at the point of the gradient.

    See `ScheduleFree`. The second moment's decay is `beta2`.
    """

    weight_decay: float = 0.0
    beta2: float = 0.999
    eps: float = 1e-8
