from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import BadJob
from stoker.jobs import EMA, LOSSES, METRICS, SGD, Job, holdout
from stoker.jobs.evaluation_settings import Evaluation
from stoker.jobs.fields import Fields
from stoker.jobs.lengths import packed
from stoker.jobs.metrics import is_stateful, metric_name, probabilities
from stoker.jobs.objective import Objective
from stoker.units import epochs, updates


def job(**changes: Any) -> Job:
    """A job that can be meant, with changes."""
    settings = {
        "model": object,
        "data": ((), ()),
        "loss": "cross_entropy",
        "optimizer": SGD(lr=0.1),
        "batch": 64,
        "until": epochs(1),
    }
    return Job(**settings | changes)


def _a_model() -> None:
    """A function that could make a model."""


def accuracy(output, target):
    """A metric with a name."""
    return output == target


def loss(output, target):
    """A metric that is called like the loss."""
    return output - target


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "resnet"}, "Job(model=…): wanted a module or a function that makes one, got a str"),
        ({"loss": "cross_entrpy"}, "Job(loss=…): 'cross_entrpy' is no loss. Did you mean 'cross_entropy'?"),
        ({"loss": None}, "Job(loss=…): None is no loss."),
        ({"optimizer": "adam"}, "Job(optimizer=…): wanted stoker.SGD, Adam, AdamW, Muon or a function"),
        ({"batch": 0}, "Job(batch=…): wanted a positive whole number of samples, got 0"),
        ({"batch": -8}, "got -8"),
        ({"batch": 64.0}, "got 64.0"),
        ({"batch": "64"}, "got '64'"),
        ({"batch": True}, "got True"),
        ({"batch": "64", "coupling_group": 8}, "Job(batch=…): wanted a positive whole number of samples, got '64'"),
        ({"until": 5}, "Job(until=…): wanted a duration such as stoker.epochs(5), got 5"),
        ({"evaluation": 3}, "Job(evaluation=…): wanted stoker.Evaluation(…), got 3"),
        ({"metrics": ["acuracy"]}, "Job(metrics=…): 'acuracy' is no metric. Did you mean 'accuracy'?"),
        ({"metrics": "accuracy"}, "Job(metrics=…): wanted a list of names and functions, got 'accuracy'"),
        ({"metrics": None}, "Job(metrics=…): wanted a list of names and functions, got None"),
        ({"metrics": ["accuracy", accuracy]}, "Job(metrics=…): 2 metrics are called 'accuracy'"),
        ({"metrics": [lambda o, t: o, lambda o, t: t]}, "2 metrics are called '<lambda>'; define each by name"),
        ({"metrics": [loss]}, "a metric called 'loss' would stand in for the loss"),
        (
            {"optimizer": SimpleNamespace(param_groups=[])},
            "got a SimpleNamespace that is made already; what is trained is a copy of the model",
        ),
        ({"schedule": 0.5}, "Job(schedule=…): wanted a function of progress, got a float"),
        (
            {"schedule": SimpleNamespace},
            "Job(schedule=…): wanted a function of progress, got the class SimpleNamespace",
        ),
        ({"augment": max}, "Job(augment=…): wanted a list of transforms, got <built-in"),
        ({"augment": ["flip"]}, "Job(augment=…): wanted a list of transforms, got 'flip'"),
        ({"augment": "flip"}, "Job(augment=…): wanted a list of transforms, got 'flip'"),
        ({"loss": Objective("mse", label_smoothing=0.1)}, "goes with the cross-entropies, not with 'mse'"),
        ({"loss": Objective("cross_entrpy")}, "Job(loss=…): 'cross_entrpy' is no loss. Did you mean 'cross_entropy'?"),
        ({"clip_norm": 0.0}, "Job(clip_norm=…): wanted a positive norm, got 0.0"),
        ({"clip_norm": "1"}, "got '1'"),
        ({"fields": "ids"}, "Job(fields=…): wanted stoker.Fields(…), got 'ids'"),
        ({"fields": Fields(collate=list), "sampling": packed(8)}, "Fields(collate=…): packed rows are of one length"),
        ({"average": 1.0}, "Job(average=…): the decay of an average must be between 0 and 1, got 1.0"),
        ({"average": 1}, "Job(average=…): the decay of an average must be between 0 and 1, got 1.0"),
        ({"average": True}, "Job(average=…): wanted a decay, stoker.EMA(…) or stoker.SWA(…), got True"),
        ({"average": "0.9"}, "Job(average=…): wanted a decay, stoker.EMA(…) or stoker.SWA(…), got '0.9'"),
        ({"coupling_group": 65}, "Job(coupling_group=…): wanted a number of samples up to the batch of 64, got 65"),
        ({"coupling_group": 0}, "got 0"),
        ({"coupling_group": 8.0}, "got 8.0"),
        ({"on_non_finite": "go on"}, 'Job(on_non_finite=…): wanted "stop", "roll_back" or "skip", got \'go on\''),
        (
            {"evaluation": Evaluation(select="worst")},
            'Job(evaluation=…): Evaluation(select=…): wanted "best" or "last", or a measure (loss), got \'worst\'',
        ),
        ({"seed": -1}, "Job(seed=…): wanted a whole number from 0 to 2^63 - 1, got -1"),
        ({"seed": 2**63}, f"got {2**63}"),
        ({"seed": 1.5}, "got 1.5"),
        ({"seed": "0"}, "got '0'"),
        ({"name": ""}, "Job(name=…): wanted a name for its runs, got ''"),
        ({"name": 3}, "got 3"),
        ({"test": holdout(0.1)}, "Job(test=…): test data must be separate"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(changes: dict[str, Any], problem: str) -> None:
    """The error names the setting, what was wanted, and the value that was given."""
    with pytest.raises(BadJob, match=re.escape(problem)):
        job(**changes)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_known_by_name(name: str) -> None:
    """The names in the documentation are accepted."""
    assert job(loss=name).loss == name


@pytest.mark.parametrize(("name", "near"), [("optimiser", "optimizer"), ("batch_size", "batch"), ("zzz", "")])
def test_a_field_that_does_not_exist_is_named_with_the_nearest(name: str, near: str) -> None:
    """Where the code says one thing and English another, the error says which."""
    guess = f" Did you mean '{near}'?" if near else ""
    with pytest.raises(BadJob, match=re.escape(f"Job({name}=…): there is no such field.{guess} Known: ")):
        job(**{name: 1})


def test_a_job_can_be_copied_and_changed() -> None:
    """As other dataclasses: by `copy`, `pickle` and `dataclasses.replace`; a copy has the same fields."""
    first = job(model=_a_model, seed=3)
    for again in (copy.copy(first), dataclasses.replace(first)):
        assert (again.model, again.batch, again.seed) == (_a_model, 64, 3)
    assert pickle.loads(pickle.dumps(first)).seed == 3  # noqa: S301 - our own
    with pytest.raises(BadJob, match="there is no such field"):
        dataclasses.replace(first, ema=0.9)  # type: ignore[call-arg]


def test_every_metric_is_known_by_name() -> None:
    """All of them together, with a function."""
    assert len(job(metrics=[*METRICS, loss_of_model]).metrics) == len(METRICS) + 1


def loss_of_model(model, batch):
    """A metric that takes the model."""
    return model(batch)


def test_an_average_may_be_given_by_its_decay() -> None:
    """A number stands for EMA with that decay; without one there is no average."""
    assert job(average=0.99).average == EMA(0.99)
    assert job(average=EMA(0.5)).average == EMA(0.5)
    assert job().average is None


def test_settings_at_their_limits_are_accepted() -> None:
    """The borders belong to the ranges that the errors state."""
    most = job(
        seed=2**63 - 1,
        coupling_group=64,
        loss=Objective("cross_entropy", label_smoothing=0.0),
        fields=Fields(inputs=("a", 1)),
        evaluation=Evaluation(every=updates(1)),
    )
    assert most.coupling_group == most.batch


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, math.nan])
def test_a_holdout_is_a_share(fraction: float) -> None:
    """All or nothing cannot be set aside."""
    with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
        holdout(fraction)


def test_settings_of_a_holdout_are_named() -> None:
    """`holdout(0.1, True)` would say neither seed nor classes."""
    held = holdout(0.1, seed=3, stratify=True)
    assert (held.fraction, held.seed, held.stratify) == (0.1, 3, True)
    with pytest.raises(TypeError, match="positional"):
        holdout(0.1, True)  # type: ignore[misc]


class Accuracy:
    """A metric with a state, as torchmetrics has them."""

    def __call__(self, output: Any, target: Any) -> float:
        """See a batch, and what it found of it."""
        return 1.0

    def update(self, output: Any, target: Any) -> None:
        """See a batch."""

    def compute(self) -> float:
        """What it found."""
        return 1.0

    def reset(self) -> None:
        """Forget."""


@pytest.mark.parametrize("metrics", [[Accuracy], ["accuracy", Accuracy], {"mine": Accuracy}, [probabilities(Accuracy)]])
def test_a_class_is_no_metric(metrics: Any) -> None:
    """It can be called, and would have failed, or counted nothing, in the first evaluation."""
    with pytest.raises(BadJob, match=r"Accuracy is a class: give an instance, Accuracy\(…\)"):
        job(metrics=metrics)
    assert job(metrics=[Accuracy()]).metrics


class Counted:
    """A metric with a state that cannot be called."""

    def update(self, output: Any, target: Any) -> None:
        """See a batch."""

    def compute(self) -> float:
        """What it found."""
        return 1.0

    def reset(self) -> None:
        """Forget."""


@pytest.mark.parametrize("metrics", [[Counted()], {"counted": Counted()}, [probabilities(Counted())]])
def test_a_metric_with_a_state_need_not_be_callable(metrics: Any) -> None:
    """`update`, `compute` and `reset` are all that evaluation calls."""
    (metric,) = job(metrics=metrics).metrics
    assert is_stateful(metric)
    assert metric_name(metric).casefold() == "counted"


def test_an_object_that_is_neither_is_no_metric() -> None:
    """Also with a name of its own, under which it would be callable."""
    with pytest.raises(BadJob, match="3 is no metric"):
        job(metrics={"mine": 3})
