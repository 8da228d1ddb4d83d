"""What convolutions on a CPU allocate beyond their outputs: the laws of `planning.model.workspaces`, and measured.

    python -m bench.forecast.hidden_bytes

Measured with PyTorch's profiler, which records every allocation: the most that is allocated at once inside an
operation, less its outputs.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stoker.planning.model.workspaces import hidden_bytes
from stoker.records.trace import Operation, TensorShape

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Shape:
    """A convolution: samples, channels in and out, pixels along a side, kernel, stride, groups."""

    batch: int
    channels: int
    out: int
    side: int
    kernel: int
    stride: int = 1
    groups: int = 1


SHAPES = (
    Shape(8, 3, 64, 32, 3),
    Shape(8, 64, 128, 32, 3),
    Shape(8, 128, 256, 16, 3, 2),
    Shape(8, 64, 64, 16, 1),
    Shape(8, 64, 64, 16, 3, 1, 8),
    Shape(16, 32, 32, 64, 3),
    Shape(4, 3, 64, 112, 7, 2),
    Shape(8, 96, 160, 20, 5),
)


def allocations(function: Callable[[], Any]) -> tuple[list[int], Any]:
    """Sizes of the allocations (negative: frees) of `function` in order [bytes], and what it gives."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    found, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:  # noqa: SLF001 - the only place that tells
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found)], result


def beyond_outputs(sizes: list[int], outputs: list[torch.Tensor]) -> int:
    """The most allocated at once, less the outputs [bytes]."""
    return max(itertools.accumulate(sizes), default=0) - sum(one.untyped_storage().nbytes() for one in outputs)


def convolution(shape: Shape, dtype: torch.dtype, *, channels_last: bool) -> list[dict[str, Any]]:
    """Forward and backward pass of one convolution."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(shape.batch, shape.channels, shape.side, shape.side).to(dtype).to(memory_format=layout)
    weight = torch.randn(shape.out, shape.channels // shape.groups, shape.kernel, shape.kernel).to(dtype)
    weight = weight.to(memory_format=layout)
    padding = shape.kernel // 2
    settings = ([shape.stride] * 2, [padding] * 2, [1, 1], False, [0, 0], shape.groups)

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(x, weight, None, *settings)

    forward()  # the first call compiles kernels
    sizes, y = allocations(forward)
    grad = torch.randn_like(y)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, True, False])

    backward()
    back_sizes, grads = allocations(backward)
    attributes = (("channels_last", channels_last), ("groups", shape.groups), ("stride", [shape.stride] * 2))
    one = _operation("convolution", [x, weight], [y], attributes)
    other = _operation(
        "convolution_backward", [grad, x, weight], list(grads[:2]), (*attributes, ("output_mask", [True, True, False]))
    )
    what = f"{shape} {_NAMES[dtype]}, channels-last {channels_last}"
    found = ((one, beyond_outputs(sizes, [y])), (other, beyond_outputs(back_sizes, list(grads[:2]))))
    return [_row(op.name, what, measured, hidden_bytes(op, target="cpu")) for op, measured in found]


def main() -> None:
    """Measure, print and write the result."""
    torch.set_num_threads(1)
    rows = [
        row
        for shape, dtype, last in itertools.product(SHAPES, _NAMES, (False, True))
        for row in convolution(shape, dtype, channels_last=last)
    ]
    off = sorted(abs(row["law_bytes"] - row["measured_bytes"]) for row in rows)
    result = {
        "what": "bytes that operations on a CPU allocate beyond their outputs, by law and measured",
        "command": "python -m bench.forecast.hidden_bytes",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "off_bytes": {"median": statistics.median(off), "nine_tenths": off[len(off) * 9 // 10], "worst": off[-1]},
        "cases": rows,
    }
    for row in rows:
        print(
            f"{row['operation']:22} {row['what']:110} law {row['law_bytes']:>10} measured {row['measured_bytes']:>10}"
        )
    print(result["off_bytes"])
    path = Path(__file__).parents[1] / "results" / f"hidden_bytes_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _row(operation: str, what: str, measured: int, law: int) -> dict[str, Any]:
    return {"operation": operation, "what": what, "measured_bytes": measured, "law_bytes": law}


def _operation(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], attributes: Any) -> Operation:
    return Operation(
        name=name,
        inputs=tuple(TensorShape(shape=tuple(one.shape), dtype=_NAMES[one.dtype]) for one in inputs),
        outputs=tuple(TensorShape(shape=tuple(one.shape), dtype=_NAMES[one.dtype]) for one in outputs),
        flops=0,
        bytes_read=0,
        bytes_written=0,
        attributes=attributes,
    )


if __name__ == "__main__":
    main()
