"""Several updates in one call: the same bits as one by one, and nothing left behind by one that fails."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import RunFailed
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Event, Plan, Position
from stoker.stepping import torch_optimizers
from stoker.stepping.captured_updates import LENGTH
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.testing import FakeClock
from stoker.training.checkpoints import Checkpointer, restore
from stoker.training.loop import Best, Loop
from stoker.training.recovery import Recovery
from stoker.training.signals import StopRequest
from stoker.training.telemetry import Telemetry
from tests.training.builders import assert_bit_equal, everything_of

BATCH, SAMPLES = 8, 84
"""Eleven updates an epoch, the last of four samples."""
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def _with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


def _data(poisoned: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((SAMPLES, 1, 4, 4), generator=generator)
    if poisoned is not None:
        inputs[poisoned] = math.nan
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


def _job(model=_mlp, **settings) -> stoker.Job:
    given = {
        "model": model,
        "data": _data(),
        "loss": "cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-2),
        "schedule": stoker.schedules.one_cycle(),
        "batch": BATCH,
        "until": stoker.epochs(3),
    } | settings
    return stoker.Job(**given)


class _Run:
    """A loop over `job`; `at_once=False`: one update after the other."""

    def __init__(self, job: stoker.Job, folder: Path, *, at_once: bool = True, **settings) -> None:
        self.events: list[Event] = []
        self.store = CheckpointStore(folder)
        plan = Plan(
            device="cpu",
            micro_batch=BATCH,
            captured=True,
            checkpoint_every_s=1e9,
            **{"optimizer_implementation": "fused", **settings},
        )
        data = datasets_of(job)
        extent, self.step = data.extent(job), _Step(job, plan, SEPARABLE)
        self.step.may_go_together = at_once
        total = extent.updates_in(job.until)
        telemetry = Telemetry(
            self.events.append,
            total_samples=extent.position(total).samples,
            total_updates=total,
            evaluate_s=0.0,
            evaluations_left=0,
            clock=FakeClock(),
        )
        source = BatchSource(data.train, self.step.pipeline(data.train, augmented=True), extent, job.seed, plan)
        self.loop = Loop(
            step=self.step,
            source=source,
            extent=extent,
            total_updates=total,
            held_out=data.held_out,
            evaluate_every=job.evaluation.every,
            best=Best("loss"),
            checkpointer=Checkpointer(self.store, spec_digest="s", version="0"),
            telemetry=telemetry,
            stop=StopRequest(),
            recovery=Recovery(self.step, tell=telemetry.emit),
        )

    def numbers(self) -> list:
        """Losses, rates and measures of all events; those of checkpoints, written in the background, come last."""
        return [
            [event.kind, *(event.fields.get(key) for key in ("samples", "loss", "lr", "metrics", "best", "indices"))]
            for event in sorted(self.events, key=lambda event: event.kind == "checkpointed")
        ]


class _Step(Step):
    may_go_together = True
    num_together = 0

    @property
    def updates_at_once(self) -> int:
        return super().updates_at_once if self.may_go_together else 1

    def updates(self, batches, first, progresses) -> list[float]:
        losses = super().updates(batches, first, progresses)
        self.num_together += len(losses)
        return losses


_SGD = stoker.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


@pytest.mark.parametrize(
    ("job", "goes_together"),
    [
        (_job(), True),
        (_job(optimizer=stoker.AdamW(lr=1e-2), valid=_data()), True),
        (_job(optimizer=_SGD), True),
        (_job(optimizer=stoker.SGD(lr=0.1)), True),
        (_job(loss="mse", data=(torch.rand(SAMPLES, 1, 4, 4), torch.rand(SAMPLES, 3))), True),
        (_job(clip_norm=0.1), False),
        (_job(average=0.9), False),
        (_job(_with_dropout), False),
        (_job(_with_batch_norm), False),
    ],
    ids=["adam", "evaluated", "momentum", "plain", "mse", "clipped", "averaged", "dropout", "batch norm"],
)
def test_a_run_is_that_of_single_updates(job, goes_together: bool, tmp_path: Path) -> None:
    """Three epochs, each with a smaller last batch, of every kind of job."""
    assert_equals_single_updates(job, tmp_path, goes_together=goes_together)


@pytest.mark.parametrize("optimizer", [stoker.AdamW(lr=1e-2), _SGD], ids=["adam", "momentum"])
def test_a_run_in_bf16_is_that_of_single_updates(optimizer, tmp_path: Path) -> None:
    """Casts do not move from one update of a call into another."""
    assert_equals_single_updates(_job(optimizer=optimizer), tmp_path, goes_together=True, precision="bf16")


def assert_equals_single_updates(job, tmp_path: Path, *, goes_together: bool, **settings) -> None:
    """The same bits of weights, optimiser, average and events, however many updates are in a call."""
    together = _Run(job, tmp_path / "together", **settings)
    singly = _Run(job, tmp_path / "singly", at_once=False, **settings)
    assert together.loop.run(Position()) == singly.loop.run(Position())
    assert_bit_equal(everything_of(together.step), everything_of(singly.step))
    assert together.numbers() == singly.numbers()
    assert (together.step.num_together >= 4 * LENGTH) == goes_together


@pytest.mark.parametrize("stop", [5, 10])
def test_a_resumed_run_is_that_of_single_updates(stop: int, tmp_path: Path) -> None:
    """Stopped where calls of several updates do not begin, and resumed: the same bits."""
    singly = _Run(_job(), tmp_path / "singly", at_once=False)
    end = singly.loop.run(Position())
    first, second = (_Run(_job(), tmp_path / "together") for _ in range(2))
    first.loop.telemetry.on_lap = lambda _part: _stop_from(first, stop)
    halfway = first.loop.run(Position())
    found = first.store.newest()
    assert found is not None
    restore(second.step, *found)
    assert second.loop.run(halfway) == end
    assert stop <= halfway.updates <= stop + LENGTH
    assert second.step.num_together >= 2 * LENGTH
    assert_bit_equal(everything_of(second.step), everything_of(singly.step))


def _stop_from(run: _Run, update: int) -> None:
    if run.loop.reached.updates >= update:
        run.loop.stop.reason = "asked"


def test_an_update_that_fails_leaves_those_before_it_alone_made(tmp_path: Path) -> None:
    """A sample that is not a number, in the third update of a call: weights and moments are those of single updates."""
    runs = []
    for name, at_once in (("together", True), ("singly", False)):
        run = _Run(_job(data=_data(_sample_of(update=6))), tmp_path / name, at_once=at_once)
        with pytest.raises(RunFailed, match="update 7"):
            run.loop.run(Position())
        assert run.loop.reached.updates == 6
        runs.append(run.step)
    assert runs[0].num_together == 2
    assert_bit_equal(everything_of(runs[0]), everything_of(runs[1]))


def test_an_update_that_is_skipped_is_skipped_alone(tmp_path: Path) -> None:
    """A job that skips updates that are not finite looks at every gradient's norm: updates go one by one."""
    job = _job(data=_data(_sample_of(update=6)), on_non_finite="skip", optimizer=_SGD)
    together, singly = _Run(job, tmp_path / "a"), _Run(job, tmp_path / "b", at_once=False)
    together.loop.run(Position())
    singly.loop.run(Position())
    assert together.step.num_together == 0
    assert_bit_equal(everything_of(together.step), everything_of(singly.step))
    assert together.numbers() == singly.numbers()


def _sample_of(update: int) -> int:
    job = _job()
    data = datasets_of(job)
    return int(data.train.order(job.seed).indices(0, update * BATCH, update * BATCH + 1)[0])


def test_an_operation_that_fails_is_reported_by_its_own_update(tmp_path: Path) -> None:
    """A target out of range in the second update of a call: PyTorch's own error, after five whole updates."""
    inputs, targets = _data()
    targets[_sample_of(update=5)] = 7
    errors = []
    for name, at_once in (("together", True), ("singly", False)):
        run = _Run(_job(data=(inputs, targets)), tmp_path / name, at_once=at_once)
        with pytest.raises(Exception, match="bounds") as error:
            run.loop.run(Position())
        errors.append((type(error.value), run.loop.reached.updates, run.step))
    assert errors[0][:2] == errors[1][:2]
    assert errors[0][1] == 5
    assert errors[0][2].num_together == 1
    assert_bit_equal(everything_of(errors[0][2]), everything_of(errors[1][2]))


def test_denormal_moments_are_swept_at_the_same_updates(tmp_path: Path, monkeypatch) -> None:
    """The sweep after update 128 comes at the end of a call."""
    sweeps = []
    original = torch_optimizers.flush_denormals
    monkeypatch.setattr("stoker.stepping.step.flush_denormals", lambda o: (sweeps.append(o), original(o)))
    data = torch.rand(2000, 1, 4, 4), torch.randint(0, 3, (2000,))
    run = _Run(_job(until=stoker.updates(140), data=data), tmp_path)
    run.loop.run(Position())
    assert len(sweeps) == 1
    assert run.step.num_together >= 128


def test_settings_that_change_on_the_way_count(tmp_path: Path) -> None:
    """Another weight decay between two calls, as a user's code may set it, is that of the next call."""
    steps = []
    for at_once in (True, False):
        run = _Run(_job(until=stoker.updates(20)), tmp_path / str(at_once), at_once=at_once)
        run.loop.telemetry.on_lap = lambda _part, run=run: _decay_from(run, 8)
        run.loop.run(Position())
        steps.append(run.step)
    assert_bit_equal(everything_of(steps[0]), everything_of(steps[1]))


def _decay_from(run: _Run, update: int) -> None:
    if run.loop.reached.updates >= update:
        run.step.optimizer.param_groups[0]["weight_decay"] = 0.5
