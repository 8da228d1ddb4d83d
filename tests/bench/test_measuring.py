"""Measuring updates of plans."""

from __future__ import annotations

import sys

import pytest

from bench.forecast.jobs import make_job
from bench.forecast.measuring import MeasuringFailed, Request, ask, measure
from stoker.loading.batches import Batch
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan
from stoker.stepping.step import Step

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")
PLANS = (Plan(device="cpu", micro_batch=32), Plan(device="cpu", micro_batch=8, precision="bf16"))


def request(*plans: Plan, **changes: object) -> Request:
    """Two updates of each plan of a tiny MLP."""
    settings: dict[str, object] = {"job": "mlp", "size": "tiny", "coupling": SEPARABLE, "updates": 2, "warm_up": 1}
    return Request(plans=plans, **(settings | changes))


def test_every_plan_is_measured_in_every_round() -> None:
    """Times of as many updates as were asked for, for each plan and round."""
    found = measure(request(*PLANS, rounds=3))
    assert sorted((one.plan, one.round) for one in found) == [(plan, turn) for plan in (0, 1) for turn in (0, 1, 2)]
    assert all(len(one.update_s) == 2 and min(one.update_s) > 0 and one.peak_bytes for one in found)


def test_the_order_is_drawn_anew() -> None:
    """Over rounds, now one plan comes first and now the other."""
    found = measure(request(*PLANS, rounds=6, updates=1, warm_up=0))
    assert {one.plan for one in found[::2]} == {0, 1}


def test_a_plan_that_cannot_be_run_says_why_and_others_go_on() -> None:
    """An illegal micro-batch is the plan's problem alone."""
    found = measure(request(Plan(device="cpu", micro_batch=33), PLANS[0]))
    errors = {one.plan: one.error for one in found}
    assert "a micro-batch has 1 to 32 samples" in str(errors[0])
    assert errors[1] is None


def test_one_process_has_one_malloc() -> None:
    """Plans that get their memory differently are not for one process."""
    mapped = Plan(device="cpu", micro_batch=32, malloc="mapped")
    with pytest.raises(ValueError, match="one malloc"):
        measure(request(PLANS[0], mapped))


def test_another_process_gives_the_same_answer() -> None:
    """Requests and answers survive the way to a process and back."""
    (found,) = ask(request(PLANS[0]))
    assert found.error is None
    assert len(found.update_s) == 2


def test_a_process_that_fails_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote last is in the error."""
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # which knows no such program, and says so
    with pytest.raises(MeasuringFailed, match=r"ended with \d+: .*bench\.forecast\.measuring"):
        ask(request(PLANS[0]))


def test_a_process_out_of_time_is_ended() -> None:
    """It says that it was late, in how many seconds."""
    with pytest.raises(MeasuringFailed, match=r"longer than 0 s") as caught:
        ask(request(PLANS[0]), timeout_s=0.1)
    assert caught.value.is_late
    assert caught.value.measured == []


def test_batches_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run's order, and by the plan's loader; more of them than an epoch has."""
    seen: list[Batch] = []

    def noted(_step: Step, batch: Batch, _update: int, _progress: float) -> None:
        seen.append(batch)

    monkeypatch.setattr(Step, "update", noted)
    measure(request(PLANS[0], updates=6, warm_up=2))
    job = make_job("tiny", "mlp")
    train = datasets_of(job).train
    order, size = train.order(job.seed), job.batch
    epoch = len(train) // size
    assert len(seen) == 8 > epoch
    for update, batch in enumerate(seen):
        first = update % epoch * size
        assert (batch.indices == order.indices(update // epoch, first, first + size)).all()
        assert batch.epoch == update // epoch
