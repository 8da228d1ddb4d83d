from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
import torch

from stoker.errors import NoDevice
from stoker.profiling.ceilings import (
    MOST_READINGS,
    RateProbe,
    Stopwatch,
    best_rates,
    copy_buffer_bytes,
    copy_probes,
    gemm_probes,
    measure_ceilings,
    on_the_plateau,
)
from stoker.records import Device
from stoker.units import GIB, MIB

CPU = Device(name="cpu", kind="cpu", model="some CPU", cores=1, memory_bytes=256 * MIB, fast_dtypes=("fp32",))
GPU = Device(
    name="cuda:0", kind="cuda", model="NVIDIA L4", cores=58, memory_bytes=22 * GIB, fast_dtypes=("fp32", "bf16")
)
FOREVER_S = 1e9


@dataclass
class FakeTime:
    """A clock that calls advance: each by the next of its durations [s], and then by the last again and again."""

    now_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def taking(self, name, *durations_s):
        durations = itertools.chain(durations_s, itertools.repeat(durations_s[-1]))

        def run() -> None:
            self.calls.append(name)
            self.now_s += next(durations)

        return run


def test_a_rate_is_work_over_the_time_of_a_call():
    """Calls of 4 s and work of 8 are 2 a second."""
    time = FakeTime()
    rates = best_rates(
        [RateProbe("p", 8.0, time.taking("p", 4.0))], Stopwatch(time.clock), slice_s=10, deadline_s=FOREVER_S
    )
    assert rates == {"p": pytest.approx(2.0)}


def test_within_a_slice_the_median_counts_and_over_slices_the_best():
    """One lucky call makes no ceiling, and one disturbed slice hides none."""
    time = FakeTime()
    disturbed, quiet = [9.0, 9.0, 9.0], [1.0, 3.0, 3.0, 3.0]  # A slice lasts 10 s: two calls, four, two.
    probe = RateProbe("p", 6.0, time.taking("p", *disturbed[:2], *quiet, *disturbed))
    rates = best_rates([probe], Stopwatch(time.clock), slice_s=10.0, deadline_s=FOREVER_S, rounds=3)
    assert rates["p"] == pytest.approx(2.0)


def test_sizes_of_one_quantity_compete():
    """The ceiling of a dtype is that of its best size."""
    time = FakeTime()
    probes = [
        RateProbe("gemm/fp32", 10.0, time.taking("small", 5.0)),
        RateProbe("gemm/fp32", 80.0, time.taking("large", 10.0)),
    ]
    assert best_rates(probes, Stopwatch(time.clock), slice_s=1, deadline_s=FOREVER_S)["gemm/fp32"] == pytest.approx(8.0)


def test_probes_take_turns():
    """A burst of other work hits all probes: none is done before the others begin."""
    time = FakeTime()
    probes = [RateProbe("a", 1.0, time.taking("a", 1.0)), RateProbe("b", 1.0, time.taking("b", 1.0))]
    best_rates(probes, Stopwatch(time.clock), slice_s=2.0, deadline_s=FOREVER_S, rounds=2)
    assert [name for name, _ in itertools.groupby(time.calls)] == ["a", "b", "a", "b"]


def test_no_round_begins_after_the_deadline():
    """One round is always done; a slow device gets no second."""
    time = FakeTime()
    rates = best_rates(
        [RateProbe("slow", 100.0, time.taking("slow", 50.0))],
        Stopwatch(time.clock),
        slice_s=1.0,
        deadline_s=20.0,
        rounds=4,
    )
    assert rates["slow"] == pytest.approx(2.0)
    assert len(time.calls) == 2


def test_a_clock_that_stands_still_ends_the_slice():
    """The number of readings is bounded, whatever the clock says, and no rate is infinite."""
    seconds = Stopwatch(lambda: 7.0).median_seconds(lambda: None, slice_s=1.0)
    assert 0 < seconds < 1e-6
    calls = []
    Stopwatch(lambda: 7.0).median_seconds(lambda: calls.append(1), slice_s=1.0)
    assert len(calls) == MOST_READINGS + 1


def test_calls_that_work_aside_are_timed_together_and_waited_for():
    """On a GPU the wait of 1 s is shared by the calls timed together, and each reading has one."""
    time = FakeTime()
    watch = Stopwatch(time.clock, finish=time.taking("wait", 1.0), calls_last_s=100.0)
    assert watch.median_seconds(time.taking("call", 1.0), slice_s=0.0) == pytest.approx(1.0 + 1.0 / 50)
    assert time.calls == ["call", "wait", *["call"] * 50, "wait"]


@pytest.mark.parametrize(
    ("gflops", "sizes"), [(1, [512]), (50, [512, 1024]), (200, [512, 1024, 2048]), (1e6, [2048, 4096, 8192])]
)
def test_sizes_grow_with_the_speed_of_the_device(gflops, sizes):
    """The three largest sizes whose products fit two slices are kept, and one for a device as slow as can be."""
    time = FakeTime()

    def product(size):
        flops = 2.0 * size**3
        return RateProbe(str(size), flops, time.taking(str(size), flops / (gflops * 1e9)))

    kept = on_the_plateau(product, Stopwatch(time.clock), slice_s=0.1)
    assert [int(probe.quantity) for probe in kept] == sizes


@pytest.mark.slow
def test_dtypes_that_are_measured():
    """fp32 and bf16 always, fp16 where it is native: elsewhere one product of 2048 takes most of a minute."""
    slow = Stopwatch(itertools.count().__next__)
    assert [probe.quantity for probe in gemm_probes(CPU, slow, 1.0)] == ["gemm/fp32", "gemm/bf16"]
    native = Device(name="cpu", kind="cpu", model="m", cores=1, memory_bytes=GIB, fast_dtypes=("fp32", "fp16", "int8"))
    assert {probe.quantity for probe in gemm_probes(native, slow, 1.0)} == {"gemm/fp32", "gemm/bf16", "gemm/fp16"}


def test_a_product_is_the_product_and_counts_two_n_cubed():
    """What is timed is the product of the two matrices, in the dtype it is named for."""
    probe = gemm_probes(CPU, Stopwatch(itertools.count().__next__), 1.0)[0]
    a, b, out = (inspect.getclosurevars(probe.run).nonlocals[name] for name in ("a", "b", "out"))
    probe.run()
    assert probe.work == 2 * 512**3
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, a @ b)


def test_copies_copy():
    """Both copies move every byte, and count it read and written."""
    probes = {probe.quantity: probe for probe in copy_probes(CPU)}
    assert set(probes) == {"copy", "fresh copy"}
    copy = probes["copy"]
    target, (source,) = copy.run.func.__self__, copy.run.args
    assert copy.work == probes["fresh copy"].work == 2 * 8 * MIB
    copy.run()
    probes["fresh copy"].run()
    assert torch.equal(target, source)
    assert source.sum() == source.numel()


@pytest.mark.parametrize(
    ("cores", "memory", "buffer"),
    [(2, 24 * GIB, 256 * MIB), (32, 256 * GIB, 512 * MIB), (96, 768 * GIB, GIB), (2, GIB, 32 * MIB), (2, 0, 256 * MIB)],
)
def test_the_copied_buffer_exceeds_caches_and_not_the_memory(cores, memory, buffer):
    """16 MiB a core exceed any cache; a small container is not filled with buffers."""
    device = Device(name="cpu", kind="cpu", model="m", cores=cores, memory_bytes=memory, fast_dtypes=("fp32",))
    assert copy_buffer_bytes(device) == buffer


@pytest.mark.slow
def test_measuring_this_cpu_leaves_no_trace():
    """Rates are positive and dated; threads, precision and random state of PyTorch are as before."""
    threads, precision = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    state = torch.random.get_rng_state().clone()
    day = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    measured = measure_ceilings(CPU, threads=threads + 1, budget_s=0.2, now=lambda: day)
    assert set(measured.gemm_flops) == {"fp32", "bf16"}
    assert min(measured.gemm_flops.values()) > 1e6
    assert measured.copy_bytes_per_s > 1e6
    assert measured.fresh_copy_bytes_per_s > 1e6
    assert measured.host_to_device_bytes_per_s is None
    assert measured.threads == threads + 1
    assert measured.took_s > 0
    assert measured.measured_at == "2026-11-21T12:00:00+00:00"
    assert measured.torch_version == torch.__version__
    assert (torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision) == (threads, precision)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_settings_are_put_back_after_a_failure():
    """A clock that breaks in mid-measurement does not leave PyTorch on other threads."""
    before = torch.get_num_threads()
    readings = itertools.count()

    def clock() -> float:
        if next(readings) > 3:
            raise OSError("the clock broke")
        return 0.0

    with pytest.raises(OSError, match="the clock broke"):
        measure_ceilings(CPU, threads=before + 1, clock=clock)
    assert torch.get_num_threads() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch that sees no GPU")
def test_a_gpu_pytorch_cannot_use_is_refused():
    """A GPU with a CPU build of PyTorch is an error with a remedy, not a crash inside CUDA."""
    with pytest.raises(NoDevice, match=r"cannot use cuda:0 \(NVIDIA L4\)") as caught:
        measure_ceilings(GPU)
    assert "--on cpu" in caught.value.remedy


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"threads": -1}, {"budget_s": 0.0}, {"budget_s": float("nan")}])
def test_impossible_requests_are_refused(wrong):
    """No threads and no time are mistakes of the caller's."""
    with pytest.raises(ValueError, match="at least 1"):
        measure_ceilings(CPU, **wrong)


@pytest.mark.gpu
def test_measuring_a_gpu():
    """Every native dtype and the way from the host are measured, and reduced precision is not slower than fp32."""
    from stoker.devices import attached_devices
    from stoker.testing.simulated_gpu import is_simulated

    device = next(device for device in attached_devices() if device.kind == "cuda")
    measured = measure_ceilings(device, budget_s=10.0)
    assert set(measured.gemm_flops) == {"fp32", "bf16"} | ({"tf32", "fp16"} & set(device.fast_dtypes))
    assert measured.host_to_device_bytes_per_s < measured.copy_bytes_per_s
    if "bf16" in device.fast_dtypes and not is_simulated():
        assert measured.gemm_flops["bf16"] > measured.gemm_flops["fp32"]
    assert measured.took_s < 20
