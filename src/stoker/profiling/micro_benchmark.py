"""Times of single operations on a device, from which update times are forecast: measured once, in at most a minute.

Method, as in `ceilings`: all calls take turns in rounds, so that a burst of other work on the machine hits all of them.
A turn counts by its median, and a call by its second-best turn of three or more, since neighbours only ever slow it
down. Operands rotate through a pool of memory (`OperandPool`). Nothing here depends on a model.

On a CPU a repeated call finds its code and operands in the nearest caches, unlike in an update. So calls of many kinds
are also made once each, in passes over a group. With several threads, large calls without products count by these
passes alone; small calls by a mean of both, since a small update leaves more in the caches; large products and
convolutions by their turns, which passes hardly differ from. Anchors are timed between the calls, to compare the
machine's speed later.

A single round is unreliable: one reading in ten is off by a factor of two. A slow machine times fewer calls, all of
them at least twice. `host_seconds` measures the cost of Python and autograd on layers too small to compute anything.
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
from torch import nn

from stoker.devices.malloc import apply_malloc
from stoker.jobs import AdamW, Job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.profiling.benchmark_calls import Call, Caller, OperandPool, ShapeLimits, prepare_call
from stoker.profiling.benchmark_compute import (
    attention_calls,
    batched_product_calls,
    convolution_calls,
    product_calls,
    recurrent_calls,
    thin_product_calls,
)
from stoker.profiling.benchmark_memory import (
    elementwise_calls,
    fresh_calls,
    image_calls,
    optimizer_calls,
    row_calls,
    table_calls,
)
from stoker.profiling.ceilings import Anchors, Stopwatch, Turn, computing_threads, require, stopwatch_for, usual
from stoker.profiling.tracing.operations import operation_of
from stoker.records import Coupling, Device, Malloc, Plan, Position
from stoker.records.hardware import MicroBenchmark, Timing
from stoker.records.trace import Operation
from stoker.stepping.fused_update import fused_update
from stoker.stepping.precision import products_in
from stoker.stepping.step import Step
from stoker.units import MIB, epochs

ROUNDS = 3
SLICE_S = 3e-3
POOL_BYTES = 96 * MIB
"""Three times the last cache of a CPU that serves a few cores."""
GPU_POOL_BYTES = 1024 * MIB
"""Four times the operands of most calls, so that those of one call do not overlap, which a GPU refuses to write to."""

_TOGETHER = 64
"""Calls in a group: about as many kinds as an update has, and few enough that none is compiled twice: oneDNN keeps
1024 compiled kernels, of which a convolution needs several."""
_PASSES = 2
_LARGE_BYTES = MIB
"""Bytes read and written that exceed a CPU's second cache."""
_ANCHORS_EVERY_S = 0.5
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class _Shares:
    """Weight of a call's time in passes against its time in turns, on a logarithmic scale [0 to 1].

    For `small` calls, and for `traffic`: large ones without products. Large products have weight 0; with
    `among_products` they are still made in passes, to evict the operands of the others, as in updates.
    """

    small: float = 0.0
    traffic: float = 0.0
    among_products: bool = False


_ON_ALL_CORES = _Shares(small=0.5, traffic=1.0, among_products=True)
_ON_ONE_CORE = _Shares(small=0.3)
"""Fitted to whole updates (docs/log.md, 2026-11-22); the one for a single core on an Intel CPU."""


@dataclass
class _Timed:
    """A call, its record, and its times in turns and in passes so far [s]."""

    caller: Caller
    operation: Operation
    turns: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    shares: _Shares = _Shares()

    @property
    def seconds(self) -> float:
        in_passes = statistics.median(self.passes) if self.passes else math.nan
        if self.share_of_passes == 1 and self.passes:
            return in_passes
        in_turns = sorted(self.turns)[1 if len(self.turns) > 2 else 0]
        if not self.passes or not self.share_of_passes:
            return in_turns
        return float(in_turns ** (1 - self.share_of_passes) * in_passes**self.share_of_passes)

    @property
    def share_of_passes(self) -> float:
        """Weight of its time in passes [0 to 1]."""
        if self.is_of_memory:
            return 0.0
        if self.operation.bytes_read + self.operation.bytes_written < _LARGE_BYTES:
            return self.shares.small
        return 0.0 if self.operation.flops else self.shares.traffic

    @property
    def is_usable(self) -> bool:
        """Whether it can be kept: not if the deadline came before its passes, since its one turn has page faults."""
        return self.share_of_passes < 1 or bool(self.passes)

    @property
    def is_of_memory(self) -> bool:
        """Whether it measures the cost of memory freshly mapped by the system."""
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
    """Time single operations on `device`; PyTorch's settings and random state are restored afterwards.

    Args:
        device: an attached device.
        threads: threads PyTorch computes with; if None, the device's cores (on a GPU they stay as they are).
        budget_s: longest time [s]; calls that a slow device has not reached by then are left out.
        clock: reads seconds.
        now: reads the date.
        calls: the calls to time; if None, `benchmark_calls` of the device.

    Raises:
        NoDevice: PyTorch cannot compute on the device.
        ValueError: `threads` is below 1, or `budget_s` is not positive.
    """
    if (threads is not None and threads < 1) or not budget_s > 0:
        raise ValueError(f"threads must be at least 1 and budget_s positive, got {threads} and {budget_s}")
    require(device)
    started, watch = clock(), stopwatch_for(device, clock)
    is_cpu = device.kind == "cpu"
    with contextlib.ExitStack() as settings:
        settings.enter_context(computing_threads(threads or (device.cores if is_cpu else None)))
        if is_cpu:
            settings.enter_context(_memory("retained", then="default"))
        settings.enter_context(torch.random.fork_rng(devices=[] if is_cpu else [device.index]))
        settings.enter_context(torch.enable_grad())
        # As under a plan of fp32: by default PyTorch lets convolutions use tf32.
        settings.enter_context(products_in("fp32", torch.device(device.torch_name)))
        if calls is None:
            calls = benchmark_calls(device.kind, _product_flops_per_s(device, watch))
        host_before = host_seconds(clock, device.torch_name)
        pace = _PaceKeeper(clock) if is_cpu else None
        pool_bytes = POOL_BYTES if is_cpu else max(POOL_BYTES, min(GPU_POOL_BYTES, device.memory_bytes // 32))
        timed = _timed(calls, OperandPool(device.torch_name, pool_bytes), watch, started + budget_s, pace)
        host_after = host_seconds(clock, device.torch_name)
        num_threads = torch.get_num_threads()
    # A burst of other work hits only one of them, and only makes it longer.
    host_s = {what: min(seconds, host_after[what]) for what, seconds in host_before.items()}
    timings = tuple(Timing(operation=call.operation, seconds=call.seconds) for call in timed if call.is_usable)
    return MicroBenchmark(
        device=device,
        threads=num_threads,
        timings=timings,
        # On a CPU, starting an operation is the time of the shortest; on a GPU, the host's.
        launch_s=host_s["forward"] + (min((timing.seconds for timing in timings), default=0.0) if is_cpu else 0.0),
        took_s=clock() - started,
        measured_at=now().isoformat(timespec="seconds"),
        torch_version=str(torch.__version__),
        host_s=host_s,
        anchors_s=usual(pace.turns) if pace else {},
    )


class _PaceKeeper:
    """Times the anchors at intervals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._anchors = clock, Anchors()
        self._next_s = clock()
        self.turns: list[Turn] = []

    def look(self) -> None:
        """Time them if the interval has passed."""
        if self._clock() >= self._next_s:
            self.turns.append(self._anchors.turn(self._clock))
            self._next_s = self._clock() + _ANCHORS_EVERY_S


def _timed(
    calls: Sequence[Call], pool: OperandPool, watch: Stopwatch, deadline_s: float, pace: _PaceKeeper | None
) -> list[_Timed]:
    """Time calls in an order that mixes their kinds, in rounds, until the deadline.

    A machine too slow for two rounds leaves out some calls of every kind.
    """
    mixed = sorted(range(len(calls)), key=lambda index: index * _GOLDEN % 1)
    timed: list[_Timed] = []
    shares, began_s, preparing_s = _Shares(), watch.clock(), 0.0
    if pace is not None:
        shares = _ON_ALL_CORES if torch.get_num_threads() > 1 else _ON_ONE_CORE
    for start in range(0, len(mixed), _TOGETHER):
        both_s = 2 * (watch.clock() - began_s) - preparing_s  # of two rounds of the calls so far
        if timed and both_s * (1 + _TOGETHER / len(timed)) > deadline_s - began_s:
            break
        group: list[_Timed] = []
        for index in mixed[start : start + _TOGETHER]:
            if (timed or group) and watch.clock() >= deadline_s:
                return [*timed, *group]
            # Kernels are compiled, chosen or loaded at the first call: it does not count.
            preparing_s -= watch.clock()
            caller, (args, keywords), result = prepare_call(calls[index], pool)
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
            for call in group:
                if watch.clock() >= deadline_s:
                    return timed
                _take_turn(call, watch, pace)
            _pass_by(group, watch, deadline_s)
    return timed


def _pass_by(group: Sequence[_Timed], watch: Stopwatch, deadline_s: float) -> None:
    """Make the calls once each, in a few passes: each after others, as in an update."""
    calls = [call for call in group if call.share_of_passes or (call.shares.among_products and not call.is_of_memory)]
    for number in range(1 + _PASSES if calls else 0):
        if watch.clock() >= deadline_s:
            return
        for call in calls:
            seconds = watch.seconds(call.caller)
            call.caller.forget()
            if number:  # in the first pass, kernels may have been evicted
                call.passes.append(seconds)


def _take_turn(call: _Timed, watch: Stopwatch, pace: _PaceKeeper | None) -> None:
    if pace:
        pace.look()
    if call.share_of_passes == 1:
        if not call.turns:
            call.turns.append(watch.seconds(call.caller))
            call.caller.forget()
        return
    with call.caller.at_ease(), _memory("mapped", then="retained") if call.is_of_memory else contextlib.nullcontext():
        watch.finish()  # a GPU is still at work on the calls that mapped memory
        call.turns.append(watch.median_seconds(call.caller, SLICE_S))


def _product_flops_per_s(device: Device, watch: Stopwatch) -> float:
    """Rate of a product of middling fp32 matrices [FLOP/s], rounded to a power of two: the same calls every time."""
    size = 512 if device.kind == "cpu" else 4096
    a = torch.ones(size, size, device=device.torch_name)
    product = functools.partial(torch.mm, a, a)
    watch.seconds(product)
    rate = 2.0 * size**3 / min(watch.seconds(product) for _ in range(5))
    return float(2.0 ** (int(rate).bit_length() - 1))


@contextlib.contextmanager
def _memory(setting: Malloc, *, then: Malloc) -> Iterator[None]:
    """Allocate as plans do: the page faults of a result are not the operation's time."""
    apply_malloc(setting)
    try:
        yield
    finally:
        apply_malloc(then)


LARGEST_CALL_S = 1e-2
"""Approximate time of the longest calls [s]: longer ones would leave no time for others."""


def benchmark_calls(device_kind: str, flops_per_s: float) -> list[Call]:
    """All calls for a device of that kind which multiplies fp32 matrices at `flops_per_s`."""
    is_cpu = device_kind == "cpu"
    # A CPU's allocator returns blocks of 32 MiB and more to the system at once; that cost is timed by `fresh_calls`.
    limits = ShapeLimits(flops_per_s * LARGEST_CALL_S, 2**22 if is_cpu else 2**28)
    calls: list[Call] = []
    # In bf16 a CPU trains without the fused kernel (`stepping/precision.py`), and needs it only for inference.
    for dtype, num, num_attention in ((torch.float32, 39, 10), (torch.bfloat16, 30, 6 if is_cpu else 16)):
        calls += product_calls(dtype, limits, num)
        calls += batched_product_calls(dtype, limits, num // 4)
        calls += thin_product_calls(dtype, 6)
        calls += attention_calls(dtype, limits, num_attention, device_kind)
    calls += convolution_calls(torch.float32, limits, 18, channels_last=False)
    calls += convolution_calls(torch.float32, limits, 12, channels_last=True)
    calls += convolution_calls(torch.bfloat16, limits, 14, channels_last=True)
    calls += convolution_calls(torch.bfloat16, limits, 6, channels_last=False)
    if is_cpu:
        calls += recurrent_calls(limits, 6)
    sizes = (2**8, 2**13, 2**16, 2**18, 2**20, 2**22) if is_cpu else (2**8, 2**16, 2**20, 2**23, 2**26)
    calls += elementwise_calls(sizes)
    calls += row_calls(sizes[-1] // 2, 7)
    calls += image_calls(sizes[-1] // 2, 5, channels_last=False)
    calls += image_calls(sizes[-1] // 2, 5, channels_last=True)
    calls += table_calls(sizes[-1] // 2, 5)
    calls += optimizer_calls(((1, 100), (40, 100), (4, 2**15), (20, 2**15), (2, sizes[-1] // 2)))
    # 64 MiB are beyond what any allocator of a CPU keeps for reuse (glibc: 32 MiB at most).
    return [*calls, *fresh_calls(64 * MIB)] if is_cpu else calls


# ruff: noqa: SLF001 - some operations of ATen have such names

_ATEN = torch.ops.aten
_FEW, _MANY = 4, 24
_ROUNDS = 32
_WARMING = 4
_WIDTH, _ROWS, _CLASSES = 16, 2, 2
_SUM, _NO_LABEL = 2, -100
"""ATen's constants: a summed loss, and the ignored label."""
_PARAMETERS_OF_BLOCK = 4
_OPERATIONS_OF_TINY_PASS = 4
"""Forward: product, log-softmax, loss and a check of the labels. Backward: as many, with two of the product's."""


def host_seconds(
    clock: Callable[[], float] = time.perf_counter, device: str = "cpu", *, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Seconds by `forward` and `backward` for each operation, `optimizer` for each parameter, `update` for each update.

    Measured on few and on many blocks of layers so narrow that nothing is computed: the difference is the cost of a
    block. On a CPU the cost of its operations when called directly is subtracted; on a GPU the host's time to start
    them is all of it, and the GPU is waited for only between readings.
    """
    is_gpu = torch.device(device).type == "cuda"
    few, many = _Blocks(_FEW, device), _Blocks(_MANY, device)
    forward_calls, backward_calls = _direct_calls()
    tiny_update, tiny_calls = _tiny_update(device), _tiny_calls()
    prepares: dict[str, Callable[[], Callable[[], object]]] = {
        "few forward": lambda: few.forward,
        "many forward": lambda: many.forward,
        "few backward": few.prepared_backward,
        "many backward": many.prepared_backward,
        "few optimizer": lambda: few.update,
        "many optimizer": lambda: many.update,
        "direct forward": lambda: _warm(forward_calls),
        "direct backward": lambda: _warm(backward_calls),
        "direct update": lambda: _warm(tiny_calls),
        "update": lambda: _warm([tiny_update]),
    }
    if is_gpu:
        prepares = {name: prepare for name, prepare in prepares.items() if not name.startswith("direct")}
    readings: dict[str, list[float]] = {name: [] for name in prepares}
    for turn in range(rounds + 1):
        for name, prepare in prepares.items():
            run = prepare()
            if is_gpu:
                torch.cuda.synchronize(device)
            started = clock()
            run()
            seconds = clock() - started
            if turn:  # the first one warms up kernels and caches
                readings[name].append(seconds)

    def of_block(phase: str) -> float:
        """Seconds of a block, from adjacent pairs of readings, so that a busy moment is in both."""
        pairs = zip(readings[f"many {phase}"], readings[f"few {phase}"], strict=True)
        return statistics.median(more - less for more, less in pairs) / (_MANY - _FEW)

    def direct(what: str) -> float:
        return 0.0 if is_gpu else statistics.median(readings[f"direct {what}"])

    forward, backward = (
        max(0.0, (of_block(phase) - direct(phase)) / len(calls))
        for phase, calls in (("forward", forward_calls), ("backward", backward_calls))
    )
    optimizer = max(0.0, of_block("optimizer") / _PARAMETERS_OF_BLOCK)
    counted = direct("update") + _OPERATIONS_OF_TINY_PASS * (forward + backward)
    update = max(0.0, statistics.median(readings["update"]) - counted)
    return {"forward": forward, "backward": backward, "optimizer": optimizer, "update": update}


class _Blocks:
    """Blocks of a linear layer, a layer norm and a GELU."""

    def __init__(self, count: int, device: str) -> None:
        blocks = [(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()) for _ in range(count)]
        self._model = nn.Sequential(*(layer for block in blocks for layer in block)).to(device)
        self._input = torch.ones(_ROWS, _WIDTH, device=device)
        self.update = fused_update(torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True))
        self.prepared_backward()()

    def forward(self) -> torch.Tensor:
        output: torch.Tensor = self._model(self._input)
        return output

    def prepared_backward(self) -> Callable[[], object]:
        for parameter in self._model.parameters():
            parameter.grad = None
        return self.forward().sum().backward


def _direct_calls() -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """The operations of a block's forward and backward pass, called directly."""
    x, weight, row = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH)
    each = torch.ones(_ROWS, 1)
    mask = [True, True, True]
    forward: list[Callable[[], object]] = [
        lambda: _ATEN.addmm.default(row, x, weight),
        lambda: _ATEN.native_layer_norm.default(x, [_WIDTH], row, row, 1e-5),
        lambda: _ATEN.gelu.default(x),
    ]
    backward: list[Callable[[], object]] = [
        lambda: _ATEN.gelu_backward.default(x, x),
        lambda: _ATEN.native_layer_norm_backward.default(x, x, [_WIDTH], each, each, row, row, mask),
        lambda: _ATEN.mm.default(x, weight),
        lambda: _ATEN.mm.default(x.t(), x),
        lambda: _ATEN.sum.dim_IntList(x, [0], True),
    ]
    return forward, backward


def _tiny_calls() -> list[Callable[[], object]]:
    """The operations of `_tiny_update`, called directly."""
    x, weight, bias = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _CLASSES), torch.ones(_CLASSES)
    labels, scalar, logits = torch.zeros(_ROWS, dtype=torch.int64), torch.ones(()), torch.ones(_ROWS, _CLASSES)
    layer = nn.Linear(_WIDTH, _CLASSES)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return [
        lambda: _ATEN.addmm.default(bias, x, weight),
        lambda: _ATEN._log_softmax.default(logits, 1, False),
        lambda: _ATEN.nll_loss_forward.default(logits, labels, None, _SUM, _NO_LABEL),
        lambda: _ATEN.min.default(labels),
        lambda: _ATEN.nll_loss_backward.default(scalar, logits, labels, None, _SUM, _NO_LABEL, scalar),
        lambda: _ATEN._log_softmax_backward_data.default(logits, logits, 1, torch.float32),
        lambda: _ATEN.mm.default(logits.t(), x),
        lambda: _ATEN.sum.dim_IntList(logits, [0], True),
        lambda: _ATEN.div.Tensor(scalar, scalar),
        fused_update(torch.optim.AdamW(layer.parameters(), lr=1e-9, fused=True)),
    ]


def _warm(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """All calls with warm caches, as the micro-benchmark times operations."""

    def run() -> None:
        for call in calls:
            call()

    for _ in range(_WARMING):
        run()
    return run


def _tiny_update(device: str) -> Callable[[], object]:
    """An update of Stoker's own step, of a model of two parameters."""
    inputs, targets = torch.ones(_ROWS, _WIDTH), torch.zeros(_ROWS, dtype=torch.int64)
    job = Job(
        model=lambda: nn.Linear(_WIDTH, _CLASSES),
        data=(inputs, targets),
        loss="cross_entropy",
        optimizer=AdamW(lr=1e-9),
        batch=_ROWS,
        until=epochs(1),
    )
    plan = Plan(device=device, micro_batch=_ROWS, threads=torch.get_num_threads(), optimizer_implementation="fused")
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence="known"))
    data = datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    batch = next(source.batches(Position(), 1))
    step.update(batch, 0, 0.0)
    step.update(batch, 0, 0.0)
    return lambda: step.update(batch, 0, 0.0)
