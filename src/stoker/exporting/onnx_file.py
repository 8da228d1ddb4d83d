"""Reading an ONNX file made elsewhere: what it says it takes, the files that belong to it, and whether it is quantised.

Nothing it says is believed until it has been asked; see `imports`.

Example inputs for a graph that came without any: drawn, the same every time, and within what the graph can take.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from stoker.artifacts import dtype_of
from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import informative_line
from stoker.engines.loader import weights_named
from stoker.errors import BadArtifact
from stoker.records import BATCH, Datatype, TensorSpec

try:
    import onnx
except ImportError as error:
    raise BadArtifact("The package onnx is not installed here", remedy="pip install 'stoker[models]'") from error

_ELEMENTS: dict[int, Datatype] = {
    onnx.TensorProto.BOOL: "BOOL", onnx.TensorProto.UINT8: "UINT8", onnx.TensorProto.UINT16: "UINT16",
    onnx.TensorProto.UINT32: "UINT32", onnx.TensorProto.UINT64: "UINT64", onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT16: "INT16", onnx.TensorProto.INT32: "INT32", onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.BFLOAT16: "BF16", onnx.TensorProto.FLOAT: "FP32",
    onnx.TensorProto.DOUBLE: "FP64", onnx.TensorProto.STRING: "BYTES",
}  # fmt: skip
_QUANTISED = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QLinearConv",
    "QLinearMatMul", "QGemm", "QAttention", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "FakeQuantize",
})  # fmt: skip
_NO_SHAPE = "Field 'shape' of 'type' is required but missing"


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file whose structure is sound; weights that lie in other files are not read."""

    path: Path
    model: Any

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes, as it says: every dimension that has no number has a name, its own or one made up.

        Raises:
            BadArtifact: an input is no tensor, or its number of dimensions is not said.
        """
        weights = {one.name for one in self.model.graph.initializer}  # listed as inputs too by old exporters
        return tuple(_spec(self.path, "input", one) for one in self.model.graph.input if one.name not in weights)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gives: names and types. Shapes are left out; what the graph says of them is seldom all there is.

        Raises:
            BadArtifact: an output is no tensor, such as the dictionaries of scikit-learn's converter.
        """
        each = {one.name: _require_tensor(self.path, "output", one) for one in self.model.graph.output}
        return tuple(
            TensorSpec(name=name, datatype=_ELEMENTS[tensor.elem_type], shape=()) for name, tensor in each.items()
        )

    @property
    def is_quantised(self) -> bool:
        """Whether any of its operations computes in, or converts from, whole numbers."""
        return any(node.op_type in _QUANTISED for node in self.model.graph.node)

    @property
    def opset(self) -> int:
        """The version of the standard operations."""
        return next((one.version for one in self.model.opset_import if one.domain in ("", "ai.onnx")), 0)

    @property
    def external(self) -> tuple[str, ...]:
        """Files with weights, by their places relative to the graph."""
        return weights_named(self.model)

    @property
    def files(self) -> dict[str, Path]:
        """Every file of the model by its place in the artifact; the graph is `model.onnx`."""
        return {"model.onnx": self.path} | {name: self.path.parent / name for name in self.external}


def read_onnx(path: Path) -> OnnxFile:
    """Read a graph and check its structure.

    Raises:
        BadArtifact: it is no ONNX, is cut off, has an operation its version does not have, or lacks a file of weights.
    """
    if not path.is_file():
        raise BadArtifact(f"There is no file {path}", remedy="Give an ONNX file, or a run.")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors, which differ from build to build
        raise BadArtifact(f"{path} is no ONNX file, or is cut off: {informative_line(error)}") from error
    if not model.graph.node:
        raise BadArtifact(f"{path} has no operations: it is no ONNX graph, or an empty one")
    found = OnnxFile(path, model)
    for name in found.external:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BadArtifact(f"{path} has weights in {name!r}, outside its directory")
        if not (path.parent / name).is_file():
            remedy = f"Put {name} beside {path.name}: it was written together with it."
            raise BadArtifact(f"{path} has weights in {name}, which is not there", remedy=remedy)
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # ValidationError, and RuntimeError from its C++ part
        if _NO_SHAPE in str(error):  # some exporters leave the outputs' shapes out, and engines work them out
            return found
        raise BadArtifact(f"{path} is not valid ONNX: {_what_fails(error)}") from error
    return found


def named_batch(model: Any) -> Any:
    """A copy of a graph whose inputs and outputs begin with a batch of any size."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    del changed.graph.value_info[:]  # shapes of what lies between, worked out for the size that it had
    return changed


def _spec(path: Path, what: str, value: Any) -> TensorSpec:
    tensor = _require_tensor(path, what, value)
    if not tensor.HasField("shape"):
        raise BadArtifact(
            f"{path} does not say how many dimensions the {what} {value.name!r} has",
            remedy="Export it again with shapes of its inputs.",
        )
    return TensorSpec(
        name=value.name,
        datatype=_ELEMENTS[tensor.elem_type],
        shape=tuple(_dim(value.name, at, one) for at, one in enumerate(tensor.shape.dim)),
    )


def _dim(name: str, at: int, dim: Any) -> int | str:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return int(dim.dim_value)
    made_up = f"{name}_{at}"
    is_name = any(letter.isalnum() for letter in dim.dim_param) and (dim.dim_param != BATCH or at == 0)
    return str(dim.dim_param) if is_name else made_up


def _require_tensor(path: Path, what: str, value: Any) -> Any:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type not in _ELEMENTS:
        raise BadArtifact(
            f"The {what} {value.name!r} of {path} is no tensor of numbers or strings",
            remedy="Of scikit-learn's converter: convert_sklearn(…, options={'zipmap': False}).",
        )
    return tensor


def _what_fails(error: Exception) -> str:
    """The checker's own words with the node they are about, which come on several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] or type(error).__name__


_PASSES_ON = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Clip", "Transpose", "Expand"}
)
_MASKS = ("mask",)
_SEED = 20
DRAWS = 3
"""How many kinds of inputs can be drawn."""
_UNKNOWN = (2, 256, 2)
"""Whole numbers of no known range lie below, by the number of the draw."""
_TOKENS, _PIXELS = 8, 64
"""Sizes of dimensions that vary: of sequences, and of images; the next name's is twice as long."""


def draw_inputs(model: Any, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], *, number: int = 0) -> Arrays:
    """Inputs of these sizes: standard normal numbers, bytes, and whole numbers below what the graph shows (`_limits`).

    Masks are 1, but for the second half of every other sample. Draws of another `number`, below `DRAWS`, have other
    numbers of other sizes: floats from 0 to 1, or small ones; whole numbers of no known range 0 and 1, or bytes.
    """
    draw = np.random.default_rng(_SEED + number)
    known: dict[str, int] = {}
    for name, below in _limits(model):
        known[name] = min(below, known.get(name, below))
    found: Arrays = {}
    for spec in inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        found[spec.name] = _drawn(draw, spec, shape, known.get(spec.name, _UNKNOWN[number]), number)
    return found


def likely_sizes(inputs: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Sizes for named dimensions that most models can take; of each name another, to tell them apart in outputs."""
    bases = {
        dim: _PIXELS if len(spec.shape) >= 4 and at > 0 else _TOKENS
        for spec in inputs
        for at, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim != BATCH
    }
    alike = {base: [dim for dim, other in bases.items() if other == base] for base in (_TOKENS, _PIXELS)}
    return {dim: base * 2 ** alike[base].index(dim) for dim, base in bases.items()}


def _drawn(
    draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], below: int, number: int
) -> NDArray[Any]:
    dtype = dtype_of(spec.datatype)
    if any(word in spec.name for word in _MASKS):
        mask = np.ones(shape, dtype=dtype)
        mask[1::2, ..., shape[-1] - shape[-1] // 2 :] = 0
        return mask
    if dtype.hasobject:
        return np.array([f"word {at}".encode() for at in range(int(np.prod(shape)))], dtype=object).reshape(shape)
    if spec.datatype == "UINT8":
        return draw.integers(0, 256, shape).astype(dtype)
    if dtype.kind in "iub":
        return draw.integers(0, below, shape).astype(dtype)
    if number == 1:
        return draw.random(shape).astype(dtype)
    return (draw.standard_normal(shape) * (0.1 if number == 2 else 1.0)).astype(dtype)


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """Inputs of whole numbers whose range the graph shows, and the number that they lie below.

    It is shown where rows of a table are looked up by them, by the depth of a one-hot encoding, and by the constants
    that they are compared with for equality, which is how one-hot encodings of JAX and TensorFlow are written.
    """
    weights = {one.name: one for one in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    came_from = {
        node.output[0]: node.input[0] for node in model.graph.node if node.op_type in _PASSES_ON and node.input
    }
    names = {one.name for one in model.graph.input} - set(weights)
    origin = partial(_origin, came_from)
    for node in model.graph.node:
        if node.op_type == "Gather":
            axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
            table, source = origin(node.input[0], weights), origin(node.input[1], names)
            if table is not None and source is not None:
                yield source, int(weights[table].dims[axis])
        elif node.op_type in {"OneHot", "Equal"}:
            pairs = [(node.input[0], node.input[1]), (node.input[1], node.input[0])]
            for asked, known in pairs[: 1 if node.op_type == "OneHot" else 2]:
                source, constant = origin(asked, names), origin(known, weights)
                if source is not None and constant is not None:
                    largest = _largest(weights[constant]) + (node.op_type == "Equal")
                    if largest > 1:
                        yield source, largest


def _origin(came_from: Mapping[str, str], tensor: str, ends: Container[str]) -> str | None:
    """Where a tensor comes from by way of operations that pass elements on, if that is one of `ends`."""
    for _ in range(len(came_from) + 1):
        if tensor in ends or tensor not in came_from:
            break
        tensor = came_from[tensor]
    return tensor if tensor in ends else None


def _largest(tensor: Any) -> int:
    """The largest element of a constant, as a whole number; 0 where it has none, or lies in another file."""
    if tensor.data_location == tensor.EXTERNAL:
        return 0
    values = numpy_helper.to_array(tensor)
    if values.dtype.kind not in "iuf" or not values.size or not np.isfinite(values).all():
        return 0
    return int(values.max())
