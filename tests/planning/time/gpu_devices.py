"""Devices and operations that tests of the GPU's time model share."""

from __future__ import annotations

from dataclasses import replace

from stoker.records import Device
from stoker.records.hardware import Hardware, MicroBenchmark, Timing
from stoker.records.trace import Operation, TensorShape

BYTES = {"fp32": 4, "bf16": 2}


def gpu(**changes) -> Hardware:
    """A device with the figures of an A100 of 400 W, or others."""
    device = Device(name="a100", kind="cuda", model="A100", cores=108, memory_bytes=40 * 2**30, fast_dtypes=("bf16",))
    figures = Hardware(
        device=device,
        dense_flops={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
        bandwidth_bytes_per_s=1.555e12,
        multiprocessors=108,
        compute_capability="8.0",
        l2_bytes=40 * 2**20,
        power_w=400.0,
    )
    return replace(figures, **changes)


def measured(hardware: Hardware, timings) -> Hardware:
    """The same device after a micro-benchmark."""
    benchmark = MicroBenchmark(
        device=hardware.device,
        threads=1,
        timings=tuple(timings),
        launch_s=1e-5,
        took_s=1.0,
        measured_at="",
        torch_version="",
    )
    return replace(hardware, benchmark=benchmark)


def timing(operation: Operation, seconds: float) -> Timing:
    """An operation and how long it took."""
    return Timing(operation=operation, seconds=seconds)


def tensor(*shape: int, dtype: str = "fp32") -> TensorShape:
    """A shape."""
    return TensorShape(shape=shape, dtype=dtype)


def operation(name: str, inputs, outputs, flops: int = 0, **attributes) -> Operation:
    """An operation that reads and writes each tensor once."""
    return Operation(
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        flops=flops,
        bytes_read=sum(one.numel * BYTES.get(one.dtype, 4) for one in inputs),
        bytes_written=sum(one.numel * BYTES.get(one.dtype, 4) for one in outputs),
        attributes=tuple(sorted(attributes.items())),
    )


def product(rows: int, columns: int, depth: int, dtype: str = "fp32", **attributes) -> Operation:
    """A matrix product."""
    a, b, result = (
        tensor(rows, depth, dtype=dtype),
        tensor(depth, columns, dtype=dtype),
        tensor(rows, columns, dtype=dtype),
    )
    return operation("mm", (a, b), (result,), 2 * rows * columns * depth, **attributes)


def batched(batch: int, rows: int, columns: int, depth: int) -> Operation:
    """A batched product."""
    inputs = (tensor(batch, rows, depth), tensor(batch, depth, columns))
    return operation("bmm", inputs, (tensor(batch, rows, columns),), 2 * batch * rows * columns * depth)


def addition(numel: int) -> Operation:
    """An element-wise operation of two tensors."""
    return operation("add", (tensor(numel), tensor(numel)), (tensor(numel),))


def layer_norm(rows: int, columns: int) -> Operation:
    """A layer norm with weights."""
    return operation(
        "native_layer_norm", (tensor(rows, columns), tensor(columns), tensor(columns)), (tensor(rows, columns),)
    )


def softmax(rows: int, columns: int) -> Operation:
    """A softmax over the last dimension."""
    return operation("_softmax", (tensor(rows, columns),), (tensor(rows, columns),), dim=-1)


def convolution(
    name: str = "convolution", *, size: int = 56, window: int = 3, dtype: str = "fp32", **attributes
) -> Operation:
    """A convolution of 64 to 64 channels at stride 1 that keeps the size, or its backward pass."""
    image, weight = tensor(32, 64, size, size, dtype=dtype), tensor(64, 64, window, window, dtype=dtype)
    flops = 2 * 32 * 64 * size * size * 64 * window**2
    if name == "convolution":
        return operation(name, (image, weight), (image,), flops, groups=1, **attributes)
    return operation(name, (image, image, weight), (image, weight), 2 * flops, groups=1, **attributes)


def recurrent(
    name: str = "_cudnn_rnn",
    *,
    steps: int = 256,
    batch: int = 32,
    width: int = 128,
    layers: int = 2,
    dtype: str = "fp32",
) -> Operation:
    """A GRU of so many layers with biases, all as wide as its input, or its backward pass."""
    x, state = tensor(steps, batch, width, dtype=dtype), tensor(layers, batch, width, dtype=dtype)
    matrix, bias = tensor(3 * width, width, dtype=dtype), tensor(3 * width, dtype=dtype)
    inputs = (x, *(matrix, matrix, bias, bias) * layers, tensor(0, dtype=dtype), state)
    flops = 2 * steps * batch * layers * 2 * 3 * width * width
    if name == "_cudnn_rnn":
        return operation(name, inputs, (x, state, tensor(1000, dtype="uint8")), flops)
    return operation(name, (*inputs, x, x, tensor(1000, dtype="uint8")), (x, state, matrix), 2 * flops)


def attention(tokens: int, *, is_causal: bool = False, kernel: str = "flash", dtype: str = "bf16") -> Operation:
    """Fused attention of 4 samples and 16 heads of width 64."""
    part = tensor(4, 16, tokens, 64, dtype=dtype)
    flops = 4 * 4 * 16 * tokens * tokens * 64
    return operation(f"_scaled_dot_product_{kernel}_attention", (part,) * 3, (part,), flops, is_causal=is_causal)
