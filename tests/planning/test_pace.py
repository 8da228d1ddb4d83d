from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.devices import attached_devices, cache_key, planned_devices
from stoker.loading.order import seed_generators
from stoker.planning import planner
from stoker.planning.planner import describe_errors, measured_hardware
from stoker.records import MicroBenchmark
from stoker.store import operations_cache, operations_key
from stoker.testing import fake_device

pytestmark = pytest.mark.usefixtures("place")

TIMED = MicroBenchmark(
    device=fake_device(),
    threads=1,
    timings=(),
    launch_s=0.0,
    took_s=1.0,
    measured_at="2026-11-22T12:00:00+00:00",
    torch_version="2",
    anchors_s={"product": 1e-3},
)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of threads that anchors were timed with; all take three times as long as in `TIMED`."""
    found: list[int] = []

    def timed(*, threads: int) -> tuple[dict[str, float], ...]:
        found.append(threads)
        return ({"product": 3e-3},)

    monkeypatch.setattr(planner, "measure_anchors", timed)
    monkeypatch.setattr("stoker.planning.planner.time.monotonic", lambda: 5.0)
    planner._turns_now.cache_clear()
    yield found
    planner._turns_now.cache_clear()


def test_a_machine_that_was_measured_is_looked_at_once_for_each_number_of_threads(looks: list[int]) -> None:
    """Plans that are compared are compared at one pace."""
    for threads in (1, 2, 1, 2):
        pace = planner.pace_now(replace(TIMED, threads=threads))
        assert pace is not None
        assert pace.factor == pytest.approx(3.0)
    assert looks == [1, 2]


def test_nothing_is_timed_where_there_is_nothing_to_compare_with(looks: list[int]) -> None:
    """Times without anchors, or of a GPU."""
    assert planner.pace_now(replace(TIMED, anchors_s={})) is None
    assert planner.pace_now(replace(TIMED, device=fake_device(kind="cuda"))) is None
    assert looks == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="`here` is a GPU")
def test_what_is_planned_here_is_planned_at_the_pace_of_now(
    looks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that were kept are taken at three times what they were, and the decision says so."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    [place] = planned_devices("here", attached_devices())
    assert measured_hardware(place, 1).slowdown == 1.0
    key = cache_key(place.device, torch.__version__)
    cache = operations_cache(tmp_path)
    cache.write(replace(TIMED, device=place.device), key, "1 threads")
    cache.write(replace(TIMED, device=place.device, threads=place.device.cores), key)
    assert measured_hardware(place, 1).slowdown == pytest.approx(3.0)
    [line] = describe_errors(place)
    assert "3.00 times as long" in line
    assert set(looks) == {1, place.device.cores}


def test_timing_the_host_changes_no_generator_and_needs_no_gradients_of_its_caller() -> None:
    """Neither Python's, NumPy's nor PyTorch's."""

    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002 - NumPy's global generator

    seed_generators(1)
    expected = drawn()
    seed_generators(1)
    with torch.no_grad():
        found = planner._host_now.__wrapped__("cpu")
    assert found.keys() == {"forward", "backward", "optimizer", "update"}
    assert drawn() == expected


def test_a_driver_without_memory_leaves_the_usual_times_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error has no class of its own; any other is the caller's."""
    for message, is_shortage in (("CUDA error: out of memory", True), ("CUDA error: misaligned address", False)):

        def fail(problem: str = message, **_: object) -> dict[str, float]:
            raise RuntimeError(problem)

        monkeypatch.setattr(planner, "host_seconds", fail)
        with contextlib.nullcontext() if is_shortage else pytest.raises(RuntimeError, match="misaligned"):
            assert planner._host_now.__wrapped__("cpu") == {}


def test_what_earlier_versions_kept_of_a_gpu_is_not_read(tmp_path: Path) -> None:
    """Its times of the host were a CPU's; what was kept of a CPU is read as before."""
    cache, gpu, cpu = operations_cache(tmp_path), "cuda-h100-0a", "cpu-epyc-0b"
    for key in (gpu, cpu):
        cache.write(TIMED, key)
    assert cache.read(*operations_key(gpu, None)) is None
    assert cache.read(*operations_key(cpu, None)) == TIMED
