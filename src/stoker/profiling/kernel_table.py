"""Which operations the time of a profiled stretch went to, by the user's lines."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.profiling.trace_events import OperationCall
from stoker.records import Kernel, KernelTable

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


def as_csv(table: KernelTable) -> str:
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
