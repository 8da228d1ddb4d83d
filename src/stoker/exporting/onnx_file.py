"""Read an ONNX file made elsewhere: its signature, its weight files, whether it is quantised; and draw inputs for it.

Nothing that the graph declares is relied on before it is verified; see `onnx_import`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
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
from stoker.records import BATCH, Datatype, DynamicDim, ServingPrecision, TensorSpec

try:
    import onnx
except ImportError as error:
    raise BadArtifact("The package onnx is not installed here", remedy="pip install 'stoker[models]'") from error

_ELEMENTS: dict[int, Datatype] = {
    onnx.TensorProto.BOOL: "BOOL",
    onnx.TensorProto.UINT8: "UINT8",
    onnx.TensorProto.UINT16: "UINT16",
    onnx.TensorProto.UINT32: "UINT32",
    onnx.TensorProto.UINT64: "UINT64",
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT16: "INT16",
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.FLOAT16: "FP16",
    onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.FLOAT: "FP32",
    onnx.TensorProto.DOUBLE: "FP64",
    onnx.TensorProto.STRING: "BYTES",
}
QUANTISED_OPERATORS = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "QGemm",
        "QAttention",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "FakeQuantize",
    }
)
"""Types of operators that only a quantised graph has: ONNX's, ONNX Runtime's, and OpenVINO's."""
_NO_SHAPE = "Field 'shape' of 'type' is required but missing"


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file whose structure is valid; weights in other files are not read."""

    path: Path
    model: Any

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Declared inputs; a dimension without a size has a name, the graph's or one made up.

        Raises:
            BadArtifact: an input is not a tensor, or its number of dimensions is not declared.
        """
        weights = {weight.name for weight in self.model.graph.initializer}  # listed as inputs too by old exporters
        specs: list[TensorSpec] = []
        for value in self.model.graph.input:
            if value.name in weights:
                continue
            tensor = _require_tensor(self.path, "input", value)
            if not tensor.HasField("shape"):
                raise BadArtifact(
                    f"{self.path} does not say how many dimensions the input {value.name!r} has",
                    remedy="Export it again with shapes of its inputs.",
                )
            shape = tuple(_dim(value.name, axis, dim) for axis, dim in enumerate(tensor.shape.dim))
            specs.append(TensorSpec(name=value.name, datatype=_ELEMENTS[tensor.elem_type], shape=shape))
        return tuple(specs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names and types of the outputs, without shapes: graphs seldom declare them in full.

        Raises:
            BadArtifact: an output is not a tensor, such as the dictionaries of scikit-learn's converter.
        """
        return tuple(
            TensorSpec(
                name=value.name, datatype=_ELEMENTS[_require_tensor(self.path, "output", value).elem_type], shape=()
            )
            for value in self.model.graph.output
        )

    @property
    def precision(self) -> ServingPrecision:
        """int8 if any operation computes in integers or converts from them."""
        return "int8" if any(node.op_type in QUANTISED_OPERATORS for node in self.model.graph.node) else "fp32"

    @property
    def opset(self) -> int:
        """Version number of the standard operators [1]; 0 if not declared."""
        return next((opset.version for opset in self.model.opset_import if opset.domain in ("", "ai.onnx")), 0)

    @property
    def external(self) -> tuple[str, ...]:
        """Weight files, by path relative to the graph."""
        return weights_named(self.model)

    @property
    def files(self) -> dict[str, Path]:
        """Every file of the model by its path in the artifact; the graph is `model.onnx`."""
        return {"model.onnx": self.path} | {name: self.path.parent / name for name in self.external}


def read_onnx(path: Path) -> OnnxFile:
    """Read a graph and check its structure.

    Raises:
        BadArtifact: it is not ONNX, is cut off, uses an operator that its opset lacks, or lacks a weight file.
    """
    if not path.is_file():
        raise BadArtifact(f"There is no file {path}", remedy="Give an ONNX file, or a run.")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors, which differ from build to build
        raise BadArtifact(f"{path} is no ONNX file, or is cut off: {informative_line(error)}") from error
    if not model.graph.node:
        raise BadArtifact(f"{path} has no operations: it is no ONNX graph, or an empty one")
    file = OnnxFile(path, model)
    for name in file.external:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BadArtifact(f"{path} has weights in {name!r}, outside its directory")
        if not (path.parent / name).is_file():
            remedy = f"Put {name} into the same folder as {path.name}: the two belong together."
            raise BadArtifact(f"{path} has weights in {name}, which is not there", remedy=remedy)
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # ValidationError, and RuntimeError from its C++ part
        if _NO_SHAPE in str(error):  # some exporters leave the outputs' shapes out, and engines work them out
            return file
        message = " ".join(str(error).split())[:400]  # several lines, with the node that fails
        raise BadArtifact(f"{path} is not valid ONNX: {message or type(error).__name__}") from error
    return file


def named_batch(model: Any) -> Any:
    """A copy of a graph whose inputs and outputs begin with a batch of any size."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    del changed.graph.value_info[:]  # inferred shapes inside the graph, which hold for the old batch size
    return changed


def _dim(name: str, axis: int, dim: Any) -> int | str:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return int(dim.dim_value)
    is_name = any(letter.isalnum() for letter in dim.dim_param) and (dim.dim_param != BATCH or axis == 0)
    return str(dim.dim_param) if is_name else f"{name}_{axis}"


def _require_tensor(path: Path, what: str, value: Any) -> Any:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type not in _ELEMENTS:
        raise BadArtifact(
            f"The {what} {value.name!r} of {path} is no tensor of numbers or strings",
            remedy="Of scikit-learn's converter: convert_sklearn(…, options={'zipmap': False}).",
        )
    return tensor


_PASSES_ON = dict.fromkeys(
    ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Clip", "Transpose", "Expand"), 0
) | {"Where": 2}
"""Operators that pass elements on, and the place of the input that they pass on. Stoker's exports have a `Where` for
negative indices."""
_SEED = 20
DRAWS = 3
"""How many kinds of inputs can be drawn."""
_UNKNOWN = (2, 256, 2)
"""Upper bound (exclusive) of integers of unknown range, by the number of the draw."""
_TOKENS, _PIXELS = 8, 64
"""Sizes of dimensions that vary: of sequences, and of images; the next name's is twice as long."""


def draw_inputs(model: Any, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], *, number: int = 0) -> Arrays:
    """Random inputs of these sizes, the same in every call: normal floats, bytes, and integers within `_limits`.

    Masks are 1, except in the second half of every other sample. Draws of another `number`, below `DRAWS`, have other
    ranges: floats from 0 to 1, or small ones; integers of unknown range 0 and 1, or bytes.
    """
    generator = np.random.default_rng(_SEED + number)
    known: dict[str, int] = {}
    for name, below in _limits(model):
        known[name] = min(below, known.get(name, below))
    arrays: Arrays = {}
    for spec in inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        arrays[spec.name] = _draw(generator, spec, shape, known.get(spec.name, _UNKNOWN[number]), number)
    return arrays


def likely_sizes(inputs: tuple[TensorSpec, ...], dims: Sequence[DynamicDim] = ()) -> dict[str, int]:
    """Sizes that most models can take, within `dims`; each named dimension has its own, so that outputs show which."""
    bases = {
        dim: _PIXELS if len(spec.shape) >= 4 and axis > 0 else _TOKENS
        for spec in inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim != BATCH
    }
    sizes: dict[str, int] = {}
    for dim, base in bases.items():
        sizes[dim] = base * 2 ** sum(bases[other] == base for other in sizes)
    for limits in dims:
        size = max(sizes.get(limits.name, 0), 2 * limits.low)
        sizes[limits.name] = size if limits.high is None else min(size, limits.high)
    return sizes


def _draw(
    generator: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], below: int, number: int
) -> NDArray[Any]:
    dtype = dtype_of(spec.datatype)
    if "mask" in spec.name and len(shape) > 1:
        mask = np.ones(shape, dtype=dtype)
        mask[1::2, ..., shape[-1] - shape[-1] // 2 :] = 0
        return mask
    if dtype.hasobject:
        return np.array([f"word {i}".encode() for i in range(int(np.prod(shape)))], dtype=object).reshape(shape)
    if spec.datatype == "UINT8":
        return generator.integers(0, 256, shape).astype(dtype)
    if dtype.kind in "iub":
        return generator.integers(0, below, shape).astype(dtype)
    if number == 1:
        return generator.random(shape).astype(dtype)
    return (generator.standard_normal(shape) * (0.1 if number == 2 else 1.0)).astype(dtype)


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """Integer inputs whose range the graph shows, each with an exclusive upper bound.

    The bound comes from the rows of a table that they index, the depth of a one-hot encoding, or the constants that
    they are compared with for equality (one-hot encodings of JAX and TensorFlow).
    """
    weights = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    came_from = {
        node.output[0]: node.input[_PASSES_ON[node.op_type]]
        for node in model.graph.node
        if node.op_type in _PASSES_ON and node.input
    }
    names = {value.name for value in model.graph.input} - set(weights)
    origin = partial(_origin, came_from)
    for node in model.graph.node:
        if node.op_type == "Gather":
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            table, source = origin(node.input[0], weights), origin(node.input[1], names)
            if table is not None and source is not None:
                yield source, int(weights[table].dims[axis])
        elif node.op_type in {"OneHot", "Equal"}:
            pairs = [(node.input[0], node.input[1]), (node.input[1], node.input[0])]
            for tensor, other in pairs[: 1 if node.op_type == "OneHot" else 2]:
                source, constant = origin(tensor, names), origin(other, weights)
                if source is not None and constant is not None:
                    largest = _largest(weights[constant]) + (node.op_type == "Equal")
                    if largest > 1:
                        yield source, largest


def _origin(came_from: Mapping[str, str], tensor: str, ends: Container[str]) -> str | None:
    """The one of `ends` that a tensor comes from through operators that pass elements on; None if there is none."""
    for _ in range(len(came_from) + 1):
        if tensor in ends or tensor not in came_from:
            break
        tensor = came_from[tensor]
    return tensor if tensor in ends else None


def _largest(tensor: Any) -> int:
    """Largest element of a constant, as an integer; 0 if it has none or is stored in another file."""
    if tensor.data_location == tensor.EXTERNAL:
        return 0
    values = numpy_helper.to_array(tensor)
    if values.dtype.kind not in "iuf" or not values.size or not np.isfinite(values).all():
        return 0
    return int(values.max())
