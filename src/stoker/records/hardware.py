"""What forecasts rest on: a device's figures, and the times of single operations measured on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from stoker.records.device import Device
from stoker.records.estimate import Basis
from stoker.records.trace import Operation


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long an operation took on a device [s], the median over repetitions, alone on the device."""

    schema: ClassVar[int] = 1
    operation: Operation
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MicroBenchmark:
    """Times of single operations on one device, driver and PyTorch: what `stoker doctor` measures once.

    `launch_s` is what the host needs to start one operation [s]; `threads` are the CPU threads it was measured with.
    `host_s` is what Python and autograd take besides the operations themselves [s]: `forward` and `backward` for each
    operation, `optimizer` for each parameter, `update` for each update. `anchors_s` are times [s] by name of the
    few calls that are timed again later, to know how fast the device was meanwhile; empty where there are none.
    """

    schema: ClassVar[int] = 1
    device: Device
    threads: int
    timings: tuple[Timing, ...]
    launch_s: float
    took_s: float
    measured_at: str
    torch_version: str
    host_s: dict[str, float] = field(default_factory=dict)
    anchors_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a device is now, beside when its operations were timed.

    `factor` is how many times as long the same calls take now, `deviation` one standard deviation of its logarithm.
    """

    schema: ClassVar[int] = 1
    factor: float
    deviation: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device as forecasts see it; None where nobody knows.

    `dense_flops` are peak rates of dense products [FLOP/s] by dtype, `power_w` the power limit and `idle_w` what it
    draws doing nothing [W], `host_link_bytes_per_s` one direction. `benchmark` is there if the device was measured,
    `pace` if it was looked at again since.
    """

    schema: ClassVar[int] = 1
    device: Device
    dense_flops: dict[str, float]
    bandwidth_bytes_per_s: float | None
    multiprocessors: int | None = None
    compute_capability: str | None = None
    l2_bytes: int | None = None
    power_w: float | None = None
    idle_w: float | None = None
    host_link_bytes_per_s: float | None = None
    benchmark: MicroBenchmark | None = None
    pace: Pace | None = None

    @property
    def basis(self) -> Basis:
        """What a forecast for it rests on."""
        return "calibrated" if self.benchmark is not None else "datasheet"

    @property
    def slowdown(self) -> float:
        """How many times as long as in `benchmark` everything takes now."""
        return self.pace.factor if self.pace else 1.0
