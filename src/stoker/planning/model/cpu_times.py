"""Times of operations on a CPU, between those that a micro-benchmark measured.

Each family of operations has a first guess, a fixed time, the FLOPs at the best rate of the dtype and the bytes at the
bandwidth, and a surface that says by how much that guess is wrong, as a function of sizes and traits. No constant
belongs to a model. Without a micro-benchmark the guess stands alone, at a usual share of the datasheet's rates.

Families of operations that run alike on a CPU, and where in its family an operation stands.

Interpolation between measured points, with how far to trust it: Gaussian-process regression in a few lines.

What: the logarithm of measured over expected time, as a smooth function of the logarithms of sizes, and of traits such
as a dtype or a layout, between which it jumps. Far from all points it returns to the mean.
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

from stoker.records.hardware import Hardware, Timing
from stoker.records.trace import Operation, TensorShape

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

    def seconds(self, place: PlacedOperation) -> float:
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

    def _guess(self, place: PlacedOperation) -> Guess:
        surface = self.surfaces.get(place.family)
        return surface.at(place.point) if surface else Guess(0.0, _DATASHEET_ERROR)


def _measured(timings: Sequence[Timing]) -> tuple[Roof, dict[str, Surface]]:
    placed = [(place_of(timing.operation), timing.seconds) for timing in timings]
    roof = _roof(placed)
    families: defaultdict[str, list[tuple[PlacedOperation, float]]] = defaultdict(list)
    for place, seconds in placed:
        families[place.family].append((place, seconds))
    surfaces = {}
    for family, members in families.items():
        values = [math.log(seconds / roof.seconds(place)) for place, seconds in members]
        surfaces[family] = fitted([place.point for place, _ in members], values)
    return roof, surfaces


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
    """An operation within its family; `flops` and `num_bytes` are the work that a first guess rests on."""

    family: str
    point: KrigingPoint
    flops: float
    num_bytes: float


def place_of(operation: Operation) -> PlacedOperation:
    """Where `operation` stands."""
    name, work = operation.name, float(operation.bytes_read + operation.bytes_written)
    family, describe = _family(operation)
    if not operation.inputs and not operation.outputs:
        return PlacedOperation("elementwise", KrigingPoint((0.0,), (name, "none", "")), 0.0, 0.0)
    sizes, traits = describe(operation)
    flops = float(operation.flops) or _flops(family, operation)
    logarithms = tuple(math.log(max(1.0, size)) for size in sizes)
    return PlacedOperation(family, KrigingPoint(logarithms, (name, *traits)), flops, work)


Description = tuple[Sequence[float], Sequence[str]]


def _family(operation: Operation) -> tuple[str, Callable[[Operation], Description]]:
    name = operation.name
    stem = name.strip("_")
    if name in _PRODUCTS:
        return "product", _product
    if name in _CONVOLUTIONS:
        return ("depthwise", _depthwise) if _is_depthwise(operation) else ("convolution", _convolution)
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
    """Whether all are whole numbers of vector registers."""
    return "aligned" if all(size % _LANES == 0 for size in sizes) else "ragged"


def _is_depthwise(operation: Operation) -> bool:
    groups = operation.attribute("groups", 1)
    return isinstance(groups, int) and groups > 1 and _weight(operation)[1] == 1


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
    """Pixels of the input for each of the output, by the stride alone."""
    stride = operation.attribute("stride")
    return math.prod(step for step in stride if isinstance(step, int)) if isinstance(stride, list) else 1


def _depthwise(operation: Operation) -> Description:
    _, out = _sides(operation)
    sizes = (out[0], math.prod(out[2:]), out[1], math.prod(_weight(operation)[2:]), _steps(operation))
    return sizes, (_dtype(operation), _layout(operation))


def _queries_and_keys(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of both [..., heads, tokens, width]."""
    at = 1 if "backward" in operation.name else 0
    return operation.inputs[at].shape, operation.inputs[at + 1].shape


def _attention(operation: Operation) -> Description:
    q, k = _queries_and_keys(operation)
    causal = "causal" if operation.attribute("is_causal") else "all pairs"
    # Each head is computed alone: how many there are says nothing that the FLOPs do not.
    return (q[-2], k[-2], q[-1]), (_dtype(operation), causal, _alignment(q[-1]), _alignment(q[-2]))


def _recurrent(operation: Operation) -> Description:
    x, weight = operation.inputs[0].shape, operation.inputs[2].shape
    return (x[0], x[1], x[2], weight[1]), (_dtype(operation),)


def _flops(family: str, operation: Operation) -> float:
    """FLOPs of what PyTorch has no formula for. Its attention on a CPU computes what a causal mask hides, too."""
    if family == "attention":
        (q, k), products = _queries_and_keys(operation), 10.0 if "backward" in operation.name else 4.0
        return products * math.prod(q) * k[-2]
    return _recurrent_flops(operation) if family == "recurrent" else 0.0


def _recurrent_flops(operation: Operation) -> float:
    """The matrix products of a recurrent layer; its backward pass has twice as many."""
    steps, batch, size = operation.inputs[0].shape
    gates, hidden = operation.inputs[2].shape
    forward = 2.0 * steps * batch * gates * (size + hidden)
    return 2 * forward if operation.name.endswith("_backward") else forward


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
    x = max(operation.inputs, key=lambda tensor: tensor.numel)
    columns, where = _reduced(operation, x)
    return (x.numel / max(1, columns), columns), (_dtype(operation), where)


def _reduced(operation: Operation, x: TensorShape) -> tuple[int, str]:
    """How many elements become one, and whether those lie side by side."""
    if "layer_norm" in operation.name:
        ends = (*operation.outputs, *operation.inputs)
        num_rows = min((tensor.numel for tensor in ends if tensor.shape[-1:] == (1,)), default=1)
        return max(1, x.numel // num_rows), "last"
    dims = operation.attribute("dim")
    if dims is None:
        return (x.shape[-1] if "softmax" in operation.name and x.shape else x.numel), "last"
    listed = [dims] if isinstance(dims, int) else dims
    places = {d % max(1, len(x.shape)) for d in listed if isinstance(d, int)} if isinstance(listed, list) else set()
    places = places or set(range(len(x.shape)))
    columns = math.prod(x.shape[place] for place in places)
    return columns, "last" if len(x.shape) - 1 in places else "first"


def _elementwise(operation: Operation) -> Description:
    ends = (*operation.inputs, *operation.outputs)
    written = operation.outputs[0].dtype if operation.outputs else "none"
    variant = str(operation.attribute("approximate", ""))
    floats = {tensor.dtype for tensor in operation.inputs if tensor.numel > 1 and tensor.dtype.startswith(("fp", "bf"))}
    # Of two dtypes one is converted on the way, slice by slice, which takes several times as long.
    read = " and ".join(sorted(floats)) or _dtype(operation)
    return (max(tensor.numel for tensor in ends),), (f"{read} to {written}", variant)


Floats = npt.NDArray[np.float64]

_LENGTHS = (1.0, 2.0, 3.5, 6.0)
"""Over how many e-folds of a size times are alike."""
_SIMILARITIES = (0.4, 0.7, 0.9)
"""How alike times are of which one trait differs."""
_NOISES = (0.03, 0.1)
"""Scatter of a measured point that no size explains, as a fraction of the spread of all."""
_SMALLEST_DEVIATION = 0.02


@dataclass(frozen=True)
class KrigingPoint:
    """A place: logarithms of sizes, and traits; the same number of each for all points of one surface."""

    sizes: tuple[float, ...]
    traits: tuple[str, ...]


@dataclass(frozen=True)
class Guess:
    """What a surface says of a place: the value, and one standard deviation of it."""

    value: float
    deviation: float


@dataclass(frozen=True)
class Smoothness:
    """How a surface varies: over which length of sizes, how alike points are that differ in a trait, and scatter."""

    length: float
    similarity: float
    noise: float

    def covariance(self, apart: PointDistances) -> Floats:
        """Between points that are so far apart, of a surface whose variance is 1."""
        # Matérn with 5/2: twice differentiable, where the squared exponential would overshoot.
        distance = math.sqrt(5) / self.length * apart.sizes
        result: Floats = (1 + distance + distance**2 / 3) * np.exp(-distance) * self.similarity**apart.traits
        return result


@dataclass(frozen=True)
class PointDistances:
    """How far points are apart: in the logarithms of sizes, and in how many traits. Both [points, known points]."""

    sizes: Floats
    traits: Floats


class KnownPoints:
    """Points where the function is known, to measure from."""

    def __init__(self, points: Sequence[KrigingPoint]) -> None:
        self.points = tuple(points)
        self._sizes = np.array([point.sizes for point in points], dtype=np.float64)
        self._codes: dict[str, int] = {}
        self._traits = self._coded(points)

    def apart_from(self, points: Sequence[KrigingPoint]) -> PointDistances:
        """How far `points` are from all that are known."""
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
        apart: of these points from each other.
        values: dimensionless, such as logarithms of ratios.
        smoothness: how the function varies; `fitted` finds it.
    """

    def __init__(self, known: KnownPoints, apart: PointDistances, values: Floats, smoothness: Smoothness) -> None:
        self._known, self._smoothness = known, smoothness
        noise = smoothness.noise
        covariance = smoothness.covariance(apart) + noise * np.eye(len(values))
        self._inverse: Floats = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        self._mean = float(self._inverse.sum(0) @ values / self._inverse.sum())
        self._weights: Floats = self._inverse @ (values - self._mean)
        variances = 1 / self._inverse.diagonal()
        self.residuals: Floats = self._weights * variances
        """Each left-out value, less what the others say of it."""
        self._scale = max(float(np.mean(self.residuals**2 / variances)), _SMALLEST_DEVIATION**2)
        self.density = -0.5 * float(np.mean(np.log(variances * self._scale)))
        """Logarithm of the density of left-out values, less a constant: the larger, the better the fit."""

    def at(self, point: KrigingPoint) -> Guess:
        """The value at `point`, and its deviation."""
        shared = self._smoothness.covariance(self._known.apart_from([point]))[0]
        variance = max(0.0, 1 - float(shared @ self._inverse @ shared)) + self._smoothness.noise
        deviation = math.sqrt(self._scale * variance)
        return Guess(self._mean + float(shared @ self._weights), max(deviation, _SMALLEST_DEVIATION))


def fitted(points: Sequence[KrigingPoint], values: Sequence[float]) -> Surface:
    """The surface through `points` under whose smoothness left-out points are the likeliest."""
    known, array = KnownPoints(points), np.array(values, dtype=np.float64)
    apart = known.apart_from(points)
    choices = itertools.product(_LENGTHS, _SIMILARITIES, _NOISES)
    surfaces = (Surface(known, apart, array, Smoothness(*choice)) for choice in choices)
    return max(surfaces, key=lambda surface: surface.density)
