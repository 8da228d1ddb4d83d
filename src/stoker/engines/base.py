"""The seam between a model on disk and whatever runs it.

What engines' libraries say when they cannot, in the form of Stoker's errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact, ServiceError
from stoker.records import ServingPrecision, TensorSpec

Where = Literal["cpu", "cuda"]
"""What an engine computes on."""


class Engine(Protocol):
    """A model that is loaded and can answer; one caller at a time.

    Several engines of one artifact run at the same time, and share its weights where the library beneath can. While
    one computes, other threads of Python go on.
    """

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs, by name.

        Inputs have the manifest's names, dtypes and shapes, which is not checked; they are read until this returns.
        Arrays that are contiguous and writable are read where they lie, others are copied first. Outputs are the
        caller's own.

        Raises:
            ServiceError: the library beneath could not, with the line that says why.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory; nothing may be running, and nothing runs afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What an engine loads: a file, what it takes and gives, and how it is computed.

    `precision` is what sums and products are computed in; of int8 graphs, the part that is not quantised is computed
    in fp32. Each of `instances` engines computes with `threads` threads.
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
    r"""What went wrong, in one line: not where in the library, but of which node.

    >>> telling_line(RuntimeError("Exception from src/infer.cpp:224:\nEltwise shape infer: dim 1 mismatch\n"))
    'Eltwise shape infer: dim 1 mismatch'
    >>> telling_line(RuntimeError("[CPU] Mul node 'm' Check 'a == b' failed at src/mul.cpp:2:\n3 and 5 mismatch"))
    "[CPU] Mul node 'm': 3 and 5 mismatch"
    """
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not _WHERE.search(line)] or lines or [type(error).__name__]
    first = _CHECK.sub("", lines[0])
    is_whole = first == lines[0] or len(lines) == 1
    words = (first,) if is_whole else (first, lines[1])
    return ": ".join(word for word in words if word)[:_MOST_CHARACTERS]


def not_installed(engine: str) -> BadArtifact:
    """The library of an engine is missing."""
    return BadArtifact(f"The engine {engine} is not installed here", remedy="pip install 'stoker[serve]'")


def cannot_load(path: Path, engine: str, error: BaseException) -> BadArtifact:
    """The library read the graph and refused it."""
    return BadArtifact(f"{engine} cannot load {path}: {informative_line(error)}", remedy="Export the model again.")


class BadInput(ServiceError):
    """The inputs are what an engine could not compute; it goes on computing others."""


def cannot_run(engine: str, error: BaseException, *, is_input: bool = False) -> ServiceError:
    """The library could not compute an answer; with `is_input` because of what it was given."""
    kind = BadInput if is_input else ServiceError
    return kind(f"{engine} could not compute this: {informative_line(error)}")


def require_names(path: Path, what: str, wanted: Iterable[TensorSpec], found: Mapping[str, str]) -> None:
    """Hold the manifest's tensors against those of the graph.

    Args:
        path: the graph's file, for the message.
        what: `input` or `output`.
        wanted: the manifest's.
        found: datatypes of the graph's, by name.

    Raises:
        BadArtifact: a name or a datatype differs.
    """
    wanted = tuple(wanted)
    names = {spec.name for spec in wanted}
    unknown = sorted(names ^ set(found) if what == "input" else names - set(found))
    if unknown:
        raise BadArtifact(
            f"{path} has the {what}s {', '.join(sorted(found))}, the manifest {', '.join(sorted(names))}",
            remedy="Export the model again.",
        )
    for spec in wanted:
        if found[spec.name] != spec.datatype:
            raise BadArtifact(
                f"{what} {spec.name!r} of {path} is {found[spec.name]}, the manifest says {spec.datatype}",
                remedy="Export the model again.",
            )
