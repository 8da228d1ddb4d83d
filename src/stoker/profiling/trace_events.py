"""Operations in a Chrome trace of PyTorch's profiler: which called which, for which line of the user's, in which range.

The trace is read rather than the profiler's objects, because it is what the user keeps, in a format that others read.
A line is where the user's function begins, since that is what the profiler notes; the module says which call it was. An
operation of a backward pass has the line of the forward operation that it belongs to, by its sequence number.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.profiling.tracing.lines import is_users_file

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
