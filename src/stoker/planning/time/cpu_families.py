"""Families of operations that run alike on a CPU, and where in its family an operation stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.planning.time.kriging import Point
from stoker.records.trace import Operation, TensorShape

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_LANES = 16
"""Single-precision numbers in the widest register of a CPU: AVX-512."""
_CONVOLUTIONS = ("convolution", "convolution_backward")
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_BY_IMAGES = ("batch_norm", "group_norm", "pool", "upsample")
_TABLES = ("embedding", "index_select", "gather", "scatter", "index_put", "nll_loss", "index_add")
_BY_ROWS = ("layer_norm", "softmax", "sum", "mean", "amax", "amin", "argmax", "max", "min", "norm", "logsumexp")


@dataclass(frozen=True)
class Place:
    """An operation within its family; `flops` and `num_bytes` are the work that a first guess rests on."""

    family: str
    point: Point
    flops: float
    num_bytes: float


def place_of(operation: Operation) -> Place:
    """Where `operation` stands."""
    name, work = operation.name, float(operation.bytes_read + operation.bytes_written)
    family, describe = _family(operation)
    if not operation.inputs and not operation.outputs:
        return Place("elementwise", Point((0.0,), (name, "none", "")), 0.0, 0.0)
    sizes, traits = describe(operation)
    flops = float(operation.flops) or _flops(family, operation)
    logarithms = tuple(math.log(max(1.0, size)) for size in sizes)
    return Place(family, Point(logarithms, (name, *traits)), flops, work)


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
