from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from stoker.jobs import SGD, Job, Muon
from stoker.jobs.evaluation_settings import Evaluation
from stoker.jobs.fields import Fields
from stoker.jobs.job_description import describe, describe_settings
from stoker.jobs.objective import Objective
from stoker.loading.transforms import RandomShift
from stoker.records import digest
from stoker.units import epochs
from tests.records.strategies import JSON_VALUES

SCALE = 2.0


def job(**changes: Any) -> Job:
    """A small job, with changes."""
    settings = {
        "model": object,
        "data": ((), ()),
        "loss": "mse",
        "optimizer": SGD(lr=0.1),
        "batch": 64,
        "until": epochs(1),
    }
    return Job(**settings | changes)


def scaled(gamma):
    """A loss that closes over `gamma`."""

    def loss(output, target):
        return gamma * (output - target)

    return loss


def with_default(gamma):
    """A loss with `gamma` as its default."""

    def loss(output, target, gamma=gamma):
        return gamma * (output - target)

    return loss


def with_keyword(gamma):
    """A loss with `gamma` as the default of a keyword."""

    def loss(output, target, *, gamma=gamma):
        return gamma * (output - target)

    return loss


def decorated(wrapped):
    """A function around another, by the usual means."""

    @functools.wraps(wrapped)
    def loss(*arguments):
        return wrapped(*arguments)

    return loss


class Focal:
    """A loss with state."""

    def __init__(self, gamma: float, note: object = None) -> None:
        self._gamma = gamma
        self.note = note

    def __call__(self, output, target):
        return self._gamma * (output - target)

    def value(self, output, target):
        return self(output, target)


class Config:
    """Settings as attributes, read from somewhere."""

    def __init__(self, gamma: float) -> None:
        self.gamma, self.names, self.inner = gamma, ["a"], SimpleNamespace(rate=0.1, act=F.relu)

    def loss(self, output, target):
        return self.gamma * (output - target)


class Slotted:
    """A loss with slots."""

    __slots__ = ("gamma", "unset")

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, output, target):
        return self.gamma * (output - target)


@dataclasses.dataclass(frozen=True)
class Noise:
    """A transform of a user's own."""

    level: float

    def __call__(self, inputs, draw):
        return inputs + self.level


class Side(enum.Enum):
    """A choice."""

    LEFT = 1
    RIGHT = 2


def module(smoothing: float) -> torch.nn.Module:
    """A loss as a module, with a hyperparameter in a module within."""
    return torch.nn.Sequential(torch.nn.Dropout(smoothing))


# Pairs of two settings of one kind that make another job: (make, one, other).
OTHERS = {
    "closure": (scaled, 2.0, 3.0),
    "closure over an array": (scaled, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "closure over a bfloat16 tensor": (scaled, torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
    "closure over a NumPy array": (scaled, np.arange(3), np.arange(3) + 1),
    "closure over a shape": (scaled, torch.zeros(2, 3), torch.zeros(3, 2)),
    "closure over a function": (scaled, F.mse_loss, F.l1_loss),
    "closure over a type": (scaled, torch.float32, torch.bfloat16),
    "closure over a choice": (scaled, Side.LEFT, Side.RIGHT),
    "closure over a path": (scaled, Path("a"), Path("b")),
    "closure over a set": (scaled, {"a", "b"}, {"a", "c"}),
    "closure over a namespace": (scaled, SimpleNamespace(gamma=2.0), SimpleNamespace(gamma=3.0)),
    "closure over arguments": (scaled, argparse.Namespace(w=torch.ones(2)), argparse.Namespace(w=torch.zeros(2))),
    "closure over settings": (scaled, Config(2.0), Config(3.0)),
    "settings as a default": (with_default, Config(2.0), Config(3.0)),
    "settings in a partial": (lambda value: functools.partial(F.mse_loss, config=value), Config(2.0), Config(3.0)),
    "a method of settings": (lambda value: value.loss, Config(2.0), Config(3.0)),
    "closure over weights": (scaled, torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)),
    "default": (with_default, 2.0, 3.0),
    "keyword": (with_keyword, 2.0, 3.0),
    "wrapped": (decorated, scaled(2.0), scaled(3.0)),
    "partial": (lambda value: functools.partial(F.mse_loss, reduction=value), "none", "sum"),
    "state": (Focal, 2.0, 3.0),
    "state in slots": (Slotted, 2.0, 3.0),
    "state of a method's object": (lambda value: Focal(value).value, 2.0, 3.0),
    "fields": (Noise, 0.1, 0.2),
    "class weights": (lambda value: torch.nn.CrossEntropyLoss(torch.tensor(value)), [1.0, 2.0], [1.0, 3.0]),
    "module": (lambda value: torch.nn.HuberLoss(delta=value), 1.0, 2.0),
    "module within": (module, 0.1, 0.2),
    "transform": (RandomShift, 1, 2),
    "named function": (lambda name: getattr(torch, name), "sin", "cos"),
    "mapping": (lambda value: {"*.bias": {"lr": value}}, 0.1, 0.2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_setting_is_described_by_what_it_does(kind: str) -> None:
    """Made twice from one value, it has one description; made from another value, another."""
    make, one, other = OTHERS[kind]
    assert describe(make(one)) == describe(make(one))
    assert digest(describe(make(one))) != digest(describe(make(other)))


def test_an_array_of_objects_is_described_by_what_it_holds() -> None:
    """Not by their address, which differs in each process."""
    names = [np.array([f"class {name}", 1.5], dtype=object) for name in ("one", "one", "two")]
    assert names[0].tobytes() != names[1].tobytes()
    assert describe(scaled(names[0])) == describe(scaled(names[1]))
    assert describe(scaled(names[0])) != describe(scaled(names[2]))


def test_functions_of_other_source_differ() -> None:
    """Two bodies under one name are two functions; the text around them does not matter."""

    def one(output, target):
        return (output - target).abs()

    first = one

    def one(output, target):
        return (output - target) ** 2

    assert describe(first) != describe(one)


def test_lambdas_on_one_line_differ() -> None:
    """Each is described by its own text, not by that of the line it shares."""
    one, two, again = (lambda o, t: o - t), (lambda o, t: t - o), (lambda o, t: o - t)
    assert describe(one) != describe(two)
    assert describe(one) == describe(again)
    swapped = lambda t, o: o - t  # noqa: E731 - the same body, with other parameters
    assert describe(swapped) != describe(one)


def test_a_lambda_of_several_lines_is_described_whole() -> None:
    """Up to its last line; letters of more than one byte do not shift what is cut out."""
    one = lambda o, t: (  # noqa: E731
        "é",
        (o - t),
    )[1]
    two = lambda o, t: (  # noqa: E731
        "é",
        (o - t),
    )[0]
    assert describe(one) != describe(two)


def test_a_class_of_other_methods_differs() -> None:
    """State alone does not say what an object does."""
    kinds = []
    for body in ("return output - target", "return target - output"):
        names: dict[str, Any] = {"__name__": "users_module"}
        exec(f"class Loss:\n    def __call__(self, output, target):\n        {body}", names)  # noqa: S102 - two classes
        kinds.append(names["Loss"])
    assert describe(kinds[0]()) != describe(kinds[1]())


def test_an_inherited_method_counts() -> None:
    """What a class has from its own base is part of it, though nothing of it is written in the class."""

    def loss_of(base: type) -> object:
        return type("Loss", (base,), {})()

    class Base:
        def __call__(self, output, target):
            return output - target

    one = Base

    class Base:
        def __call__(self, output, target):
            return target - output

    assert describe(loss_of(one)) == describe(loss_of(one))
    assert describe(loss_of(one)) != describe(loss_of(Base))


def test_installed_code_is_named_only() -> None:
    """Another version of PyTorch is another environment, not another job."""
    assert describe(F.mse_loss)["function"] == "torch.nn.functional.mse_loss"
    assert "source" not in describe(F.mse_loss)
    assert "source" not in describe(torch.optim.SGD)
    assert describe(torch.dist)["function"].endswith("dist")
    assert "source" not in describe(torch.dist)
    assert describe(np.add)["type"] == "numpy.ufunc"


def test_a_function_that_closes_over_itself_is_described() -> None:
    """Recursion in the user's code is none in the description."""

    def loss(output, depth):
        return output if depth == 0 else loss(output, depth - 1)

    assert describe(loss) == describe(loss)


def test_a_variable_that_is_not_assigned_yet_is_described() -> None:
    """An empty cell is no reason to fail."""

    def outer():
        def loss(output, target):
            return later * output

        found = describe(loss)
        later = 1
        return found, describe(loss), later

    before, after, _ = outer()
    assert before["closure"] == {"later": None}
    assert after["closure"] == {"later": 1}


def test_objects_that_do_nothing_are_named() -> None:
    """A data set that a function closes over is identified elsewhere, by its content."""

    class Dataset:
        """Not described: it would be long."""

    assert describe(Dataset()) == {"type": f"{__name__}.{Dataset.__qualname__}"}


def test_an_object_that_holds_more_than_settings_is_named() -> None:
    """A file, a lock or another object has states that differ in each process; what leads back to itself has no end."""
    holds, again, indexed = Config(2.0), Config(2.0), Config(2.0)
    holds.lock, again.self = threading.Lock(), again  # type: ignore[attr-defined]
    indexed.__class__ = type("Indexed", (Config,), {"__getitem__": lambda _self, _index: 0})
    assert describe(holds) == describe(again) == {"type": f"{__name__}.Config"}
    assert "gamma" not in describe(indexed)


@given(JSON_VALUES)
def test_plain_values_are_themselves(value: Any) -> None:
    """What JSON can hold is kept as it is, and whatever comes out can be written."""
    assert describe(value) == value
    json.dumps(describe((value, scaled(value))))


def test_all_settings_but_model_and_data_are_described() -> None:
    """Weights and data are identified by their content, the name is not what is learned."""
    one = describe_settings(job())
    content = {"model", "init", "data", "valid", "test", "name"}
    assert set(one) == {field.name for field in dataclasses.fields(Job)} - content
    assert one["optimizer"]["type"] == "SGD"
    assert describe_settings(job(name="other", test=((), ()))) == one


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD(lr=0.2)},
        {"optimizer": SGD(lr=0.1, groups={"*.bias": {"lr": 1.0}})},
        {"batch": 32},
        {"until": epochs(2)},
        {"loss": "l1"},
        {"metrics": ["mse"]},
        {"seed": 1},
        {"average": 0.9},
        {"clip_norm": 1.0},
        {"augment": [RandomShift(1)]},
        {"fields": Fields(inputs=0)},
        {"evaluation": Evaluation(every=epochs(2))},
        {"evaluation": Evaluation(select="last")},
        {"loss": Objective("mse", penalty=lambda model: 0.0)},
        {"coupling_group": 8},
        {"loss": Objective("mse", scope="batch")},
        {"fields": Fields(collate=list)},
        {"on_non_finite": "skip"},
    ],
)
def test_every_setting_counts(changes: dict[str, Any]) -> None:
    """A job that learns something else has another description."""
    assert describe_settings(job(**changes)) != describe_settings(job())


SCRIPT = """
import functools, json
from stoker.jobs.job_description import describe
def loss(output, target, names={"b", "a", "c"}):
    kept = [name for name in names if name in {"x", "y", "z"}]
    return (lambda value: value + len(kept))(output - target)
class Loss:
    def __call__(self, output, target):
        return [inner for inner in (output, target)]
print(json.dumps([describe(one) for one in (loss, Loss(), [].append, Loss().__call__, functools.partial(loss))]))
"""


def test_a_description_is_the_same_in_every_process() -> None:
    """No address, no order of a set, gets into it, even of code that has no source file."""

    def described(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
        )
        return done.stdout

    assert described("1") == described("2")


def test_groups_by_predicate_are_described_by_what_it_does() -> None:
    """Not by an address, which differs in every process; what it closes over, and the order of groups, count."""

    def groups(least: int, *, first: bool = True) -> Any:
        pairs = [(lambda _name, parameter: parameter.dim() >= least, {"lr": 1.0}), ("*.bias", {"lr": 0.5})]
        return describe(SGD(lr=0.1, groups=dict(pairs if first else pairs[::-1])))

    assert groups(2) == groups(2)
    assert "0x" not in str(groups(2))
    assert groups(2) != groups(3)
    assert groups(2) != groups(2, first=False)


def test_the_order_of_patterns_counts() -> None:
    """The first that matches a name decides; patterns in the order of the alphabet need no statement."""
    one, other = {"*.bias": {"lr": 1.0}}, {"head.*": {"lr": 0.5}}
    in_order, swapped = SGD(lr=0.1, groups=one | other), SGD(lr=0.1, groups=other | one)
    assert digest(describe(in_order)) != digest(describe(swapped))
    assert "order" not in describe(in_order)
    of_rest = [describe_settings(job(optimizer=Muon(lr=0.1, rest=rest))) for rest in (in_order, swapped)]
    assert digest(of_rest[0]) != digest(of_rest[1])
