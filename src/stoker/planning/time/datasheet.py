"""What a GPU sustains of what its datasheet says, where nobody measured it.

The shares are of the peak, fitted once on the public measurements of NeuSight (ASPLOS 2025: P4, P100, V100, T4, A100,
L4, H100; fp32 outside of tensor cores), or, for tensor cores, as published by others. `bench/forecast/gpu_constants.py`
fits them again with a device left out, and `bench/forecast/gpu_operations.py` tells how wrong they then are for it: a
device that differs from all others is told wrong by as much as they differ among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planning.time.power import PowerModel, has_stacked_memory
from stoker.planning.time.tiles import Rates, TileShape
from stoker.records.hardware import Hardware

PRODUCT = TileShape(
    large=1.0, half_columns=1.0, half_rows=0.81, quarter=0.88, eighth=0.8, sixteenth=0.4, prologue=25.0, resident=0.08,
    tail=0.39, split_traffic=0.05, split_s=0.3e-6, overlap=3.4,
)  # fmt: skip
"""One product at a time."""
BATCHED = TileShape(
    large=0.974, half_columns=0.855, half_rows=0.667, quarter=0.593, eighth=0.8, sixteenth=0.4, prologue=26.7,
    resident=0.25, tail=0.01, split_traffic=1.6, split_s=3.1e-6, overlap=2.5,
)  # fmt: skip
"""Many equal products at once: the libraries have fewer kernels for them, and use large tiles where small would do."""

_TENSOR_PROLOGUE = 128.0
"""Depth that filling and draining a tile costs on tensor cores [elements]; not measured, from about 1.5 µs per tile."""
_TENSOR_SHARES = {"8.0": 0.87, "8.6": 0.95, "8.9": 0.95, "9.0": 0.80, "10.0": 0.78, "10.3": 0.79, "12.0": 0.95}
"""Of the dense bf16 peak on the best shapes. Source: Bekman, "Maximum Achievable Matmul FLOPS" (2024): A100 271 of 312
TFLOP/s, H100 795 of 989, B200 1745 of 2250, B300 1769 of 2250. Smaller chips clock above what their sheets say: an RTX
4090 was reported at 159 to 167 of 165 (github.com/mli/transformers-benchmarks, issue 4)."""
_SEPARATE_INTEGERS = ("7.0", "7.2", "7.5", "8.0")
"""Capabilities with integer units beside all fp32 units. In the others addresses are computed in the slots of the
arithmetic, or twice as many fp32 units share the registers' ports. Source: NVIDIA's Volta and GA102 white papers."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What is sustained of the peak [fraction].

    Of fp32 products on large tiles where integer units are separate and where the slots are shared, and of the
    bandwidth of stacked memory, of other memory with error correction, and of that without: an RTX 4090 was reported at
    895 to 921 of 1008 GB/s (github.com/krrishnarraj/clpeak, issue 106; github.com/JuliaGPU/CUDA.jl, issue 1860).
    """

    separate: float = 0.935
    shared: float = 0.77
    stacked: float = 0.89
    graphics: float = 0.77
    unprotected: float = 0.90


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """What a device is expected to sustain, by dtype, before anything was measured on it."""

    hardware: Hardware
    power: PowerModel
    shares: Shares = Shares()
    product: TileShape = PRODUCT
    batched: TileShape = BATCHED

    def groups(self) -> tuple[str, str]:
        """Which of `Shares` hold for its arithmetic and for its memory."""
        arithmetic = "separate" if self.hardware.compute_capability in _SEPARATE_INTEGERS else "shared"
        if has_stacked_memory(self.hardware):
            return arithmetic, "stacked"
        names = f"{self.hardware.device.name} {self.hardware.device.model}".lower()
        return arithmetic, "unprotected" if "rtx" in names or "geforce" in names else "graphics"

    @property
    def bandwidth(self) -> float:
        """Bytes per second that long streams reach."""
        peak = self.hardware.bandwidth_bytes_per_s
        assert peak is not None, "GpuTimes.of refuses devices without a bandwidth"
        share: float = getattr(self.shares, self.groups()[1])
        return peak * share

    def peak_flops(self, dtype: str) -> tuple[float, bool]:
        """Peak of a dtype's products [FLOP/s], and whether they run on tensor cores; fp32's where it has none."""
        rates = self.hardware.dense_flops
        if dtype in {"fp32", "fp64"} or dtype not in rates:
            # Consumer and inference chips have fp64 units for tests only: 1/32 is the mildest ratio among them.
            return rates["fp32"] * (
                (0.5 if has_stacked_memory(self.hardware) else 1 / 32) if dtype == "fp64" else 1
            ), False
        return rates[dtype], True

    def flops(self, dtype: str) -> float:
        """FLOP/s on large tiles, at the clock that the power limit allows."""
        peak, is_tensor = self.peak_flops(dtype)
        capability = self.hardware.compute_capability or ""
        share: float = _TENSOR_SHARES.get(capability, 0.8) if is_tensor else getattr(self.shares, self.groups()[0])
        return peak * share * self.power.sustained_share(peak * share, dtype if is_tensor else "fp32")

    def rates(self, dtype: str) -> Rates:
        """For tiles."""
        multiprocessors = self.hardware.multiprocessors
        assert multiprocessors is not None, "GpuTimes.of refuses devices without a number of multiprocessors"
        return Rates(flops=self.flops(dtype), bytes_per_s=self.bandwidth, multiprocessors=multiprocessors)

    def tiles(self, dtype: str, *, is_batched: bool) -> TileShape:
        """How tiles of this dtype behave."""
        shape = self.batched if is_batched else self.product
        if not self.peak_flops(dtype)[1]:
            return shape
        return TileShape(**{**_fields(shape), "prologue": _TENSOR_PROLOGUE})


def _fields(shape: TileShape) -> dict[str, float]:
    return {name: getattr(shape, name) for name in TileShape.__dataclass_fields__}
