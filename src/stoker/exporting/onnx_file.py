"""Reading an ONNX file made elsewhere: what it says it takes, the files that belong to it, and whether it is quantised.

Nothing it says is believed until it has been asked; see `imports`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.engines.onnx_weights import weights_named
from stoker.engines.problems import telling_line
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
        raise BadArtifact(f"{path} is no ONNX file, or is cut off: {telling_line(error)}") from error
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
