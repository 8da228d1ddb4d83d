"""Export a run, a module or an ONNX file as an artifact that engines can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stoker import exporting
from stoker.artifacts import Artifact
from stoker.artifacts.dtypes import Arrays
from stoker.data.files.source import stated_classes
from stoker.errors import BadArtifact, BadJob
from stoker.exporting import About, Inputs, JobInputs, job_inputs, named_outputs, varying
from stoker.exporting.torch_export import as_tensor
from stoker.exporting.version_writer import NUM_GOLDEN
from stoker.jobs import Job
from stoker.loading.datasets import Datasets, datasets_of, input_columns_of
from stoker.loading.order import generators_kept
from stoker.loading.samples import Samples
from stoker.planning.resolved_job import users_code
from stoker.recipes import resolved
from stoker.records import ArtifactSource, InputColumn
from stoker.records.codec import dumps
from stoker.stepping.foreign_models import merge_adapters
from stoker.store import sha256_file
from stoker.store.run_files import COLUMNS, WEIGHTS
from stoker.training.run_handle import Run, load
from stoker.units import MIB, format_bytes

_NUM_EXAMPLES = 8
_MOST_BYTES_OF_WORDS = 8 * MIB
"""Columns in a manifest as JSON, half of the 16 MiB that it has at most; with more a model takes numbers."""
_MOST_LOOKED_AT, _LOOKED_AT_ONCE = 4096, 64
"""Most samples that are looked through for NaN, and how many of them are copied at once."""

Examples = Inputs | Mapping[str, NDArray[Any]]
"""Example inputs, samples first: tensors by position or by name, or arrays by name."""


def export(
    what: Run | nn.Module | str | Path,
    out: str | Path,
    *,
    inputs: Examples | None = None,
    about: About | None = None,
    job: Job | None = None,
) -> Artifact:
    """Export a model as the next version in its directory; nothing is written unless an engine computes the same.

    Args:
        what: a run, its directory or name; an ONNX file; or a module.
        out: the model's directory, such as `models/digits`.
        inputs: example inputs, first dimension samples; of a run they come from its data.
        about: names, dimensions that vary, labels, and how much answers may differ.
        job: the job of a run that was made in Python.

    Returns:
        The artifact: engine, signature, golden answers, and what was proved of it.

    Raises:
        BadArtifact: it cannot be exported, or no engine computes the same; with the numbers.
        BadRun: there is no such run, or it is not finished.
    """
    out = Path(out)
    if isinstance(what, nn.Module):
        if inputs is None:
            raise BadArtifact("A module is exported with examples of its inputs", remedy="Give inputs=…, two or more.")
        if isinstance(inputs, Mapping):
            inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
        with generators_kept(), users_code("the model", None, error=BadArtifact):
            return exporting.export_module(what, inputs, out, about)
    if not isinstance(what, Run) and Path(what).suffix == ".onnx":
        if inputs is not None and not isinstance(inputs, Mapping):
            raise BadArtifact("Example inputs of an ONNX file go by name", remedy="Give inputs={NAME: array, …}.")
        arrays = None if inputs is None else {name: np.asarray(value) for name, value in inputs.items()}
        return exporting.import_onnx(Path(what), out, inputs=arrays, about=about)
    if not isinstance(what, Run):
        _require_known_kind(Path(what))
    if inputs is not None:
        raise BadArtifact(
            "Example inputs of a run come from its data",
            remedy="Leave them out; inputs are for ONNX files and modules.",
        )
    return export_run(what if isinstance(what, Run) else load(what), out, about or About(), job)


def export_run(run: Run, out: Path, about: About, job: Job | None = None) -> Artifact:
    """Export what a run learned; see `export`."""
    exporting.require_place(out)
    where = run.where_it_started() if job is None else nullcontext()
    job = resolved(job or run.job())
    with generators_kept(), users_code("the model or its data", None, error=BadArtifact), ExitStack() as stack:
        module = merge_adapters(run.model(job))
        source = ArtifactSource(kind="run", name=run.name, digest=sha256_file(run.path / WEIGHTS))
        out = out.absolute()
        stack.enter_context(where)
        data = _data_of(job, run)
        samples = data.valid or data.test or data.train
        inputs = job_inputs(job, module, samples)
        columns, left_out = _columns(job, run, inputs, data)
        about = dataclasses.replace(
            about,
            name=about.name or out.name,
            metrics=about.metrics or run.metrics,
            source=source,
            dynamic=about.dynamic or _varying(inputs),
            labels=about.labels or _labels(job, module, inputs),
            columns=about.columns or columns,
            notes=(*about.notes, *_note_on_changes(data, run), *left_out),
            takes_prepared=False,
        )
        rows = with_missing(inputs, module, example_rows(samples))
        try:
            return exporting.export_call(module, inputs.call, inputs.arrays(rows), out, about)
        except exporting.Untraceable:
            if not inputs.has_preparation:
                raise
            inputs = inputs.prepared()  # its preparation cannot be exported: the model takes prepared samples
            about = dataclasses.replace(about, takes_prepared=True)
            return exporting.export_call(module, inputs.call, inputs.arrays(rows), out, about)


def example_rows(samples: Samples) -> list[int]:
    """Samples from all over the data that are at hand, ascending; of a stream those at its beginning."""
    count = samples.num_at_hand
    return [int(row) for row in np.linspace(0, count - 1, num=min(_NUM_EXAMPLES, count))]


def with_missing(inputs: JobInputs, module: nn.Module, rows: list[int]) -> list[int]:
    """Example rows, the first of them one with NaN if some data in memory have it and the model answers it.

    The first examples become golden inputs, by which a service knows that a model takes NaN; where a hundredth of the
    numbers are missing, evenly spaced examples seldom show it.
    """
    samples = inputs.samples
    if not samples.is_in_memory:
        return rows
    first = inputs.arrays(rows[:NUM_GOLDEN])
    if all(array.dtype.kind != "f" for array in first.values()) or _missing(first).any():
        return rows
    looked_at = np.unique(np.linspace(0, samples.num_at_hand - 1, num=_MOST_LOOKED_AT, dtype=np.int64))
    parts = (looked_at[start : start + _LOOKED_AT_ONCE] for start in range(0, len(looked_at), _LOOKED_AT_ONCE))
    found = next((some for part in parts if len(some := part[_missing(inputs.arrays(part))])), None)
    if found is None:
        return rows
    with torch.no_grad():
        outputs = named_outputs(inputs.call(module, *map(as_tensor, inputs.arrays(found[:1]).values())))
    answers = any(bool(tensor.isnan().any()) for tensor in outputs.values())
    return rows if answers else [int(found[0]), *(row for row in rows if row != found[0])][:_NUM_EXAMPLES]


def _missing(arrays: Arrays) -> NDArray[np.bool_]:
    """Whether a sample has NaN in an input [N]."""
    found = np.zeros(len(next(iter(arrays.values()))), np.bool_)
    for array in arrays.values():
        if array.dtype.kind == "f":
            found |= np.isnan(array).reshape(len(array), -1).any(axis=1)
    return found


def _require_known_kind(path: Path) -> None:
    """Refuse files of models that are neither a run nor ONNX, with the way to export them.

    Raises:
        BadArtifact: it is a SavedModel, a TF Lite file, or weights of PyTorch.
    """
    if path.suffix in {".pt", ".pth", ".pt2", ".ckpt", ".safetensors"}:
        raise BadArtifact(
            f"{path} holds weights or a program of PyTorch: stoker export takes a run, or an ONNX file",
            remedy="Load it in Python and call stoker.export(module, OUT, inputs=…), or convert it to ONNX.",
        )
    keras = "a Keras model"
    kinds = {".tflite": "a TF Lite model", ".pb": "a TensorFlow graph", ".h5": keras, ".keras": keras}
    kind = "a TensorFlow SavedModel" if (path / "saved_model.pb").is_file() else kinds.get(path.suffix)
    if kind is not None:
        raise BadArtifact(
            f"{path} is {kind}: stoker export takes a run, or an ONNX file",
            remedy="Convert it to ONNX first (tf2onnx), then: stoker export model.onnx -o DIR.",
        )


def _data_of(job: Job, run: Run) -> Datasets:
    """The run's data, source of the example inputs.

    Raises:
        BadJob: they cannot be loaded.
    """
    try:
        return datasets_of(job)
    except BadJob as error:
        raise BadJob(
            f"{error.message} (of the data of {run.name}'s job: an export takes examples of its inputs from them)",
            remedy="Put the data back, or give examples yourself: "
            f"stoker.export(stoker.load({run.name!r}).model(), OUT, inputs=…).",
        ) from error


def _note_on_changes(data: Datasets, run: Run) -> tuple[str, ...]:
    """A remark if the data are no longer those of the run."""
    if data.were_of(run.directory.read_spec().data_fingerprint):
        return ()
    return (
        f"the data changed since {run.name} began: preparation and class names are those of the data as they are now",
    )


def _varying(inputs: JobInputs) -> dict[str, dict[int, str]]:
    """Dimensions in which samples of the data, each alone, differ; arrays in memory have one size."""
    if inputs.samples.is_in_memory:
        return {}
    return varying([inputs.arrays([row]) for row in example_rows(inputs.samples)])


def _columns(
    job: Job, run: Run, inputs: JobInputs, data: Datasets
) -> tuple[dict[str, tuple[InputColumn, ...]], tuple[str, ...]]:
    """The columns that each input was read from when the run began, and a remark if a manifest cannot hold them."""
    stored = run.directory.read(COLUMNS)
    if stored is None and not _note_on_changes(data, run):  # of a run that began before Stoker kept them
        stored = input_columns_of(job)
    entries = {} if stored is None else stored.entries
    columns = {
        name: entries[str(key)] for name, key in zip(inputs.names, inputs.keys, strict=True) if str(key) in entries
    }
    size = len(dumps(columns).encode())
    if size <= _MOST_BYTES_OF_WORDS:
        return columns, ()
    note = (
        f"the model takes numbers of categories, and no words: columns and words of training are {format_bytes(size)}, "
        f"and a manifest has at most {format_bytes(_MOST_BYTES_OF_WORDS)} of them"
    )
    return {}, (note,)


def _labels(job: Job, module: nn.Module, inputs: JobInputs) -> dict[str, tuple[str, ...]]:
    """The data's class names, for a single output with one value per class."""
    classes = stated_classes(job.data)
    if not classes:
        return {}
    with torch.no_grad():
        outputs = named_outputs(inputs.call(module, *map(as_tensor, inputs.arrays([0]).values())))
    wide = [name for name, tensor in outputs.items() if tensor.shape == (1, len(classes))]
    return {wide[0]: classes} if len(outputs) == len(wide) == 1 else {}
