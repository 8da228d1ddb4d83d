"""Settings around the step: what goes together, what is known of a measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stoker
from stoker import optimizers, schedules
from stoker.errors import BadJob, BadSetting
from stoker.jobs.job import plateau_of
from stoker.jobs.job_description import describe
from stoker.jobs.metrics import Named, direction_of, gives_one_number, is_stateful, metric_name

PATIENCE = stoker.epochs(2)


def a_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One that does not say which way is better."""
    return output.sum(1) + target


class Stateful:
    """As of torchmetrics, without it."""

    higher_is_better = True

    def update(self, output: object, target: object) -> None:
        """See a batch."""

    def compute(self) -> float:
        """The result."""
        return 0.5

    def reset(self) -> None:
        """Forget."""

    def __call__(self, output: object, target: object) -> float:
        """See one batch alone."""
        return 0.5


def job(**changed: Any) -> stoker.Job:
    """A job with a validation set."""
    data = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
    given: dict[str, Any] = {
        "model": torch.nn.Linear(2, 2),
        "data": data,
        "valid": data,
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 4,
        "until": stoker.epochs(10),
        "metrics": ["accuracy"],
    }
    return stoker.Job(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"stop": [stoker.EarlyStopping("f1", patience=PATIENCE)]}, "'f1' is none of this job's measures: loss, acc"),
        ({"stop": [stoker.EarlyStopping(patience=PATIENCE)], "valid": None}, "which the job does not have"),
        ({"stop": stoker.Target("accuracy", 0.9)}, "wanted a list of stoker.EarlyStopping"),
        ({"stop": ["accuracy"]}, "wanted stoker.EarlyStopping.* got a str"),
        ({"stop": [stoker.Target("accuracy", 95)]}, "accuracy is a share: Target"),
        ({"stop": [stoker.Target("a_metric", 1)], "metrics": [a_metric]}, "say of 'a_metric' which way is better"),
        ({"schedule": schedules.plateau("a_metric"), "metrics": [a_metric]}, r"Job\(schedule=….*which way is better"),
        ({"schedule": schedules.plateau(), "valid": None}, "measured on valid data"),
        ({"average": "swa"}, "wanted a decay, stoker.EMA.* or stoker.SWA"),
        ({"average": stoker.SWA(), "sync": stoker.LocalSGD(every=stoker.updates(2))}, "one site's weights"),
        ({"optimizer": optimizers.ScheduleFreeSGD(lr=1), "schedule": schedules.one_cycle()}, "goes without one"),
        ({"optimizer": optimizers.ScheduleFreeSGD(lr=1), "average": 0.9}, "does not go with ScheduleFreeSGD"),
        ({"metrics": {"precision": "accuracy"}}, "is a name already"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: dict[str, Any], problem: str) -> None:
    """With the field, and what is wrong."""
    with pytest.raises(BadJob, match=problem):
        job(**changed)


def test_a_rule_outside_a_list_comes_with_the_list() -> None:
    """Where one rule stands by itself, the remedy shows it in a list."""
    for rule in (stoker.EarlyStopping(patience=PATIENCE), stoker.Target("accuracy", 0.9)):
        with pytest.raises(BadJob, match="wanted a list") as caught:
            job(stop=rule)
        assert caught.value.remedy == f"Put it into a list: stop=[stoker.{type(rule).__name__}(…)]."


def test_what_goes_together_is_taken() -> None:
    """Names with their split, a class of a vector, a direction that is given, a warm-up before a plateau."""
    made = job(
        stop=[
            stoker.EarlyStopping("valid loss", patience=PATIENCE, min_delta=0.1),
            stoker.Target("valid/f1[1]", 0.5),
            stoker.Target("a_metric", 0.5, lower_is_better=True),
        ],
        metrics={"f1": Stateful(), "a_metric": a_metric},
        schedule=schedules.warmup(0.1, then=schedules.plateau()),
    )
    assert [metric_name(metric) for metric in made.metrics] == ["f1", "a_metric"]
    assert plateau_of(made) is not None
    assert plateau_of(job()) is None
    free = job(optimizer=optimizers.ScheduleFreeAdamW(lr=1e-3), schedule=schedules.warmup(0.1))
    assert isinstance(free.optimizer, optimizers.ScheduleFree)


@pytest.mark.parametrize(
    ("name", "metrics", "given", "expected"),
    [
        ("loss", [], None, True),
        ("accuracy", ["accuracy"], None, False),
        ("mse", ["mse"], None, True),
        ("f1[2]", [Named("f1", Stateful())], None, False),
        ("a_metric", [a_metric], None, None),
        ("a_metric", [a_metric], False, False),
        ("absent", ["accuracy"], None, None),
    ],
)
def test_which_way_is_better(name: str, metrics: list[Any], given: bool | None, expected: bool | None) -> None:
    """By what is said, by the name, by the metric itself; else it is unknown."""
    assert direction_of(name, metrics, given) is expected


def test_a_metric_under_a_name_is_the_metric_for_everything_else() -> None:
    """It is called, has the metric's attributes, and is described by both."""
    named = Named("mine", Stateful())
    assert (metric_name(named), named(1, 2), named.higher_is_better) == ("mine", 0.5, True)
    assert is_stateful(named)
    assert not is_stateful(Named("other", a_metric))
    assert not is_stateful(Stateful)
    assert gives_one_number(named)
    described = describe(named)
    assert isinstance(described, dict)
    assert described["name"] == "mine"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: stoker.EarlyStopping(patience=stoker.seconds(1)), "patience is counted.*not seconds"),
        (lambda: stoker.EarlyStopping(patience=PATIENCE, min_delta=-1), "min_delta"),
        (lambda: stoker.Target("accuracy", float("nan")), "finite"),
        (lambda: stoker.SWA(start=1.0), r"in \[0, 1\), got 1.0"),
        (lambda: stoker.SWA(every=stoker.seconds(1)), "not seconds"),
        (lambda: stoker.SWA(start=stoker.epochs(5)), "start is the share of the run.*got 5 epochs"),  # type: ignore[arg-type]
        (lambda: stoker.SWA(statistics=0), "1 or more, got 0"),
        (lambda: stoker.l2(-1.0), "not negative"),
        (lambda: optimizers.ScheduleFreeSGD(lr=1.0, beta=1.0), r"in \(0, 1\), got 1.0"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(make: Any, problem: str) -> None:
    """With its name and value."""
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: stoker.EarlyStopping(patience=5), "patience"),  # type: ignore[arg-type]
        (lambda: stoker.SWA(every=1), "every"),  # type: ignore[arg-type]
        (lambda: schedules.plateau(patience=5), "patience"),  # type: ignore[arg-type]
        (lambda: schedules.plateau(patience=PATIENCE, cooldown=2), "cooldown"),  # type: ignore[arg-type]
    ],
    ids=["stop", "swa", "plateau", "cooldown"],
)
def test_a_length_without_a_unit_is_refused_with_one_that_has(make: Any, problem: str) -> None:
    """As PyTorch counts evaluations, a bare number is what people write first."""
    with pytest.raises(BadSetting, match=rf"{problem} is a length such as stoker.epochs\(5\), got \d"):
        make()
