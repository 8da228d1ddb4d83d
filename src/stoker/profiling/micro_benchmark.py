"""Times of single operations on a device, from which the times of whole updates are made: at most a minute, once.

Method, as in `ceilings`: all calls take turns in rounds, so that a burst of other work on the machine hits all of them
alike. A turn counts by its median, and a call by its best turn but one of three or more, since neighbours only ever
slow it down. Operands come from ever other memory (`operations.Pool`). Nothing here knows a model.

On a CPU a call that is made over and over finds its code and its operands in the nearest caches, which in an update it
does not. So calls of many kinds are also made once each, one after another, a few times over. With several threads,
what moves many bytes and multiplies none counts by these passes alone; what is small by a mean of both, since a small
update leaves more in the caches; large products and convolutions by their turns, which passes hardly differ from. And
anchors are timed now and then among the calls, so that a later look at them tells how fast the machine was meanwhile.

What was timed in one round alone is not worth much: one reading in ten is then off by a factor of two. On a slow
machine fewer calls are timed, and all of them twice.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from stoker.devices.malloc import apply_malloc
from stoker.profiling import thread_count
from stoker.profiling.anchors import Anchors, Turn, usual
from stoker.profiling.ceilings import Stopwatch, require, stopwatch_for
from stoker.profiling.host import host_seconds
from stoker.profiling.operations import Call, Caller, Pool, benchmark_calls, prepare
from stoker.profiling.tracing.operations import operation_of
from stoker.records import Device, Malloc
from stoker.records.hardware import MicroBenchmark, Timing
from stoker.records.trace import Operation
from stoker.units import MIB

ROUNDS = 3
SLICE_S = 3e-3
POOL_BYTES = 96 * MIB
"""Three times the last cache of a CPU that serves a few cores; on a GPU, of any so far."""

_TOGETHER = 64
"""Calls that are made one after another: about as many kinds as an update has, and few enough that none is compiled
anew, since oneDNN keeps 1024 compiled kernels, of which a convolution needs several."""
_PASSES = 2
_LARGE_BYTES = MIB
"""Operands that, read and written, are more than a CPU's second cache holds beside others."""
_ANCHORS_EVERY_S = 0.5
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class _Shares:
    """How far a call's time [logarithm] is that after others, and not that over and over [fraction].

    Of what is `small`, and of `traffic`: what is large, and takes as long as its operands take to come and go. Large
    products have none; `among_products`: they are made between the others all the same, and drive what these need out
    of the caches, as in updates.
    """

    small: float = 0.0
    traffic: float = 0.0
    among_products: bool = False


_ON_ALL_CORES = _Shares(small=0.5, traffic=1.0, among_products=True)
_ON_ONE_CORE = _Shares(small=0.3)
"""Those by which updates come out right (docs/log.md, 2026-11-22); of one core as measured on an Intel CPU."""


@dataclass
class _Timed:
    """A call, its record, how long it took in each turn so far, and when it came after all the others [s]."""

    caller: Caller
    operation: Operation
    turns: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    shares: _Shares = _Shares()

    @property
    def seconds(self) -> float:
        after_others = statistics.median(self.passes) if self.passes else math.nan
        if self.share_of_passes == 1 and self.passes:
            return after_others
        over_and_over = sorted(self.turns)[min(1, len(self.turns) - 1) if len(self.turns) > 2 else 0]
        if not self.passes or not self.share_of_passes:
            return over_and_over
        return float(over_and_over ** (1 - self.share_of_passes) * after_others**self.share_of_passes)

    @property
    def share_of_passes(self) -> float:
        """How far its time after others counts."""
        if self.is_of_memory:
            return 0.0
        if self.operation.bytes_read + self.operation.bytes_written < _LARGE_BYTES:
            return self.shares.small
        return 0.0 if self.operation.flops else self.shares.traffic

    @property
    def is_usable(self) -> bool:
        """Not where time was over before its passes: large results were then had from the system in its one turn."""
        return self.share_of_passes < 1 or bool(self.passes)

    @property
    def is_of_memory(self) -> bool:
        """Whether it is there to show what memory costs that is had from the system each time."""
        return self.operation.name == "zeros"


def measure_operations(
    device: Device,
    *,
    threads: int | None = None,
    budget_s: float = 60.0,
    clock: Callable[[], float] = time.perf_counter,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    calls: Sequence[Call] | None = None,
) -> MicroBenchmark:
    """Time single operations on `device`; PyTorch's settings and random state are as before afterwards.

    Args:
        device: an attached device.
        threads: threads PyTorch computes with; if None, the device's cores (on a GPU they stay as they are).
        budget_s: time it takes at most [s]; what a slow device has not reached by then is left out.
        clock: reads seconds.
        now: reads the date.
        calls: what to time; if None, what suits the device.

    Raises:
        NoDevice: PyTorch cannot compute on the device.
        ValueError: `threads` is below 1, or `budget_s` is not positive.
    """
    if (threads is not None and threads < 1) or not budget_s > 0:
        raise ValueError(f"threads must be at least 1 and budget_s positive, got {threads} and {budget_s}")
    require(device)
    started, watch = clock(), stopwatch_for(device, clock)
    with _settings(device, threads or (device.cores if device.kind == "cpu" else None)):
        if calls is None:
            calls = benchmark_calls(device.kind, _product_flops_per_s(device, watch))
        host_before = host_seconds(clock)
        pace = _PaceKeeper(clock) if device.kind == "cpu" else None
        timed = _timed(calls, Pool(device.torch_name, POOL_BYTES), watch, started + budget_s, pace)
        host_after = host_seconds(clock)
        num_threads = torch.get_num_threads()
    # A burst of other work is over by then, and only ever makes one of them too long.
    host_s = {what: min(seconds, host_after[what]) for what, seconds in host_before.items()}
    timings = tuple(Timing(operation=one.operation, seconds=one.seconds) for one in timed if one.is_usable)
    return MicroBenchmark(
        device=device,
        threads=num_threads,
        timings=timings,
        launch_s=host_s["forward"] + min((timing.seconds for timing in timings), default=0.0),
        took_s=clock() - started,
        measured_at=now().isoformat(timespec="seconds"),
        torch_version=str(torch.__version__),
        host_s=host_s,
        anchors_s=usual(pace.turns) if pace else {},
    )


class _PaceKeeper:
    """Times anchors now and then, from beginning to end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._anchors = clock, Anchors()
        self._next_s = clock()
        self.turns: list[Turn] = []

    def look(self) -> None:
        """Time them if it is time."""
        if self._clock() >= self._next_s:
            self.turns.append(self._anchors.turn(self._clock))
            self._next_s = self._clock() + _ANCHORS_EVERY_S


def _timed(
    calls: Sequence[Call], pool: Pool, watch: Stopwatch, deadline_s: float, pace: _PaceKeeper | None
) -> list[_Timed]:
    """All calls in an order that mixes their kinds, and round after round, until the deadline.

    A machine that is too slow, or too busy, for two rounds leaves some of every kind out.
    """
    mixed = sorted(range(len(calls)), key=lambda index: index * _GOLDEN % 1)
    timed: list[_Timed] = []
    shares, began_s, preparing_s = _shares(pace), watch.clock(), 0.0
    for start in range(0, len(mixed), _TOGETHER):
        both_s = 2 * (watch.clock() - began_s) - preparing_s  # of the rounds of what is timed so far
        if timed and both_s * (1 + _TOGETHER / len(timed)) > deadline_s - began_s:
            break
        group: list[_Timed] = []
        for index in mixed[start : start + _TOGETHER]:
            if (timed or group) and watch.clock() >= deadline_s:
                return [*timed, *group]
            # Kernels are compiled, chosen or loaded at the first call: it does not count.
            preparing_s -= watch.clock()
            caller, (args, keywords), result = prepare(calls[index], pool)
            preparing_s += watch.clock()
            record = operation_of(calls[index].function, args, keywords, result)
            group.append(_Timed(caller, record, shares=shares))
            del result
            _take_turn(group[-1], watch, pace)
        timed += group
        _pass_by(group, watch, deadline_s)
    for _ in range(ROUNDS - 1):
        for start in range(0, len(timed), _TOGETHER):
            group = timed[start : start + _TOGETHER]
            for one in group:
                if watch.clock() >= deadline_s:
                    return timed
                _take_turn(one, watch, pace)
            _pass_by(group, watch, deadline_s)
    return timed


def _shares(pace: _PaceKeeper | None) -> _Shares:
    """What counts passes: nothing on a GPU, which keeps no pace."""
    if pace is None:
        return _Shares()
    return _ON_ALL_CORES if torch.get_num_threads() > 1 else _ON_ONE_CORE


def _pass_by(group: Sequence[_Timed], watch: Stopwatch, deadline_s: float) -> None:
    """Calls once each, a few times over: each after others, as in an update."""
    calls = [one for one in group if one.share_of_passes or (one.shares.among_products and not one.is_of_memory)]
    for number in range(1 + _PASSES if calls else 0):
        if watch.clock() >= deadline_s:
            return
        for one in calls:
            seconds = watch.seconds(one.caller)
            one.caller.forget()
            if number:  # the first finds kernels that others have driven out
                one.passes.append(seconds)


def _take_turn(one: _Timed, watch: Stopwatch, pace: _PaceKeeper | None) -> None:
    if pace:
        pace.look()
    if one.share_of_passes == 1:
        if not one.turns:
            one.turns.append(watch.seconds(one.caller))
            one.caller.forget()
        return
    with one.caller.at_ease(), _memory("mapped", then="retained") if one.is_of_memory else contextlib.nullcontext():
        one.turns.append(watch.median_seconds(one.caller, SLICE_S))


def _product_flops_per_s(device: Device, watch: Stopwatch) -> float:
    """What a middling product of fp32 matrices reaches [FLOP/s], to a factor of two: the same calls every time."""
    size = 512 if device.kind == "cpu" else 4096
    a = torch.ones(size, size, device=device.torch_name)
    product = functools.partial(torch.mm, a, a)
    watch.seconds(product)
    rate = 2.0 * size**3 / min(watch.seconds(product) for _ in range(5))
    return float(2.0 ** (int(rate).bit_length() - 1))


@contextlib.contextmanager
def _memory(setting: Malloc, *, then: Malloc) -> Iterator[None]:
    """Memory as plans have it: what an operation's result costs in page faults is not the operation's."""
    apply_malloc(setting)
    try:
        yield
    finally:
        apply_malloc(then)


@contextlib.contextmanager
def _settings(device: Device, threads: int | None) -> Iterator[None]:
    """Compute with `threads` threads, gradients on, random numbers forked; all as before afterwards."""
    memory = _memory("retained", then="default") if device.kind == "cpu" else contextlib.nullcontext()
    devices = [device.index] if device.kind == "cuda" else []
    with thread_count.threads(threads), memory, torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield
