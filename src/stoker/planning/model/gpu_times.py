"""Times of operations on a GPU that need not be here.

What: Products by tiles and waves, convolutions as products, recurrent layers as products step after step, fused
attention by its FLOPs, everything else by the bytes that cross memory; rates from the datasheet, or from a
micro-benchmark of the device.
Use when: forecasting for a CUDA device.
Costs: Half a second to fit a micro-benchmark of a thousand points; then 0.1 ms per operation.
Does not combine with: operations that run in parallel: each is assumed to have the device for itself.
Source: `gpu_kernels` and `gpu_roofline` name theirs.

A micro-benchmark gives two or three numbers per kind and dtype (factors on arithmetic and memory, and the time that
measuring a single operation adds, which queued operations do not have), by coordinate descent. The remaining error,
log(measured / modelled time), is kriged: far from all points the correction fades to their mean, and its error grows to
the points' spread. Kinds that were not measured use the factors of their dtype's products, or the datasheet.
Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), equations 2.25, 2.26 and, for leaving
one out, 5.12; the kernel is exponential in the distance of logarithmic sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import NoDevice
from stoker.planning.model import gpu_kernels
from stoker.planning.model.gpu_kernels import TileShape, product_seconds
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

_ARITHMETIC = ("product", "batched product", "convolution", "recurrent")
_RECOVERY = 0.2
"""Part of the clock's loss under a power limit (an exponent) that throttled arithmetic gets back in a step, since
kernels between draw less and the driver limits the mean. From whole steps against operations measured alone: 1.14 on a
T4 whose products alone run at 0.45 of the clock, 1.01 on an A100 at 0.9 (NeuSight's points and labels)."""

_GAP_S = 1.5e-6
"""Time between two kernels of a stream, the next already queued [s]."""
_DATASHEET_ERRORS = {
    "product": 0.09,
    "batched product": 0.16,
    "convolution": 0.35,
    "attention": 0.25,
    "recurrent": 0.5,
    "row": 0.25,
    "stream": 0.1,
}
"""One standard deviation by kind, if only a datasheet is known [fraction]. From devices left out of the fit; for
attention and recurrent layers, judgements: nothing public measures them device by device."""
_DRIFT = 0.04
"""Deviation between two boards of a model and their rooms [fraction]."""
_THROTTLED_DRIFT = 0.6
"""More of it for a board throttled by its power limit, per share of the clock lost: much depends on its cooling."""
_FAMILY_ERRORS: dict[Kind, tuple[str, float]] = {
    "product": ("products on tensor cores", 0.09),
    "batched product": ("products on tensor cores", 0.09),
    "recurrent": ("products on tensor cores", 0.09),
    "convolution": ("convolutions on tensor cores", 0.09),
    "attention": ("fused attention", 0.20),
    "row": ("memory", 0.07),
    "stream": ("memory", 0.07),
}
_CONTIGUOUS_ERROR = 0.20
"""The same for convolutions on tensor cores that are not in channels-last: a ResNet-9 in tf32 took 1.17 times as long
as forecast on an H100, in bf16 1.04 times."""
_PLAIN_ERROR = 0.05
"""One standard deviation that all operations of a family share [fraction], as their rate is one constant: on tensor
cores, across memory, and (the last) of products outside of tensor cores. From the residuals of published steps, each
family of which leaves out (`docs/forecast-accuracy.md`)."""


@dataclass
class GpuTimes:
    """`OperationTimes` of a CUDA device; with `in_step` False those of operations repeated alone."""

    sustained: Sustained
    calibration: GpuCalibration
    in_step: bool = True
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _last: tuple[Operation | None, tuple[float, float]] = None, (0.0, 0.0)

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        shares: Shares | None = None,
        product: TileShape | None = None,
        batched: TileShape | None = None,
        *,
        is_alone: bool = True,
    ) -> GpuTimes:
        """The model of a device, alone or one of several in a run; None: the shapes and shares shipped.

        Raises:
            NoDevice: its datasheet lacks a figure that every forecast needs.
        """
        missing = [
            name
            for name, value in (
                ("memory bandwidth", hardware.bandwidth_bytes_per_s),
                ("number of multiprocessors", hardware.multiprocessors),
                ("peak rate of fp32", hardware.dense_flops.get("fp32")),
            )
            if not value
        ]
        if missing:
            device, are = hardware.device, "is" if len(missing) == 1 else "are"
            raise NoDevice(
                f"The time on {device.name} ({device.model}) cannot be forecast: its {' and '.join(missing)} {are} not "
                "known.",
                remedy="Add it to a catalogue of your own (STOKER_CATALOGUE), or choose another device.",
            )
        known = {
            name: value for name, value in (("shares", shares), ("product", product), ("batched", batched)) if value
        }
        sustained = Sustained(hardware=hardware, power=PowerModel.of(hardware, is_alone=is_alone), **known)  # type: ignore[arg-type]
        return cls(sustained, calibrate(sustained))

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others."""
        return self._time_and_error(operation)[0]

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds` [fraction]."""
        return self._time_and_error(operation)[1]

    def _clock_gain(self, kind: Kind, dtype: str) -> float:
        """Factor on the rate of throttled arithmetic in a step, over that of an operation measured alone [1].

        What tensor cores sustain is known from whole steps, and has no such factor.
        """
        if not self.in_step or kind not in _ARITHMETIC or self.sustained.peak_flops(dtype)[1]:
            return 1.0
        peak = self.sustained.peak_flops("fp32")[0] * self.sustained.plain_share
        return math.pow(self.sustained.power.sustained_share(peak, "fp32"), -_RECOVERY)

    def _time_and_error(self, operation: Operation) -> tuple[float, float]:
        if operation is self._last[0]:  # both are asked for one after the other
            return self._last[1]
        self._last = operation, self._looked_up(operation)
        return self._last[1]

    def _looked_up(self, operation: Operation) -> tuple[float, float]:
        # Attributes may be lists, so an operation itself cannot be a key.
        key = (operation.name, operation.inputs, operation.outputs, operation.bytes_read, repr(operation.attributes))
        if key in self._known:
            return self._known[key]
        kind, dtype = kind_of(operation)
        seconds = roof_seconds(operation, kind, dtype, self.sustained, self.calibration.scales(kind, dtype))
        error = 0.0
        if seconds != 0.0:
            residuals = self.calibration.residuals.get((kind, dtype))
            error = _DATASHEET_ERRORS[kind]
            if residuals is not None:
                correction, error = residuals.at(point_of(operation, kind))
                seconds *= float(np.exp(correction))
            seconds /= self._clock_gain(kind, dtype)
            seconds, error = seconds + _GAP_S, float(np.hypot(error, self._drift(dtype)))
        self._known[key] = seconds, error
        return seconds, error

    def shared_error(self, operation: Operation) -> tuple[str, float]:
        """The family whose error an operation shares, and one standard deviation of it [fraction]."""
        kind, dtype = kind_of(operation)
        family, error = _FAMILY_ERRORS[kind]
        if kind not in {"row", "stream", "attention"} and not self.sustained.peak_flops(dtype)[1]:
            family, error = "other arithmetic", _PLAIN_ERROR
        elif kind == "convolution" and operation.attribute("channels_last") is not True:
            error = _CONTIGUOUS_ERROR
        return family, _DRIFT if self.calibration.residuals else error

    def _drift(self, dtype: str) -> float:
        """Deviation that a micro-benchmark of single operations does not show [fraction]."""
        peak, is_tensor = self.sustained.peak_flops(dtype)
        lost = 0.0 if is_tensor else 1 - self.sustained.power.sustained_share(0.9 * peak, "fp32")
        return _DRIFT + _THROTTLED_DRIFT * lost


Floats = NDArray[np.float64]

_RANGES: Ranges = {"flops": (0.1, 2.0), "bandwidth": (0.3, 1.5), "alone_s": (1e-7, 3e-4)}
_LEAST_POINTS = 4
"""Fewer points of a kind cannot determine two or three numbers."""
_MOST_FITTED = 500
"""Points that the factors are fitted on; kriging uses more."""


@dataclass(frozen=True)
class GpuCalibration:
    """Factors and residuals, by kind and dtype."""

    fitted: dict[tuple[Kind, str], Scales]
    residuals: dict[tuple[Kind, str], TimeResiduals]

    def scales(self, kind: Kind, dtype: str) -> Scales:
        """The factors of this kind and dtype, or those of related ones."""
        if (kind, dtype) in self.fitted:
            return self.fitted[kind, dtype]
        if kind in {"row", "stream"}:
            return self.fitted.get(("stream", ""), Scales())
        return self.fitted.get(("product", "bf16" if dtype == "fp8" else dtype), Scales())  # fp8 is not measured


def calibrate(sustained: Sustained) -> GpuCalibration:
    """The calibration from the micro-benchmark of `sustained.hardware`; empty without one."""
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
            _add_kind(calibration, key, timings, sustained)
    return calibration


def _add_kind(
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
    # A short operation, less the time of measuring it, is mostly noise: at least half of it stays.
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
        scaled = rates.scaled(flops=values["flops"], bandwidth=values["bandwidth"])
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
    """Fit one factor on both rates, for kinds whose points do not separate arithmetic and memory."""
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
"""Errors are clipped at so many spreads, but at least at this [logarithm]: measured singly, some operations behave in
ways that they do not in a step."""
_MOST_SCORE = 4.0
"""Limit of a point's standardised error in the inflation of deviations."""
_MOST_POINTS = 1200
"""Points that are used at most: the time to solve grows with their cube."""


@dataclass(frozen=True)
class TimeResiduals:
    """Correction of a time model.

    `points` (n, d) are doublings of sizes, `left_out` is the error of each point predicted from the others [logarithm].
    `inflation` is the ratio of these errors to those that the kernel expects, at least 1.
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
        """The correction from points (n, d) and log(measured / modelled time) there (n,); n is at least 1."""
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


def typical(errors: Floats) -> float:
    """Mean absolute error of logarithms [1], each clipped to 0.5 against broken measurements."""
    return float(np.mean(np.minimum(np.abs(errors), 0.5)))


def descend(
    loss: Callable[[dict[str, float]], float],
    start: Mapping[str, float],
    ranges: Ranges,
    rounds: int = 20,
    step: float = 0.3,
) -> dict[str, float]:
    """The parameters, within `ranges`, at which `loss` is small, by coordinate descent on their logarithms.

    Each in turn goes up or down by a factor; a factor that helps grows, one that does not shrinks. Without gradients,
    since tiles and waves make the loss jump.
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
