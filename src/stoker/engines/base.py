"""The protocol between a model on disk and the library that runs it, and that library's errors as Stoker's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact, ServiceError
from stoker.records import EngineName, ServingPrecision, TensorSpec

Where = Literal["cpu", "cuda"]
"""The device an engine computes on."""


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """An engine, as all other parts know it. A file of `stoker.engines` with a record `ENGINE` is an engine.

    The file must be importable without the engine's library: `load_all` imports it, and raises BadArtifact if the
    library is missing or refuses the graph.

    Args:
        name: in manifests, and of the engine's file.
        load_all: one engine for each instance of a graph.
        platform: name in the protocol's model metadata.
        packages: distributions whose versions the answers depend on.
        suffixes: of graphs in artifacts; other files that a graph of another format reads would not be checked.
        export_rank: an export names the engine of the lowest rank that holds.
        reference_rank: an imported graph means what the engine of the lowest rank answers.
    """

    name: EngineName
    load_all: Callable[[Graph], Sequence[Engine]]
    platform: str
    packages: tuple[str, ...]
    suffixes: tuple[str, ...] = (".onnx",)
    export_rank: int = 100
    reference_rank: int = 100


class Engine(Protocol):
    """A loaded model; one caller at a time.

    Several engines of one artifact run at the same time, and share its weights where the library allows it. Other
    Python threads run while an engine computes.
    """

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs, by name.

        Inputs have the manifest's names, dtypes and shapes (not checked) and must not change until this returns.
        Contiguous and writable arrays are read in place, others are copied. The caller owns the outputs.

        Raises:
            ServiceError: the library failed; with the line that says why.
        """
        ...

    def close(self) -> None:
        """Release threads and memory; no `run` may be in progress or follow."""
        ...


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph file, its inputs and outputs, and how to compute it.

    `precision` is that of sums and products; the part of an int8 graph that is not quantised is computed in fp32.
    Each of `instances` engines computes with `threads` threads.
    """

    path: Path
    precision: ServingPrecision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instances: int = 1
    threads: int = 1
    where: Where = "cpu"


_WHERE = re.compile(
    r"^(Exception from \S+:\d+|Check '.*' failed at \S+:\d+|FrontEnd API failed with \w+|Summary):$|fully converted\.$"
)
_CHECK = re.compile(r"( ?Check '.*' failed at \S+:\d+)?:$")
_MOST_CHARACTERS = 300


def informative_line(error: BaseException) -> str:
    r"""The cause of a library's error in one line: the node, not the place in the library's source.

    >>> informative_line(RuntimeError("Exception from src/infer.cpp:224:\nEltwise shape infer: dim 1 mismatch\n"))
    'Eltwise shape infer: dim 1 mismatch'
    >>> informative_line(RuntimeError("[CPU] Mul node 'm' Check 'a == b' failed at src/mul.cpp:2:\n3 and 5 mismatch"))
    "[CPU] Mul node 'm': 3 and 5 mismatch"
    """
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not _WHERE.search(line)] or lines or [type(error).__name__]
    first = _CHECK.sub("", lines[0])
    if first != lines[0] and len(lines) > 1:
        first = ": ".join(filter(None, (first, lines[1])))
    return first[:_MOST_CHARACTERS]


class EngineMissing(BadArtifact):
    """An engine's library is not installed here, whatever the model is."""


def not_installed(engine: str) -> EngineMissing:
    """The engine's library is missing."""
    return EngineMissing(f"The engine {engine} is not installed here", remedy="pip install 'stoker[serve]'")


def cannot_load(path: Path, engine: str, error: BaseException) -> BadArtifact:
    """The library read the graph and refused it."""
    return BadArtifact(f"{engine} cannot load {path}: {informative_line(error)}", remedy="Export the model again.")


class BadInput(ServiceError):
    """The engine cannot compute these inputs; it still computes others."""


class BadValue(BadInput):
    """An input has a number that is not taken, which was found before anything was computed."""


def cannot_run(engine: str, error: BaseException, *, is_input: bool = False) -> ServiceError:
    """The library could not compute an answer; with `is_input` because of the inputs."""
    kind = BadInput if is_input else ServiceError
    return kind(f"{engine} could not compute this: {informative_line(error)}")


def require_names(path: Path, what: str, specs: Iterable[TensorSpec], datatypes: Mapping[str, str]) -> None:
    """Compare the manifest's tensors with those of the graph.

    Args:
        path: the graph's file, for the message.
        what: `input` or `output`.
        specs: the manifest's tensors.
        datatypes: of the graph's tensors, by name.

    Raises:
        BadArtifact: a name or a datatype differs.
    """
    specs = tuple(specs)
    names = {spec.name for spec in specs}
    unknown = names ^ set(datatypes) if what == "input" else names - set(datatypes)
    if unknown:
        raise BadArtifact(
            f"{path} has the {what}s {', '.join(sorted(datatypes))}, the manifest {', '.join(sorted(names))}",
            remedy="Export the model again.",
        )
    for spec in specs:
        if datatypes[spec.name] != spec.datatype:
            raise BadArtifact(
                f"{what} {spec.name!r} of {path} is {datatypes[spec.name]}, the manifest says {spec.datatype}",
                remedy="Export the model again.",
            )
