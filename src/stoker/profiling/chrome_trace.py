"""Operations in a Chrome trace of PyTorch's profiler: which called which, for which line of the user's, in which range.

The trace is read rather than the profiler's objects, because it is what the user keeps, in a format that others read.
A line is where the user's function begins, since that is what the profiler notes; the module says which call it was. An
operation of a backward pass has the line of the forward operation that it belongs to, by its sequence number.

Which operations the time of a profiled stretch went to, by the user's lines.

How the memory of tensors rises and falls over a profiled stretch, and which lines hold it at its peak.
"""

from __future__ import annotations

import bisect
import csv
import functools
import io
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.profiling.tracing.operations import is_users_file
from stoker.records import Kernel, KernelTable, Share

RANGES = ("data", "gradient", "forward", "backward", "update")
"""Parts of an update, as `ranges.py` names them."""

_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_MODULE = re.compile(r"^nn\.Module: (?P<name>.+?)(_\d+)?$")
_STOKER = f"{Path(__file__).parents[1]}/"
_ZOO = f"{_STOKER}zoo/"
_BACKWARD = "autograd::engine::evaluate_function: "

TraceEvent = Mapping[str, Any]


@dataclass(slots=True)
class OperationCall:
    """One call; times in microseconds of the trace's clock.

    `own_us` is the time without the operations it called, `device_us` that of the kernels it started itself. `where` is
    a line of the user's and a module, empty if there is none; `phase` is one of `RANGES`, or `beside`.
    """

    name: str
    started_us: float
    ended_us: float
    thread: Any
    own_us: float
    where: str
    phase: str
    parent: OperationCall | None
    sequence: int | None
    external_id: Any
    arguments: Mapping[str, Any]
    device_us: float = 0.0
    children: list[OperationCall] = field(default_factory=list)

    @property
    def is_node(self) -> bool:
        """Whether it is autograd's, and computes nothing itself."""
        return self.name.startswith(("autograd::", "torch::autograd::"))

    @property
    def is_backward_node(self) -> bool:
        """Whether it is the engine's evaluation of one node."""
        return self.name.startswith(_BACKWARD)


def operation_calls(events: Sequence[TraceEvent]) -> list[OperationCall]:
    """All calls of operations in a trace, in the order in which they began."""
    by_thread: defaultdict[Any, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "python_function") and event["name"] not in RANGES:
            by_thread[event["tid"]].append(event)
    ranges = _ranges(events)
    calls = sorted(
        (call for thread in by_thread.values() for call in _nested(thread, ranges)), key=lambda call: call.started_us
    )
    _time_on_device(events, calls)
    _lines_of_backward(calls)
    return calls


def _nested(events: Iterable[TraceEvent], ranges: Sequence[tuple[float, float, str]]) -> Iterator[OperationCall]:
    """The calls of one thread, each within what was running when it began."""
    running: list[tuple[float, OperationCall | None, str, str]] = []  # (end, call, line, module)
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        started, ended = event["ts"], event["ts"] + event["dur"]
        while running and running[-1][0] <= started:
            running.pop()
        _, parent, line, module = running[-1] if running else (0.0, None, "", "")
        call = None
        if event["cat"] == "cpu_op":
            where = ", ".join(part for part in (line, module) if part)
            call = _call(event, where, _range_at(started, ranges), parent)
            if parent is not None:
                parent.own_us -= event["dur"]
                parent.children.append(call)
            yield call
        elif event["cat"] == "python_function":
            line, module = _frame(event["name"], line, module)
        running.append((ended, call or parent, line, module))


def _call(event: TraceEvent, where: str, phase: str, parent: OperationCall | None) -> OperationCall:
    arguments = event.get("args", {})
    return OperationCall(
        name=event["name"], started_us=event["ts"], ended_us=event["ts"] + event["dur"], thread=event["tid"],
        own_us=event["dur"], where=where, phase=phase, parent=parent, sequence=arguments.get("Sequence number"),
        external_id=arguments.get("External id"), arguments=arguments,
    )  # fmt: skip


def _frame(name: str, line: str, module: str) -> tuple[str, str]:
    """The user's line and the module once a Python function of this name runs."""
    if found := _MODULE.match(name):
        return line, found["name"]
    found = _FRAME.match(name)
    if found is None:
        return line, module
    path = _whole_path(found["file"])
    if _is_own(path):  # what is below was entered before training, and says nothing of an operation
        return "", ""
    if not _is_told(path):
        return line, module
    return f"{Path(found['file']).name}:{found['line']} {found['function']}", ""


@functools.lru_cache(maxsize=4096)
def _is_told(path: str) -> bool:
    """Whether a file is the user's, or of a reference model, which users may have copied."""
    return is_users_file(path) or path.startswith(_ZOO)


def _is_own(path: str) -> bool:
    return path.startswith(_STOKER) and not path.startswith(_ZOO)


@functools.lru_cache(maxsize=4096)
def _whole_path(name: str) -> str:
    """The profiler cuts off the folder of `sys.path` that a file lies in."""
    if Path(name).is_absolute() or name.startswith("<"):
        return name
    places = (Path(place or ".") / name for place in sys.path)
    return next((str(place.absolute()) for place in places if place.is_file()), name)


def _ranges(events: Iterable[TraceEvent]) -> list[tuple[float, float, str]]:
    """(start, end, name) of the parts of updates [us], in order."""
    found = [e for e in events if e.get("name") in RANGES and e.get("ph") == "X"]
    return sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in found)


def _range_at(time_us: float, ranges: Sequence[tuple[float, float, str]]) -> str:
    """The part of an update at that time; they follow each other, and the last that has begun counts."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][0] <= time_us:
            low = middle + 1
        else:
            high = middle
    return ranges[low - 1][2] if low and time_us <= ranges[low - 1][1] else "beside"


def _time_on_device(events: Iterable[TraceEvent], calls: Iterable[OperationCall]) -> None:
    """Book each GPU kernel and copy under the innermost call that started it."""
    by_id = {call.external_id: call for call in calls if call.external_id is not None}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = by_id.get(event.get("args", {}).get("External id"))
            if call is not None:
                call.device_us += event["dur"]


def _lines_of_backward(calls: Sequence[OperationCall]) -> None:
    """Give calls of a backward pass the line of their forward operation: the last one that began with its number."""
    lines: dict[int, str] = {}
    for call in calls:
        if call.is_backward_node or (call.parent is not None and call.parent.is_backward_node):
            if call.sequence is not None and call.sequence in lines:
                _give(call, lines[call.sequence])
        elif call.sequence is not None and call.where:
            lines[call.sequence] = call.where


def _give(call: OperationCall, where: str) -> None:
    call.where = where
    for child in call.children:
        _give(child, where)


MOST_KERNELS = 200
"""Rows that are kept; what is left out took less time than any of them."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Where the two operands stand among the arguments."""


@dataclass
class _Row:
    calls: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    flops: float = 0.0


def kernels(calls: Iterable[OperationCall], most: int = MOST_KERNELS) -> tuple[Kernel, ...]:
    """Calls added up by operation, line and part of the update, the most time first."""
    rows: dict[tuple[str, str, str], _Row] = {}
    for call in calls:
        # The engine's own evaluation of a node is no operation; what autograd takes is in the node that it calls.
        if call.is_node:
            continue
        row = rows.setdefault((call.name.removeprefix("aten::"), call.where, call.phase), _Row())
        row.calls += 1
        row.host_us += max(0.0, call.own_us)
        row.device_us += call.device_us
        _count_flops(call, rows, row)
    is_on_gpu = any(row.device_us > 0 for row in rows.values())
    found = (
        Kernel(
            operation=operation, where=where, phase=phase, calls=row.calls, host_s=row.host_us / 1e6,
            device_s=row.device_us / 1e6, flops_per_s=_rate(row, is_on_gpu=is_on_gpu),
        )
        for (operation, where, phase), row in rows.items()
    )  # fmt: skip
    return tuple(sorted(found, key=lambda kernel: -(kernel.device_s if is_on_gpu else kernel.host_s))[:most])


def kernels_csv(table: KernelTable) -> str:
    """The table as comma-separated values, one operation of one line a row."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["operation", "where", "phase", "calls", "host_s", "device_s", "share", "flops_per_s"])
    for kernel in table.kernels:
        share = table.seconds(kernel) / table.total_s if table.total_s else 0.0
        rate = "" if kernel.flops_per_s is None else f"{kernel.flops_per_s:.4g}"
        writer.writerow([kernel.operation, kernel.where, kernel.phase, kernel.calls, f"{kernel.host_s:.6g}",
                         f"{kernel.device_s:.6g}", f"{share:.4f}", rate])  # fmt: skip
    return text.getvalue()


def _rate(row: _Row, *, is_on_gpu: bool) -> float | None:
    """FLOP/s where FLOPs are counted."""
    seconds = (row.device_us if is_on_gpu else row.host_us) / 1e6
    return row.flops / seconds if row.flops and seconds > 0 else None


def _count_flops(call: OperationCall, rows: dict[tuple[str, str, str], _Row], row: _Row) -> None:
    """Book the FLOPs of a call where its time is booked: a convolution's with the library's kernel that it calls."""
    sizes = call.arguments.get("Input Dims") or []
    if call.name in _PRODUCTS:
        row.flops += _product_flops(sizes[_PRODUCTS[call.name] :])
    elif call.name == "aten::convolution_backward":
        inputs = call.arguments.get("Concrete Inputs") or [""]
        gradients = sum(str(inputs[-1]).count(word) for word in ("True", "true"))
        positions = sizes[1] if _is_transposed(inputs, 7) else sizes[0]
        row.flops += min(2, gradients or 2) * _convolution_flops(positions, sizes[2])
    elif call.name == "aten::convolution":
        doing = _busiest(call)
        key = doing.name.removeprefix("aten::"), doing.where, doing.phase
        inputs = call.arguments.get("Concrete Inputs") or []
        positions = sizes[0] if _is_transposed(inputs, 6) else _output_size(sizes, inputs)
        rows.setdefault(key, _Row()).flops += _convolution_flops(positions, sizes[1])


def _busiest(call: OperationCall) -> OperationCall:
    """Of a call and what it calls, the one with the most time of its own."""
    return max((call, *map(_busiest, call.children)), key=lambda one: (one.device_us, one.own_us))


def _product_flops(operands: Sequence[Sequence[int]]) -> float:
    """FLOPs of [..., M, K] @ [..., K, N], a multiply-add counted as two."""
    if len(operands) < 2 or len(operands[0]) < 2 or len(operands[1]) < 2:
        return 0.0
    return 2.0 * math.prod(operands[0]) * operands[1][-1]


def _convolution_flops(positions: Sequence[int], weight: Sequence[int]) -> float:
    """FLOPs of one pass of a convolution with output [N, C_out, ...] and weight [C_out, C_in / groups, ...].

    Of a transposed one `positions` is the size of its input [N, C_in, ...], its weight [C_in, C_out / groups, ...].
    """
    return 2.0 * math.prod(positions) * math.prod(weight[1:]) if positions and weight else 0.0


def _is_transposed(inputs: Sequence[Any], index: int) -> bool:
    return len(inputs) > index and str(inputs[index]).lower() in ("true", "1")


def _output_size(sizes: Sequence[Sequence[int]], inputs: Sequence[Any]) -> list[int]:
    """Size of the output of a convolution that is not transposed; empty where its settings are not in the trace."""
    settings = [_numbers(text) for text in inputs[3:6]]
    if len(settings) < 3 or not all(settings):
        return []
    image, weight = sizes[0], sizes[1]
    spatial = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(
            image[2:], weight[2:], *(_for_each(values, len(weight) - 2) for values in settings), strict=True
        )
    ]
    return [image[0], weight[0], *spatial]


def _numbers(text: Any) -> list[int]:
    """`[1, 1]` as the trace writes it."""
    return [int(part) for part in str(text).strip("[]() ").split(",") if part.strip().lstrip("-").isdigit()]


def _for_each(values: Sequence[int], count: int) -> Sequence[int]:
    return values if len(values) == count else [values[0]] * count


_MOST_SHARES = 12
_ALLOCATING = frozenset({
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::resize_", "aten::zeros",
    "aten::zeros_like", "aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous",
})  # fmt: skip
"""Operations that allocate for whoever calls them."""
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
"""How the trace numbers devices (`c10::DeviceType`)."""


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """An allocation (`change` above 0) or a free [bytes]; `total` is what is allocated after it.

    `at_s` and `total` count from the beginning of the profile. An allocation has the operation it was made in.
    """

    at_s: float
    change: int
    total: int
    address: int
    operation: str
    where: str


def memory_timeline(
    events: Iterable[TraceEvent], calls: Sequence[OperationCall], kind: str
) -> tuple[MemoryChange, ...]:
    """Every allocation and free on a `cpu` or `cuda` device, in order.

    Args:
        events: of a trace with memory.
        calls: `operation_calls` of the same trace.
        kind: of the device.
    """
    found = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == _DEVICE_TYPES[kind]]
    found.sort(key=lambda event: event["ts"])
    around = _Around(calls)
    timeline: list[MemoryChange] = []
    total = 0
    for event in found:
        change = int(event["args"]["Bytes"])
        total += change
        call = _asked_by(around.at(event["ts"], event["tid"])) if change > 0 else None
        timeline.append(
            MemoryChange(
                at_s=(event["ts"] - found[0]["ts"]) / 1e6, change=change, total=total,
                address=int(event["args"].get("Addr", 0)),
                operation="" if call is None else call.name.removeprefix("aten::"),
                where="" if call is None else call.where,
            )
        )  # fmt: skip
    return tuple(timeline)


def peak_shares(timeline: Sequence[MemoryChange]) -> tuple[int, tuple[Share, ...]]:
    """The most that was allocated [bytes], and what was alive of it by operation and line, the largest first."""
    if not timeline:
        return 0, ()
    peak = max(range(len(timeline)), key=lambda index: timeline[index].total)
    alive: dict[int, MemoryChange] = {}
    for one in timeline[: peak + 1]:
        if one.change > 0:
            alive[one.address] = one
        else:
            alive.pop(one.address, None)
    held: defaultdict[tuple[str, str], int] = defaultdict(int)
    for one in alive.values():
        held[one.operation, one.where] += one.change
    ranked = sorted(held.items(), key=lambda item: -item[1])[:_MOST_SHARES]
    shares = tuple(Share(what=operation, value=float(size), where=where) for (operation, where), size in ranked)
    return max(0, timeline[peak].total), shares


def memory_csv(timeline: Iterable[MemoryChange]) -> str:
    """The timeline as comma-separated values."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["at_s", "change_bytes", "total_bytes", "operation", "where"])
    for one in timeline:
        writer.writerow([f"{one.at_s:.6f}", one.change, one.total, one.operation, one.where])
    return text.getvalue()


def _asked_by(call: OperationCall | None) -> OperationCall | None:
    """The call that wanted the memory."""
    while call is not None and call.name in _ALLOCATING and call.parent is not None and not call.parent.is_node:
        call = call.parent
    return call


class _Around:
    """Finds the innermost call that runs at a time."""

    def __init__(self, calls: Sequence[OperationCall]) -> None:
        self._calls: defaultdict[object, list[OperationCall]] = defaultdict(list)
        for call in calls:
            self._calls[call.thread].append(call)
        self._starts = {thread: [call.started_us for call in of] for thread, of in self._calls.items()}

    def at(self, time_us: float, thread: object) -> OperationCall | None:
        """The call; None between calls."""
        index = bisect.bisect_right(self._starts.get(thread, ()), time_us) - 1
        call = self._calls[thread][index] if index >= 0 else None
        while call is not None and call.ended_us < time_us:
            call = call.parent
        return call
