"""Hooks at every update look on, and that is all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import stoker
from stoker import schedules
from stoker.training.hooks import Update
from tests.flow.builders import PLAN, Heard, assert_equal_weights, blobs_job

pytestmark = pytest.mark.usefixtures("place")


def trained(run_dir: str, **settings: Any) -> tuple[stoker.Run, Heard]:
    """The run of a small job, and what was reported of it."""
    heard = Heard()
    job = blobs_job(schedule=stoker.schedules.polynomial(), clip_norm=0.5)
    return stoker.train(job, plan=PLAN, sink=heard, run_dir=run_dir, **settings), heard


def test_every_update_is_seen_and_the_run_is_that_of_nobody_looking() -> None:
    """Fifteen updates of three epochs; weights are equal bit for bit, and the log has no event more."""
    seen: list[Update] = []
    run, told = trained("seen", hooks=[stoker.on("updated", seen.append)])
    other, told_other = trained("unseen")
    assert_equal_weights(run, other)
    assert [one.updates for one in seen] == list(range(1, 16))
    assert [one.samples for one in seen] == [16 * number for number in range(1, 16)]
    assert [one.epoch for one in seen[3:6]] == [0, 1, 1]
    assert {one.batch for one in seen} == {16}
    assert all(one.grad_norm is not None and one.grad_norm > 0 for one in seen)
    assert [one.lr for one in seen] == sorted((one.lr for one in seen), reverse=True)
    assert all(before.wall_s <= after.wall_s for before, after in itertools.pairwise(seen))
    kinds = {event.kind for event in run.directory.read_events()}
    assert kinds == {event.kind for event in other.directory.read_events()}
    assert seen[0].loss == told.of("progress")[0]["loss"] == told_other.of("progress")[0]["loss"]
    assert seen[0].grad_norm == told.of("progress")[0]["grad_norm"]


def test_one_that_raises_is_told_of_at_once_and_at_the_end_and_the_run_goes_on() -> None:
    """Others go on seeing."""
    seen: list[int] = []

    def broken(one: Update) -> None:
        if one.updates == 3:
            raise RuntimeError("no more")

    run, told = trained(
        "run", hooks=[stoker.on("updated", broken), stoker.on("updated", lambda one: seen.append(one.updates))]
    )
    assert run.status == "finished"
    assert seen == list(range(1, 16))
    failure = "the hook broken raised RuntimeError (no more) at 'updated'"
    messages = [f"{failure}, and is called no more", f"{failure}, and saw nothing of the run after that"]
    assert [event["message"] for event in told.of("warned")] == messages
    assert told.kinds.index("finished") < len(told.kinds) - 1


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (schedules.multi_step(at=[stoker.updates(4), stoker.updates(8)]), [1.0] * 4 + [0.1] * 4 + [0.01]),
        (
            schedules.warmup(0.5, then=schedules.step(every=stoker.updates(2))),
            [0, 1 / 4.5, 0.2 / 4.5, 0.3 / 4.5, 0.04 / 4.5, 1e-2, 1e-3, 1e-3, 1e-4],
        ),
        (schedules.polynomial(), [1 - samples / 368 for samples in (0, 48, 80, 128, 160, 208, 240, 288, 320)]),
    ],
)
def test_places_in_updates_come_at_these_updates(schedule: schedules.Schedule, rates: list[float]) -> None:
    """Though each second batch, at an epoch's end, is smaller, so that shares of samples are none of updates."""
    seen: list[float] = []
    job = blobs_job(schedule=schedule, batch=48, until=stoker.updates(9), optimizer=stoker.SGD(lr=1.0))
    stoker.train(job, sink=Heard(), hooks=[stoker.on("updated", lambda update: seen.append(update.lr))])
    assert seen == pytest.approx(rates)


def test_several_processes_are_not_looked_into() -> None:
    """Said before anything is spent, and not silently left out."""
    with pytest.raises(stoker.BadJob, match="a hook at every update looks into one process"):
        stoker.train(blobs_job(), on="2xhere", hooks=[stoker.on("updated", print)], sink=Heard())
