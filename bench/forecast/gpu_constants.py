"""The constants of `planning.model.gpu_roofline`, and how they are fitted on other devices than the one forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.forecast.gpu_labels import normalised
from bench.forecast.gpu_points import Points, with_points
from stoker.planning.model import gpu_kernels
from stoker.planning.model.gpu_kernels import Rates, TileShape, product_seconds
from stoker.planning.model.gpu_roofline import BATCHED, PRODUCT, PowerModel, Shares, Sustained
from stoker.planning.model.gpu_times import GpuTimes, calibrate, descend, typical
from stoker.records.hardware import Hardware, Timing

Floats = NDArray[np.float64]

_RANGES = {
    "large": (0.9, 1.1),
    "half_columns": (0.3, 1.0),
    "half_rows": (0.3, 1.0),
    "quarter": (0.3, 1.0),
    "eighth": (0.2, 1.0),
    "sixteenth": (0.1, 1.0),
    "prologue": (4.0, 200.0),
    "resident": (0.02, 4.0),
    "tail": (0.01, 0.99),
    "split_traffic": (0.02, 4.0),
    "split_s": (1e-7, 3e-5),
    "overlap": (1.5, 8.0),
}
_LEAST_SIZE = 48
"""Products with a smaller side are no shapes of models, and have kernels of their own."""
_PER_SET = 150
_NEIGHBOURS = {"6.1": "6.0", "7.5": "7.0", "8.9": "9.0"}
"""Whose energy per FLOP stands in where the only device it was told from is left out."""

REFITTED = (
    "datasheet.PRODUCT and datasheet.BATCHED: how tiles of products behave",
    "datasheet.Shares: what is sustained of arithmetic and bandwidth; but for `unprotected`, which none of them is",
    "power._FP32_PICOJOULE of capabilities 6.1, 7.5 and 8.9: replaced by a neighbour's where that device is left out",
)
"""What leaving a device out covers. Boards of the same chip stay: without the A100 of 40 GB, the one of 80 GB."""
NOT_REFITTED = (
    "power._FP32_PICOJOULE of all other capabilities (8.0 was told from the A100s), power._CLOCK_EXPONENT",
    "roofs._WINOGRAD_SHARE, roofs._WINOGRAD_S: fitted on convolutions of P4, P100, V100, T4 and A100",
    "bandwidth.ROW_KERNELS, bandwidth._WARP_SOFTMAX and the shares of the L2 cache: checked against the same points",
    "kriging._LENGTHS, _SIMILARITIES, _NOISES: the choices among which a device's own points decide",
    "gpu._GAP_S, gpu._DATASHEET_ERRORS, gpu._DRIFT, gpu._THROTTLED_DRIFT: the latter three set intervals alone",
    "gpu_forecast._HOST_S, gpu_forecast._WAIT_S: judgements made while the labels were at hand",
)
"""Which constants stay as shipped when a device is left out, its points having been among those they come from."""
JUDGED_ON_LABELS = (
    "gpu_times._RECOVERY: throttled arithmetic in a step against alone, from five labels of a T4",
    "gpu_forecast.SlowAllocator.call_s: a call of cudaMalloc, from forward passes of three V100 training labels",
    "gpu_forecast.SlowAllocator.slow_s_per_byte: training's upper end, from forward passes as long as backward ones",
)
"""Which constants come from whole models. The last two act in training only."""


@dataclass(frozen=True)
class Constants:
    """What is fitted once and shipped; without arguments, what is shipped."""

    product: TileShape = PRODUCT
    batched: TileShape = BATCHED
    shares: Shares = field(default_factory=Shares)
    capabilities: Mapping[str, str] = field(default_factory=dict)

    def times(self, hardware: Hardware) -> GpuTimes:
        """The model of a device under these constants."""
        capability = hardware.compute_capability or ""
        power = replace(PowerModel.of(hardware), capability=self.capabilities.get(capability, capability))
        sustained = Sustained(
            hardware=hardware, power=power, shares=self.shares, product=self.product, batched=self.batched
        )
        return GpuTimes(sustained, calibrate(sustained))


def fitted_without(device: str, points: Points, devices: Mapping[str, Hardware]) -> Constants:
    """The constants as the points of all devices but `device` tell them."""
    others = {
        name: timings
        for name in points.by_device
        if name != normalised(device) and name in devices and (timings := points.drawn(name, _PER_SET * 4))
    }
    product, batched = (
        _fitted_shape(start, [(devices[name], timings) for name, timings in others.items()], is_batched=is_batched)
        for start, is_batched in ((PRODUCT, False), (BATCHED, True))
    )
    draft = Constants(product=product, batched=batched, capabilities=_NEIGHBOURS)
    return replace(draft, shares=_fitted_shares(draft, {name: (devices[name], others[name]) for name in others}))


def _fitted_shape(
    start: TileShape, measured: list[tuple[Hardware, tuple[Timing, ...]]], *, is_batched: bool
) -> TileShape:
    """How tiles behave, from all devices at once: first each device's own rates, then the shape common to all."""
    names = gpu_kernels.BATCHED if is_batched else gpu_kernels.SINGLE
    sets = [one for hardware, timings in measured if (one := _point_set(start, hardware, timings, names)) is not None]

    def loss(values: dict[str, float]) -> float:
        shape = TileShape(**values)
        return sum(
            typical(np.log((product_seconds(one.sizes, 4.0, shape, one.rates) + one.alone_s) / one.seconds))
            for one in sets
        ) / len(sets)

    begin = {name: getattr(start, name) for name in _RANGES}
    return TileShape(**descend(loss, begin, _RANGES, rounds=8, step=0.2))


@dataclass(frozen=True)
class _PointSet:
    """Products of one device: sizes (n, 4), times [s], and the rates and time of starting that fit them."""

    sizes: Floats
    seconds: Floats
    rates: Rates
    alone_s: float


def _point_set(
    start: TileShape, hardware: Hardware, timings: tuple[Timing, ...], names: tuple[str, ...]
) -> _PointSet | None:
    kept = [one for one in timings if one.operation.name in names and _is_model_like(one)][:_PER_SET]
    if len(kept) < 20:
        return None
    sizes = np.array([gpu_kernels.product_sizes(one.operation) for one in kept], dtype=float)
    seconds = np.array([one.seconds for one in kept])
    plain = Sustained(hardware=hardware, power=PowerModel.of(hardware)).rates("fp32")

    def rates_at(values: dict[str, float]) -> Rates:
        return Rates(plain.flops * values["flops"], plain.bytes_per_s * values["bandwidth"], plain.multiprocessors)

    best = descend(
        lambda values: typical(
            np.log((product_seconds(sizes, 4.0, start, rates_at(values)) + values["alone_s"]) / seconds)
        ),
        {"flops": 1.0, "bandwidth": 1.0, "alone_s": float(seconds.min()) / 2},
        {"flops": (0.2, 2.0), "bandwidth": (0.5, 1.2), "alone_s": (1e-7, float(seconds.min()))},
        rounds=12,
    )
    return _PointSet(sizes, seconds, rates_at(best), best["alone_s"])


def _is_model_like(timing: Timing) -> bool:
    sizes = gpu_kernels.product_sizes(timing.operation)
    return sizes is not None and min(sizes[1:]) >= _LEAST_SIZE


def _fitted_shares(draft: Constants, measured: Mapping[str, tuple[Hardware, tuple[Timing, ...]]]) -> Shares:
    """What is sustained of the peak: the median over the devices of each group.

    Only those that their power limit does not throttle count, if there are any.
    """
    rates: dict[str, list[tuple[float, float]]] = {one.name: [] for one in fields(Shares)}
    for hardware, timings in measured.values():
        times = draft.times(with_points(hardware, timings))
        group, memory = times.sustained.groups()
        expected = getattr(draft.shares, group)
        peak = hardware.dense_flops["fp32"]
        clock = times.sustained.power.sustained_share(peak * expected, "fp32")
        if ("product", "fp32") in times.calibration.fitted:
            rates[group].append((clock, expected * times.calibration.fitted["product", "fp32"].flops))
        if ("stream", "") in times.calibration.fitted:
            found = times.calibration.fitted["stream", ""].bandwidth
            rates[memory].append((1.0, getattr(draft.shares, memory) * found))
    return Shares(**{group: _middle(found) or getattr(draft.shares, group) for group, found in rates.items()})


def _middle(found: list[tuple[float, float]]) -> float | None:
    free = [share for clock, share in found if clock > 0.97] or [share for _, share in found]
    return median(free) if free else None
