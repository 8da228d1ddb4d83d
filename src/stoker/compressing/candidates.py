"""What a candidate is: how it is called, what it computes in, and how it is made.

Candidates made of a pruned network: its graph, in the forms that served the whole one best.

What: a network with fewer channels, trained on beside the whole one, takes the same inputs and answers in the same
shapes; whatever makes the whole one's graph faster is done to it as well.
Use when: there is a run to train on; see `compressing.pruning`.
Costs: as the form it is made in.

What a graph is made of, as far as the choice of candidates depends on it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from stoker.artifacts import Artifact
from stoker.artifacts.dtypes import Arrays
from stoker.compressing.rows import EvaluationRows, batches
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.records import EngineName, ServingPrecision


class CannotBuild(StokerError):
    """A candidate that the library beneath could not make; the search goes on with the next."""


@dataclass(frozen=True)
class BuildContext:
    """What candidates are made from: the model given, and rows of training data, asked one at a time.

    `graph` takes the place of the model's own, such as that of a pruned network with the same inputs. `sums_fit` says
    that the CPU adds products of 8 bits without overflow (VNNI and its like); others need weights of 7.
    """

    source: Artifact
    calibration: EvaluationRows
    sums_fit: bool = True
    graph: Path | None = None

    @property
    def graph_path(self) -> Path:
        """The graph to make candidates of."""
        return self.graph or self.source.graph_path

    def calibration_inputs(self) -> Iterator[Arrays]:
        """Inputs of each row [1, ...], cut to its own length, so that filling is not calibrated on."""
        for _, inputs in batches(self.calibration, self.source.manifest, 1):
            yield inputs


@dataclass(frozen=True)
class BuiltGraph:
    """The graph of a candidate, every file that belongs to it, and files `beside` that the engine does not read."""

    graph: Path
    files: tuple[Path, ...]
    beside: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What the engine reads [bytes]."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class CompressionCandidate:
    """A way to make the model smaller or faster.

    `make(workshop, directory)` writes the graph into an empty directory; raises CannotMake. `effort` is about how many
    times as long that takes as other candidates of its kind.
    """

    name: str
    how: str
    engine: EngineName
    precision: ServingPrecision
    make: Callable[[BuildContext, Path], BuiltGraph] = field(repr=False)
    effort: float = 1.0
    is_pruned: bool = False

    @property
    def is_reduced(self) -> bool:
        """Whether it computes in 8 bits."""
        return self.precision in {"int8", "int8+bf16"}

    @property
    def is_lossy(self) -> bool:
        """Whether it costs accuracy by design, and so has to beat the best that does not."""
        return self.is_reduced or self.is_pruned


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever a library raises, as CannotMake."""
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        raise CannotBuild(f"{what} raised {type(error).__name__}: {first_line(error)}") from error


@dataclass(frozen=True)
class PrunedGraph:
    """A pruned network's graph; `record` is a file that tells how it was made, and goes where the graph goes."""

    name: str
    how: str
    graph: Path
    record: Path


def forms_of(
    pruned: PrunedGraph, candidates: Sequence[CompressionCandidate], paces: Mapping[str, float]
) -> Iterator[CompressionCandidate]:
    """A pruned network in the fastest form so far that is not in 8 bits, and in the fastest in 8 bits.

    Args:
        pruned: the network.
        candidates: forms of the whole network, the most promising of each kind first.
        paces: how fast those were that passed, by name; where none of a kind did, its first is taken.
    """
    for is_reduced in (False, True):
        alike = [one for one in candidates if one.is_reduced is is_reduced]
        if alike:
            yield of_pruned(pruned, max(alike, key=lambda one: paces.get(one.name, 0.0)))


def of_pruned(pruned: PrunedGraph, form: CompressionCandidate) -> CompressionCandidate:
    """A candidate that does to the pruned network's graph what `form` does to the whole one's."""

    def make(workshop: BuildContext, directory: Path) -> BuiltGraph:
        made = form.make(dataclasses.replace(workshop, graph=pruned.graph), directory)
        return dataclasses.replace(made, beside=(*made.beside, pruned.record))

    return dataclasses.replace(
        form, name=f"{pruned.name}, {form.name}", how=f"{pruned.how}; {form.how}", make=make, is_pruned=True
    )


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
