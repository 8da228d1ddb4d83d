from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from stoker.errors import BadSetting
from stoker.jobs import SGD, Adam, AdamW, Muon, optimizers
from stoker.jobs.optimizers import Optimizer, RMSprop, ScheduleFree, ScheduleFreeAdamW


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SGD(lr=0.0), "lr must be positive and finite, got 0.0"),
        (lambda: SGD(lr=-1), "got -1"),
        (lambda: Adam(lr=math.nan), "got nan"),
        (lambda: Adam(lr=math.inf), "got inf"),
        (lambda: AdamW(lr=1e-3, weight_decay=-0.1), "weight_decay must be finite and not negative, got -0.1"),
        (lambda: AdamW(lr=1e-3, groups={"*.bias": {"wd": 0.0}}), r"group '\*.bias' has no setting 'wd'.*weight_decay"),
        (lambda: SGD(learning_rate=0.1), r"SGD has no setting 'learning_rate'\. Did you mean 'lr'\?"),
        (lambda: AdamW(lr=1e-3, wd=0.1), r"AdamW has no setting 'wd'\. Did you mean 'weight_decay'\?"),
        (lambda: Adam(lr=1e-3, beta=(0.9, 0.9)), r"Adam has no setting 'beta'\. Did you mean 'betas'\?"),
        (lambda: AdamW(lr="1e-3"), "lr must be positive and finite, got '1e-3'"),
        (lambda: AdamW(lr=1e-3, betas=0.9), r"betas must be two numbers in \[0, 1\), such as .*, got 0.9"),
        (lambda: Adam(lr=1e-3, betas=(0.9, 1.0)), r"betas must be two numbers.*got \(0.9, 1.0\)"),
        (lambda: Adam(lr=1e-3, betas=(0.9, 0.99, 0.999)), "betas must be two numbers"),
        (lambda: AdamW(lr=1e-3, eps=-1e-8), "eps must be finite and not negative, got -1e-08"),
        (lambda: AdamW(lr=1e-3, amsgrad=1), "amsgrad must be True or False, got 1"),
        (lambda: RMSprop(lr=1e-3, alpha=1.5), r"alpha must be a number in \[0, 1\), got 1.5"),
        (lambda: ScheduleFreeAdamW(lr=1e-3, beta2=1.0), r"beta2 must be a number in \[0, 1\), got 1.0"),
        (lambda: SGD(lr=0.1, nesterov=True), "wants momentum above 0 and no dampening; got momentum=0.0"),
        (lambda: SGD(lr=0.1, nesterov=True, momentum=0.9, dampening=0.5), "no dampening; .*dampening=0.5"),
        (lambda: SGD(lr=0.1, groups={"*.bias": {"lr": -1}}), r"lr of group '\*.bias' must be positive.*got -1"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """Before anything is spent, with the value."""
    with pytest.raises(BadSetting, match=problem):
        make()


def test_settings_are_the_arguments_of_pytorch() -> None:
    """All but the groups, which are parameters' own."""
    optimizer = SGD(lr=0.1, momentum=0.9, groups={"*.bias": {"lr": 0.2}})
    assert optimizer.settings() == {
        "lr": 0.1,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
    }
    assert AdamW(lr=1e-3).settings()["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"steps": 0}, "Newton-Schulz steps, 1 or more, got 0"),
        ({"adjust": "rms"}, "got 'rms'"),
        ({"rest": Muon(lr=0.1, rest=SGD(lr=0.1))}, "rest is stoker.SGD, Adam or AdamW, got a Muon"),
        ({"groups": {"*": {"steps": 3}}}, "has no setting 'steps'"),
    ],
)
def test_muons_own_settings_are_checked(changed: dict[str, object], problem: str) -> None:
    """Each says what it may be; a group may set what is by parameter, and nothing else."""
    with pytest.raises(BadSetting, match=problem):
        Muon(**{"lr": 0.02, "rest": SGD(lr=0.1), **changed})  # type: ignore[arg-type]
    assert Muon(lr=0.02, rest=SGD(lr=0.1), groups={"*": {"momentum": 0.5}}).groups


@pytest.mark.parametrize("key", [3, lambda parameter: parameter.dim() >= 2, None], ids=["3", "one", "None"])
def test_a_key_of_a_group_is_a_pattern_or_a_function_of_name_and_parameter(key: Any) -> None:
    """Anything else is refused when the optimiser is stated, before a model is made."""
    with pytest.raises(BadSetting, match="a function of a name and its parameter, got"):
        SGD(lr=0.1, groups={key: {"lr": 1.0}})


_SETTINGS = [
    (made, setting.name)
    for made in map(vars(optimizers).get, optimizers.__all__)
    if isinstance(made, type) and issubclass(made, Optimizer) and made not in (Optimizer, ScheduleFree)
    for setting in fields(made)
]


@pytest.mark.parametrize(("made", "name"), _SETTINGS, ids=[f"{made.__name__}-{name}" for made, name in _SETTINGS])
def test_no_setting_goes_unchecked(made: type[Optimizer], name: str) -> None:
    """What cannot be a setting is refused by every field of every optimiser, also by one that is added."""
    needed: dict[str, Any] = {"lr": 0.1} | ({"rest": AdamW(lr=1e-3)} if made is Muon else {})
    with pytest.raises(BadSetting):
        made(**needed | {name: object()})
