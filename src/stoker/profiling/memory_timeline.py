"""How the memory of tensors rises and falls over a profiled stretch, and which lines hold it at its peak."""

from __future__ import annotations

import bisect
import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.profiling.trace_events import OperationCall, TraceEvent
from stoker.records import Share

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


def as_csv(timeline: Iterable[MemoryChange]) -> str:
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
