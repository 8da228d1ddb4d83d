"""Runs cut into slices, by the same command again and again, against runs that were not cut."""

from __future__ import annotations

from pathlib import Path

import pytest

import stoker
from stoker.records import NOT_COMPARED, Layout
from stoker.store import RunDirectory
from stoker.store.run_files import COUPLING
from stoker.training.slices import Slice
from stoker.training.telemetry import Telemetry
from tests.flow.builders import PLAN, Heard, assert_equal_weights, blobs_job
from tests.flow.command import job_file, stoker_here, stoker_process
from tests.flow.test_many_processes import LONG, TWO, plan_over


class Ticking:
    """A clock that moves on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time [s]."""
        self.now_s += 1.0
        return self.now_s


def chain(job: stoker.Job, length_s: float, run_dir: str, **options: object) -> tuple[stoker.Run, list[Heard]]:
    """The job trained in slices until it is finished; the run, and what each slice said."""
    slices: list[Heard] = []
    while True:
        slices.append(Heard())
        slice_ = Slice(length_s, length_s, clock=Ticking())
        run = stoker.train(job, run_dir=run_dir, sink=slices[-1], slice=slice_, **options)
        if run.status == "finished":
            return run, slices
        assert (run.stopped_by, run.exit_code) == ("slice over", 75)
        assert len(slices) < 60


def test_slices_end_at_the_bits_of_one_run() -> None:
    """Ten of them and more, with dropout, momentum and evaluations; each begins where the one before saved."""
    job = blobs_job(until=stoker.epochs(4))
    whole = stoker.train(job, plan=PLAN, run_dir="whole", sink=Heard())
    run, slices = chain(job, 5.0, "sliced", plan=PLAN)
    assert len(slices) >= 10
    assert_equal_weights(run, whole)
    assert run.metrics == whole.metrics
    stops = [heard.of("stopped")[0] for heard in slices[:-1]]
    begins = [heard.of("resumed")[0]["samples"] for heard in slices[1:]]
    assert [stop["samples"] for stop in stops] == begins
    assert all(stop["reason"] == "slice over" and stop["slices_left"] > 0 for stop in stops[1:])
    assert begins == sorted(set(begins))


def test_a_slice_that_is_too_short_makes_one_update() -> None:
    """Else the same command would never come to an end; the plan says so."""
    run, slices = chain(blobs_job(until=stoker.updates(3), valid=None), 0.5, "short", plan=PLAN)
    assert run.record.updates == 3
    assert len(slices) == 4, "three updates, and the last evaluation in one of its own"
    assert [heard.of("stopped")[0]["samples"] for heard in slices[:3]] == [16, 32, 48]
    assert any("too short to train in" in line for line in slices[0].of("planned")[0]["explanation"])


class Noted(Slice):
    """A slice that is never over, and notes how long the evaluations that were due are expected to take [s]."""

    def is_over(self, *, updates_s: float, evaluate_s: float = 0.0) -> bool:
        expected.append(evaluate_s)
        return False


expected: list[float] = []


def test_the_first_evaluation_of_a_run_that_tries_plans_has_time_kept() -> None:
    """By forecast: with none the place would end the process in it, and the chain of slices with it."""
    expected.clear()
    stoker.train(blobs_job(until=stoker.epochs(1)), run_dir="first", sink=Heard(), slice=Noted(3600.0, 0.0))
    assert [seconds > 0 for seconds in expected[:5]] == [False, False, False, True, True], "before the last update"


def test_without_validation_a_last_evaluation_that_fits_in_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample takes no longer than its share of an update: 30 of them 2 updates of 16, not 30."""
    monkeypatch.setattr(Telemetry, "next_update_s", 1.0)
    slice_ = Slice(3600.0, 30.0, clock=lambda: 0.0)
    run = stoker.train(blobs_job(valid=None), plan=PLAN, run_dir="tested", sink=Heard(), slice=slice_)
    assert run.status == "finished"
    assert "test/accuracy" in run.metrics


@pytest.mark.slow
def test_the_command_ends_a_slice_with_75_and_goes_on() -> None:
    """By the time of the process; the last one ends with 0."""
    path, name = job_file(), "timed"
    arguments: list[str | Path] = ["train", path, "--set", "epochs=300", "--plan", plan_over(Layout()), "--json"]
    first = stoker_process(*arguments, "--run-dir", name, "--slice", "1s")
    assert first.code == 75, first.err
    stopped = first.of("stopped")[0]
    assert stopped["reason"] == "slice over"
    assert 0 < stopped["samples"] < 300 * 80
    assert stoker.load(name).record.samples == stopped["samples"]
    last = stoker_process(*arguments, "--run-dir", name, "--slice", "10min")
    assert last.code == 0, last.err
    assert last.of("resumed")[0]["samples"] == stopped["samples"]
    assert stoker_here(*arguments, "--run-dir", "whole").code == 0
    assert_equal_weights(stoker.load(name), stoker.load("whole"))


@pytest.mark.slow
def test_several_processes_end_their_slice_together() -> None:
    """They leave after the same update, with 75, and the same command goes on to the bits of a run that was not cut."""
    path, plan = job_file(LONG), plan_over(TWO)
    arguments: list[str | Path] = ["train", path, "--set", "epochs=80", "--on", "2xhere", "--plan", plan, "--json"]
    first = stoker_process(*arguments, "--run-dir", "two", "--slice", "0.5s")
    assert first.code == 75, first.err
    samples = first.of("stopped")[0]["samples"]
    assert 0 < samples < 80 * 80
    last = stoker_process(*arguments, "--run-dir", "two")
    assert last.code == 0, last.err
    assert last.of("resumed")[0]["samples"] == samples
    whole = stoker_process(*arguments, "--run-dir", "whole")
    assert whole.code == 0, whole.err
    assert_equal_weights(stoker.load("two"), stoker.load("whole"))


@pytest.mark.slow
def test_two_processes_go_on_from_a_slice_that_ended_before_samples_were_compared() -> None:
    """A run that begins at once assumes that its samples are coupled: they are compared before a batch is divided."""
    arguments: list[str | Path] = ["train", job_file(LONG), "--run-dir", "cut", "--json"]
    first = stoker_process(*arguments, "--slice", "0.1s")
    assert first.code == 75, first.err
    assumed = RunDirectory(Path("cut")).read(COUPLING)
    assert assumed is not None
    assert assumed.evidence == NOT_COMPARED
    last = stoker_process(*arguments, "--on", "2xhere")
    assert last.code == 0, last.err
    assert last.of("replanned")[0]["new"]["layout"]["replicas"] == 2
    assert last.of("finished")[0]["samples"] == 3 * 80


@pytest.mark.slow
def test_a_plan_says_how_many_slices_it_takes() -> None:
    """`stoker plan --slice`; a word that is no time is refused."""
    shown = stoker_here("plan", job_file(), "--slice", "50min", "--json")
    assert shown.code == 0
    assert "slices of 50 min: one is enough" in shown.out
    assert stoker_here("plan", job_file(), "--slice", "soon").code == 2
