"""Rates, the split of the time, and the time to go, by a clock that the test moves."""

from __future__ import annotations

import math

import pytest
import torch

from stoker.devices.malloc import peak_resident_bytes, resident_bytes
from stoker.records import Event, Position
from stoker.testing import FakeClock
from stoker.training.telemetry import Telemetry
from stoker.units import MIB

LOSS = torch.tensor(1.0)


class Watched:
    """Telemetry of a run of 1000 samples in 10 updates, with its events."""

    def __init__(self, *, evaluations: int = 0, wall_s: float = 0.0, device: str = "cpu") -> None:
        self.clock = FakeClock(50.0)
        self.events: list[Event] = []
        self.telemetry = Telemetry(
            self.events.append,
            total_samples=1000,
            total_updates=10,
            evaluate_s=3.0,
            evaluations_left=evaluations,
            device=device,
            wall_s=wall_s,
            clock=self.clock,
        )
        self.position = Position()

    def update(self, *, data_s: float, update_s: float, loss: float = 1.0) -> bool:
        """One update of 100 samples; whether a progress event is due."""
        self.clock.advance(data_s)
        self.telemetry.lap("data")
        self.clock.advance(update_s)
        self.position = Position(samples=self.position.samples + 100, updates=self.position.updates + 1)
        return self.telemetry.updated(torch.tensor(loss), 100)

    def progress(self) -> dict:
        """The fields of a progress event sent now."""
        self.telemetry.progress(self.position, 0.1)
        return self.events[-1].fields


def test_progress_tells_what_happened_since_the_one_before() -> None:
    """The mean loss and the rate of the updates since, the position, and the split of the time."""
    run = Watched()
    run.update(data_s=0.5, update_s=1.5, loss=2.0)
    run.update(data_s=0.5, update_s=1.5, loss=4.0)
    fields = run.progress()
    assert (fields["samples"], fields["updates"], fields["total_samples"], fields["lr"]) == (200, 2, 1000, 0.1)
    assert fields["loss"] == 3.0
    assert fields["samples_per_s"] == pytest.approx(50.0)
    assert fields["split_s"] == {"data": 1.0, "update": 3.0, "evaluation": 0.0, "checkpoint": 0.0}
    assert fields["resident_bytes"] > 0
    assert "allocated_bytes" not in fields, "it is a GPU's"
    run.update(data_s=0.0, update_s=1.0, loss=8.0)
    fields = run.progress()
    assert (fields["loss"], fields["samples_per_s"]) == (8.0, pytest.approx(100.0))
    assert fields["split_s"] == {"data": 0.0, "update": 1.0, "evaluation": 0.0, "checkpoint": 0.0}


def test_the_split_of_the_time_adds_up_to_the_wall() -> None:
    """Every second up to the last lap is booked once, whatever it went to, over all progress events together."""
    run = Watched()
    for number in range(4):
        run.update(data_s=0.3, update_s=1.1)
        if number % 2:
            run.progress()
            run.clock.advance(0.7)
            run.telemetry.lap("evaluation")
            run.clock.advance(0.2)
            run.telemetry.lap("checkpoint")
    run.update(data_s=0.3, update_s=1.1)
    run.progress()
    booked = sum(sum(event.fields["split_s"].values()) for event in run.events)
    assert booked == pytest.approx(run.telemetry.wall_s) == pytest.approx(5 * 1.4 + 2 * 0.9)


def test_progress_is_due_every_half_second_and_not_more_often() -> None:
    """Fast updates share an event."""
    run = Watched()
    due = []
    for _ in range(6):
        due.append(run.update(data_s=0.0, update_s=0.2))
        if due[-1]:
            run.progress()
    assert due == [False, False, True, False, False, True]


def test_a_long_run_reports_more_rarely() -> None:
    """After a week every half minute, so that its log can be read; the time before this process counts."""
    run = Watched(wall_s=7 * 86_400.0)
    num_due = 0
    for _ in range(600):
        if run.update(data_s=0.0, update_s=1.0):
            num_due += 1
            run.progress()
    assert num_due == 19


def test_the_time_to_go_is_what_is_left_at_the_recent_rate_and_the_evaluations_to_come() -> None:
    """400 samples at 100 a second and two evaluations of as long as the last one took."""
    run = Watched(evaluations=3)
    run.telemetry.evaluated(5.0)
    for _ in range(6):
        run.update(data_s=0.2, update_s=0.8)
    assert run.progress()["eta_s"] == pytest.approx(4.0 + 2 * 5.0)


def test_the_first_update_of_a_process_says_nothing_of_the_time_to_go() -> None:
    """It includes the first batch and what is made once: unknown after it, then by the later updates alone."""
    run = Watched()
    run.update(data_s=20.0, update_s=30.0)
    fields = run.progress()
    assert (fields["eta_s"], fields["samples_per_s"]) == (None, pytest.approx(2.0))
    for _ in range(4):
        run.update(data_s=0.05, update_s=0.2)
    assert run.progress()["eta_s"] == pytest.approx(500 / 400)


def test_the_time_to_go_leaves_the_first_update_out_of_an_event_of_several() -> None:
    """As in a process that goes on with a run, whose first event comes after half a second."""
    run = Watched()
    run.update(data_s=20.0, update_s=30.0)
    for _ in range(4):
        run.update(data_s=0.05, update_s=0.2)
    assert run.progress()["eta_s"] == pytest.approx(500 / 400)


def test_the_first_update_under_another_plan_says_nothing_of_the_time_to_go() -> None:
    """It compiles: half a minute that comes once would be hours in a run of many updates."""
    run = Watched()
    for update_s in (1.0, 0.2, 30.0, 0.2):
        if update_s == 30.0:
            run.telemetry.replanned()
        run.update(data_s=0.05, update_s=update_s)
    assert run.progress()["eta_s"] == pytest.approx(600 / 400)


def test_a_slow_stretch_does_not_spoil_the_time_to_go() -> None:
    """It weighs no more than the time it took: after as many fast seconds the rate is half of the true one."""
    run = Watched()
    run.update(data_s=0.0, update_s=0.25)
    run.update(data_s=0.0, update_s=1.0)
    run.progress()
    for _ in range(4):
        run.update(data_s=0.0, update_s=0.25)
    assert run.progress()["eta_s"] == pytest.approx(400 * 2.0 / 500, rel=0.05)


def test_evaluations_and_checkpoints_do_not_slow_the_rate_that_is_expected() -> None:
    """They are counted on their own: 900 samples at 100 a second, though a minute went elsewhere."""
    run = Watched()
    run.update(data_s=0.25, update_s=0.75)
    run.clock.advance(60.0)
    run.telemetry.lap("evaluation")
    run.update(data_s=0.25, update_s=0.75)
    assert run.progress()["eta_s"] == pytest.approx(8.0)


def test_the_recent_rate_forgets() -> None:
    """A run that became slower for two minutes expects to stay so."""
    run = Watched()
    run.update(data_s=0.0, update_s=1.0)
    run.progress()
    run.update(data_s=0.0, update_s=120.0)
    assert run.progress()["eta_s"] == pytest.approx(8 * 120, rel=0.05)


def test_the_wall_goes_on_from_earlier_processes() -> None:
    """A resumed run counts the seconds of the processes before it, in its rate it does not."""
    run = Watched(wall_s=100.0)
    run.update(data_s=0.0, update_s=2.0)
    fields = run.progress()
    assert (fields["wall_s"], fields["samples_per_s"]) == (pytest.approx(102.0), pytest.approx(50.0))


def test_news_are_what_progress_has_not_told() -> None:
    """After an update there are some, after its progress event none."""
    run = Watched()
    assert not run.telemetry.has_news
    run.update(data_s=0.0, update_s=1.0)
    assert run.telemetry.has_news
    run.progress()
    assert not run.telemetry.has_news


def test_a_loss_that_is_not_finite_is_told_as_it_is() -> None:
    """The mean that `progress` returns shows it, for the loop to act on."""
    run = Watched()
    run.update(data_s=0.0, update_s=1.0, loss=math.inf)
    assert run.telemetry.progress(run.position, 0.1) == math.inf


@pytest.mark.gpu
def test_on_a_gpu_progress_has_the_most_that_the_plan_in_force_allocated() -> None:
    """What was freed since counts, until another plan is in force."""
    run = Watched(device="cuda:0")
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
    del held
    peaks = []
    for number in range(3):
        if number == 2:
            run.telemetry.replanned()
        run.update(data_s=0.0, update_s=1.0)
        peaks.append(run.progress()["allocated_bytes"])
    assert peaks[0] == peaks[1] == peaks[2] + 64 * MIB


def test_memory_is_that_of_this_process() -> None:
    """Resident memory is between a megabyte and its own peak."""
    assert 2**20 < resident_bytes() <= peak_resident_bytes() + 2**20
