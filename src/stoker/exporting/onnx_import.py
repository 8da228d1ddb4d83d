"""Taking over an ONNX graph made elsewhere: from TensorFlow, JAX, MXNet, scikit-learn, or PyTorch long ago.

What a graph says of its dimensions is a proposal. A batch is what it has if its samples have the same answers alone as
together, at every size that is served; else it is served request by request, and the manifest's notes say so. Where no
example inputs are given several kinds are drawn, as nonsense may move answers that real inputs leave alone.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import Artifact, dtype_of, read_settings
from stoker.artifacts.dtypes import Arrays
from stoker.engines import Graph, default_threads, engine_records, load_graph
from stoker.errors import BadArtifact, ServiceError
from stoker.exporting.onnx_file import DRAWS, OnnxFile, draw_inputs, likely_sizes, named_batch, read_onnx
from stoker.exporting.proofs import (
    NUM_SAMPLES,
    Answer,
    Trial,
    contiguous,
    eight_samples,
    is_held,
    padded_specs,
    prove_alone,
)
from stoker.exporting.signature import About, output_specs, ranges, require_varied
from stoker.exporting.version_writer import Exported, require_place, write_version
from stoker.records import BATCH, ArtifactSource, DynamicDim, EngineName, ServingPrecision, TensorSpec
from stoker.store import sha256_file

_MOST_BY_NONSENSE = 0.05
"""Answers alone and together that differ by more, of the largest value, are of samples that depend on one another, and
not of rounding that drawn inputs magnify: no other kind is drawn then."""


def import_onnx(
    path: Path, model: Path, *, inputs: Mapping[str, NDArray[Any]] | None = None, about: About | None = None
) -> Artifact:
    """Take over an ONNX file as the next version of a model.

    Args:
        path: the file; weights in files beside it are taken along.
        model: the model's directory, such as `models/digits`.
        inputs: example inputs, first dimension samples; drawn where there are none.
        about: names, dimensions that vary, labels, and how much answers may differ.

    Raises:
        BadArtifact: it is damaged, no engine can load it or answer the examples, or engines disagree.
    """
    require_place(model)
    about = about or About()
    if about.dynamic:
        raise BadArtifact("What varies in an ONNX file is said by its graph", remedy="Leave --dynamic out.")
    found = read_onnx(path)
    with _candidates(found) as candidates:
        problem: BadArtifact | None = None
        for candidate, specs in candidates:
            is_batched = all(spec.shape[:1] == (BATCH,) for spec in specs)
            for number in range(DRAWS if inputs is None and is_batched else 1):
                samples = _drawn(candidate, specs, about.dims, number) if inputs is None else _fitting(inputs, specs)
                notes = _notes(problem, is_drawn=inputs is None, is_batched=is_batched)
                try:
                    return _take_over(found, candidate, specs, model, samples, about, notes, is_drawn=inputs is None)
                except _NoBatch as error:
                    problem = problem or error
                    if _MOST_BY_NONSENSE < error.difference < math.inf:
                        break
        assert problem is not None, "the last candidate has no batch to be wrong about"
        raise problem


def _notes(problem: BadArtifact | None, *, is_drawn: bool, is_batched: bool) -> tuple[str, ...]:
    """What to know of an import: that inputs were drawn, and why there is no batch, or hardly one."""
    notes = [
        "example inputs were drawn at random: proofs are of these; give real ones with --inputs FILE.npz"
    ] * is_drawn
    if problem is not None and is_batched:
        notes.append(f"a batch was proved by drawn inputs of another kind than these: {problem.message}")
    elif problem is not None:
        kinds = " (by drawn inputs)" * is_drawn
        notes.append(f"served request by request, without batching: {problem.message}{kinds}")
    elif not is_batched:
        notes.append("served request by request, without batching: its inputs do not all begin with a size that varies")
    return tuple(notes)


class _NoBatch(BadArtifact):
    """The first dimension is not the samples; `difference` of answers alone and together, infinite where unknown."""

    difference = math.inf


class _CannotVary(BadArtifact):
    """A graph without a batch that cannot answer the examples, or not when they are cut shorter."""


Candidate = tuple[OnnxFile, tuple[TensorSpec, ...]]


@contextmanager
def _candidates(found: OnnxFile) -> Iterator[tuple[Candidate, ...]]:
    """The graph with its first dimension as the batch, where that could be; then as it is, without one."""
    inputs = found.inputs
    firsts = {spec.shape[0] if spec.shape else None for spec in inputs}
    alone = tuple(dataclasses.replace(spec, shape=_renamed(spec)) for spec in inputs)
    batched = tuple(dataclasses.replace(spec, shape=(BATCH, *spec.shape[1:])) for spec in inputs)
    if None in firsts:
        yield ((found, alone),)
    elif all(isinstance(first, str) for first in firsts):
        yield ((found, batched), (found, alone))
    elif firsts == {1} and not found.external:
        with TemporaryDirectory(prefix="stoker-import-") as folder:
            changed = OnnxFile(Path(folder) / "model.onnx", named_batch(found.model))
            changed.path.write_bytes(changed.model.SerializeToString())
            yield ((changed, batched), (found, alone))
    else:
        yield ((found, alone),)


def _renamed(spec: TensorSpec) -> tuple[int | str, ...]:
    """A shape in which no dimension is called the batch."""
    return tuple(f"{spec.name}_{at}" if dim == BATCH else dim for at, dim in enumerate(spec.shape))


def _take_over(
    found: OnnxFile,
    file: OnnxFile,
    specs: tuple[TensorSpec, ...],
    model: Path,
    samples: Arrays,
    about: About,
    notes: tuple[str, ...],
    *,
    is_drawn: bool,
) -> Artifact:
    """Write the graph of one candidate, if it holds what its signature says of these samples."""
    dims = ranges([dim for spec in specs for dim in spec.shape if isinstance(dim, str)], about.dims)
    trial = Trial(samples=contiguous(samples), inputs=specs, dims=dims, most_rows=read_settings(model).max_batch_rows)
    if trial.is_batched:
        trial = dataclasses.replace(trial, samples=eight_samples(trial.samples))
        require_varied(trial)
    name, answer = _reference(file, specs)
    _require_batch(name, answer, trial, about.limit)
    try:
        outputs = _outputs(answer, trial)
    except _CannotVary:
        if is_drawn:
            raise
        trial = dataclasses.replace(trial, inputs=_fixed_size_specs(trial), dims=())
        outputs = _outputs(answer, trial)
    # What is proved of the reference here is proved again of each engine, and kept then.
    inputs, _ = padded_specs(name, answer, trial, outputs, about.pad, about.limit)
    exported = Exported(
        name=about.name or model.name,
        graph="model.onnx",
        inputs=inputs,
        outputs=outputs,
        dims=trial.dims,
        oracle=answer,
        oracle_name=name,
        trial=trial.with_inputs(inputs),
        source=ArtifactSource(kind="onnx", name=found.path.name, digest=sha256_file(found.path)),
        precision=_precision(file),
        labels={output: tuple(classes) for output, classes in about.labels.items()},
        metrics=about.metrics,
        limit=about.limit,
        notes=notes,
    )

    def write_files(directory: Path) -> None:
        for place, source in file.files.items():
            (directory / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / place)

    return write_version(model, exported, write_files)


def _drawn(file: OnnxFile, specs: tuple[TensorSpec, ...], dims: Sequence[DynamicDim], number: int) -> Arrays:
    sizes = likely_sizes(specs)
    for dim in dims:
        size = max(sizes.get(dim.name, 0), 2 * dim.low)
        sizes[dim.name] = size if dim.high is None else min(size, dim.high)
    return draw_inputs(file.model, specs, {**sizes, BATCH: NUM_SAMPLES}, number=number)


def _fitting(given: Mapping[str, NDArray[Any]], specs: tuple[TensorSpec, ...]) -> Arrays:
    """The user's examples, held against what the graph takes.

    Raises:
        BadArtifact: a name, a type or a shape does not fit.
    """
    names = {spec.name for spec in specs}
    if set(given) != names:
        raise BadArtifact(
            f"The example inputs are {', '.join(sorted(given))}; the graph takes {', '.join(sorted(names))}",
            remedy="Save them under its names: np.savez('inputs.npz', NAME=array, …).",
        )
    for spec in specs:
        array, wanted = given[spec.name], dtype_of(spec.datatype)
        fits = len(array.shape) == len(spec.shape) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or array.dtype != wanted:
            raise BadArtifact(
                f"The example input {spec.name!r} is {array.dtype} {list(array.shape)}; the graph takes {wanted} "
                f"{list(spec.shape)}"
            )
    return {spec.name: np.asarray(given[spec.name]) for spec in specs}


def _reference(file: OnnxFile, specs: tuple[TensorSpec, ...]) -> tuple[EngineName, Answer]:
    """The engine that says what the graph means.

    Raises:
        BadArtifact: none can load it; with what each says.
    """
    problems: list[str] = []
    for name in (record.name for record in sorted(engine_records(), key=lambda record: record.reference_rank)):
        graph = Graph(
            path=file.path, precision=_precision(file), inputs=specs, outputs=file.outputs, threads=default_threads(1)
        )
        try:
            return name, load_graph(name, graph)[0].run
        except BadArtifact as error:
            problems.append(error.message)
    raise BadArtifact(
        "\n  ".join((f"No engine can load {file.path.name} (opset {file.opset}):", *problems)),
        remedy="Operations that an engine names are missing there: export with others, or with a newer opset.",
    )


def _precision(file: OnnxFile) -> ServingPrecision:
    return "int8" if file.is_quantised else "fp32"


def _require_batch(name: EngineName, answer: Answer, trial: Trial, limit: float) -> None:
    """Hold what must hold of a batch.

    Raises:
        _NoBatch: samples have other answers alone than together, or cannot be asked so.
    """
    if not trial.is_batched:
        return
    proof = prove_alone(name, answer, trial, limit)
    if not is_held(proof):
        problem = _NoBatch(f"{proof.what} differ by {proof.error:.2g}, at most {limit:g} is allowed")
        problem.difference = proof.error
        raise problem


def _fixed_size_specs(trial: Trial) -> tuple[TensorSpec, ...]:
    """Inputs of the examples' sizes alone."""
    return tuple(dataclasses.replace(spec, shape=trial.samples[spec.name].shape) for spec in trial.inputs)


def _outputs(answer: Answer, trial: Trial) -> tuple[TensorSpec, ...]:
    """What the graph gives, as found by asking.

    Raises:
        _NoBatch: not every output begins with the samples, or sizes cannot be varied.
        _CannotVary: the example, or a shorter one, cannot be answered.
    """
    try:
        found = output_specs(answer, trial)
    except ServiceError as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in trial.samples.items())
        kind = _NoBatch if trial.is_batched else _CannotVary
        remedy = "Give real examples: --inputs FILE.npz."
        raise kind(
            f"The graph cannot answer inputs of these shapes ({shapes}): {error.message}", remedy=remedy
        ) from error
    if trial.is_batched and any(spec.shape[:1] != (BATCH,) for spec in found):
        raise _NoBatch("not every output begins with the samples")
    return found
