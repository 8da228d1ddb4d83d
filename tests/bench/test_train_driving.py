"""Which slices count, how they are tried again, and what is reported to a contender."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.train.cases import CASES, quick
from bench.train.contenders import CONTENDERS
from bench.train.driving import MOST_OTHERS, TRIES, Slice, environment, on_last_cores, process_seconds, until_clean
from bench.train.pacing import WARM_UP_S, WARM_UP_UPDATES, Pacer


def _slice(others: float, *, samples: int = 10, stolen: float = 0.0) -> Slice:
    return Slice(samples=samples, updates=2, wall_s=1.0, cpu_s=1.0, others=others, stolen=stolen)


def test_a_slice_counts_if_others_left_the_cpus_alone() -> None:
    """Other processes and the host's other guests, each by itself, may take less than 6 %."""
    assert _slice(0.059).is_clean(MOST_OTHERS)
    assert not _slice(0.06).is_clean(MOST_OTHERS)
    assert not _slice(0.0, stolen=0.06).is_clean(MOST_OTHERS)


def test_speed_plays_no_part_in_what_counts() -> None:
    """The first quiet slice is kept, though a disturbed one before it was faster, and none after it is tried."""
    coming = iter([_slice(0.5, samples=1000), _slice(0.01, samples=1), _slice(0.0, samples=1000)])
    found = until_clean(lambda: next(coming), MOST_OTHERS)
    assert [one.samples for one in found] == [1000, 1]


def test_a_turn_ends_though_the_machine_stays_busy() -> None:
    """After four tries the round goes without."""
    found = until_clean(lambda: _slice(0.9), MOST_OTHERS)
    assert len(found) == TRIES
    assert not found[-1].is_clean(MOST_OTHERS)


def test_cpu_time_of_a_process_is_the_kernels() -> None:
    """The CPU time of this process grows with its work; that of an ended process is nothing."""
    before = process_seconds(os.getpid())
    while process_seconds(os.getpid()) < before + 0.02:
        sum(range(10_000))
    spent = os.times()
    assert process_seconds(os.getpid()) == pytest.approx(sum(spent[:4]), abs=0.05)
    assert process_seconds(2**22 + 1) == 0.0


def test_contenders_have_the_cases_threads_and_nothing_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread means one for all contenders; the caller's allocator reaches none of them."""
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so")
    found = environment(CONTENDERS["keras_jax"], CASES["mlp"], tmp_path)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["KERAS_BACKEND"] == "jax"
    assert "LD_PRELOAD" not in found
    assert environment(CONTENDERS["plain"], CASES["gpt"], tmp_path)["OMP_NUM_THREADS"] == "2"


def test_contenders_have_the_cases_cores_whatever_they_make_of_its_threads() -> None:
    """A process keeps the core it was started with; the one that started it has all of its own again."""
    mine = os.sched_getaffinity(0)
    told = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with on_last_cores(1):
        started = subprocess.run(told, check=True, capture_output=True, text=True)
    assert started.stdout.strip() == str(sorted(mine)[-1:])
    assert os.sched_getaffinity(0) == mine


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Left(Exception):
    pass


def _leave(_code: int) -> None:
    raise _Left


def _updates_until_left(pacer: Pacer, clock: _Clock, update_s: float) -> int:
    """Updates of so many seconds that a contender makes until it is stopped."""
    for number in itertools.count(1):
        clock.now_s += update_s
        try:
            pacer.updated(8, lambda: 1.5)
        except _Left:
            return number
    raise AssertionError("counting does not end")


def _answers(text: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def test_a_contender_trains_when_told_and_says_what_it_did() -> None:
    """Warm-up, one slice of half a second, the end: updates and samples of the slice alone are counted."""
    clock, answers = _Clock(), io.StringIO()
    commands = io.StringIO('{"slice_s": 0.5, "least_updates": 2}\n{"stop": true}\n')
    pacer = Pacer(commands, answers, started=90.0, clock=clock, leave=_leave)
    updates = _updates_until_left(pacer, clock, 0.2)
    ready, done, _ = _answers(answers)
    assert ready["losses"] == [1.5] * WARM_UP_UPDATES
    assert ready["first_update_s"] == pytest.approx(10.2)
    assert (done["updates"], done["samples"]) == (3, 24)
    assert done["wall_s"] == pytest.approx(0.6)
    assert updates == 1 + round(WARM_UP_S / 0.2) + 3


def test_a_slice_has_its_updates_though_they_are_long() -> None:
    """Of updates that take longer than the slice, there are as many as asked for."""
    clock, answers = _Clock(), io.StringIO()
    commands = io.StringIO('{"slice_s": 0.5, "least_updates": 2}\n{"stop": true}\n')
    pacer = Pacer(commands, answers, started=100.0, clock=clock, leave=_leave)
    _updates_until_left(pacer, clock, 3.0)
    assert _answers(answers)[1]["updates"] == 2


def test_updates_that_take_back_what_was_left_to_others_do_not_count() -> None:
    """Before each rest something is left to others; the first two updates after it are in no slice."""
    clock, answers, rests = _Clock(), io.StringIO(), []
    commands = io.StringIO('{"slice_s": 0.5, "least_updates": 2}\n{"stop": true}\n')
    pacer = Pacer(commands, answers, started=90.0, clock=clock, leave=_leave)
    pacer.settling_updates, pacer.before_rest = 2, lambda: rests.append(clock.now_s)
    updates = _updates_until_left(pacer, clock, 0.2)
    _, done, _ = _answers(answers)
    assert (done["updates"], done["samples"]) == (3, 24)
    assert done["wall_s"] == pytest.approx(0.6)
    assert updates == 1 + round(WARM_UP_S / 0.2) + 2 + 3
    assert len(rests) == 2


def test_updates_that_choose_settings_are_warming_up() -> None:
    """A contender that tries plans on its first updates is measured once it has settled, five seconds in."""
    clock, answers = _Clock(), io.StringIO()
    commands = io.StringIO('{"slice_s": 0.5, "least_updates": 2}\n{"stop": true}\n')
    pacer = Pacer(commands, answers, started=90.0, clock=clock, leave=_leave)
    began = clock.now_s
    pacer.is_choosing = lambda: clock.now_s - began < 5.0
    updates = _updates_until_left(pacer, clock, 0.2)
    assert _answers(answers)[1]["updates"] == 3
    assert updates == pytest.approx(25 + 3, abs=1)


def test_time_spent_waiting_is_told_to_the_contender() -> None:
    """Stoker's clock stands still during that time."""
    clock = _Clock()

    class Slow(io.StringIO):
        def readline(self, *_arguments: object) -> str:
            clock.now_s += 30.0
            return super().readline()

    pacer = Pacer(Slow('{"slice_s": 9, "least_updates": 2}\n'), io.StringIO(), started=100.0, clock=clock)
    waited = []
    for _ in range(WARM_UP_UPDATES):
        clock.now_s += 1.0
        waited.append(pacer.updated(8, lambda: 1.5))
    assert waited == [0.0] * (WARM_UP_UPDATES - 1) + [30.0]


def test_a_quick_case_is_small_and_still_the_case() -> None:
    """A rehearsal runs the same architectures."""
    for case in CASES.values():
        small = quick(case)
        assert small.architecture == case.architecture
        assert small.is_text == case.is_text
        assert small.threads == 1
