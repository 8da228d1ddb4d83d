from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from stoker.devices.cpu import CpuLoad, CpuSample, load_between, others_cores, parse_stat, sample_cpu, watch_cpu

STAT = """\
cpu  8071 0 3274 172678 551 0 68 15 0 0
cpu0 4000 100 1500 86000 300 10 30 10 0 0
cpu1 4071 0 1774 86678 251 0 38 5 0 0
intr 1234
ctxt 99
"""


def test_only_the_usable_cpus_count():
    """A process pinned to one CPU is not disturbed by work on the others."""
    one = parse_stat(STAT, {1}, ticks_per_s=100, own_s=2.0)
    assert one.busy_s == pytest.approx((4071 + 1774 + 38) / 100)
    assert one.stolen_s == pytest.approx(0.05)
    assert one.total_s == pytest.approx((4071 + 1774 + 38 + 5 + 86678 + 251) / 100)
    assert one.own_s == 2.0
    both = parse_stat(STAT, {0, 1}, ticks_per_s=100, own_s=0.0)
    assert both.busy_s == pytest.approx(one.busy_s + (4000 + 100 + 1500 + 10 + 30) / 100)


def test_a_text_without_the_cpus_is_none():
    """Nothing is made up where the kernel does not tell."""
    assert parse_stat("cpu  1 2 3 4\n", {0}, ticks_per_s=100, own_s=0.0) is None
    assert parse_stat("", {0}, ticks_per_s=100, own_s=0.0) is None


def test_old_kernels_list_fewer_states():
    """Four numbers are user, nice, system and idle; the rest count as nothing."""
    sample = parse_stat("cpu0 10 0 10 80\n", {0}, ticks_per_s=10, own_s=0.0)
    assert (sample.busy_s, sample.stolen_s, sample.total_s) == (2.0, 0.0, 10.0)


def test_own_work_is_not_a_neighbour():
    """Of two CPUs for 10 s, 13 s busy and 9 s our own leave a fifth to others; a twentieth went to the host."""
    before = CpuSample(busy_s=100.0, stolen_s=1.0, total_s=1000.0, own_s=5.0)
    after = CpuSample(busy_s=113.0, stolen_s=2.0, total_s=1020.0, own_s=14.0)
    assert load_between(before, after) == CpuLoad(others=pytest.approx(0.2), stolen=pytest.approx(0.05))


def test_coarse_clocks_never_give_less_than_nothing():
    """Ticks of a hundredth of a second may count less than our own time, or nothing at all."""
    start = CpuSample(busy_s=1.0, stolen_s=0.0, total_s=10.0, own_s=0.0)
    assert load_between(start, CpuSample(busy_s=1.1, stolen_s=0.0, total_s=10.2, own_s=0.15)).others == 0.0
    assert load_between(start, start) == CpuLoad(0.0, 0.0)


def test_watching_waits_once_and_gives_fractions():
    """The thin function samples, waits by the sleep it was given, and samples again."""
    waits: list[float] = []
    load = watch_cpu(0.5, sleep=waits.append)
    assert waits == [0.5]
    if sample_cpu() is not None:
        assert 0.0 <= load.others <= 1.0
        assert 0.0 <= load.stolen <= 1.0


@pytest.mark.parametrize(
    ("load", "is_quiet"), [((0.0, 0.0), True), ((0.1, 0.05), True), ((0.11, 0.0), False), ((0.0, 0.06), False)]
)
def test_measurements_under_load_are_not_to_be_kept(load, is_quiet):
    """A tenth of the CPUs in other hands, or a twentieth taken by the host, is the most."""
    assert CpuLoad(*load).is_quiet is is_quiet


def test_what_others_hold_is_told_in_cores():
    """Of two CPUs for 10 s: 4 s of others and 1 s of the host's guests are half a core."""
    before = CpuSample(busy_s=100.0, stolen_s=1.0, total_s=1000.0, own_s=5.0)
    after = CpuSample(busy_s=113.0, stolen_s=2.0, total_s=1020.0, own_s=14.0)
    assert others_cores(before, after, 10.0) == pytest.approx(0.5)
    assert others_cores(before, before, 0.0) == 0.0


def test_loader_workers_are_our_own():
    """What a running child computes is no neighbour's."""
    context = multiprocessing.get_context("spawn")
    before = sample_cpu()
    if before is None:
        pytest.skip("this system has no /proc/stat")
    worker = context.Process(target=_compute, daemon=True)
    worker.start()
    try:
        deadline = time.monotonic() + 60
        used = 0.0
        while used < 0.3 and time.monotonic() < deadline:
            used = sample_cpu().own_s - before.own_s
        spent = os.times()
        mine = spent.user + spent.system + spent.children_user + spent.children_system
        assert sample_cpu().own_s > mine
    finally:
        worker.kill()
        worker.join()


def _compute() -> None:
    while True:
        pass
