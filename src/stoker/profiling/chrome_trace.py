"""Analysis of a Chrome trace of PyTorch's profiler: time by operation and user's line, and the timeline of memory.

The trace is read rather than the profiler's objects, because it is the file that the user keeps. A line is the
beginning of the user's function, as recorded by the profiler; the module identifies the call. An operation of a
backward pass gets the line of its forward operation, by its sequence number.
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
from typing import Any, Literal

from stoker.profiling.tracing.operations import is_users_file
from stoker.records import Kernel, KernelTable, Share

RANGES = ("data", "gradient", "forward", "backward", "update")
"""Parts of an update, as `torch_profile.py` names them."""

_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_MODULE = re.compile(r"^nn\.Module: (?P<name>.+?)(_\d+)?$")
_STOKER = f"{Path(__file__).parents[1]}/"
_ZOO = f"{_STOKER}zoo/"
_BACKWARD = "autograd::engine::evaluate_function: "

TraceEvent = Mapping[str, Any]


@dataclass(slots=True)
class OperationCall:
    """One call; times in microseconds of the trace's clock.

    `own_us` is its time without the operations it called, `device_us` the time of the kernels it started itself.
    `where` is a user's line and a module, or empty; `phase` is one of `RANGES`, or `other`.
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
        """Whether it belongs to autograd and computes nothing itself."""
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
    parts = [event for event in events if event.get("name") in RANGES and event.get("ph") == "X"]
    ranges = sorted((part["ts"], part["ts"] + part["dur"], part["name"]) for part in parts)
    nested = (call for thread in by_thread.values() for call in _nested(thread, ranges))
    calls = sorted(nested, key=lambda call: call.started_us)
    # Each GPU kernel and copy counts for the innermost call that started it.
    by_id = {call.external_id: call for call in calls if call.external_id is not None}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = by_id.get(event.get("args", {}).get("External id"))
            if call is not None:
                call.device_us += event["dur"]
    # A backward call gets the line of its forward operation: the last one that began with its sequence number.
    lines: dict[int, str] = {}
    for call in calls:
        if call.is_backward_node or (call.parent is not None and call.parent.is_backward_node):
            if call.sequence is not None and call.sequence in lines:
                _set_line(call, lines[call.sequence])
        elif call.sequence is not None and call.where:
            lines[call.sequence] = call.where
    return calls


def _nested(events: Iterable[TraceEvent], ranges: Sequence[tuple[float, float, str]]) -> Iterator[OperationCall]:
    """The calls of one thread, each within the one running when it began; `ranges` are (start, end, name) [us]."""
    running: list[tuple[float, OperationCall | None, str, str]] = []  # (end, call, line, module)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        started, ended = event["ts"], event["ts"] + event["dur"]
        while running and running[-1][0] <= started:
            running.pop()
        _, parent, line, module = running[-1] if running else (0.0, None, "", "")
        call = None
        if event["cat"] == "cpu_op":
            arguments = event.get("args", {})
            following = bisect.bisect_right(ranges, started, key=lambda part: part[0])
            is_within = following > 0 and started <= ranges[following - 1][1]
            call = OperationCall(
                name=event["name"],
                started_us=started,
                ended_us=ended,
                thread=event["tid"],
                own_us=event["dur"],
                where=", ".join(part for part in (line, module) if part),
                phase=ranges[following - 1][2] if is_within else "other",
                parent=parent,
                sequence=arguments.get("Sequence number"),
                external_id=arguments.get("External id"),
                arguments=arguments,
            )
            if parent is not None:
                parent.own_us -= event["dur"]
                parent.children.append(call)
            yield call
        elif event["cat"] == "python_function":
            line, module = _frame(event["name"], line, module)
        running.append((ended, call or parent, line, module))


def _frame(name: str, line: str, module: str) -> tuple[str, str]:
    """The user's line and the module once a Python function of this name runs."""
    if match := _MODULE.match(name):
        return line, match["name"]
    match = _FRAME.match(name)
    if match is None:
        return line, module
    owner = _owner_of(match["file"])
    if owner == "stoker":  # the frames outside of it are from before training
        return "", ""
    if owner == "library":
        return line, module
    return f"{Path(match['file']).name}:{match['line']} {match['function']}", ""


@functools.lru_cache(maxsize=4096)
def _owner_of(name: str) -> Literal["user", "stoker", "library"]:
    """The owner of a file; reference models count as the user's, who may have copied them."""
    path = name
    if not (Path(name).is_absolute() or name.startswith("<")):  # the profiler cuts off the folder of `sys.path`
        places = (Path(place or ".") / name for place in sys.path)
        path = next((str(place.absolute()) for place in places if place.is_file()), name)
    if path.startswith(_STOKER) and not path.startswith(_ZOO):
        return "stoker"
    return "user" if is_users_file(path) or path.startswith(_ZOO) else "library"


def _set_line(call: OperationCall, where: str) -> None:
    call.where = where
    for child in call.children:
        _set_line(child, where)


MOST_KERNELS = 200
"""Rows kept; any other took less time."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Index of the first of the two operands among the arguments."""


@dataclass
class _Row:
    calls: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    flops: float = 0.0


def kernels(calls: Iterable[OperationCall]) -> tuple[Kernel, ...]:
    """Calls summed by operation, line and part of the update, the most time first."""
    rows: dict[tuple[str, str, str], _Row] = {}
    for call in calls:
        if call.is_node:  # the evaluation of a node is not an operation
            continue
        row = rows.setdefault((call.name.removeprefix("aten::"), call.where, call.phase), _Row())
        row.calls += 1
        row.host_us += max(0.0, call.own_us)
        row.device_us += call.device_us
        _count_flops(call, rows, row)
    is_on_gpu = any(row.device_us > 0 for row in rows.values())
    table: list[Kernel] = []
    for (operation, where, phase), row in rows.items():
        seconds = (row.device_us if is_on_gpu else row.host_us) / 1e6
        table.append(
            Kernel(
                operation=operation,
                where=where,
                phase=phase,
                calls=row.calls,
                host_s=row.host_us / 1e6,
                device_s=row.device_us / 1e6,
                flops_per_s=row.flops / seconds if row.flops and seconds > 0 else None,
            )
        )
    return tuple(sorted(table, key=lambda kernel: -(kernel.device_s if is_on_gpu else kernel.host_s))[:MOST_KERNELS])


def kernels_csv(table: KernelTable) -> str:
    """The table as comma-separated values, a row for each operation of a line."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["operation", "where", "phase", "calls", "host_s", "device_s", "share", "flops_per_s"])
    for kernel in table.kernels:
        share = table.seconds(kernel) / table.total_s if table.total_s else 0.0
        rate = "" if kernel.flops_per_s is None else f"{kernel.flops_per_s:.4g}"
        times = [f"{kernel.host_s:.6g}", f"{kernel.device_s:.6g}", f"{share:.4f}"]
        writer.writerow([kernel.operation, kernel.where, kernel.phase, kernel.calls, *times, rate])
    return text.getvalue()


def _count_flops(call: OperationCall, rows: dict[tuple[str, str, str], _Row], row: _Row) -> None:
    """Add the FLOPs of a call where its time is counted: a convolution's to the library kernel that it calls."""
    sizes = call.arguments.get("Input Dims") or []
    if call.name in _PRODUCTS:
        operands = sizes[_PRODUCTS[call.name] :]
        if len(operands) >= 2 and len(operands[0]) >= 2 and len(operands[1]) >= 2:
            # [..., M, K] @ [..., K, N], a multiply-add counted as two.
            row.flops += 2.0 * math.prod(operands[0]) * operands[1][-1]
    elif call.name == "aten::convolution_backward":
        inputs = call.arguments.get("Concrete Inputs") or [""]
        gradients = sum(str(inputs[-1]).count(word) for word in ("True", "true"))
        positions = sizes[1] if _is_transposed(inputs, 7) else sizes[0]
        row.flops += min(2, gradients or 2) * _convolution_flops(positions, sizes[2])
    elif call.name == "aten::convolution":
        busiest = _busiest(call)
        key = busiest.name.removeprefix("aten::"), busiest.where, busiest.phase
        inputs = call.arguments.get("Concrete Inputs") or []
        positions = sizes[0] if _is_transposed(inputs, 6) else _output_size(sizes, inputs)
        rows.setdefault(key, _Row()).flops += _convolution_flops(positions, sizes[1])


def _busiest(call: OperationCall) -> OperationCall:
    """The call with the most time of its own, of `call` and all that it calls."""
    return max((call, *map(_busiest, call.children)), key=lambda each: (each.device_us, each.own_us))


def _convolution_flops(positions: Sequence[int], weight: Sequence[int]) -> float:
    """FLOPs of one pass of a convolution with output [N, C_out, ...] and weight [C_out, C_in / groups, ...].

    For a transposed one, `positions` is the size of its input [N, C_in, ...], and its weight [C_in, C_out / groups,
    ...].
    """
    return 2.0 * math.prod(positions) * math.prod(weight[1:]) if positions and weight else 0.0


def _is_transposed(inputs: Sequence[Any], index: int) -> bool:
    return len(inputs) > index and str(inputs[index]).lower() in ("true", "1")


def _output_size(sizes: Sequence[Sequence[int]], inputs: Sequence[Any]) -> list[int]:
    """Size of the output of a convolution that is not transposed; empty where its settings are not in the trace."""
    settings: list[list[int]] = []
    for text in inputs[3:6]:  # stride, padding and dilation, such as `[1, 1]`
        parts = str(text).strip("[]() ").split(",")
        settings.append([int(part) for part in parts if part.strip().lstrip("-").isdigit()])
    if len(settings) < 3 or not all(settings):
        return []
    image, weight = sizes[0], sizes[1]
    dims = len(weight) - 2
    each = [values if len(values) == dims else [values[0]] * dims for values in settings]
    spatial = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(image[2:], weight[2:], *each, strict=True)
    ]
    return [image[0], weight[0], *spatial]


_MOST_SHARES = 12
_ALLOCATING = frozenset(
    {
        "aten::empty",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::resize_",
        "aten::zeros",
        "aten::zeros_like",
        "aten::to",
        "aten::_to_copy",
        "aten::clone",
        "aten::contiguous",
    }
)
"""Operations that allocate for their caller."""
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
"""Numbers of devices in the trace (`c10::DeviceType`)."""


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """An allocation (`change` above 0) or a free [bytes]; `total` is allocated after it.

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
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == _DEVICE_TYPES[kind]]
    changes.sort(key=lambda event: event["ts"])
    around = _Around(calls)
    timeline: list[MemoryChange] = []
    total = 0
    for event in changes:
        change = int(event["args"]["Bytes"])
        total += change
        call = around.at(event["ts"], event["tid"]) if change > 0 else None
        while call is not None and call.name in _ALLOCATING and call.parent is not None and not call.parent.is_node:
            call = call.parent  # up to the call that needs the memory
        timeline.append(
            MemoryChange(
                at_s=(event["ts"] - changes[0]["ts"]) / 1e6,
                change=change,
                total=total,
                address=int(event["args"].get("Addr", 0)),
                operation="" if call is None else call.name.removeprefix("aten::"),
                where="" if call is None else call.where,
            )
        )
    return tuple(timeline)


def peak_shares(timeline: Sequence[MemoryChange]) -> tuple[int, tuple[Share, ...]]:
    """Peak of allocated memory [bytes], and its live allocations by operation and line, the largest first."""
    if not timeline:
        return 0, ()
    peak = max(range(len(timeline)), key=lambda index: timeline[index].total)
    alive: dict[int, MemoryChange] = {}
    for change in timeline[: peak + 1]:
        if change.change > 0:
            alive[change.address] = change
        else:
            alive.pop(change.address, None)
    held: defaultdict[tuple[str, str], int] = defaultdict(int)
    for allocation in alive.values():
        held[allocation.operation, allocation.where] += allocation.change
    ranked = sorted(held.items(), key=lambda item: -item[1])[:_MOST_SHARES]
    shares = tuple(Share(what=operation, value=float(size), where=where) for (operation, where), size in ranked)
    return max(0, timeline[peak].total), shares


def memory_csv(timeline: Iterable[MemoryChange]) -> str:
    """The timeline as comma-separated values."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["at_s", "change_bytes", "total_bytes", "operation", "where"])
    for change in timeline:
        writer.writerow([f"{change.at_s:.6f}", change.change, change.total, change.operation, change.where])
    return text.getvalue()


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
