"""The watchdog: what counts as a hang, what is written, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.activity import doing, is_long
from stoker.errors import BadJob, RunFailed
from stoker.loading.samples import ItemSamples, Samples
from stoker.loading.streams import as_stream
from stoker.loading.workers import WorkerWatch, by_workers
from stoker.records import Estimate
from stoker.training.signals import StopRequest, stop_on_signals
from stoker.training.watchdog import PATIENCE_VARIABLE, Watchdog, WatchdogPatience, patience_s, slowest_phase_s
from tests.reporting.story import forecast

SOON_S = 0.05


class Laps:
    """A run that has made some updates, none of which took long."""

    def __init__(self, num_laps: int = 10, longest_s: float = 0.0) -> None:
        self.num_laps, self.longest_s = num_laps, longest_s


class Heard(list[str]):
    """What was reported, and an event for when it was."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def __call__(self, words: str) -> None:
        """Keep the words."""
        self.append(words)
        self.event.set()


def watching(tell: Heard, stop: StopRequest | None = None, **settings: Any) -> Watchdog:
    """A watchdog with little patience."""
    given = {"laps": Laps(), "workers": WorkerWatch(), "least_s": SOON_S} | settings
    return Watchdog(given.pop("laps"), given.pop("workers"), stop or StopRequest(), tell=tell, **given)


def test_a_main_thread_that_hangs_is_told_of_with_its_stack_and_then_ended(tmp_path: Path) -> None:
    """In Python's own wait, as a socket would be: the verdict is raised out of it."""
    told = Heard()
    with stop_on_signals() as stop, watching(told, stop, dumps=tmp_path / "dumps"):  # noqa: SIM117 - the watchdog outlives the error
        with pytest.raises(RunFailed, match="training hangs: nothing has moved for") as caught:
            threading.Event().wait(60)
    assert PATIENCE_VARIABLE in (caught.value.remedy or "")
    assert str(tmp_path / "dumps" / "stacks.txt") in told[0]
    assert "test_watchdog.py" in (tmp_path / "dumps" / "stacks.txt").read_text()


def test_a_main_thread_that_heeds_nothing_takes_the_process_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a call into a library that never comes back: the process ends, with the exit code of a failure."""
    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    stop = StopRequest()
    with stop_on_signals() as heeding, watching(Heard(), stop, leave=leave):
        assert left.wait(60)  # this wait goes on when the signal has only set `heeding`
        assert heeding.reason == "SIGINT"
    assert codes == [RunFailed.exit_code]
    assert "training hangs" in capsys.readouterr().err


def test_workers_that_send_nothing_are_ended(tmp_path: Path) -> None:
    """Reported with the stacks, and killed for a reason that the next event repeats."""
    workers, told, killed = WorkerWatch(), Heard(), threading.Event()
    workers.is_waiting = True
    reasons: list[str] = []

    def kill(why: str) -> int:
        reasons.append(why)
        workers.is_waiting = False
        killed.set()
        return 2

    workers.kill = kill  # type: ignore[method-assign]
    laps = Laps()
    with watching(told, workers=workers, laps=laps, dumps=tmp_path):
        assert killed.wait(60)
        laps.num_laps += 1
    assert reasons[0].startswith("no batch came for")
    assert "the workers are replaced" in told[0]
    assert "nothing was heard of them" in (tmp_path / "stacks.txt").read_text()


def test_a_run_that_moves_is_left_alone() -> None:
    """However slowly, as long as it is within its own measure."""
    told, laps = Heard(), Laps()
    with watching(told, laps=laps, least_s=0.6):
        for _ in range(10):
            laps.num_laps += 1
            assert not told.event.wait(0.1)


class Slow(torch.utils.data.IterableDataset):
    """A stream of 20 samples, each of which takes `pause_s` [s]."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(len(self)):
            threading.Event().wait(self.pause_s)
            yield torch.tensor([float(index)])


@pytest.mark.parametrize("loader", ["inline", "workers"])
def test_a_stream_that_is_read_again_moves(loader: str) -> None:
    """A resumed run reads up to its place before it makes a lap, in this process or in a worker: that is no hang."""
    told, workers, last = Heard(), WorkerWatch(), np.array([19])
    samples = as_stream(Slow(0.1), what="data")
    with stop_on_signals() as stop, watching(told, stop, workers=workers, least_s=1.0):
        if loader == "inline":
            content = samples.fetch(last, 0)
        else:
            ((_, content),) = by_workers(samples, iter([(0, last)]), 1, 1, is_pinned=False, watch=workers)
    assert content.tolist() == [[19.0]]
    assert not told


class Stuck(torch.utils.data.Dataset):
    """A dataset that hangs."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(60.0)
        return torch.zeros(1)


@pytest.mark.parametrize("samples", [as_stream(Slow(60.0), what="data"), ItemSamples(Stuck(), None, 0)])
def test_the_verdict_on_data_that_hang_is_no_fault_of_a_sample(samples: Samples) -> None:
    """It comes out of the read as it is, with its remedy."""
    with stop_on_signals() as stop, watching(Heard(), stop):  # noqa: SIM117 - the watchdog outlives the error
        with pytest.raises(RunFailed, match="training hangs: nothing has moved for"):
            samples.fetch(np.array([0]), 0)


def test_patience_follows_what_updates_take() -> None:
    """Ten times the longest lap or the forecast; the floor is higher at first, and while a checkpoint is written."""

    def of(laps: Laps, **settings: Any) -> float:
        return watching(Heard(), laps=laps, least_s=60.0, **settings).patience_s()

    assert of(Laps()) == 60
    assert of(Laps(longest_s=30)) == 300
    assert of(Laps(), slowest_s=100.0) == 1000
    assert of(Laps(num_laps=2)) == 1200
    assert of(Laps(), is_busy=lambda: True) == 1200
    with doing("compiling", is_long=True):
        assert of(Laps(), is_busy=is_long) == 1200
    assert of(Laps(), is_busy=is_long) < 1200


def test_patience_with_other_processes_follows_the_slowest_phase() -> None:
    """Half a minute of a disk is no loss; nor are minutes where an evaluation, or an interval of sites, takes long."""
    step_s, evaluate_s, checkpoint_s = (
        Estimate(value=value, low=0.0, high=1e3, unit="s", basis="roofline") for value in (2.0, 50.0, 1.0)
    )
    slow = dataclasses.replace(forecast(), step_s=step_s, evaluate_s=evaluate_s, checkpoint_s=checkpoint_s)
    assert (slowest_phase_s(slow), slowest_phase_s(slow, sync_interval=100)) == (50.0, 200.0)
    assert WatchdogPatience.of(0.1, {}) == WatchdogPatience(others_s=300.0, answer_s=20.0)
    assert WatchdogPatience.of(50.0, {}) == WatchdogPatience(others_s=500.0, answer_s=500.0)
    assert WatchdogPatience.of(0.1, {PATIENCE_VARIABLE: "3"}) == WatchdogPatience(others_s=3.0, answer_s=3.0)
    assert WatchdogPatience.of(0.1, {PATIENCE_VARIABLE: "0"}).others_s > 86_400


def test_the_environment_sets_the_patience() -> None:
    """In seconds; 0 switches the watchdog off, and what is no number of seconds is refused."""
    assert [patience_s({PATIENCE_VARIABLE: given}) for given in ("5", "0", "")] == [5.0, 0.0, 60.0]
    assert patience_s({}, processes=2) == 300.0
    for given in ("soon", "-1", "nan", "inf"):
        with pytest.raises(BadJob, match=f"STOKER_WATCHDOG={given} is no number of seconds"):
            patience_s({PATIENCE_VARIABLE: given})
    before = threading.active_count()
    with watching(Heard(), least_s=0):
        assert threading.active_count() == before
    assert PATIENCE_VARIABLE not in os.environ
