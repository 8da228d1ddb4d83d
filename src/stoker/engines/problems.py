"""What engines' libraries say when they cannot, in the form of Stoker's errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker.errors import BadArtifact, ServiceError
from stoker.records import TensorSpec

_PLACES = re.compile(r"^(Exception from |Check '.*' failed at |\[ONNXRuntimeError\] : \d+ : )")


def telling_line(error: BaseException) -> str:
    r"""The first line that says what went wrong, not where in the library.

    >>> telling_line(RuntimeError("Exception from src/infer.cpp:224:\nEltwise shape infer: dim 1 mismatch\n"))
    'Eltwise shape infer: dim 1 mismatch'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not (_PLACES.match(line) and line.endswith(":"))]
    return (telling or lines or [type(error).__name__])[0][:300]


def not_installed(engine: str) -> BadArtifact:
    """The library of an engine is missing."""
    return BadArtifact(f"The engine {engine} is not installed here", remedy="pip install 'stoker[serve]'")


def cannot_load(path: Path, engine: str, error: BaseException) -> BadArtifact:
    """The library read the graph and refused it."""
    return BadArtifact(f"{engine} cannot load {path}: {telling_line(error)}", remedy="Export the model again.")


def cannot_run(engine: str, error: BaseException) -> ServiceError:
    """The library could not compute an answer."""
    return ServiceError(f"{engine} could not compute this: {telling_line(error)}")


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
