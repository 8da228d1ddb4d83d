"""Import an ONNX graph made elsewhere: TensorFlow, JAX, MXNet, scikit-learn, or an old PyTorch.

The first dimension is the batch if every sample has the same answer alone as in batches, at every served size.
Otherwise the model is served request by request, and the manifest's notes say so. Without example inputs several kinds
are drawn, since meaningless inputs may change answers that real ones leave alone.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
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
from stoker.records import BATCH, ArtifactSource, EngineName, TensorSpec
from stoker.store import sha256_file

_MOST_BY_NONSENSE = 0.05
"""A larger difference between answers alone and in a batch, relative to the largest value, means that samples depend on
one another. A smaller one may be rounding that drawn inputs magnify: another kind is drawn then."""


def import_onnx(
    path: Path, model: Path, *, inputs: Mapping[str, NDArray[Any]] | None = None, about: About | None = None
) -> Artifact:
    """Take over an ONNX file as the next version of a model.

    Args:
        path: the file; its weight files are copied with it.
        model: the model's directory, such as `models/digits`.
        inputs: example inputs, samples first; None: drawn at random.
        about: names, dimensions that vary, labels, and how much answers may differ.

    Raises:
        BadArtifact: it is damaged, no engine can load it or answer the examples, or engines disagree.
    """
    require_place(model)
    about = about or About()
    if about.dynamic:
        raise BadArtifact("What varies in an ONNX file is said by its graph", remedy="Leave --dynamic out.")
    original = read_onnx(path)
    with _candidates(original) as candidates:
        problem: BadArtifact | None = None
        for file, specs in candidates:
            is_batched = all(spec.shape[:1] == (BATCH,) for spec in specs)
            for number in range(DRAWS if inputs is None and is_batched else 1):
                if inputs is None:
                    sizes = {**likely_sizes(specs, about.dims), BATCH: NUM_SAMPLES}
                    samples = draw_inputs(file.model, specs, sizes, number=number)
                else:
                    samples = _fitting(inputs, specs)
                notes = _notes(problem, is_drawn=inputs is None, is_batched=is_batched)
                try:
                    return _write(original, file, specs, model, samples, about, notes, is_drawn=inputs is None)
                except _NoBatch as error:
                    problem = problem or error
                    if _MOST_BY_NONSENSE < error.difference < math.inf:
                        break
        assert problem is not None, "the last candidate has no batch to be wrong about"
        raise problem


def _notes(problem: BadArtifact | None, *, is_drawn: bool, is_batched: bool) -> tuple[str, ...]:
    """Notes for the manifest: that inputs were drawn, and why the model has no batch or barely has one."""
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
    """The first dimension is not the samples; `difference` of answers alone and in a batch is infinite if unknown."""

    difference = math.inf


class _CannotVary(BadArtifact):
    """A graph without a batch that cannot answer the examples, or not when they are cut shorter."""


Candidate = tuple[OnnxFile, tuple[TensorSpec, ...]]


@contextmanager
def _candidates(file: OnnxFile) -> Iterator[tuple[Candidate, ...]]:
    """The graph with its first dimension as the batch, where possible; then as it is, without a batch."""
    inputs = file.inputs
    firsts = {spec.shape[0] if spec.shape else None for spec in inputs}
    unnamed = [
        tuple(f"{spec.name}_{axis}" if dim == BATCH else dim for axis, dim in enumerate(spec.shape)) for spec in inputs
    ]
    alone = tuple(dataclasses.replace(spec, shape=shape) for spec, shape in zip(inputs, unnamed, strict=True))
    batched = tuple(dataclasses.replace(spec, shape=(BATCH, *spec.shape[1:])) for spec in inputs)
    if all(isinstance(first, str) for first in firsts):
        yield ((file, batched), (file, alone))
    elif firsts == {1} and not file.external:
        with TemporaryDirectory(prefix="stoker-import-") as folder:
            changed = OnnxFile(Path(folder) / "model.onnx", named_batch(file.model))
            changed.path.write_bytes(changed.model.SerializeToString())
            yield ((changed, batched), (file, alone))
    else:
        yield ((file, alone),)


def _write(
    original: OnnxFile,
    file: OnnxFile,
    specs: tuple[TensorSpec, ...],
    model: Path,
    samples: Arrays,
    about: About,
    notes: tuple[str, ...],
    *,
    is_drawn: bool,
) -> Artifact:
    """Write the graph of one candidate, if its answers to these samples agree with its signature."""
    dims, most_rows = ranges(specs, about.dims), read_settings(model).max_batch_rows
    trial = Trial(samples=contiguous(samples), inputs=specs, dims=dims, most_rows=most_rows)
    if trial.is_batched:
        trial = dataclasses.replace(trial, samples=eight_samples(trial.samples))
        require_varied(trial)
    name, answer = _reference(file, specs)
    if trial.is_batched and not is_held(proof := prove_alone(name, answer, trial, about.limit)):
        problem = _NoBatch(f"{proof.what} differ by {proof.error:.2g}, at most {about.limit:g} is allowed")
        problem.difference = proof.error
        raise problem
    try:
        outputs = _outputs(answer, trial)
    except _CannotVary:
        if is_drawn:
            raise
        fixed = tuple(dataclasses.replace(spec, shape=trial.samples[spec.name].shape) for spec in trial.inputs)
        trial = dataclasses.replace(trial, inputs=fixed, dims=())
        outputs = _outputs(answer, trial)
    # The reference's proofs are not kept: each engine is proved again below.
    inputs, _ = padded_specs(name, answer, trial, outputs, about.pad, about.limit)
    exported = Exported(
        about=about,
        graph="model.onnx",
        trial=trial.with_inputs(inputs),
        outputs=outputs,
        oracle=answer,
        oracle_name=name,
        source=ArtifactSource(kind="onnx", name=original.path.name, digest=sha256_file(original.path)),
        precision=file.precision,
        notes=notes,
    )

    def write_files(directory: Path) -> None:
        for place, source in file.files.items():
            (directory / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / place)

    return write_version(model, exported, write_files)


def _fitting(given: Mapping[str, NDArray[Any]], specs: tuple[TensorSpec, ...]) -> Arrays:
    """The user's examples, checked against the graph's inputs.

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
        array, dtype = given[spec.name], dtype_of(spec.datatype)
        fits = len(array.shape) == len(spec.shape) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or array.dtype != dtype:
            raise BadArtifact(
                f"The example input {spec.name!r} is {array.dtype} {list(array.shape)}; the graph takes {dtype} "
                f"{list(spec.shape)}"
            )
    return {spec.name: np.asarray(given[spec.name]) for spec in specs}


def _reference(file: OnnxFile, specs: tuple[TensorSpec, ...]) -> tuple[EngineName, Answer]:
    """The reference engine.

    Raises:
        BadArtifact: no engine can load it; with the message of each.
    """
    problems: list[str] = []
    for name in (record.name for record in sorted(engine_records(), key=lambda record: record.reference_rank)):
        graph = Graph(
            path=file.path, precision=file.precision, inputs=specs, outputs=file.outputs, threads=default_threads(1)
        )
        try:
            return name, load_graph(name, graph)[0].run
        except BadArtifact as error:
            problems.append(error.message)
    raise BadArtifact(
        "\n  ".join((f"No engine can load {file.path.name} (opset {file.opset}):", *problems)),
        remedy="Operations that an engine names are missing there: export with others, or with a newer opset.",
    )


def _outputs(answer: Answer, trial: Trial) -> tuple[TensorSpec, ...]:
    """The graph's outputs, found by running it.

    Raises:
        _NoBatch: not every output begins with the samples, or sizes cannot be varied.
        _CannotVary: the example, or a shorter one, cannot be answered.
    """
    try:
        outputs = output_specs(answer, trial)
    except ServiceError as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in trial.samples.items())
        kind = _NoBatch if trial.is_batched else _CannotVary
        remedy = "Give real examples: --inputs FILE.npz."
        raise kind(
            f"The graph cannot answer inputs of these shapes ({shapes}): {error.message}", remedy=remedy
        ) from error
    if trial.is_batched and any(spec.shape[:1] != (BATCH,) for spec in outputs):
        raise _NoBatch("not every output begins with the samples")
    return outputs
