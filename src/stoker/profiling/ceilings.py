"""Measured ceilings of a device: matrix products per dtype and memory bandwidths, in some ten seconds.

Method: each `RateProbe` is a function and the FLOPs or bytes of one call. Probes take turns in rounds, so that a burst
of other work on the machine hits all of them. In its turn a probe is called for a slice of time, which counts by its
median; over rounds and sizes the best slice is the ceiling. The median of everything would report a busy neighbour, the
shortest call a lucky reading of the clock. Slices are short, so that some fall between a neighbour's bursts; a constant
load is detected by `stoker.devices.cpu`, not here. Matrices grow until a call takes two slices: large enough to reach
the plateau, and in time on a slow device.

`Anchors` measure the present speed of a CPU by a few fixed calls, in a fraction of a second. The speed of a shared
machine changes from minute to minute by more than forecasts may be off; `micro_benchmark` times operations once and
anchors with them, and anchors measured later give the ratio.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from stoker.errors import NoDevice
from stoker.records import Ceilings, Device
from stoker.units import MIB

ROUNDS = 6
LONGEST_SLICE_S = 0.1
SLICES_IN_BUDGET = 150
MOST_READINGS = 1000
GEMM_SIZES = (512, 1024, 2048, 4096, 8192)

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RateProbe:
    """A function to time: one `run` does `work` [FLOPs or bytes] of `quantity`, such as `gemm/bf16`."""

    quantity: str
    work: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Stopwatch:
    """Times calls. `clock` reads seconds; `finish` waits for started work, on asynchronous devices.

    Calls are timed together for `calls_last_s` [s]: 0 times each alone, more hides the cost of waiting.
    """

    clock: Callable[[], float] = time.perf_counter
    finish: Callable[[], object] = lambda: None
    calls_last_s: float = 0.0

    def seconds(self, run: Callable[[], object], calls: int = 1) -> float:
        """Time of one of `calls` calls [s]."""
        started = self.clock()
        for _ in range(calls):
            run()
        self.finish()
        return (self.clock() - started) / calls

    def median_seconds(self, run: Callable[[], object], slice_s: float) -> float:
        """Median time of a call [s] over `slice_s` seconds of calling, at least two readings."""
        started = self.clock()
        first = max(self.seconds(run), 1e-9)
        calls = max(1, min(100, math.ceil(self.calls_last_s / first)))
        readings = [self.seconds(run, calls)]
        while self.clock() - started < slice_s and len(readings) < MOST_READINGS:
            readings.append(self.seconds(run, calls))
        return max(statistics.median(readings if calls > 1 else [first, *readings]), 1e-9)


_START_S = 5e-5
"""The host's time to start an operation on a GPU, amply [s]."""
_MOST_TRIES = 3
_CYCLES_PER_S = 2e9


@dataclass(frozen=True)
class GpuStopwatch(Stopwatch):
    """Times calls by a GPU's own clock, without the host's time to start them, which a slow host takes longer for.

    The GPU is kept waiting until all of them are queued; those that wait for the GPU themselves are timed with that.
    """

    device: str = "cuda:0"

    def seconds(self, run: Callable[[], object], calls: int = 1) -> float:
        """Time of one of `calls` calls [s]."""
        wait_s = calls * _START_S
        with torch.cuda.device(self.device):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_MOST_TRIES):
                started = self.clock()
                torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))  # noqa: SLF001 - PyTorch's own tests wait so
                before.record()
                for _ in range(calls):
                    run()
                after.record()
                were_queued, wait_s = not before.query(), 2 * (self.clock() - started)
                after.synchronize()
                if were_queued:
                    break
        return float(before.elapsed_time(after)) * 1e-3 / calls


def measure_ceilings(
    device: Device,
    *,
    threads: int | None = None,
    budget_s: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Ceilings:
    """Measure the rates of `device`; PyTorch's settings and random state are restored afterwards.

    Args:
        device: an attached device.
        threads: threads PyTorch computes with; if None, the device's cores (on a GPU they stay as they are).
        budget_s: longest time [s], except that one round is always done.
        clock: reads seconds.
        now: reads the date.

    Returns:
        Rates in FLOP/s (a product of n x n matrices is 2 n^3 FLOPs) and bytes/s (a copy is bytes read plus bytes
        written; host to device is the bytes that cross).

    Raises:
        NoDevice: PyTorch cannot compute on the device.
        ValueError: `threads` is below 1, or `budget_s` is not positive.
    """
    if (threads is not None and threads < 1) or not budget_s > 0:
        raise ValueError(f"threads must be at least 1 and budget_s positive, got {threads} and {budget_s}")
    require(device)
    started, watch = clock(), stopwatch_for(device, clock)
    slice_s = min(LONGEST_SLICE_S, budget_s / SLICES_IN_BUDGET)
    num_threads = threads or (device.cores if device.kind == "cpu" else None)
    precision_before = torch.backends.cuda.matmul.fp32_precision
    try:
        with computing_threads(num_threads), torch.inference_mode():
            probes = [*gemm_probes(device, watch, slice_s), *copy_probes(device)]
            rates = best_rates(probes, watch, slice_s=slice_s, deadline_s=started + budget_s)
            num_threads = torch.get_num_threads()
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision_before
    return Ceilings(
        device=device,
        threads=num_threads,
        gemm_flops={name.removeprefix("gemm/"): rate for name, rate in rates.items() if name.startswith("gemm/")},
        copy_bytes_per_s=rates["copy"],
        fresh_copy_bytes_per_s=rates["fresh copy"],
        host_to_device_bytes_per_s=rates.get("host to device"),
        took_s=clock() - started,
        measured_at=now().isoformat(timespec="seconds"),
        torch_version=torch.__version__,
    )


def best_rates(
    probes: Sequence[RateProbe], watch: Stopwatch, *, slice_s: float, deadline_s: float, rounds: int = ROUNDS
) -> dict[str, float]:
    """Best rate [work/s] of each quantity over its probes and over `rounds` turns of each.

    Args:
        probes: several may belong to one quantity.
        watch: the stopwatch.
        slice_s: length of a turn [s].
        deadline_s: reading of the clock after which no further round begins.
        rounds: turns of each probe, at most.
    """
    best: dict[str, float] = {}
    for _ in range(rounds):
        for probe in probes:
            rate = probe.work / watch.median_seconds(probe.run, slice_s)
            best[probe.quantity] = max(rate, best.get(probe.quantity, 0.0))
        if watch.clock() >= deadline_s:
            break
    return best


def gemm_probes(device: Device, watch: Stopwatch, slice_s: float) -> list[RateProbe]:
    """Square matrix products: fp32 and bf16 always, tf32 and fp16 where the device multiplies them natively."""
    native = set(device.fast_dtypes)
    names = [name for name in _DTYPES if name in ("fp32", "bf16") or name in native]
    return [probe for name in names for probe in on_the_plateau(functools.partial(_gemm, device, name), watch, slice_s)]


def copy_probes(device: Device) -> list[RateProbe]:
    """Copies of a buffer larger than any cache: over memory in use, into fresh memory, and from the host to a GPU."""
    num_bytes = copy_buffer_bytes(device)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.torch_name)
    target = torch.zeros_like(source)
    probes = [
        RateProbe("copy", 2 * source.nbytes, functools.partial(target.copy_, source)),
        RateProbe("fresh copy", 2 * source.nbytes, functools.partial(_into_fresh_memory, source)),
    ]
    if device.kind == "cuda":
        host = torch.ones(64 * MIB, dtype=torch.float32, pin_memory=True)
        here = torch.empty_like(host, device=device.torch_name)
        probes.append(RateProbe("host to device", host.nbytes, functools.partial(here.copy_, host, non_blocking=True)))
    return probes


def copy_buffer_bytes(device: Device) -> int:
    """Size of the copied buffer [bytes]: 16 MiB a core, more than the cache of any CPU sold; 256 MiB to 1 GiB.

    A small machine is not filled for it: at most 1/32 of the memory.
    """
    num_bytes = max(256 * MIB, min(1024 * MIB, 16 * MIB * device.cores))
    return min(num_bytes, max(4 * MIB, device.memory_bytes // 32)) if device.memory_bytes else num_bytes


def on_the_plateau(product_of_size: Callable[[int], RateProbe], watch: Stopwatch, slice_s: float) -> list[RateProbe]:
    """The three largest products that fit two slices [s]; on the slowest devices the smallest product alone."""
    kept: list[RateProbe] = []
    for size in GEMM_SIZES:
        kept.append(product_of_size(size))
        watch.seconds(kept[-1].run)  # Kernels are compiled, chosen or loaded at the first call.
        # The next size has twice the rows, columns and depth: eight times the work.
        if 8 * min(watch.seconds(kept[-1].run) for _ in range(3)) > 2 * slice_s:
            break
    return kept[-3:]


def _gemm(device: Device, name: str, size: int) -> RateProbe:
    """A product of two random matrices. Random, because GPUs draw less power, and run faster, on zeros."""
    dtype = _DTYPES[name]
    random = torch.Generator(device=device.torch_name).manual_seed(0)
    a, b = (torch.randn(size, size, generator=random, device=device.torch_name).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        if device.kind == "cuda" and dtype is torch.float32:
            torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        torch.mm(a, b, out=out)

    return RateProbe(f"gemm/{name}", 2.0 * size**3, run)


def _into_fresh_memory(source: torch.Tensor) -> None:
    """Copy into memory that the kernel, or the GPU's driver, has to map first, not an allocator's cache."""
    if source.is_cpu and hasattr(mmap, "MAP_PRIVATE"):
        pages = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(pages, dtype=source.dtype).copy_(source)
        return
    if source.is_cuda:
        torch.cuda.empty_cache()
    torch.empty_like(source).copy_(source)


def require(device: Device) -> None:
    """Raise NoDevice if PyTorch cannot compute on the device."""
    if device.kind == "cuda" and not (torch.cuda.is_available() and device.index < torch.cuda.device_count()):
        raise NoDevice(
            f"PyTorch {torch.__version__} cannot use {device.torch_name} ({device.model}); "
            f"it sees {torch.cuda.device_count()} CUDA devices.",
            remedy="Install a CUDA build of PyTorch that fits the driver, or use `--on cpu`.",
        )


def stopwatch_for(device: Device, clock: Callable[[], float]) -> Stopwatch:
    """A stopwatch for the device: a GPU's own clock is coarse, so short calls are timed in groups."""
    if device.kind == "cpu":
        return Stopwatch(clock)
    finish = functools.partial(torch.cuda.synchronize, device.torch_name)
    return GpuStopwatch(clock, finish, calls_last_s=1e-3, device=device.torch_name)


TURNS = 12
"""Turns of all anchors in one measurement, which takes about half a second."""
_SLICE_S = 4e-3
_SIZE, _ROWS, _WIDTH = 384, 2048, 512
_TINY_CALLS = 40

Run = Callable[[], object]
Turn = Mapping[str, float]
"""Mean time of a call of each anchor [s], of one turn."""


class Anchors:
    """Products, memory traffic, row operations and tiny calls, with their memory (about 20 MiB)."""

    def __init__(self) -> None:
        a, b, out = (torch.full((_SIZE, _SIZE), 0.5) for _ in range(3))
        narrow = [tensor.bfloat16() for tensor in (a, b, out)]
        images, kernel = torch.full((8, 32, 28, 28), 0.5), torch.full((32, 32, 3, 3), 0.5)
        x, y, result = (torch.full((_ROWS, _WIDTH), 0.5) for _ in range(3))
        tiny = torch.full((64,), 0.5)

        def tiny_calls() -> None:
            for _ in range(_TINY_CALLS):
                torch.neg(tiny, out=tiny)

        self._runs: dict[str, Run] = {
            "product in fp32": functools.partial(torch.mm, a, b, out=out),
            "product in bf16": functools.partial(torch.mm, narrow[0], narrow[1], out=narrow[2]),
            "convolution": functools.partial(torch.conv2d, images, kernel, padding=1),
            "sum of two": functools.partial(torch.add, x, y, out=result),
            "exponential of each": functools.partial(torch.exp, x, out=result),
            "softmax of rows": functools.partial(torch.softmax, x, -1, out=result),
            "norm of rows": functools.partial(torch.layer_norm, x, [_WIDTH]),
            "calls of next to nothing": tiny_calls,
        }
        for run in self._runs.values():
            run()

    def turn(self, clock: Callable[[], float]) -> Turn:
        """Mean time of each anchor over a slice of time [s]; disturbances count, as they do in updates."""
        seconds = {}
        with torch.inference_mode():
            for name, run in self._runs.items():
                started = now = clock()
                calls = 0
                while calls == 0 or now - started < _SLICE_S:
                    run()
                    calls += 1
                    now = clock()
                seconds[name] = max((now - started) / calls, 1e-9)
        return seconds


def measure_anchors(
    *, threads: int, turns: int = TURNS, clock: Callable[[], float] = time.perf_counter
) -> tuple[Turn, ...]:
    """Times of all anchors, turn by turn; PyTorch's number of threads is restored afterwards.

    Args:
        threads: threads PyTorch computes with.
        turns: number of turns.
        clock: reads seconds.
    """
    with computing_threads(threads):
        anchors = Anchors()
        return tuple(anchors.turn(clock) for _ in range(turns))


def usual(turns: Sequence[Turn]) -> dict[str, float]:
    """The median of each anchor over turns [s]."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]} if turns else {}


@contextlib.contextmanager
def computing_threads(count: int | None) -> Iterator[None]:
    """Run with `count` intra-op threads (None: unchanged), and restore their number afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
