"""Plain values that models and losses keep in Python: distinguished from what cannot be kept, saved and put back."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stoker.stepping.python_state import plain_changes, put_plain, python_state, tallies, unchanged, unsaved_tensors
from stoker.training.snapshots import restore_snapshot, snapshot_of
from tests.stepping import models
from tests.training.builders import advance, step_of, tiny_job

COUNT = 0


class Settings:
    """An object that a model holds."""

    def __init__(self) -> None:
        self.factor = 1.0


class Stateful(nn.Module):
    """A model with state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.settings, self.recent = Settings(), deque([1, 2], maxlen=2)
        self.alias = self.recent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * COUNT


def count_up(*_: Any) -> None:
    """A loss that counts in a global."""
    global COUNT  # noqa: PLW0603 - as users do
    COUNT += 1


def kept(model: nn.Module, loss: object, before: Any) -> Any:
    """What a checkpoint would hold, as it is read again."""
    return json.loads(json.dumps(plain_changes(model, loss, before)))


VALUES: list[Any] = [
    3,
    2.5,
    "phase 2",
    None,
    True,
    [1, [2.0]],
    (1, 2),
    {"a": [1], 3: "b"},
    {1, 2},
    frozenset({"a"}),
    float("inf"),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_plain_value_comes_back(value: Any) -> None:
    """As it was, of the type that it had, where the attribute is one that training made."""
    model = Stateful()
    before = python_state(model)
    model.made = value
    model.inner.made = value
    fresh = Stateful()
    put_plain(fresh, None, kept(model, None, before))
    assert fresh.made == value
    assert type(fresh.inner.made) is type(value)


def test_what_did_not_change_is_not_kept() -> None:
    """A checkpoint of a model that keeps nothing holds nothing."""
    model = Stateful()
    assert plain_changes(model, None, python_state(model, with_tensors=False)) == {}


def test_objects_loss_and_globals_are_among_it() -> None:
    """What a model's objects hold, and what the loss's code names; collections are changed in place."""
    model = Stateful()
    before = python_state(model, count_up)
    model.settings.factor, model.scale = 0.5, np.float32(0.25)
    model.recent.append(3)
    count_up()
    found = kept(model, count_up, before)
    fresh = Stateful()
    globals()["COUNT"] -= 1
    put_plain(fresh, count_up, found)
    assert (fresh.settings.factor, fresh.scale, list(fresh.alias), fresh.alias.maxlen) == (0.5, 0.25, [2, 3], 2)
    assert python_state(fresh, count_up).changed_since(before) >= {(".settings", "factor"), ("", "recent")}
    assert python_state(model, count_up).values == python_state(fresh, count_up).values


def test_tensors_are_noticed_and_not_kept() -> None:
    """In attributes, lists and arrays; not of activations, which have a graph."""
    model = Stateful()
    model.seen, model.array, model.last = [torch.zeros(2)], np.zeros(2), torch.zeros(2)
    before = python_state(model)
    model.seen[0] += 1
    model.array[1] = 2
    model.last = model.inner(torch.zeros(2))
    after = python_state(model)
    changed = after.changed_since(before)
    assert {place[1] for place in changed} == {"seen", "array"}
    assert not any(after.is_plain(place) for place in changed)
    assert plain_changes(model, None, before) == {}
    assert after.in_words(("", "seen")) == "the attribute 'seen' of Stateful"


class Counter:
    """A loss whose count begins as its class's."""

    calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_a_value_set_over_a_class_own_is_removed_again() -> None:
    """Else a count that began at the class's value would go on from what was only looked at."""
    model, loss = Stateful(), Counter()
    with unchanged(model, loss):
        loss(None)
        assert loss.calls == 1
    assert loss.calls == 0


def test_a_loss_is_left_as_it_was_given() -> None:
    """After what only looks at it."""
    model, number = Stateful(), COUNT
    with unchanged(model, count_up):
        count_up()
    assert number == COUNT


class Annealing:
    """An object with a loss and a step as methods, which count."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        """Grows with each call."""
        self.calls += 1
        return self.calls * output.square().mean(1)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        """A whole update."""
        loss = self.loss(model(batch[0]), batch[1]).mean()
        loss.backward()
        optimizer.step()
        return loss


@pytest.mark.parametrize("changes", [{"loss": "loss"}, {"step": "step", "loss": None, "metrics": []}])
def test_what_the_object_of_a_method_counts_is_kept(changes: dict[str, Any]) -> None:
    """Of a loss and of a job's own step: a resumed run counts on from there."""
    annealing = Annealing()
    given = {name: getattr(annealing, value) if value else value for name, value in changes.items()}
    if "step" in changes:
        given["optimizer"] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(tiny_job(**given))
    advance(step, 0, 2)
    assert json.loads(json.dumps(step.python_changes())) == {"loss:": {"calls": 2}}


class Counting(torch.optim.SGD):
    """SGD that counts its steps in an attribute, and may keep tensors in others."""

    def __init__(self, parameters: Any, **attributes: object) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> Any:
        """As `torch.optim.SGD`, less often from the third step on."""
        self.steps += 1
        return super().step(closure) if self.steps < 3 or self.steps % 2 else None


def test_what_an_optimizer_counts_is_kept() -> None:
    """A checkpoint has its `state_dict()`, and an attribute began again with the process."""
    job = tiny_job(optimizer=Counting)
    straight, stopped, resumed = (step_of(job) for _ in range(3))
    advance(straight, 0, 6)
    advance(stopped, 0, 3)
    restore_snapshot(resumed, snapshot_of(stopped))
    assert resumed.optimizer.steps == 3
    advance(resumed, 3, 6)
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_tensors_that_an_optimizer_keeps_outside_its_state_are_named() -> None:
    """Those in attributes are in no checkpoint; weights of the model, and what `state_dict()` has, are."""
    weights = list(nn.Linear(2, 2).parameters())
    assert unsaved_tensors(Counting(weights, slow=[torch.zeros(2)], weights=weights, most=3)) == ["slow"]
    assert unsaved_tensors(torch.optim.SGD(weights)) == []

    class Saving(Counting):
        """Saves more."""

        def state_dict(self) -> dict[str, Any]:
            """With the slow weights."""
            return {**super().state_dict(), "slow": vars(self)["slow"]}

    assert unsaved_tensors(Saving(weights, slow=[torch.zeros(2)])) == []


class Sharpened(torch.optim.Optimizer):
    """An optimiser around another, as SAM is, whose state is not the other's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)


def test_an_optimizer_within_another_is_named() -> None:
    """The momentum of the inner one began again in a resumed run; one that shares its state loses nothing."""
    weights = list(nn.Linear(2, 2).parameters())
    assert unsaved_tensors(Sharpened(weights)) == ["inner"]
    sharing = Sharpened(weights)
    sharing.inner.state = sharing.state
    assert unsaved_tensors(sharing) == []


def test_what_optimizers_of_an_own_step_count_is_kept() -> None:
    """Each of several, as of one."""

    def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        first, *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
        return {"first": Counting(first.parameters()), "last": Counting(last.parameters(), steps=10)}

    def step(model: nn.Module, parts: Any, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        for part in parts.values():
            part.step()
        return loss

    job = tiny_job(step=step, loss=None, metrics=[], optimizer=optimizers)
    stopped, resumed = step_of(job), step_of(job)
    advance(stopped, 0, 3)
    restore_snapshot(resumed, snapshot_of(stopped))
    assert [part.steps for part in resumed.optimizer.parts] == [3, 13]


class Rotating(nn.Module):
    """A model with a table for the last number of inputs, as rotary embeddings have it for a length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0
        self.length: int | None = None
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) != self.length or self.table.device != x.device:
            self.length, self.table = len(x), torch.arange(1.0, 1 + len(x), device=x.device)
        return self.layer(x) / self.table[:, None]


def test_a_table_and_its_length_stay_together_where_changes_are_undone() -> None:
    """After an evaluation of other lengths, training met the table of those under the length that it had."""
    model = Rotating()
    for before in (None, 5):
        table = model.table
        with unchanged(model, None):
            model(torch.ones(3, 6))
            assert model.length == 3
        assert model.length == before
        assert model.table is table
        model(torch.ones(5, 6))


def test_the_length_of_a_table_is_not_kept_without_it() -> None:
    """In a resumed run the model took the length for the sign of a table that was not there."""
    job = tiny_job(model=Rotating)
    straight, stopped, resumed = (step_of(job) for _ in range(3))
    advance(straight, 0, 4)
    advance(stopped, 0, 2)
    assert stopped.python_changes() == {"": {"calls": 2}}
    restore_snapshot(resumed, snapshot_of(stopped))
    advance(resumed, 2, 4)
    assert resumed.model.calls == 4
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_count_is_a_number_again_after_its_reads_were_noted() -> None:
    """Copies of a model may share the object that has it."""
    model = models.Evaluations()
    with tallies(model, {("", "nfe")}) as reads:
        model.nfe = 1 + model.nfe + 1
        assert reads == []
        with pytest.raises(TypeError):
            _ = model.nfe > 1000
        assert reads == ["gt"]
    assert model.nfe == 0
