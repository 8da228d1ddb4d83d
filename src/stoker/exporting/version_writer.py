"""Write a version of a model: its graph, the proofs of every engine, and the manifest with the results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from safetensors.numpy import save_file

from stoker.artifacts import MANIFEST, Artifact, Golden, publish
from stoker.artifacts.directory import manifest_problem
from stoker.devices import attached_cpu
from stoker.engines import Graph, default_threads, engine_records
from stoker.errors import BadArtifact
from stoker.exporting.proofs import Answer, Trial, prove
from stoker.exporting.signature import About
from stoker.records import BATCH, ArtifactSource, FileDigest, Manifest, Proof, ServingPrecision, TensorSpec

GOLDEN = "golden.safetensors"
NUM_GOLDEN = 4
_LIBRARIES = ("stoker", "torch", "onnx", "onnxscript")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A model to be written.

    `trial` has the inputs, their dimensions and samples to try; `oracle` is the original to compare with, and `proofs`
    are its own. `remedy` is for an original that no engine agrees with, where more is known than the usual cause.
    """

    about: About
    graph: str
    trial: Trial
    outputs: tuple[TensorSpec, ...]
    oracle: Answer
    oracle_name: str
    source: ArtifactSource
    precision: ServingPrecision = "fp32"
    proofs: tuple[Proof, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: str = ""


def write_version(model: Path, exported: Exported, write_files: Callable[[Path], None]) -> Artifact:
    """Write the next version, prove it, and put it in place; a failure leaves nothing behind.

    Args:
        model: the model's directory.
        exported: what is written.
        write_files: puts the graph, and what belongs to it, into a directory.

    Raises:
        BadArtifact: no engine computes what the model does, what is said of it cannot be, or the disk cannot be
            written.
    """
    require_place(model)
    about, trial = exported.about, exported.trial
    _require_labels_fit(about, exported.outputs)
    _require_columns_fit(about, trial.inputs)

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        write_files(directory)
        graph = Graph(
            path=directory / exported.graph,
            precision=exported.precision,
            inputs=trial.inputs,
            outputs=exported.outputs,
            threads=default_threads(1),
        )
        inputs = trial.samples
        if trial.is_batched:
            inputs = {name: array[:NUM_GOLDEN].copy() for name, array in inputs.items()}
        proven = prove(graph, exported.oracle, exported.oracle_name, trial, inputs, about.limit, remedy=exported.remedy)
        save_file(Golden(inputs, proven.golden).as_tensors(), directory / GOLDEN)
        manifest = Manifest(
            name=about.name or model.name,
            engine=proven.engine,
            precision=exported.precision,
            graph=exported.graph,
            golden=GOLDEN,
            inputs=tuple(_with_columns(about, spec) for spec in trial.inputs),
            outputs=exported.outputs,
            dims=trial.dims,
            tolerance=proven.tolerance,
            labels={output: tuple(classes) for output, classes in about.labels.items()},
            metrics=dict(about.metrics),
            proofs=(*exported.proofs, *proven.proofs),
            notes=(*exported.notes, *about.notes),
            takes_prepared=about.takes_prepared,
            proved_on=attached_cpu().model,
            source=exported.source,
            libraries=library_versions(),
            made_at=now(),
            files=digests(),
        )
        if (problem := manifest_problem(manifest)) is not None:
            raise BadArtifact(f"{model} was not written: its manifest could not be read: it {problem}")
        return manifest

    return publish(model, write)


def _require_labels_fit(about: About, outputs: Sequence[TensorSpec]) -> None:
    """Refuse class names of an output that has another number of classes.

    Raises:
        BadArtifact: there are such names.
    """
    for spec in outputs:
        count = len(about.labels.get(spec.name, ()))
        if count and len(spec.shape) == 2 and isinstance(spec.shape[1], int) and spec.shape[1] != count:
            raise BadArtifact(
                f"The output {spec.name!r} has {spec.shape[1]} values a sample, and there are {count} labels for it",
                remedy="Give one label for each value, in their order.",
            )


def _require_columns_fit(about: About, inputs: Sequence[TensorSpec]) -> None:
    """Refuse columns of an input that has another number of elements a sample.

    Raises:
        BadArtifact: there are such columns.
    """
    shapes = {spec.name: spec.shape for spec in inputs}
    for name, columns in about.columns.items():
        if shapes.get(name) != (BATCH, len(columns)):
            known = ", ".join(f"{other} {list(shape)}" for other, shape in shapes.items())
            raise BadArtifact(
                f"{len(columns)} columns are named for the input {name!r}; the model has {known}",
                remedy="Name one column for each element of an input [batch, elements].",
            )


def _with_columns(about: About, spec: TensorSpec) -> TensorSpec:
    return dataclasses.replace(spec, columns=tuple(about.columns.get(spec.name, spec.columns)))


def require_place(model: Path) -> None:
    """Refuse a directory that is not a model's, nor could become one.

    Raises:
        BadArtifact: it is a file, a version of a model, or holds other things.
    """
    if model.is_file():
        raise BadArtifact(f"{model} is a file", remedy="Name a directory with -o, such as models/digits.")
    if not model.is_dir():
        if model.name.isdigit():
            remedy = f"Name the model alone: -o {model.parent}."
            raise BadArtifact(f"{model} is named like a version, which Stoker numbers itself", remedy=remedy)
        return
    if (model / MANIFEST).is_file():
        raise BadArtifact(f"{model} is a version of a model", remedy=f"Name the model: -o {model.parent}.")
    entries = [entry.name for entry in model.iterdir() if not entry.name.startswith(".")]
    foreign = [name for name in entries if not name.isdigit() and name != "service.json"]
    if foreign:
        raise BadArtifact(
            f"{model} is not a model's directory: it holds {', '.join(sorted(foreign)[:3])}",
            remedy=f"Name one of the model's own, such as -o {model / 'NAME'}.",
        )


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that an export uses."""
    versions = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *(package for record in engine_records() for package in record.packages)):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
