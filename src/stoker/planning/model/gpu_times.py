"""Times of operations on a GPU, which need not be here.

What  Products by tiles and waves, convolutions as products, recurrent layers as products step after step, fused
      attention by its FLOPs, everything else by the bytes that cross memory; rates from the datasheet, or from a
      micro-benchmark of the device.
Use when  forecasting for a CUDA device.
Costs  Half a second to take in a micro-benchmark of a thousand points; then 0.1 ms per operation asked for.
Does not combine with  operations that work while others do: each is taken to have the device for itself.
Source  `tiles`, `bandwidth`, `power`, `datasheet`, `residuals` each name theirs.

What a micro-benchmark says about a device: factors on the datasheet's rates, and where the model is wrong.

Of each kind and dtype two or three numbers are fitted (arithmetic, memory, and the time that measuring an operation
alone adds, which queued operations do not have); what remains is kriged. Kinds that were not measured borrow the
factors of their dtype's products, or stay with the datasheet.

What measured points say about a model's error nearby: kriging of the logarithm of measured over modelled time.

Far from all points the correction fades to their mean and its error grows to the points' spread, so a few points
correct little and many interpolate. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006),
equations 2.25, 2.26 and, for leaving one out, 5.12; the kernel is exponential in the distance of logarithmic sizes.

Fitting a few positive parameters, each within its range: coordinate descent on their logarithms.

The losses here have steps (tiles, waves), so nothing needs a gradient, and have few parameters, so nothing needs speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import NoDevice
from stoker.planning.model import gpu_kernels
from stoker.planning.model.gpu_kernels import Rates, TileShape, product_seconds
from stoker.planning.model.gpu_roofline import (
    Kind,
    PowerModel,
    Scales,
    Shares,
    Sustained,
    kind_of,
    point_of,
    roof_seconds,
)
from stoker.records.hardware import Hardware, Timing
from stoker.records.trace import Operation

_GAP_S = 1.5e-6
"""Between two kernels of a stream, the next already queued [s]."""
_DATASHEET_ERRORS = {
    "product": 0.09, "batched product": 0.16, "convolution": 0.35, "attention": 0.25, "recurrent": 0.5,
    "row": 0.25, "stream": 0.1,
}  # fmt: skip
"""One standard deviation by kind, where only a datasheet is known [fraction]. From devices left out of the fit; of
attention and recurrent layers, judgements: nothing public measures them device by device."""
_DRIFT = 0.04
"""Between two boards of a model and two rooms they stand in [fraction]."""
_THROTTLED_DRIFT = 0.6
"""The same of a board that its power limit throttles, per share of the clock it loses: much depends on its cooling."""
_TENSOR_DRIFT = 0.08
"""Of tensor cores, of whose shapes nothing was measured here."""


@dataclass
class GpuTimes:
    """`OperationTimes` of a CUDA device."""

    sustained: Sustained
    calibration: GpuCalibration
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        shares: Shares | None = None,
        product: TileShape | None = None,
        batched: TileShape | None = None,
    ) -> GpuTimes:
        """The model of a device; shapes and shares are those shipped unless others are given.

        Raises:
            NoDevice: its datasheet lacks what no forecast can do without.
        """
        missing = [
            words
            for words, value in (
                ("memory bandwidth", hardware.bandwidth_bytes_per_s),
                ("number of multiprocessors", hardware.multiprocessors),
                ("peak rate of fp32", hardware.dense_flops.get("fp32")),
            )
            if not value
        ]
        if missing:
            raise NoDevice(
                f"The time on {hardware.device.name!r} cannot be forecast: its {' and '.join(missing)} is not known. "
                "Add it to the catalogue's row, or choose another device.",
            )
        known = {
            name: value for name, value in (("shares", shares), ("product", product), ("batched", batched)) if value
        }
        sustained = Sustained(hardware=hardware, power=PowerModel.of(hardware), **known)  # type: ignore[arg-type]
        return cls(sustained, calibrate(sustained))

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others."""
        return self._time_and_error(operation)[0]

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        return self._time_and_error(operation)[1]

    def _time_and_error(self, operation: Operation) -> tuple[float, float]:
        # Attributes may be lists, so that an operation as such is no key.
        key = (operation.name, operation.inputs, operation.outputs, operation.bytes_read, repr(operation.attributes))
        if key not in self._known:
            self._known[key] = self._forecast(operation)
        return self._known[key]

    def _forecast(self, operation: Operation) -> tuple[float, float]:
        kind, dtype = kind_of(operation)
        scales = self.calibration.scales(kind, dtype)
        seconds = roof_seconds(operation, kind, dtype, self.sustained, scales)
        if seconds == 0.0:
            return 0.0, 0.0
        residuals = self.calibration.residuals.get((kind, dtype))
        if residuals is None:
            return seconds + _GAP_S, float(np.hypot(_DATASHEET_ERRORS[kind], self._drift(dtype)))
        correction, error = residuals.at(point_of(operation, kind))
        return seconds * float(np.exp(correction)) + _GAP_S, float(np.hypot(error, self._drift(dtype)))

    def _drift(self, dtype: str) -> float:
        """What no micro-benchmark of single operations can tell [fraction]."""
        peak, is_tensor = self.sustained.peak_flops(dtype)
        lost = 1 - self.sustained.power.sustained_share(0.9 * peak, dtype if is_tensor else "fp32")
        unseen = _TENSOR_DRIFT if is_tensor and not self.calibration.residuals else 0.0
        return _DRIFT + _THROTTLED_DRIFT * lost + unseen


Floats = NDArray[np.float64]

_RANGES: Ranges = {"flops": (0.1, 2.0), "bandwidth": (0.3, 1.5), "alone_s": (1e-7, 3e-4)}
_LEAST_POINTS = 4
"""Fewer points of a kind say too little about two or three numbers."""
_MOST_FITTED = 500
"""The factors settle with fewer points than kriging can use."""


@dataclass(frozen=True)
class GpuCalibration:
    """Factors and residuals, by kind and dtype."""

    fitted: dict[tuple[Kind, str], Scales]
    residuals: dict[tuple[Kind, str], TimeResiduals]

    def scales(self, kind: Kind, dtype: str) -> Scales:
        """Those of this kind and dtype, or borrowed ones."""
        if (kind, dtype) in self.fitted:
            return self.fitted[kind, dtype]
        if kind in {"row", "stream"}:
            return self.fitted.get(("stream", ""), Scales())
        return self.fitted.get(("product", dtype), Scales())


def calibrate(sustained: Sustained) -> GpuCalibration:
    """From the micro-benchmark of `sustained.hardware`; nothing where there is none."""
    calibration = GpuCalibration({}, {})
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


def _take_in(
    calibration: GpuCalibration, key: tuple[Kind, str], timings: Sequence[Timing], sustained: Sustained
) -> None:
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
        calibration.residuals[key] = TimeResiduals.of(points, np.log(net / modelled[usable]))


def _fit_products(
    key: tuple[Kind, str], timings: Sequence[Timing], measured: Floats, sustained: Sustained
) -> tuple[Scales, float, Floats]:
    kind, dtype = key
    sizes = np.array([gpu_kernels.product_sizes(timing.operation) for timing in timings], dtype=float)
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


_REACH = 4.0
"""Distance in which the correlation falls to 1/e [doublings of a size]."""
_NOISE = 0.025
"""Spread of repeated measurements of the same operation [fraction]."""
_LEAST_SPREAD = 0.04
_OUTLIER, _LEAST_OUTLIER = 2.0, 0.25
"""Errors beyond so many spreads (and this [logarithm]) are taken for so much: alone, some operations hit what they do
not hit in a step."""
_MOST_SCORE = 4.0
"""Standard deviations that a single point's error counts for at most when they are judged."""
_MOST_POINTS = 1200
"""More than these are thinned: solving takes time with their cube."""


@dataclass(frozen=True)
class TimeResiduals:
    """Correction of a model.

    `points` (n, d) are doublings of sizes, `left_out` is the error made of each point by the others [logarithm].
    `inflation` is how much larger these are than the kernel would have them, at least 1.
    """

    points: Floats
    weights: Floats
    precision: Floats
    mean: float
    spread: float
    left_out: Floats
    inflation: float

    @classmethod
    def of(cls, points: Floats, errors: Floats) -> TimeResiduals:
        """From points (n, d) and the logarithms of measured over modelled time there (n,); n is at least 1."""
        if len(points) > _MOST_POINTS:
            kept = np.random.default_rng(0).permutation(len(points))[:_MOST_POINTS]
            points, errors = points[kept], errors[kept]
        mean = float(np.median(errors))
        spread = max(_LEAST_SPREAD, float(1.4826 * np.median(np.abs(errors - mean))))
        reach = max(_OUTLIER * spread, _LEAST_OUTLIER)
        errors = np.clip(errors, mean - reach, mean + reach)
        covariance = _covariance(points, points, spread) + _NOISE**2 * np.eye(len(points))
        precision = np.linalg.inv(covariance).astype(np.float64)
        weights = precision @ (errors - mean)
        left_out = weights / np.diag(precision)
        scores = left_out * np.sqrt(np.diag(precision))
        inflation = max(1.0, float(np.sqrt(np.mean(np.minimum(scores**2, _MOST_SCORE**2)))))
        return cls(points, weights, precision, mean, spread, left_out, inflation)

    def at(self, point: Floats) -> tuple[float, float]:
        """The expected logarithm of true over modelled time at a point (d,), and its standard deviation."""
        near = _covariance(point[None, :], self.points, self.spread)[0]
        variance = self.spread**2 + _NOISE**2 - float(near @ self.precision @ near)
        return self.mean + float(near @ self.weights), self.inflation * max(variance, _NOISE**2) ** 0.5


def _covariance(a: Floats, b: Floats, spread: float) -> Floats:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    distances: Floats = np.sqrt(np.maximum(squared, 0.0))
    covariance: Floats = spread**2 * np.exp(-distances / _REACH)
    return covariance


Ranges = Mapping[str, tuple[float, float]]


def typical(errors: Floats, limit: float = 0.5) -> float:
    """Mean absolute error, each point's held to `limit`: what a few broken measurements cannot drag along."""
    return float(np.mean(np.minimum(np.abs(errors), limit)))


def descend(
    loss: Callable[[dict[str, float]], float],
    start: Mapping[str, float],
    ranges: Ranges,
    rounds: int = 20,
    step: float = 0.3,
) -> dict[str, float]:
    """The parameters, within `ranges`, at which `loss` is small.

    Each in turn goes up or down by a factor; a factor that helps grows, one that does not shrinks.
    """
    best = {name: min(max(value, ranges[name][0]), ranges[name][1]) for name, value in start.items()}
    least = loss(best)
    steps = dict.fromkeys(best, step)
    for _ in range(rounds):
        for name, (low, high) in ((name, ranges[name]) for name in best):
            for sign in (1, -1):
                value = min(max(best[name] * float(np.exp(sign * steps[name])), low), high)
                trial = best | {name: value}
                if value != best[name] and (reached := loss(trial)) < least:
                    best, least = trial, reached
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
    return best
