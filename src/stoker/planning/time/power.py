"""What a power limit does to the clock, and what a device draws.

A product on large tiles draws `idle + energy per FLOP x rate`. Where that is above the limit the driver lowers clock
and voltage together, and power falls with a power of the clock; the clock settles where the two meet. Boards of 70 W
live there (an L4 sustains two fifths of its peak), boards of 300 W and more hardly ever.

Energies per FLOP are in pJ, which is W per TFLOP/s. Where they come from: fp32 of capability 8.0 is what makes an A100
of 250 W sustain 0.9 of what one of 300 W does; 6.1, 7.5 and 8.9 are what makes P4, T4 and L4 sustain 0.6, 0.55 and 0.4
of their peaks, all in the public measurements of NeuSight (ASPLOS 2025); 6.0, 7.0 and 9.0 are not above what lets P100,
V100 and H100 run unthrottled there; 10.0 and 12.0 are not above what lets B200 and RTX 5090 near their peaks. 8.6 is
that of its process node. Tensor cores: A100 of 300 W, A100 of 400 W, H100 of 700 W and B200 of 1000 W then do what
Bekman's "Maximum Achievable Matmul FLOPS" (2024) lists for them, within 10 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

_CLOCK_EXPONENT = 1.5
"""Power above idle grows with this power of the clock: 1 at constant voltage, 3 where voltage follows the clock.
Between what 1.2 and 2 would give for A100, T4 and L4 the measurements do not decide."""

_FP32_PICOJOULE = {
    "6.0": 22.0, "6.1": 23.0, "7.0": 14.5, "7.5": 20.0, "8.0": 13.9, "8.6": 9.0, "8.9": 10.0, "9.0": 9.5, "10.0": 6.0,
    "10.3": 6.0, "12.0": 5.5,
}  # fmt: skip
_UNKNOWN_PICOJOULE = 10.0
_TENSOR_SHARE = {"tf32": 0.16, "bf16": 0.08, "fp16": 0.08, "fp8": 0.045, "int8": 0.045}
"""Energy per operation of tensor cores, as a share of fp32's outside of them on the same chip."""
_DRAM_PICOJOULE_PER_BYTE = {"hbm": 40.0, "gddr": 90.0}
"""Memory and its interface together. Source: O'Connor et al., "Fine-Grained DRAM" (MICRO 2017): HBM2 3.9 pJ/bit, GDDR5
14 pJ/bit; here with what the way to it takes on the chip, and between GDDR5 and GDDR6."""
_IDLE_SHARE = 0.15
"""What a busy board draws besides arithmetic and memory traffic, as a share of its limit, where nobody measured it."""


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """What a device draws [W, J]. `limit_w` is None where nobody knows it: then nothing is throttled.

    `dense_dtypes` are those whose products its datasheet rates; the others are computed as fp32.
    """

    limit_w: float | None
    floor_w: float
    capability: str
    is_hbm: bool
    dense_dtypes: frozenset[str]

    @classmethod
    def of(cls, hardware: Hardware) -> PowerModel:
        """From the datasheet."""
        limit = hardware.power_w
        floor = max(hardware.idle_w or 0.0, _IDLE_SHARE * (limit or 100.0))
        capability = hardware.compute_capability or ""
        return cls(
            limit_w=limit,
            floor_w=floor,
            capability=capability,
            is_hbm=has_stacked_memory(hardware),
            dense_dtypes=frozenset(hardware.dense_flops),
        )

    def joules_per_flop(self, dtype: str) -> float:
        """Energy of a FLOP at full clock [J]."""
        fp32 = _FP32_PICOJOULE.get(self.capability, _UNKNOWN_PICOJOULE)
        return fp32 * (_TENSOR_SHARE.get(dtype, 1.0) if dtype in self.dense_dtypes else 1.0) * 1e-12

    def joules_per_byte(self) -> float:
        """Energy of a byte that crosses the device's memory interface [J]."""
        return _DRAM_PICOJOULE_PER_BYTE["hbm" if self.is_hbm else "gddr"] * 1e-12

    def sustained_share(self, full_flops: float, dtype: str) -> float:
        """The clock under the limit, as a share of the full one, while `full_flops` [FLOP/s] would be done at that."""
        if self.limit_w is None:
            return 1.0
        wanted = full_flops * self.joules_per_flop(dtype)
        allowed = max(self.limit_w - self.floor_w, 0.1 * self.limit_w)
        return min(1.0, (allowed / wanted) ** (1 / _CLOCK_EXPONENT)) if wanted > 0 else 1.0

    def energy_j(self, seconds: float, flops: dict[str, float], num_bytes: float) -> float:
        """Energy of some work [J]: `seconds` busy, `flops` by dtype, bytes across memory; never above the limit."""
        arithmetic = sum(count * self.joules_per_flop(dtype) for dtype, count in flops.items())
        wanted = self.floor_w * seconds + arithmetic + num_bytes * self.joules_per_byte()
        return wanted if self.limit_w is None else min(wanted, self.limit_w * seconds)


def flops_by_dtype(operations_with_counts: Iterable[tuple[Operation, float]]) -> dict[str, float]:
    """FLOPs of operations, each as often as it runs, by the dtype in which the time model takes them to be computed."""
    from stoker.planning.time.roofs import kind_of  # noqa: PLC0415 - roofs need rates, which need this file's clock

    flops: defaultdict[str, float] = defaultdict(float)
    for operation, count in operations_with_counts:
        if operation.flops:
            kind, dtype = kind_of(operation)
            # What memory bounds, such as a depthwise convolution, is computed outside of tensor cores.
            flops["fp32" if kind in {"row", "stream"} else dtype] += operation.flops * count
    return dict(flops)


def has_stacked_memory(hardware: Hardware) -> bool:
    """Whether its memory is HBM: NVIDIA's data-centre chips are those whose capability ends in 0, but for 12.0."""
    capability = hardware.compute_capability or ""
    return capability.endswith((".0", ".3")) and not capability.startswith("12")
