"""Times of operations on a CPU, interpolated between those that a micro-benchmark measured.

Each family of operations has a first guess (a fixed time, FLOPs at the best rate of the dtype, bytes at the bandwidth)
and a surface: the factor by which the guess is wrong, as a function of sizes and traits. No constant belongs to a
model. Without a micro-benchmark the guess is used alone, at a usual share of the datasheet's rates.

What: a surface is a Gaussian process over the logarithms of sizes and over traits such as a dtype or a layout, between
which it jumps; its values are logarithms of measured over guessed time. Far from all points it returns to the mean.
Use when: some ten to a few hundred points, up to six sizes.
Source: C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1 and, for
leave-one-out residuals without refitting, equations 5.10 to 5.12. Ours differs: length and similarity are taken from a
small grid by the density of left-out points, and deviations are scaled so that left-out points have them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

_USUAL_START_S = 4e-6
_DATASHEET_SHARE = 0.5
"""Share of a datasheet's rates that operations reach without measurements, give or take `_DATASHEET_ERROR`."""
_DATASHEET_ERROR = 0.6
_UNKNOWN_FLOPS, _UNKNOWN_BANDWIDTH = 5e10, 1.5e10
"""Rates of one unknown core [FLOP/s in fp32, bytes/s]; native bf16 is twice as fast."""
_BANDWIDTH_POWER = 0.5
"""Bandwidth grows with cores to this power, since they share the memory."""


@dataclass(frozen=True)
class Roof:
    """The best rates of a CPU: products [FLOP/s] by dtype, memory [bytes/s]; and the least time of a call [s]."""

    flops_per_s: dict[str, float]
    bytes_per_s: float
    start_s: float

    def seconds(self, place: PlacedOperation) -> float:
        """First guess of an operation's time [s]."""
        dtype = next((trait for trait in place.point.traits if trait in self.flops_per_s), "fp32")
        return self.start_s + place.flops / self.flops_per_s[dtype] + place.num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class CpuTimes:
    """Times of operations on one CPU at one number of threads; `slowdown` is their ratio to those measured."""

    roof: Roof
    surfaces: dict[str, Surface] = field(default_factory=dict)
    slowdown: float = 1.0

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """The model from a CPU's micro-benchmark, else from its datasheet or usual figures."""
        if hardware.benchmark is None:
            return cls(_datasheet_roof(hardware))
        placed = [(place_of(timing.operation), timing.seconds) for timing in hardware.benchmark.timings]
        roof = _roof(placed)
        families: defaultdict[str, list[tuple[PlacedOperation, float]]] = defaultdict(list)
        for place, seconds in placed:
            families[place.family].append((place, seconds))
        surfaces = {}
        for family, members in families.items():
            values = [math.log(seconds / roof.seconds(place)) for place, seconds in members]
            surfaces[family] = fitted([place.point for place, _ in members], values)
        return cls(roof, surfaces, hardware.slowdown)

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` by itself, with its operands out of the cache [s]."""
        place = place_of(operation)
        return self.slowdown * self.roof.seconds(place) * math.exp(self._guess(place).value)

    def traffic_seconds(self, operation: Operation) -> float:
        """Time to read and write the bytes of `operation` at the memory's best rate [s]."""
        return self.slowdown * place_of(operation).num_bytes / self.roof.bytes_per_s

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, from left-out measurements [fraction]."""
        return self._guess(place_of(operation)).deviation

    def _guess(self, place: PlacedOperation) -> Guess:
        surface = self.surfaces.get(place.family)
        return surface.at(place.point) if surface else Guess(0.0, _DATASHEET_ERROR)


def _roof(placed: Sequence[tuple[PlacedOperation, float]]) -> Roof:
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


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_LANES = 16
"""Single-precision numbers in the widest register of a CPU: AVX-512."""
_CONVOLUTIONS = ("convolution", "convolution_backward")
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_BY_IMAGES = ("batch_norm", "group_norm", "pool", "upsample")
_TABLES = ("embedding", "index_select", "gather", "scatter", "index_put", "nll_loss", "index_add")
_BY_ROWS = ("layer_norm", "softmax", "sum", "mean", "amax", "amin", "argmax", "max", "min", "norm", "logsumexp")


@dataclass(frozen=True)
class PlacedOperation:
    """An operation as a point of its family; the first guess rests on `flops` and `num_bytes`."""

    family: str
    point: KrigingPoint
    flops: float
    num_bytes: float


def place_of(operation: Operation) -> PlacedOperation:
    """The family of `operation`, and its point there."""
    name, work = operation.name, float(operation.bytes_read + operation.bytes_written)
    family, describe = _family(operation)
    if not operation.inputs and not operation.outputs:
        return PlacedOperation("elementwise", KrigingPoint((0.0,), (name, "none", "")), 0.0, 0.0)
    sizes, traits = describe(operation)
    flops = float(operation.flops)
    if not flops and family == "attention":  # on a CPU it also computes what a causal mask hides
        (q, k), products = _queries_and_keys(operation), 10.0 if "backward" in name else 4.0
        flops = products * math.prod(q) * k[-2]
    elif not flops and family == "recurrent":  # its matrix products; a backward pass has twice as many
        steps, batch, size = operation.inputs[0].shape
        gates, hidden = operation.inputs[2].shape
        flops = (4.0 if name.endswith("_backward") else 2.0) * steps * batch * gates * (size + hidden)
    logarithms = tuple(math.log(max(1.0, size)) for size in sizes)
    return PlacedOperation(family, KrigingPoint(logarithms, (name, *traits)), flops, work)


Description = tuple[Sequence[float], Sequence[str]]


def _family(operation: Operation) -> tuple[str, Callable[[Operation], Description]]:
    name = operation.name
    stem = name.strip("_")
    if name in _PRODUCTS:
        return "product", _product
    if name in _CONVOLUTIONS:
        groups = operation.attribute("groups", 1)
        is_depthwise = isinstance(groups, int) and groups > 1 and _weight(operation)[1] == 1
        return ("depthwise", _depthwise) if is_depthwise else ("convolution", _convolution)
    if "attention" in name:
        return "attention", _attention
    if name in _RECURRENT:
        return "recurrent", _recurrent
    if name.startswith(("_fused_", "_foreach_", "_amp_foreach")):
        return "optimizer", _list
    if any(part in name for part in _BY_IMAGES):
        return "images", _images
    if stem.startswith(_TABLES):
        return "tables", _table
    if any(part in stem for part in ("layer_norm", "softmax")) or stem in _BY_ROWS:
        return "rows", _rows
    return "elementwise", _elementwise


def _dtype(operation: Operation) -> str:
    return next((tensor.dtype for tensor in operation.inputs if tensor.dtype.startswith(("fp", "bf"))), "fp32")


def _layout(operation: Operation) -> str:
    return "channels-last" if operation.attribute("channels_last") else "contiguous"


def _product(operation: Operation) -> Description:
    a, b = operation.inputs[-2].shape, operation.inputs[-1].shape
    transposed = f"{bool(operation.attribute('transpose_a'))}{bool(operation.attribute('transpose_b'))}"
    batch = a[0] if len(a) == 3 else 1
    return (a[-2], b[-1], a[-1], batch), (_dtype(operation), transposed, _alignment(b[-1], a[-1]))


def _alignment(*sizes: int) -> str:
    """`aligned` if all sizes are multiples of a vector register, else `ragged`."""
    return "aligned" if all(size % _LANES == 0 for size in sizes) else "ragged"


def _weight(operation: Operation) -> tuple[int, ...]:
    return operation.inputs[1 if operation.name == "convolution" else 2].shape


def _sides(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the forward pass's input and output."""
    if operation.name == "convolution":
        return operation.inputs[0].shape, operation.outputs[0].shape
    return operation.inputs[1].shape, operation.inputs[0].shape


def _convolution(operation: Operation) -> Description:
    _, out = _sides(operation)
    weight = _weight(operation)
    kind = "transposed" if operation.attribute("transposed") else f"{len(weight) - 2}d"
    mask = operation.attribute("output_mask", [True])
    asked = "all" if isinstance(mask, list) and mask[0] else "weights only"
    # Images come one after another, as heads do in attention.
    sizes = (math.prod(out[2:]), weight[1], weight[0], math.prod(weight[2:]), _steps(operation))
    return sizes, (_dtype(operation), _layout(operation), kind, asked, _alignment(*weight[:2]))


def _steps(operation: Operation) -> int:
    """Number of input pixels per output pixel, from the stride alone."""
    stride = operation.attribute("stride")
    return math.prod(step for step in stride if isinstance(step, int)) if isinstance(stride, list) else 1


def _depthwise(operation: Operation) -> Description:
    _, out = _sides(operation)
    sizes = (out[0], math.prod(out[2:]), out[1], math.prod(_weight(operation)[2:]), _steps(operation))
    return sizes, (_dtype(operation), _layout(operation))


def _queries_and_keys(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of both [..., heads, tokens, width]."""
    first = 1 if "backward" in operation.name else 0
    return operation.inputs[first].shape, operation.inputs[first + 1].shape


def _attention(operation: Operation) -> Description:
    q, k = _queries_and_keys(operation)
    causal = "causal" if operation.attribute("is_causal") else "all pairs"
    # Each head is computed by itself: their number is in the FLOPs.
    return (q[-2], k[-2], q[-1]), (_dtype(operation), causal, _alignment(q[-1]), _alignment(q[-2]))


def _recurrent(operation: Operation) -> Description:
    x, weight = operation.inputs[0].shape, operation.inputs[2].shape
    return (x[0], x[1], x[2], weight[1]), (_dtype(operation),)


def _list(operation: Operation) -> Description:
    largest = max(tensor.numel for tensor in operation.inputs)
    whole = sum(tensor.numel for tensor in operation.inputs)
    return (max(1.0, whole / max(1, largest)), whole), (_dtype(operation),)


def _images(operation: Operation) -> Description:
    shape = max(operation.inputs, key=lambda tensor: tensor.numel).shape
    if len(shape) < 3:
        shape = (*shape, 1, 1)
    return (shape[0], shape[1], math.prod(shape[2:])), (_dtype(operation), _layout(operation))


def _table(operation: Operation) -> Description:
    ends = (*operation.inputs, *operation.outputs)
    indices = min((tensor.numel for tensor in ends if tensor.dtype.startswith("int")), default=1)
    width = max(1, max(tensor.numel for tensor in ends) // max(1, indices))
    return (indices, width, max(tensor.numel for tensor in ends)), (_dtype(operation),)


def _rows(operation: Operation) -> Description:
    """Rows and columns; `columns` elements are reduced to one, along the last dimension or the first ones."""
    x = max(operation.inputs, key=lambda tensor: tensor.numel)
    dims, where = operation.attribute("dim"), "last"
    if "layer_norm" in operation.name:
        ends = (*operation.outputs, *operation.inputs)
        num_rows = min((tensor.numel for tensor in ends if tensor.shape[-1:] == (1,)), default=1)
        columns = max(1, x.numel // num_rows)
    elif dims is None:
        columns = x.shape[-1] if "softmax" in operation.name and x.shape else x.numel
    else:
        listed = [dims] if isinstance(dims, int) else dims
        reduced = (
            {d % max(1, len(x.shape)) for d in listed if isinstance(d, int)} if isinstance(listed, list) else set()
        )
        reduced = reduced or set(range(len(x.shape)))
        columns = math.prod(x.shape[dim] for dim in reduced)
        where = "last" if len(x.shape) - 1 in reduced else "first"
    return (x.numel / max(1, columns), columns), (_dtype(operation), where)


def _elementwise(operation: Operation) -> Description:
    ends = (*operation.inputs, *operation.outputs)
    written = operation.outputs[0].dtype if operation.outputs else "none"
    variant = str(operation.attribute("approximate", ""))
    floats = {tensor.dtype for tensor in operation.inputs if tensor.numel > 1 and tensor.dtype.startswith(("fp", "bf"))}
    # With two dtypes one is converted slice by slice, which takes several times as long.
    read = " and ".join(sorted(floats)) or _dtype(operation)
    return (max(tensor.numel for tensor in ends),), (f"{read} to {written}", variant)


Floats = npt.NDArray[np.float64]

_LENGTHS = (1.0, 2.0, 3.5, 6.0)
"""Correlation length of times [e-folds of a size]."""
_SIMILARITIES = (0.4, 0.7, 0.9)
"""Correlation of times that differ in one trait."""
_NOISES = (0.03, 0.1)
"""Variance of a measured point that no size explains, as a fraction of the variance of all."""
_SMALLEST_DEVIATION = 0.02


@dataclass(frozen=True)
class KrigingPoint:
    """A point: logarithms of sizes, and traits; the same number of each for all points of one surface."""

    sizes: tuple[float, ...]
    traits: tuple[str, ...]


@dataclass(frozen=True)
class Guess:
    """The value of a surface at a point, and its standard deviation."""

    value: float
    deviation: float


@dataclass(frozen=True)
class Smoothness:
    """Parameters of a surface: correlation length of sizes, correlation per differing trait, and noise variance."""

    length: float
    similarity: float
    noise: float

    def covariance(self, distances: PointDistances) -> Floats:
        """Covariance of points at these distances, of a surface whose variance is 1."""
        # Matérn with 5/2: twice differentiable, where the squared exponential would overshoot.
        scaled = math.sqrt(5) / self.length * distances.sizes
        result: Floats = (1 + scaled + scaled**2 / 3) * np.exp(-scaled) * self.similarity**distances.traits
        return result


@dataclass(frozen=True)
class PointDistances:
    """Distances in the logarithms of sizes, and numbers of differing traits. Both [points, known points]."""

    sizes: Floats
    traits: Floats


class KnownPoints:
    """Points where the function is known."""

    def __init__(self, points: Sequence[KrigingPoint]) -> None:
        self.points = tuple(points)
        self._sizes = np.array([point.sizes for point in points], dtype=np.float64)
        self._codes: dict[str, int] = {}
        self._traits = self._coded(points)

    def distances_from(self, points: Sequence[KrigingPoint]) -> PointDistances:
        """Distances of `points` from all known points."""
        sizes = np.array([point.sizes for point in points], dtype=np.float64)
        squares = ((sizes[:, None, :] - self._sizes[None, :, :]) ** 2).sum(-1)
        differing = (self._coded(points)[:, None, :] != self._traits[None, :, :]).sum(-1)
        return PointDistances(np.sqrt(squares), differing.astype(np.float64))

    def _coded(self, points: Sequence[KrigingPoint]) -> npt.NDArray[np.int64]:
        rows = [[self._codes.setdefault(trait, len(self._codes)) for trait in point.traits] for point in points]
        return np.array(rows, dtype=np.int64)


class Surface:
    """A function with `values` at the points `known`.

    Args:
        known: at least one point.
        distances: of these points from each other.
        values: dimensionless, such as logarithms of ratios.
        smoothness: the function's parameters; `fitted` finds them.
    """

    def __init__(self, known: KnownPoints, distances: PointDistances, values: Floats, smoothness: Smoothness) -> None:
        self._known, self._smoothness = known, smoothness
        noise = smoothness.noise
        covariance = smoothness.covariance(distances) + noise * np.eye(len(values))
        self._inverse: Floats = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        self._mean = float(self._inverse.sum(0) @ values / self._inverse.sum())
        self._weights: Floats = self._inverse @ (values - self._mean)
        variances = 1 / self._inverse.diagonal()
        self.residuals: Floats = self._weights * variances
        """Each value, less its prediction from the others."""
        self._scale = max(float(np.mean(self.residuals**2 / variances)), _SMALLEST_DEVIATION**2)
        self.density = -0.5 * float(np.mean(np.log(variances * self._scale)))
        """Logarithm of the density of left-out values, less a constant: the larger, the better the fit."""

    def at(self, point: KrigingPoint) -> Guess:
        """The value at `point`, and its deviation."""
        shared = self._smoothness.covariance(self._known.distances_from([point]))[0]
        variance = max(0.0, 1 - float(shared @ self._inverse @ shared)) + self._smoothness.noise
        deviation = math.sqrt(self._scale * variance)
        return Guess(self._mean + float(shared @ self._weights), max(deviation, _SMALLEST_DEVIATION))


def fitted(points: Sequence[KrigingPoint], values: Sequence[float]) -> Surface:
    """The surface through `points` whose smoothness makes left-out points likeliest."""
    known, array = KnownPoints(points), np.array(values, dtype=np.float64)
    distances = known.distances_from(points)
    choices = itertools.product(_LENGTHS, _SIMILARITIES, _NOISES)
    surfaces = (Surface(known, distances, array, Smoothness(*choice)) for choice in choices)
    return max(surfaces, key=lambda surface: surface.density)
