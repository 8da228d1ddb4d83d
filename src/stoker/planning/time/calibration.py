"""What a micro-benchmark says about a device: factors on the datasheet's rates, and where the model is wrong.

Of each kind and dtype two or three numbers are fitted (arithmetic, memory, and the time that measuring an operation
alone adds, which queued operations do not have); what remains is kriged. Kinds that were not measured borrow the
factors of their dtype's products, or stay with the datasheet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.planning.time import products
from stoker.planning.time.datasheet import Sustained
from stoker.planning.time.fitting import Ranges, descend, typical
from stoker.planning.time.residuals import Residuals
from stoker.planning.time.roofs import Kind, Scales, kind_of, point_of, roof_seconds
from stoker.planning.time.tiles import Rates, product_seconds
from stoker.records.hardware import Timing

Floats = NDArray[np.float64]

_RANGES: Ranges = {"flops": (0.1, 2.0), "bandwidth": (0.3, 1.5), "alone_s": (1e-7, 3e-4)}
_LEAST_POINTS = 4
"""Fewer points of a kind say too little about two or three numbers."""
_MOST_FITTED = 500
"""The factors settle with fewer points than kriging can use."""


@dataclass(frozen=True)
class Calibration:
    """Factors and residuals, by kind and dtype."""

    fitted: dict[tuple[Kind, str], Scales]
    residuals: dict[tuple[Kind, str], Residuals]

    def scales(self, kind: Kind, dtype: str) -> Scales:
        """Those of this kind and dtype, or borrowed ones."""
        if (kind, dtype) in self.fitted:
            return self.fitted[kind, dtype]
        if kind in {"row", "stream"}:
            return self.fitted.get(("stream", ""), Scales())
        return self.fitted.get(("product", dtype), Scales())


def calibrate(sustained: Sustained) -> Calibration:
    """From the micro-benchmark of `sustained.hardware`; nothing where there is none."""
    calibration = Calibration({}, {})
    if sustained.hardware.benchmark is None:
        return calibration
    grouped: dict[tuple[Kind, str], list[Timing]] = defaultdict(list)
    for timing in sustained.hardware.benchmark.timings:
        if timing.seconds > 0:
            grouped[kind_of(timing.operation)].append(timing)
    # Products first: convolutions and attention start from their factors.
    for key in sorted(grouped, key=lambda key: (key[0] != "stream", key[0] != "product", key)):
        timings = grouped[key]
        if len(timings) >= _LEAST_POINTS:
            _take_in(calibration, key, timings, sustained)
    return calibration


def _take_in(calibration: Calibration, key: tuple[Kind, str], timings: Sequence[Timing], sustained: Sustained) -> None:
    kind, dtype = key
    measured = np.array([timing.seconds for timing in timings])
    if kind in {"product", "batched product"}:
        scales, alone_s, modelled = _fit_products(key, timings, measured, sustained)
    else:
        start = calibration.scales(kind, dtype)
        roofs = np.array([roof_seconds(one.operation, kind, dtype, sustained, start) for one in timings])
        scales, alone_s, modelled = _fit_factor(start, roofs, measured)
    usable = modelled > 0
    # What is left of a short operation after taking off the time of measuring it alone is mostly noise: half stays.
    net = np.maximum(measured - alone_s, measured / 2)[usable]
    points = np.array([point_of(one.operation, kind) for one in timings])[usable]
    if len(points) >= _LEAST_POINTS:
        calibration.fitted[key] = scales
        calibration.residuals[key] = Residuals.of(points, np.log(net / modelled[usable]))


def _fit_products(
    key: tuple[Kind, str], timings: Sequence[Timing], measured: Floats, sustained: Sustained
) -> tuple[Scales, float, Floats]:
    kind, dtype = key
    sizes = np.array([products.product_sizes(timing.operation) for timing in timings], dtype=float)
    shape, rates = sustained.tiles(dtype, is_batched=kind != "product"), sustained.rates(dtype)
    element = {"fp64": 8.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}.get(dtype, 4.0)

    def modelled(values: dict[str, float], rows: Floats) -> Floats:
        scaled = Rates(
            flops=rates.flops * values["flops"],
            bytes_per_s=rates.bytes_per_s * values["bandwidth"],
            multiprocessors=rates.multiprocessors,
        )
        return product_seconds(rows, element, shape, scaled)

    few = np.random.default_rng(0).permutation(len(sizes))[:_MOST_FITTED]
    start = {"flops": 1.0, "bandwidth": 1.0, "alone_s": min(2e-5, float(measured.min()) / 2)}
    ranges = {**_RANGES, "alone_s": (1e-7, max(2e-7, 0.95 * float(measured.min())))}
    best = descend(
        lambda values: typical(np.log((modelled(values, sizes[few]) + values["alone_s"]) / measured[few])),
        start,
        ranges,
    )
    return Scales(best["flops"], best["bandwidth"]), best["alone_s"], modelled(best, sizes)


def _fit_factor(start: Scales, roofs: Floats, measured: Floats) -> tuple[Scales, float, Floats]:
    """One factor on both rates, for kinds whose arithmetic and memory the points do not tell apart."""
    usable = roofs > 0
    ranges = {"rate": (0.1, 3.0), "alone_s": (1e-7, max(2e-7, 0.95 * float(measured.min())))}
    begin = {"rate": 1.0, "alone_s": min(1e-5, float(measured.min()) / 2)}
    best = descend(
        lambda values: typical(
            np.log((roofs[usable] / values["rate"] + values["alone_s"]) / measured[usable]),
        ),
        begin,
        ranges,
    )
    scales = Scales(start.flops * best["rate"], start.bandwidth * best["rate"])
    return scales, best["alone_s"], roofs / best["rate"]
