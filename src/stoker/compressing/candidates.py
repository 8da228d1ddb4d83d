"""A compression candidate: its name, engine and precision, and how its graph is built.

A pruned network is tried in the forms that were fastest for the whole one. `kind_of` describes a graph as far as the
choice of candidates depends on it.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from stoker.artifacts import Artifact
from stoker.artifacts.dtypes import Arrays
from stoker.compressing.rows import EvaluationRows, batches
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.exporting.onnx_file import QUANTISED_OPERATORS
from stoker.records import EngineName, ServingPrecision


class CannotBuild(StokerError):
    """A library could not build the candidate; the search goes on with the next."""


@dataclass(frozen=True)
class BuildContext:
    """The model to compress, and rows of training data to calibrate on.

    `graph` replaces the model's own, such as a pruned network's with the same inputs. `sums_fit`: the CPU adds 8-bit
    products without overflow (VNNI); others need 7-bit weights.
    """

    source: Artifact
    calibration: EvaluationRows
    sums_fit: bool = True
    graph: Path | None = None

    @property
    def graph_path(self) -> Path:
        """The graph to build candidates from."""
        return self.graph or self.source.graph_path

    def calibration_inputs(self) -> Iterator[Arrays]:
        """Inputs of each row [1, ...], cut to its own length, so that padding is not calibrated on."""
        for _, inputs in batches(self.calibration, self.source.manifest, 1):
            yield inputs


@dataclass(frozen=True)
class BuiltGraph:
    """A candidate's graph, the files that the engine reads, and further files to keep (`extra_files`)."""

    graph: Path
    files: tuple[Path, ...]
    extra_files: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the files that the engine reads [bytes]."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class CompressionCandidate:
    """A way to make the model smaller or faster.

    `make(context, directory)` writes the graph into an empty directory, or raises CannotBuild. `effort` is the time
    that takes relative to other candidates of its kind.
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
        """Whether it costs accuracy by design, and so has to be faster than the best lossless one."""
        return self.is_reduced or self.is_pruned


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn any exception of a library into CannotBuild."""
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        raise CannotBuild(f"{what} raised {type(error).__name__}: {first_line(error)}") from error


def library(name: str) -> Any:
    """A library of the extra `compress`, which is loaded where it is used.

    Raises:
        CannotBuild: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotBuild(f"{name} is not installed", remedy="pip install 'stoker[compress]'") from error


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the advice and the progress bars that quantisers log and print."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class PrunedGraph:
    """A pruned network's graph; `record` is the file that describes its pruning, and is kept with it."""

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
        paces: speed-up [1] of those that passed, by name; if none of a kind passed, its first is taken.
    """
    for is_reduced in (False, True):
        forms = [form for form in candidates if form.is_reduced is is_reduced]
        if not forms:
            continue
        best = max(forms, key=lambda form: paces.get(form.name, 0.0))

        def make(context: BuildContext, directory: Path, form: CompressionCandidate = best) -> BuiltGraph:
            made = form.make(dataclasses.replace(context, graph=pruned.graph), directory)
            return dataclasses.replace(made, extra_files=(*made.extra_files, pruned.record))

        yield dataclasses.replace(
            best, name=f"{pruned.name}, {best.name}", how=f"{pruned.how}; {best.how}", make=make, is_pruned=True
        )


_HEAVY = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "Convolution"})


@dataclass(frozen=True)
class GraphKind:
    """How many operators of each type a graph has."""

    operators: dict[str, int]

    @property
    def quantised(self) -> tuple[str, ...]:
        """Types of operators that only a quantised graph has, sorted."""
        return tuple(sorted(QUANTISED_OPERATORS & set(self.operators)))

    @property
    def heavy(self) -> int:
        """Number of convolutions and matrix products, which 8 bits make faster [operators]."""
        return sum(count for name, count in self.operators.items() if name in _HEAVY)

    @property
    def has_convolutions(self) -> bool:
        """Whether any product is a convolution."""
        return bool({"Conv", "ConvTranspose", "Convolution"} & set(self.operators))

    @property
    def has_attention(self) -> bool:
        """Whether it looks like a transformer: it has matrix products and softmax."""
        return {"MatMul", "Softmax"} <= set(self.operators) or "Attention" in self.operators


def kind_of(path: Path) -> GraphKind:
    """Operators of the graph in a file, ONNX or OpenVINO's, without subgraphs.

    Raises:
        BadArtifact: it cannot be read.
    """
    try:
        if path.suffix == ".xml":
            tree = ET.parse(path)  # noqa: S314 - a graph of our own, or of an artifact that was verified
            types = [layer.get("type", "") for layer in tree.iterfind("layers/layer")]
        else:
            types = [node.op_type for node in library("onnx").load(path, load_external_data=False).graph.node]
    except Exception as error:
        raise BadArtifact(f"{path} cannot be read: {first_line(error)}", remedy="Export the model again.") from error
    return GraphKind(dict(Counter(types)))
