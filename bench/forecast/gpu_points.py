"""Public measurements of single operations on GPUs, as what `stoker doctor` would have measured there.

The files are those of NeuSight (ASPLOS 2025, MIT licence): `devices.json`, `train_*.csv.gz` and `test_*.csv.gz`, one
row per device and shape, latency in milliseconds, fp32 with TF32 off, PyTorch 2.1, each operation alone between two
events. What `devices.json` does not say (power limit, compute capability) is taken from the datasheets named below.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.forecast.gpu_labels import normalised
from stoker.devices import catalogue
from stoker.records import Device
from stoker.records.hardware import Hardware, MicroBenchmark, Timing
from stoker.records.trace import Operation, TensorShape

_BOARDS = {
    "tesla p4": ("6.1", 75.0),
    "tesla p100 pcie 16gb": ("6.0", 250.0),
    "tesla v100 pcie 32gb": ("7.0", 250.0),
    "tesla t4": ("7.5", 70.0),
    "nvidia a100 pcie 40gb": ("8.0", 250.0),
    "nvidia a100 sxm4 40gb": ("8.0", 400.0),
    "nvidia a100 80gb pcie": ("8.0", 300.0),
    "nvidia l4": ("8.9", 72.0),
    "nvidia h100 80gb hbm3": ("9.0", 700.0),
}
"""Compute capability and power limit [W]. Source: NVIDIA's datasheets of these boards."""
_OPERANDS = {"add": 2, "mul": 2, "div": 2, "pow": 2}
"""Element-wise operations of two tensors; the others, and those with a trailing `u`, have one."""


@dataclass(frozen=True)
class Points:
    """Measured operations by device and kind (`linear`, `bmm`, `conv`, `elem`, `ln`, `softmax`)."""

    by_device: Mapping[str, Mapping[str, tuple[Timing, ...]]]

    def drawn(self, device: str, num: int | None, seed: int = 0) -> tuple[Timing, ...]:
        """A device's points, `num` of each kind at random (None: all of them)."""
        kinds = self.by_device.get(normalised(device), {})
        drawn: list[Timing] = []
        for kind in sorted(kinds):
            timings = kinds[kind]
            few = num is not None and num < len(timings)
            drawn += random.Random(f"{seed} {kind}").sample(timings, num) if few and num is not None else timings
        return tuple(drawn)


def read_points(folder: Path) -> Points:
    """Every point of every `train_*` and `test_*` file in `folder`."""
    found: dict[str, dict[str, list[Timing]]] = {}
    for path in sorted([*folder.glob("train_*.csv*"), *folder.glob("test_*.csv*")]):
        kind = path.name.split("_", 1)[1].split(".")[0]
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                operation = _operation(row)
                seconds = float(row["Latency"] or 0) * 1e-3
                if operation is not None and seconds > 0:
                    kinds = found.setdefault(normalised(row["Device"]), {})
                    kinds.setdefault(kind, []).append(Timing(operation=operation, seconds=seconds))
    return Points({device: {k: tuple(v) for k, v in kinds.items()} for device, kinds in found.items()})


def read_devices(folder: Path) -> dict[str, Hardware]:
    """The devices of `devices.json`, by normalised name."""
    rows = json.loads((folder / "devices.json").read_text(encoding="utf-8"))
    return {normalised(name): _hardware(name, row) for name, row in rows.items()}


def with_points(hardware: Hardware, timings: tuple[Timing, ...]) -> Hardware:
    """The same device, measured."""
    if not timings:
        return hardware
    benchmark = MicroBenchmark(
        device=hardware.device,
        threads=1,
        timings=timings,
        launch_s=1e-5,
        took_s=0.0,
        measured_at="",
        torch_version="2.1",
    )
    return replace(hardware, benchmark=benchmark)


def _hardware(name: str, row: Mapping[str, float]) -> Hardware:
    capability, power = _BOARDS.get(normalised(name), (None, None))
    if capability is None:
        known = (one for one in catalogue().entries if normalised(name) in map(normalised, one.driver_names))
        entry = next(known, None)
        capability, power = (entry.compute_capability, entry.power_w) if entry else (None, None)
    memory = int(row["Dev_Mem"] * 2**30)
    device = Device(
        name=name, kind="cuda", model=name, cores=int(row["Num_Sm"]), memory_bytes=memory, fast_dtypes=("fp32",)
    )
    return Hardware(
        device=device,
        dense_flops={"fp32": row["SingleFLOPs"] * 1e9},
        bandwidth_bytes_per_s=row["Mem_Bw"] * 1e9,
        multiprocessors=int(row["Num_Sm"]),
        compute_capability=capability,
        l2_bytes=int(row["L2Cache"] * 2**20),
        power_w=power,
    )


def _operation(row: Mapping[str, str]) -> Operation | None:
    """What a row measured; None where it is of a kind unknown here."""
    name = row["OPName"]
    if name in {"linear", "bmm"}:
        return _product(*(int(row[key]) for key in "BMNK"), is_linear=name == "linear")
    if name == "conv":
        return _convolution(row)
    rows, columns = int(row.get("B") or 0), int(row.get("H") or 0)
    if rows * columns == 0:
        return None
    if name == "ln":
        weights = (_fp32(columns), _fp32(columns))
        return _memory_bound("native_layer_norm", (_fp32(rows, columns), *weights), _fp32(rows, columns))
    if name == "softmax":
        shape = _fp32(rows, columns)
        return replace(_memory_bound("_softmax", (shape,), shape), attributes=(("dim", -1),))
    shape = _fp32(rows, columns)
    return _memory_bound(
        name.removesuffix("u") if name[:-1] in _OPERANDS else name, (shape,) * _OPERANDS.get(name, 1), shape
    )


def _product(batch: int, rows: int, columns: int, depth: int, *, is_linear: bool) -> Operation:
    prefix = () if is_linear else (batch,)
    a, b, result = _fp32(*prefix, rows, depth), _fp32(*prefix, depth, columns), _fp32(*prefix, rows, columns)
    operation = _memory_bound(
        "addmm" if is_linear else "bmm", (*((_fp32(columns),) if is_linear else ()), a, b), result
    )
    layout = (("transpose_a", False), ("transpose_b", is_linear))
    return replace(operation, flops=2 * batch * rows * columns * depth, attributes=layout)


def _convolution(row: Mapping[str, str]) -> Operation | None:
    batch, channels, kernels = (int(row[key]) for key in ("B", "Input_Channel", "Output_Channel"))
    window, size, stride, padding = (int(row[key]) for key in ("Kernel_Szie", "Input_Size", "Stride", "Padding"))
    out = (size + 2 * padding - window) // stride + 1
    if out < 1:
        return None
    image, weight = _fp32(batch, channels, size, size), _fp32(kernels, channels, window, window)
    operation = _memory_bound("convolution", (image, weight), _fp32(batch, kernels, out, out))
    attributes = (("groups", 1), ("padding", [padding] * 2), ("stride", [stride] * 2))
    return replace(operation, flops=2 * batch * kernels * out * out * channels * window**2, attributes=attributes)


def _memory_bound(name: str, inputs: tuple[TensorShape, ...], result: TensorShape) -> Operation:
    return Operation(
        name=name,
        inputs=inputs,
        outputs=(result,),
        flops=0,
        bytes_read=4 * sum(one.numel for one in inputs),
        bytes_written=4 * result.numel,
    )


def _fp32(*sizes: int) -> TensorShape:
    return TensorShape(shape=sizes, dtype="fp32")


def kinds_of(points: Points, device: str) -> Iterator[tuple[str, int]]:
    """How many points of each kind a device has."""
    for kind, timings in sorted(points.by_device.get(normalised(device), {}).items()):
        yield kind, len(timings)
