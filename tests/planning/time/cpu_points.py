"""Operations, and a CPU whose times follow a law, to test models of time with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker.records import Hardware, MicroBenchmark, Operation, TensorShape, Timing
from stoker.testing import fake_device

FLOPS_PER_S, BYTES_PER_S, START_S = 1e11, 2e10, 3e-6


def tensor(*shape: int, dtype: str = "fp32") -> TensorShape:
    """A shape."""
    return TensorShape(shape=shape, dtype=dtype)


def product(rows: int, columns: int, depth: int, dtype: str = "fp32") -> Operation:
    """[rows, depth] @ [depth, columns]."""
    width = 2 if dtype == "bf16" else 4
    return Operation(
        name="mm",
        inputs=(tensor(rows, depth, dtype=dtype), tensor(depth, columns, dtype=dtype)),
        outputs=(tensor(rows, columns, dtype=dtype),),
        flops=2 * rows * columns * depth,
        bytes_read=width * depth * (rows + columns),
        bytes_written=width * rows * columns,
        attributes=(("transpose_a", False), ("transpose_b", False)),
    )


def elementwise(name: str, numel: int) -> Operation:
    """A function of each of `numel` numbers."""
    one = tensor(numel)
    return Operation(name=name, inputs=(one,), outputs=(one,), flops=0, bytes_read=4 * numel, bytes_written=4 * numel)


def law(operation: Operation) -> float:
    """Seconds on the CPU of the tests: a start, arithmetic of which thin matrices reach less, bytes."""
    share = 1.0
    if operation.flops:
        rows, depth = operation.inputs[0].shape
        columns = operation.inputs[1].shape[1]
        share = min(rows, columns, depth) / (min(rows, columns, depth) + 24)
    twice = 2.0 if operation.inputs[0].dtype == "bf16" else 1.0
    num_bytes = operation.bytes_read + operation.bytes_written
    return START_S + operation.flops / (FLOPS_PER_S * twice * share) + num_bytes / BYTES_PER_S


def calibration_set() -> list[Operation]:
    """What a micro-benchmark would time."""
    sizes = (16, 48, 128, 384, 1024)
    shapes = [
        (a, b, c)
        for i, a in enumerate(sizes)
        for j, b in enumerate(sizes)
        for k, c in enumerate(sizes)
        if (i + j + k) % 3 == 0
    ]
    products = [product(*shape, dtype=dtype) for shape in shapes for dtype in ("fp32", "bf16")]
    return [*products, *(elementwise(name, 4**power) for name in ("relu", "add") for power in range(4, 12))]


def hardware(seconds: Callable[[Operation], float] = law, **host_s: float) -> Hardware:
    """A CPU that was measured, by that law."""
    benchmark = MicroBenchmark(
        device=fake_device(),
        threads=2,
        timings=tuple(Timing(operation=one, seconds=seconds(one)) for one in calibration_set()),
        launch_s=5e-6,
        took_s=20.0,
        measured_at="2026-11-21T12:50:35+00:00",
        torch_version="2.13.0",
        host_s=host_s,
    )
    return Hardware(device=fake_device(), dense_flops={}, bandwidth_bytes_per_s=None, benchmark=benchmark)


def unmeasured(**figures: object) -> Hardware:
    """The same CPU of which only a datasheet is known, or nothing."""
    return replace(hardware(), benchmark=None, **figures)
