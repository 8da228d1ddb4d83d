"""Shapes of learning rates: those of PyTorch's schedulers, their laws, and where in a run something happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import stoker
from stoker import schedules
from stoker.errors import BadJob
from stoker.jobs.job_description import describe
from stoker.jobs.schedules import Timed, bound

RUN = stoker.updates(30)
Scheduler = Callable[[torch.optim.Optimizer], Any]

AS_IN_TORCH: dict[str, tuple[schedules.Schedule, Scheduler]] = {
    "step": (
        schedules.step(every=stoker.updates(7), factor=0.3),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 7, gamma=0.3),
    ),
    "multi step": (
        schedules.multi_step(at=[stoker.updates(10), 0.5, 0.9]),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 15, 27]),
    ),
    "exponential": (
        schedules.exponential(0.9, every=stoker.updates(1)),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "smooth exponential": (
        schedules.exponential(0.9, every=stoker.updates(1), smooth=True),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "polynomial": (
        schedules.polynomial(power=2.0),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=30, power=2.0),
    ),
    "restarts": (
        schedules.cosine_restarts(first=stoker.updates(4), multiply=2, final=0.1),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, 2, eta_min=0.01),
    ),
    "cyclic": (
        schedules.cyclic(period=stoker.updates(10), low=0.2),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.02, 0.1, step_size_up=5, cycle_momentum=False),
    ),
    "halving cycles": (
        schedules.cyclic(period=stoker.updates(10), low=0.2, halving=True),
        lambda optimizer: lr_scheduler.CyclicLR(
            optimizer, 0.02, 0.1, step_size_up=5, mode="triangular2", cycle_momentum=False
        ),
    ),
    "warm-up": (
        schedules.warmup(stoker.updates(6), initial=0.25),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=6),
    ),
    "piecewise": (
        schedules.piecewise({0: 1.0, stoker.updates(10): 0.5, stoker.updates(20): 0.1}, between="step"),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n < 10 else 0.5 if n < 20 else 0.1),
    ),
    "inverse root": (
        schedules.inverse_sqrt(warmup=stoker.updates(5)),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: n / 5 if n < 5 else (5 / n) ** 0.5),
    ),
}


@pytest.mark.parametrize("name", AS_IN_TORCH)
def test_thirty_updates_have_the_rates_of_pytorchs_scheduler(name: str) -> None:
    """At a rate of 0.1, update by update, as its own loop sets them."""
    mine, make = AS_IN_TORCH[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs, over = make(optimizer), bound(mine, RUN)
    assert callable(over)
    for update in range(30):
        assert 0.1 * over(update / 30) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-12), update
        optimizer.step()
        theirs.step()


@given(total=st.integers(1, 400), every=st.integers(1, 400), update=st.integers(0, 400))
def test_an_interval_ends_exactly_where_it_does_in_whole_numbers(total: int, every: int, update: int) -> None:
    """Whatever floats make of it: after `every` epochs of `total`, not one before or after."""
    if update >= total:
        return
    over = bound(schedules.step(every=stoker.epochs(every), factor=0.5), stoker.epochs(total))
    assert callable(over)
    assert over(update / total) == 0.5 ** (update // every)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 1))
def test_cycles_and_restarts_stay_between_their_ends(first: int, total: int, progress: float) -> None:
    """No factor is above 1 or below the lower end."""
    for one in (
        schedules.cyclic(period=stoker.epochs(first), low=0.1),
        schedules.cosine_restarts(first=stoker.epochs(first), multiply=1.5, final=0.1),
    ):
        over = bound(one, stoker.epochs(total))
        assert callable(over)
        assert 0.1 - 1e-9 <= over(progress) <= 1 + 1e-9


def test_lines_between_points_and_the_last_one_stays() -> None:
    """By hand."""
    line = schedules.piecewise([(0.2, 1.0), (0.6, 0.5)])
    assert [round(line(at), 6) for at in (0.0, 0.2, 0.4, 0.6, 0.9)] == [1.0, 1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize("between", ["line", "step"])
def test_two_points_at_one_place_are_a_jump(between: str) -> None:
    """Down as well as up, in the order of the points."""
    drop = schedules.piecewise([(0, 1.0), (0.5, 1.0), (0.5, 0.1), (1, 0.1)], between=between)  # type: ignore[arg-type]
    assert [drop(at) for at in (0.0, 0.25, 0.49, 0.5, 0.75, 1.0)] == pytest.approx([1.0] * 3 + [0.1] * 3)
    rise = schedules.piecewise([(0, 0.1), (0.5, 0.1), (0.5, 1.0)], between=between)  # type: ignore[arg-type]
    assert [rise(at) for at in (0.25, 0.5, 0.75)] == pytest.approx([0.1, 1.0, 1.0])


def test_a_job_says_how_long_its_schedule_is_and_again_when_it_is_longer() -> None:
    """`dataclasses.replace` with another length moves the places with it; those within a warm-up as well."""
    import dataclasses

    schedule = schedules.warmup(stoker.epochs(1), then=schedules.step(every=stoker.epochs(2)))
    job = _job(schedule=schedule, until=stoker.epochs(4))
    assert job.schedule(0.5) == pytest.approx(0.1)
    longer = dataclasses.replace(job, until=stoker.epochs(8))
    assert longer.schedule(0.2) == 1.0
    assert longer.schedule(0.25) == pytest.approx(0.1)
    assert describe(job.schedule) != describe(longer.schedule)


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (schedules.step(every=stoker.epochs(2)), "2 epochs is no place in a run of 30 updates"),
        (schedules.warmup(0.1, then=schedules.multi_step(at=[stoker.samples(5)])), "5 samples is no place in a run"),
    ],
)
def test_a_place_in_another_unit_than_the_run_is_refused(schedule: schedules.Schedule, problem: str) -> None:
    """Before anything is spent, with both."""
    with pytest.raises(BadJob, match=rf"Job\(schedule=…\): {problem}"):
        _job(schedule=schedule, until=RUN)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: schedules.step(every=0.0), r"every is a share of the run, in \(0, 1\]"),
        (lambda: schedules.step(every=0.5, factor=-1), "factor must be positive and finite, got -1"),
        (lambda: schedules.multi_step(at=[0.5], factor=0), "factor must be positive"),
        (lambda: schedules.polynomial(power=0), "power must be positive"),
        (lambda: schedules.polynomial(final=2), "final is a factor of the learning rate"),
        (lambda: schedules.cosine_restarts(first=0.1, multiply=0.5), "1 or more, got 0.5"),
        (lambda: schedules.cyclic(period=0.1, low=-1), "low is a factor"),
        (lambda: schedules.multi_step(at=[30, 60]), r"shares of the run, in \[0, 1\], or stoker.epochs\(30\)"),
        (lambda: schedules.piecewise({0: 1.0, 30: 0.1}), "shares of the run"),
        (lambda: schedules.piecewise({}), "none of them negative"),
        (lambda: schedules.piecewise({0: 1}, between="curve"), 'a "line" or a "step"'),  # type: ignore[arg-type]
        (lambda: schedules.plateau(factor=1.5), r"by a factor in \(0, 1\), got 1.5"),
        (lambda: schedules.plateau(patience=stoker.seconds(3)), "patience is counted in epochs, samples or updates"),
        (lambda: schedules.plateau(min_delta=-1), "min_delta"),
    ],
)
def test_a_shape_that_cannot_be_meant_is_refused(make: Callable[[], object], problem: str) -> None:
    """The error has the name and the value."""
    with pytest.raises(ValueError, match=problem):
        make()


def test_a_bare_shape_knows_no_curve() -> None:
    """It is there to be made something of."""
    with pytest.raises(NotImplementedError):
        Timed()(0.5)


def _job(**changed: Any) -> stoker.Job:
    given: dict[str, Any] = {
        "model": torch.nn.Linear(2, 2),
        "data": (torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)),
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 4,
        "until": RUN,
    }
    return stoker.Job(**(given | changed))
