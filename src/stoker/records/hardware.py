"""Hardware as forecasts use it: a device's figures, times of single operations, and links between devices."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.device import Device
from stoker.records.plan import Basis
from stoker.records.trace import Operation


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of an operation on an otherwise idle device [s], the median over repetitions."""

    schema: ClassVar[int] = 1
    operation: Operation
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MicroBenchmark:
    """Times of single operations on one device, driver and PyTorch, measured once by `stoker doctor`.

    Of a GPU the doctor measures the host alone, without `timings`.

    `launch_s` is the host's time to start one operation [s]; `threads` are the CPU threads it was measured with.
    `host_s` is the time of Python and autograd without the operations [s]: `forward` and `backward` for each operation,
    `optimizer` for each parameter, `update` for each update. `anchors_s` are times [s] by name of a few calls that are
    timed again later, to compare the device's speed; empty if there are none.
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
    """Speed of a device now, compared with when its operations were timed.

    `factor` is the ratio of times now to times then, `deviation` one standard deviation of its logarithm.
    """

    schema: ClassVar[int] = 1
    factor: float
    deviation: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of a device for forecasts; None: unknown.

    `dense_flops` are peak rates of dense products [FLOP/s] by dtype, `power_w` the power limit and `idle_w` the idle
    draw [W], `host_link_bytes_per_s` the rate in one direction. `host_memory_bytes` is
    the memory of the machine that a GPU here stands in, `host_bandwidth_bytes_per_s` the printed rate of that.
    `benchmark` is there if the device was measured, `pace`
    if its speed was compared since. `host_s` is as in `MicroBenchmark`, of the host of a GPU; empty: not measured.
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
    host_memory_bytes: int | None = None
    host_bandwidth_bytes_per_s: float | None = None
    host_s: dict[str, float] = field(default_factory=dict)
    benchmark: MicroBenchmark | None = None
    pace: Pace | None = None

    @property
    def basis(self) -> Basis:
        """The basis of forecasts for it."""
        return "calibrated" if self.benchmark is not None and self.benchmark.timings else "datasheet"

    @property
    def slowdown(self) -> float:
        """Ratio of times now to those in `benchmark` [1]."""
        return self.pace.factor if self.pace else 1.0


Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"]
"""A collective operation on a tensor, as named by `torch.distributed`."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The time of one collective among the processes of a group: `alpha_s` [s] and `beta_s_per_byte` [s/byte].

    Bytes are those of the whole tensor: in an all-gather the result of each process, in a reduce-scatter its input, in
    an all-to-all everything that it sends. `measured` are sizes [bytes] and times [s], by size, if it was measured:
    protocols change with the size of messages, which a line would miss.
    """

    collective: Collective
    alpha_s: float
    beta_s_per_byte: float
    measured: tuple[tuple[int, float], ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """Time of the collective over so many bytes [s]: interpolated between measured sizes, or by the line.

        >>> LinkCost(collective="all-reduce", alpha_s=1e-3, beta_s_per_byte=1e-9).seconds(1e6)
        0.002
        """
        if len(self.measured) < 2:
            return self.alpha_s + num_bytes * self.beta_s_per_byte
        sizes = [size for size, _ in self.measured]
        index = min(max(bisect.bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
        (small, low_s), (large, high_s) = self.measured[index - 1], self.measured[index]
        if num_bytes <= small:
            return low_s
        return max(low_s, low_s + (high_s - low_s) * (num_bytes - small) / (large - small))


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links between `world_size` devices, each with one process, on one level.

    `name` is the kind of link, such as `NVLink`. `spread` is a factor of at least 1 by which times may be off to either
    side in 8 cases of 10. `overlap` is the share of a message's time that is hidden by concurrent arithmetic [0 to 1]:
    on a CPU they compete for its cores. `slowdown` is the ratio of arithmetic in all processes at once to that in one
    process, by what bounds it, `arithmetic` or `memory`: processes on one CPU share its caches and its memory. `waits`
    are the extra times of a message that all wait for, after so much arithmetic in each process: (arithmetic, extra)
    [s], by arithmetic. `note` has the assumptions.
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
        """The cost of a collective.

        Raises:
            KeyError: it is unknown.
        """
        for cost in self.costs:
            if cost.collective == collective:
                return cost
        raise KeyError(collective)

    def seconds(self, collective: Collective, num_bytes: float) -> float:
        """Time of a collective over a tensor of so many bytes [s]."""
        return self.cost(collective).seconds(num_bytes)

    def wait_s(self, arithmetic_s: float) -> float:
        """Extra time of a message that all wait for, after so much arithmetic [s]; 0 if it was not measured.

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
