"""Trials in real processes: what one breaks stays there, answers come before it goes on, none outlives the study."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadJob, DoesNotFit
from stoker.tuning.processes import (
    Judge,
    Processes,
    TrialReading,
    TrialRequest,
    TrialResult,
    TrialSlot,
    in_a_process,
    run_here,
)
from tests.tuning import children


class Plain:
    """A conductor with a list of settings, which stops trials at an evaluation on request."""

    def __init__(self, folder: Path, settings: Sequence[dict[str, Any]], *, stop_at: int = 10**9) -> None:
        self.folder, self.settings, self.stop_at = folder, list(settings), stop_at
        self.endings: dict[int, TrialResult] = {}
        self.readings: list[tuple[int, int]] = []
        self.places: dict[int, str] = {}
        self.most_at_once = self._running = 0
        self.seconds_left: float | None = None
        self.given = 0

    @property
    def is_over(self) -> bool:
        """Never, unless time is up."""
        return self.seconds_left == 0.0

    def next_request(self) -> TrialRequest | None:
        """The next settings."""
        if self.given >= len(self.settings) or self.is_over:
            return None
        self.given, self._running = self.given + 1, self._running + 1
        self.most_at_once = max(self.most_at_once, self._running)
        number = self.given - 1
        return TrialRequest(number=number, parameters=self.settings[number], directory=self.folder / f"{number:04}")

    def on_place(self, number: int, on: str) -> None:
        """Note it."""
        self.places[number] = on

    def judge(self, number: int, reading: TrialReading) -> bool:
        """Note it, and stop it where it is time."""
        self.readings.append((number, reading.samples))
        return reading.samples >= self.stop_at

    def ended(self, number: int, ending: TrialResult) -> None:
        """Note it."""
        self._running -= 1
        self.endings[number] = ending


def test_trials_run_side_by_side_each_in_its_own_process(tmp_path: Path) -> None:
    """As many at once as there are slots, on the slots' CPUs; what they print is kept with their runs."""
    cpu = min(os.sched_getaffinity(0))
    slots = [TrialSlot(on="cpu", cpus=(cpu,)), TrialSlot(on="cpu", cpus=(cpu,))]
    plain = Plain(tmp_path, [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}])
    Processes(children.climb, slots).run(plain)
    assert plain.most_at_once == 2
    assert [plain.endings[number].metrics["score"] for number in range(3)] == [1.0] * 3
    assert len({plain.endings[number].metrics["pid"] for number in range(3)} | {os.getpid()}) == 4
    assert sorted(plain.readings) == [(n, samples) for n in range(3) for samples in (100, 200, 300, 400)]
    assert (tmp_path / "0001.output.txt").read_text() == "trial 1 on cpu\n"


def test_a_trial_stops_at_the_evaluation_it_is_told_to(tmp_path: Path) -> None:
    """It waits for the answer, so that it goes no further, however long the study may take."""
    plain = Plain(tmp_path, [{"x": 1.0}], stop_at=200)
    plain.seconds_left = 365 * 86400.0  # longer than the system waits at once
    Processes(children.climb, [TrialSlot()]).run(plain)
    assert plain.endings[0] == TrialResult(kind="stopped", samples=200)
    assert plain.readings == [(0, 100), (0, 200)]


def test_whatever_a_trial_does_the_study_goes_on(tmp_path: Path) -> None:
    """An exception, an exit, a kill, an error of Stoker's: each is reported in words."""
    ways = ["raise", "exit", "killed", "too wide", "well"]
    plain = Plain(tmp_path, [{"how": way} for way in ways])
    Processes(children.misbehave, [TrialSlot()]).run(plain)
    assert [(plain.endings[n].kind, plain.endings[n].words) for n in range(5)] == [
        ("failed", "ZeroDivisionError: a mistake of its own"),
        ("failed", "its process ended with exit code 7"),
        ("failed", "its process was killed by SIGKILL"),
        ("failed", "too wide"),
        ("finished", ""),
    ]
    assert "ZeroDivisionError" in (tmp_path / "0000.output.txt").read_text()


def test_a_process_that_the_system_killed_for_memory_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts what it kills: SIGKILL while the count rose is want of memory."""
    counts = iter([3, 4])
    monkeypatch.setattr("stoker.store.child_process._kills_for_memory", lambda: next(counts))
    plain = Plain(tmp_path, [{"how": "killed"}])
    Processes(children.misbehave, [TrialSlot()]).run(plain)
    assert plain.endings[0].kind == "out of memory"


class Watching(Plain):
    """Notes how many processes there are when a trial ends."""

    def ended(self, number: int, ending: TrialResult) -> None:
        """Note it."""
        super().ended(number, ending)
        self.most_at_once = len(multiprocessing.active_children())


def test_a_process_that_does_not_end_is_killed_once_its_result_is_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the job's that lives on holds up neither the study nor what is looked up before it."""
    monkeypatch.setattr("stoker.tuning.processes._ENDING_S", 0.2)
    path = tmp_path / "lived on"
    watching = Watching(tmp_path, [{"path": str(path)}] * 2)
    Processes(children.lingering, [TrialSlot()]).run(watching)
    assert [ending.kind for ending in watching.endings.values()] == ["finished"] * 2
    assert watching.most_at_once == 1, "its result did not wait for its end"
    assert in_a_process(children.linger, (path,), TrialSlot()) == "answered"
    assert not path.exists()


class Limited(Plain):
    """Time is up once the first trial has begun."""

    @property
    def is_over(self) -> bool:
        """Whether it has."""
        return (self.folder / "saved.began").exists()


def test_when_time_is_up_trials_save_and_stop(tmp_path: Path) -> None:
    """They are asked to, and waited for."""
    limited = Limited(tmp_path, [{"path": str(tmp_path / "saved")}])
    limited.seconds_left = 0.05
    Processes(children.endless, [TrialSlot()]).run(limited)
    assert limited.endings[0].kind == "stopped"
    assert (tmp_path / "saved").read_text() == "saved"


STUDY = """
import sys
from pathlib import Path
from stoker.tuning.processes import TrialSlot
from stoker.tuning.processes import Processes
from tests.tuning import children
from tests.tuning.test_processes import Plain

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    Processes(children.endless, [TrialSlot()]).run(Plain(folder, [{"path": str(folder / "saved")}]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_ends_with_its_study_and_saves_first(tmp_path: Path, number: signal.Signals) -> None:
    """Even if the study is killed: no trial goes on training."""
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    study = subprocess.Popen([sys.executable, script, tmp_path], env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    try:
        _wait_for(tmp_path / "saved.began")
        study.send_signal(number)
        assert study.wait(timeout=60) == -number
        _wait_for(tmp_path / "saved")
    finally:
        study.kill()
        study.wait()


def _wait_for(path: Path) -> None:
    """Until a file is there and has content; a minute at most."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)


def test_in_this_process_trials_run_one_after_another(tmp_path: Path) -> None:
    """The same trial, without another process."""
    plain = Plain(tmp_path, [{"x": 1.0}, {"x": 2.0}], stop_at=300)
    run_here(plain, children.climb, TrialSlot(on="cpu"))
    assert [ending.samples for ending in plain.endings.values()] == [300, 300]
    assert plain.places == {0: "cpu", 1: "cpu"}


def test_in_this_process_a_signal_ends_the_study(tmp_path: Path) -> None:
    """A trial that stopped without a request was stopped by somebody: so is the study."""
    plain = Plain(tmp_path, [{"x": 1.0}, {"x": 2.0}])
    with pytest.raises(KeyboardInterrupt):
        run_here(plain, lambda *_: TrialResult(kind="stopped", samples=3), TrialSlot())
    assert list(plain.endings) == [0]


def test_in_this_process_a_trial_told_to_stop_early_does_not_end_the_study(tmp_path: Path) -> None:
    """One that was cut off gets several evaluations at once: the first verdict counts, whatever the last one."""

    def told_of_two(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        verdicts = [judge(TrialReading(samples=at, total_samples=900, metrics={"score": 0.0})) for at in (300, 100)]
        assert verdicts == [True, False]
        return TrialResult(kind="stopped", samples=310)

    plain = Plain(tmp_path, [{"x": 1.0}, {"x": 2.0}], stop_at=300)
    run_here(plain, told_of_two, TrialSlot())
    assert list(plain.endings) == [0, 1]


def test_a_function_answers_from_another_process_or_raises_its_error() -> None:
    """The same error, with its remedy."""
    assert in_a_process(children.doubled, ([1, 2],), TrialSlot()) == [2, 4]
    with pytest.raises(DoesNotFit) as error:
        in_a_process(children.doubled, ([],), TrialSlot())
    assert (error.value.message, error.value.remedy) == ("nothing to double", "Give a number.")


def test_what_cannot_go_to_another_process_is_refused() -> None:
    """A lambda, a function within a function: with what to do."""
    with pytest.raises(BadJob, match="cannot be given to another process"):
        Processes(lambda *_: TrialResult(kind="finished"), [TrialSlot()])
    with pytest.raises(BadJob, match="cannot be given to another process"):
        in_a_process(functools.partial(lambda: None), (), TrialSlot())
