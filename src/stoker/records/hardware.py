"""What forecasts rest on: a device's figures, and the times of single operations measured on it.

Links between devices: how long a message of some size takes, by what is done with it.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import ClassVar, Literal

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


Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"]
"""What processes do together with a tensor, as `torch.distributed` calls it."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The time of one collective among the processes of a group: `alpha_s` [s] and `beta_s_per_byte` [s/byte].

    Bytes are those of the whole tensor: of an all-gather what each process has afterwards, of a reduce-scatter what
    each has before, of an all-to-all what each one sends in all. `measured` are sizes [bytes] and times [s], by size,
    if it was measured: a protocol changes with the size of its messages, and a line alone would miss that.
    """

    collective: Collective
    alpha_s: float
    beta_s_per_byte: float
    measured: tuple[tuple[int, float], ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """The time of a tensor of so many bytes [s]: between the sizes measured, or by the line.

        >>> LinkCost(collective="all-reduce", alpha_s=1e-3, beta_s_per_byte=1e-9).seconds(1e6)
        0.002
        """
        if len(self.measured) < 2:
            return self.alpha_s + num_bytes * self.beta_s_per_byte
        sizes = [size for size, _ in self.measured]
        at = min(max(bisect.bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
        (small, low_s), (large, high_s) = self.measured[at - 1], self.measured[at]
        if num_bytes <= small:
            return low_s
        return max(low_s, low_s + (high_s - low_s) * (num_bytes - small) / (large - small))


@dataclass(frozen=True, kw_only=True)
class Links:
    """What `world_size` devices, each with one process, reach between them on one level.

    `name` says over what, such as `NVLink`. `spread` is how far times may be off to either side, as a factor of at
    least 1 that holds in 8 cases of 10. `overlap` is which share of a message's time passes beside arithmetic where
    both go on at once [0 to 1]: on a CPU they compete for its cores. `slowdown` is how much longer arithmetic takes
    where all processes compute at once than where one does alone, by what bounds it, `arithmetic` or `memory`: those of
    one CPU share its caches and its memory. `waits` are how much longer a message that all stop for takes where
    each process comes to it from so much arithmetic of its own: (arithmetic, longer) [s], by arithmetic. `note` says
    what was assumed.
    """

    schema: ClassVar[int] = 2
    name: str
    world_size: int
    costs: tuple[LinkCost, ...]
    basis: Basis
    spread: float = 1.0
    overlap: float = 0.0
    slowdown: dict[str, float] = field(default_factory=dict)
    waits: tuple[tuple[float, float], ...] = ()
    note: str = ""
    took_s: float = 0.0
    measured_at: str = ""
    torch_version: str = ""

    def __post_init__(self) -> None:
        if not self.spread >= 1:
            raise ValueError(f"spread is a factor of at least 1, got {self.spread}")

    def cost(self, collective: Collective) -> LinkCost:
        """That of a collective.

        Raises:
            KeyError: nobody knows it.
        """
        for one in self.costs:
            if one.collective == collective:
                return one
        raise KeyError(collective)

    def seconds(self, collective: Collective, num_bytes: float) -> float:
        """The time of one collective over a tensor of so many bytes [s]."""
        return self.cost(collective).seconds(num_bytes)

    def wait_s(self, arithmetic_s: float) -> float:
        """What a message that all stop for takes longer after so much arithmetic [s]; 0 where nobody measured it.

        >>> Links(name="", world_size=2, costs=(), basis="unknown", waits=((1e-3, 2e-3), (3e-3, 4e-3))).wait_s(2e-3)
        0.003
        """
        before, low_s = 0.0, 0.0
        for after, high_s in self.waits:
            if arithmetic_s <= after:
                return low_s + (high_s - low_s) * (arithmetic_s - before) / (after - before)
            before, low_s = after, high_s
        return low_s


def line_through(points: tuple[tuple[int, float], ...]) -> tuple[float, float]:
    """Alpha [s] and beta [s/byte] of measured sizes [bytes] and times [s]: the shortest time, and the steepest end.

    >>> line_through(((4, 1e-3), (1_000_000, 2e-3), (11_000_000, 12e-3)))
    (0.001, 1e-09)
    """
    alpha_s = min(seconds for _, seconds in points)
    slopes = [(b_s - a_s) / (b - a) for (a, a_s), (b, b_s) in itertools.pairwise(points)]
    return alpha_s, max(0.0, round(slopes[-1], 15)) if slopes else 0.0
