"""Times of operations on a CPU, between those that a micro-benchmark measured.

Each family of operations has a first guess, a fixed time, the FLOPs at the best rate of the dtype and the bytes at the
bandwidth, and a surface that says by how much that guess is wrong, as a function of sizes and traits. No constant
belongs to a model. Without a micro-benchmark the guess stands alone, at a usual share of the datasheet's rates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from stoker.planning.time.cpu_families import Place, place_of
from stoker.planning.time.kriging import Guess, Surface, fitted
from stoker.records.hardware import Hardware, Timing
from stoker.records.trace import Operation

_USUAL_START_S = 4e-6
_DATASHEET_SHARE = 0.5
"""Of a datasheet's rates that operations reach where nothing was measured, give or take `_DATASHEET_ERROR`."""
_DATASHEET_ERROR = 0.6
_UNKNOWN_FLOPS, _UNKNOWN_BANDWIDTH = 5e10, 1.5e10
"""Of one core of which nothing is known [FLOP/s in fp32, bytes/s]; where bf16 is native it is twice as fast."""
_BANDWIDTH_POWER = 0.5
"""Bandwidth grows with cores to this power, since they share the memory."""


@dataclass(frozen=True)
class Roof:
    """The best rates of a CPU: products [FLOP/s] by dtype, memory [bytes/s]; and the least time of a call [s]."""

    flops_per_s: dict[str, float]
    bytes_per_s: float
    start_s: float

    def seconds(self, place: Place) -> float:
        """A first guess [s]."""
        dtype = next((trait for trait in place.point.traits if trait in self.flops_per_s), "fp32")
        return self.start_s + place.flops / self.flops_per_s[dtype] + place.num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class CpuTimes:
    """Times of operations on one CPU at one number of threads; `slowdown` is its pace now [times as long]."""

    roof: Roof
    surfaces: dict[str, Surface] = field(default_factory=dict)
    slowdown: float = 1.0

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """From its micro-benchmark; from its datasheet, or usual figures, where it was not measured."""
        if hardware.benchmark is None:
            return cls(_datasheet_roof(hardware))
        roof, surfaces = _measured(hardware.benchmark.timings)
        return cls(roof, surfaces, hardware.slowdown)

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` alone, with its operands out of the cache [s]."""
        place = place_of(operation)
        return self.slowdown * self.roof.seconds(place) * math.exp(self._guess(place).value)

    def traffic_seconds(self, operation: Operation) -> float:
        """Time that the bytes of `operation` take to come and go, at the memory's best rate [s]."""
        return self.slowdown * place_of(operation).num_bytes / self.roof.bytes_per_s

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it, as left-out measurements show it."""
        return self._guess(place_of(operation)).deviation

    def _guess(self, place: Place) -> Guess:
        surface = self.surfaces.get(place.family)
        return surface.at(place.point) if surface else Guess(0.0, _DATASHEET_ERROR)


def _measured(timings: Sequence[Timing]) -> tuple[Roof, dict[str, Surface]]:
    placed = [(place_of(timing.operation), timing.seconds) for timing in timings]
    roof = _roof(placed)
    families: defaultdict[str, list[tuple[Place, float]]] = defaultdict(list)
    for place, seconds in placed:
        families[place.family].append((place, seconds))
    surfaces = {}
    for family, members in families.items():
        values = [math.log(seconds / roof.seconds(place)) for place, seconds in members]
        surfaces[family] = fitted([place.point for place, _ in members], values)
    return roof, surfaces


def _roof(placed: Sequence[tuple[Place, float]]) -> Roof:
    rates: dict[str, float] = {}
    for place, seconds in placed:
        if place.family == "product":
            dtype = place.point.traits[1]
            rates[dtype] = max(rates.get(dtype, 0.0), place.flops / seconds)
    rates.setdefault("fp32", max(rates.values(), default=_UNKNOWN_FLOPS))
    large = max((place.num_bytes for place, _ in placed if place.family == "elementwise"), default=0.0)
    copies = [p.num_bytes / s for p, s in placed if p.family == "elementwise" and p.num_bytes > large / 4]
    shortest = min((seconds for place, seconds in placed if place.family == "elementwise"), default=_USUAL_START_S)
    return Roof(rates, sorted(copies)[len(copies) // 2] if copies else _UNKNOWN_BANDWIDTH, shortest)


def _datasheet_roof(hardware: Hardware) -> Roof:
    rates = {dtype: rate * _DATASHEET_SHARE for dtype, rate in hardware.dense_flops.items()}
    cores = max(1, hardware.device.cores)
    rates.setdefault("fp32", min(rates.values(), default=_UNKNOWN_FLOPS * cores))
    if "bf16" in hardware.device.fast_dtypes:
        rates.setdefault("bf16", 2 * rates["fp32"])
    known = hardware.bandwidth_bytes_per_s
    bandwidth = known * _DATASHEET_SHARE if known else _UNKNOWN_BANDWIDTH * cores**_BANDWIDTH_POWER
    return Roof(rates, bandwidth, _USUAL_START_S)
