"""The loop: when it evaluates and saves, where it stops, and what it leaves when something goes wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stoker
from stoker.devices.hardware import checkpoint_interval_s
from stoker.errors import RunFailed
from stoker.jobs.run_length import Extent
from stoker.loading.datasets import datasets_of
from stoker.records import Event, Layout, Plan, Position
from stoker.stepping.diloco_exchange import PendingExchange
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.store import CheckpointStore
from stoker.testing import FakeClock
from stoker.training.checkpoints import Checkpointer, Written, restore
from stoker.training.elastic.state_broadcast import SurvivorState, state_from_furthest_rank
from stoker.training.loop import Best, Loop, evaluation_is_due
from stoker.training.recovery import Recovery
from stoker.training.signals import StopRequest
from stoker.training.telemetry import Telemetry
from stoker.units import Duration
from tests.training.builders import assert_bit_equal, everything_of, source_of, step_of, tiny_job


class Training:
    """A loop over `job` in `folder`, with its events; the clock moves a second at every look."""

    def __init__(self, job: stoker.Job, folder: Path, plan: Plan | None = None) -> None:
        self.events: list[Event] = []
        self.store = CheckpointStore(folder)
        data = datasets_of(job)
        step = step_of(job, plan or Plan(device="cpu", micro_batch=16, checkpoint_every_s=1e9))
        extent = data.extent(job)
        telemetry = Telemetry(
            self.events.append,
            total_samples=extent.position(extent.updates_in(job.until)).samples,
            total_updates=extent.updates_in(job.until),
            evaluate_s=0.0,
            evaluations_left=0,
            clock=FakeClock(tick_s=1.0),
        )
        self.loop = Loop(
            step=step,
            source=source_of(step, data),
            extent=extent,
            total_updates=extent.updates_in(job.until),
            held_out=data.held_out,
            evaluate_every=job.evaluation.every,
            best=Best("loss"),
            checkpointer=Checkpointer(self.store, spec_digest="s", version="0"),
            telemetry=telemetry,
            stop=StopRequest(),
            recovery=Recovery(step, tell=telemetry.emit),
        )

    def of(self, kind: str, field: str = "samples") -> list:
        """That field of every event of a kind."""
        return [event.fields[field] for event in self.events if event.kind == kind]


def test_a_run_evaluates_every_interval_and_at_the_end_and_saves_what_was_best(tmp_path: Path) -> None:
    """80 samples in batches of 16, two and a half epochs: an evaluation after each epoch and one at the end."""
    training = Training(tiny_job(valid=stoker.holdout(0.2), until=stoker.epochs(2.5)), tmp_path)
    position = training.loop.run(Position())
    assert (position.samples, position.updates, position.epoch) == (160, 10, 2)
    assert training.of("evaluated") == [64, 128, 160]
    assert training.of("evaluated", "best")[0] is True
    best = [
        samples for samples, is_best in zip([64, 128, 160], training.of("evaluated", "best"), strict=True) if is_best
    ]
    assert training.of("checkpointed") == sorted({*best, 160})
    found = training.store.best()
    assert found is not None
    assert found[1].position.samples == best[-1] == training.loop.best.samples


def test_the_loss_scale_is_kept_in_the_turn_of_another_precision(tmp_path: Path) -> None:
    """As while plans are tried: fp16 goes on from it after a resume."""
    loop = Training(tiny_job(numerics=["fp16"]), tmp_path).loop
    loop.step.loss_scale.load([64.0, 3])
    assert loop.step.plan.precision == "fp32"
    assert loop.progress()["loss_scale"] == [64.0, 3.0]


def test_checkpoints_come_by_the_clock(tmp_path: Path) -> None:
    """With a checkpoint due at every look at the clock there is one after each update, the last two kept."""
    plan = Plan(device="cpu", micro_batch=16, checkpoint_every_s=0.5)
    training = Training(tiny_job(until=stoker.updates(4)), tmp_path, plan)
    training.loop.run(Position())
    assert training.of("checkpointed") == [16, 32, 48, 64]
    assert training.store.names() == ("000000000048", "000000000064")


def test_the_interval_counts_from_the_runs_last_checkpoint(tmp_path: Path) -> None:
    """Processes that meet again go on counting: a checkpoint that was nearly due is not put off by the meeting."""
    plan = Plan(device="cpu", micro_batch=16, checkpoint_every_s=100.0)

    def saved(unsaved_s: float) -> list[int]:
        training = Training(tiny_job(until=stoker.updates(4)), tmp_path / f"{unsaved_s}", plan)
        training.loop.unsaved_s = unsaved_s
        training.loop.run(Position())
        return training.of("checkpointed")

    assert saved(0.0) == [64]
    assert saved(99.5) == [16, 64]


def test_the_interval_follows_what_saving_takes_here(tmp_path: Path) -> None:
    """Once it is measured, if a rate of failures is given; it is kept with the state. Else it stays the plan's."""
    given = Plan(device="cpu", micro_batch=16, checkpoint_every_s=77.0)
    written = Written(tmp_path, Position(samples=16), num_bytes=1, blocked_s=1.0, write_s=5.0, best=False)
    for mtbf_h, expected in ((None, 77.0), (99.0, checkpoint_interval_s(1.0, 5.0, 99 * 3600.0))):
        plan = dataclasses.replace(given, device_mtbf_h=mtbf_h)
        training = Training(tiny_job(until=stoker.updates(1)), tmp_path / f"{mtbf_h}", plan)
        loop = training.loop
        loop.save_every_s = plan.checkpoint_every_s
        loop._announce([written])
        assert loop.save_every_s == expected
        assert loop.progress().get("save_every_s") == (None if mtbf_h is None else expected)
        loop.run(Position())
        measured = [event for event in training.events if event.kind == "checkpointed"][-1].fields
        if mtbf_h is not None:  # the last one is of this tiny model
            assert loop.save_every_s == checkpoint_interval_s(measured["blocked_s"], measured["write_s"], 99 * 3600.0)


def test_a_request_to_stop_ends_after_the_update_with_its_state_saved(tmp_path: Path) -> None:
    """What is restored from there is the state at that point, and goes on to the same end."""
    whole = Training(tiny_job(), tmp_path / "whole")
    whole.loop.run(Position())
    stopped = Training(tiny_job(), tmp_path / "stopped")
    stopped.loop.stop.ask("SIGTERM")
    position = stopped.loop.run(Position())
    assert (position.updates, stopped.of("checkpointed")) == (1, [16])
    again = Training(tiny_job(), tmp_path / "stopped")
    found = again.store.newest()
    assert found is not None
    restore(again.loop.step, *found)
    again.loop.run(found[1].position)
    assert_bit_equal(everything_of(again.loop.step), everything_of(whole.loop.step))


def breaking_at(update: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A loss that becomes infinite in that update (from 1)."""
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.nn.functional.cross_entropy(output, target, reduction="none") / (len(calls) < update)

    return loss


def test_a_loss_that_breaks_leaves_the_checkpoint_under_way_whole(tmp_path: Path) -> None:
    """The loop waits for what is being written before it gives up, reports it, and then raises the first error."""
    plan = Plan(device="cpu", micro_batch=16, checkpoint_every_s=0.5)
    training = Training(tiny_job(loss=breaking_at(3)), tmp_path, plan)
    with pytest.raises(RunFailed, match="the loss is inf at update 3") as caught:
        training.loop.run(Position())
    assert caught.value.remedy is not None
    assert training.store.names()[-1] == "000000000032"
    assert training.of("checkpointed") == [16, 32]
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("broken", range(3))
def test_a_site_whose_exchange_fails_goes_on_from_the_update_before_it(
    broken: int, overlap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever exchange it is, the last one too: the update counts once, and the run ends as an unbroken one does."""
    job = tiny_job(sync=stoker.DiLoCo(every=stoker.updates(4), overlap=overlap), valid=stoker.holdout(0.2))
    whole = Training(job, tmp_path / "whole")
    whole.loop.run(Position())
    training = Training(job, tmp_path / "broken")
    outer = training.loop.step.outer
    assert outer is not None
    calls = []
    received = PendingExchange.received

    def failing(sending: PendingExchange) -> object:
        calls.append(outer.shared.update + 1)
        if len(calls) == broken + 1:
            raise RuntimeError("Connection closed by peer")
        return received(sending)

    monkeypatch.setattr(PendingExchange, "received", failing)
    with pytest.raises(RuntimeError, match="closed by peer"):
        training.loop.run(Position())
    assert training.loop.is_between_updates()
    carried = SurvivorState.of(training.loop)
    assert carried.position.updates == calls[-1]
    again = Training(job, tmp_path / "broken")
    given = state_from_furthest_rank(again.loop.step, carried)
    assert given is not None
    again.loop.unevaluated = given.unevaluated
    again.loop.run(given.position)
    assert_bit_equal(everything_of(again.loop.step), everything_of(whole.loop.step))
    assert (training.of("evaluated") + again.of("evaluated")) == whole.of("evaluated")


class Lossy:
    """A checkpointer of one of two processes; the other is lost before saving begins, or before it is complete."""

    def __init__(self, *, begins: bool) -> None:
        self.begins = begins

    def save(self, step: Step, *_: object, **_named: object) -> list[Written]:
        """Begin, or fail."""
        step.world = World(Layout(replicas=2))
        if not self.begins:
            raise RuntimeError("Connection closed by peer")
        return []

    def collect(self, *, wait: bool = False) -> list[Written]:
        """Fail if the other process has to be waited for."""
        if wait:
            raise RuntimeError("Connection closed by peer")
        return []

    def abandon(self) -> list[Written]:
        """Nothing was written."""
        return []


@pytest.mark.parametrize("begins", [False, True])
def test_a_best_checkpoint_that_was_given_up_is_written_by_those_who_go_on(begins: bool, tmp_path: Path) -> None:
    """They evaluate once more, and what they carry as the best is what the store marks as the best."""
    job = tiny_job(valid=stoker.holdout(0.2), until=stoker.epochs(1))
    broken = Training(job, tmp_path)
    broken.loop.checkpointer = Lossy(begins=begins)
    with pytest.raises(RuntimeError, match="closed by peer"):
        broken.loop.run(Position())
    assert broken.loop.is_between_updates()
    carried = SurvivorState.of(broken.loop)
    again = Training(job, tmp_path)
    again.loop.best = Best(**carried.progress["best"])
    given = state_from_furthest_rank(again.loop.step, carried)
    assert given is not None
    again.loop.unevaluated = given.unevaluated
    again.loop.run(given.position)
    found = again.store.best()
    assert found is not None
    assert found[1].position.samples == again.loop.best.samples == broken.loop.best.samples == 64


def test_a_position_at_the_end_is_left_as_it_is(tmp_path: Path) -> None:
    """A run killed after its last checkpoint has nothing to train."""
    training = Training(tiny_job(until=stoker.updates(4)), tmp_path)
    end = training.loop.extent.position(4)
    assert training.loop.run(end) == end
    assert training.events == []


def test_the_rate_that_is_told_follows_the_schedule(tmp_path: Path) -> None:
    """`lr` of the first progress event is that of the first update."""
    job = tiny_job(schedule=lambda progress: 1 - progress, until=stoker.updates(4))
    training = Training(job, tmp_path)
    training.loop.run(Position())
    assert training.of("progress", "lr")[0] == pytest.approx(0.1)
    assert training.of("progress", "lr")[-1] == pytest.approx(0.1 * 0.25)
    assert all(math.isfinite(loss) for loss in training.of("progress", "loss"))


@pytest.mark.parametrize(
    ("every", "due_after"),
    [
        (stoker.epochs(1), [5, 10]),
        (stoker.epochs(0.5), [3, 5, 8, 10]),
        (stoker.updates(4), [4, 8]),
        (stoker.samples(100), [7]),
        (stoker.samples(1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_an_evaluation_is_due_where_an_interval_ends(every: Duration, due_after: list[int]) -> None:
    """Epochs of 72 samples in batches of 16: five updates, the last of 8 samples."""
    extent = Extent(num_train=72, batch=16)
    due = [n for n in range(1, 11) if evaluation_is_due(every, extent, extent.position(n - 1), extent.position(n))]
    assert due == due_after
