"""What a graph is made of, as far as the choice of candidates depends on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from stoker.errors import BadArtifact, first_line

_QUANTISED = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
    "MatMulInteger", "FakeQuantize",
})  # fmt: skip
_HEAVY = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "Convolution"})


@dataclass(frozen=True)
class GraphKind:
    """How many operators of each type a graph has."""

    operators: dict[str, int]

    @property
    def quantised(self) -> tuple[str, ...]:
        """Types of operators that only a quantised graph has, sorted."""
        return tuple(sorted(_QUANTISED & set(self.operators)))

    @property
    def heavy(self) -> int:
        """Convolutions and matrix products: what 8 bits make faster."""
        return sum(count for name, count in self.operators.items() if name in _HEAVY)

    @property
    def has_convolutions(self) -> bool:
        """Whether any product is a convolution."""
        return bool({"Conv", "ConvTranspose", "Convolution"} & set(self.operators))

    @property
    def has_attention(self) -> bool:
        """Whether it looks like a transformer: matrix products and softmax."""
        return {"MatMul", "Softmax"} <= set(self.operators) or "Attention" in self.operators


def kind_of(path: Path) -> GraphKind:
    """What the graph in a file, ONNX or OpenVINO's, is made of; subgraphs are left out.

    Raises:
        BadArtifact: it cannot be read.
    """
    try:
        return GraphKind(dict(Counter(_types_in_ir(path) if path.suffix == ".xml" else _types_in_onnx(path))))
    except ImportError as error:
        raise BadArtifact("onnx is not installed", remedy="pip install 'stoker[compress]'") from error
    except Exception as error:
        raise BadArtifact(f"{path} cannot be read: {first_line(error)}", remedy="Export the model again.") from error


def _types_in_onnx(path: Path) -> list[str]:
    import onnx  # noqa: PLC0415 - an extra, which is loaded where it is used

    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def _types_in_ir(path: Path) -> list[str]:
    tree = ET.parse(path)  # noqa: S314 - a graph of our own, or of an artifact that was verified
    return [layer.get("type", "") for layer in tree.iterfind("layers/layer")]
