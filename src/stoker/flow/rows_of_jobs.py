"""Rows and the metric of the job that a model was trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stoker.artifacts import Artifact, datatype_of, read
from stoker.compressing import Metric, Rows, named
from stoker.compressing.scores import NAMES
from stoker.engines.torch_module import as_array
from stoker.errors import BadArtifact, BadJob
from stoker.exporting import JobInputs, job_inputs
from stoker.flow.runs import load
from stoker.jobs import Job
from stoker.loading import datasets_of
from stoker.loading.keys import Stream, key_of
from stoker.loading.order import KeyedPermutation
from stoker.loading.samples import Samples
from stoker.recipes import resolved
from stoker.records import Manifest
from stoker.stepping import outline

_FETCHED = 1024
"""Samples fetched at once."""


def job_of(artifact: Artifact) -> Job:
    """The job of the run that an artifact came from, by way of other versions of the model if need be.

    Raises:
        BadJob: it came from an ONNX file, or from a version that is gone.
        BadRun: the run is gone.
    """
    source = artifact.manifest.source
    if source.kind == "artifact":
        try:
            return job_of(read(artifact.path.parent / source.name.rpartition("/")[2]))
        except BadArtifact as error:
            raise BadJob(f"the version it was made of is gone: {source.name}", remedy="Give --job FILE.") from error
    if source.kind == "onnx":
        raise BadJob(
            f"{artifact.path} was made elsewhere: its training and validation data are not known",
            remedy="Give rows with --data FILE (.npz or .parquet) and --metric, or the job with --job FILE.",
        )
    return load(source.name).job()


def rows_of_job(job: Job, manifest: Manifest, calibration: int, most: int, seed: int) -> tuple[Rows, Rows]:
    """Some training rows, and validation rows, as the exported model takes them.

    Raises:
        BadJob: the job has neither validation nor test data.
    """
    job = resolved(job)
    data = datasets_of(job)
    validation = data.valid or data.test
    if validation is None:
        raise BadJob(
            "the job has no validation data to choose and accept by", remedy="Give Job(valid=…), or rows with --data."
        )
    taken = stored_as(job_inputs(job, outline(job), validation), manifest)
    return _rows(taken, data.train, calibration, seed), _rows(taken, validation, most, seed)


def metric_of_job(job: Job) -> Metric:
    """The job's first metric, or its loss where that is an error by name.

    Raises:
        BadJob: there is none that can be asked row by row.
    """
    first = next(iter(job.metrics), job.loss)
    if isinstance(first, str) and first in NAMES:
        return named(first)
    if first is None or isinstance(first, str):
        raise BadJob(
            "the job has no metric to keep", remedy=f"Give --metric FILE, or one of {', '.join(NAMES)} with --metric."
        )

    def per_row(outputs: Any, targets: Any) -> Any:
        found = first(torch.from_numpy(outputs), torch.from_numpy(targets))
        return found.detach().numpy() if isinstance(found, torch.Tensor) else found

    return Metric(getattr(first, "__name__", "metric"), per_row, bool(getattr(first, "lower_is_better", False)))


def stored_as(taken: JobInputs, manifest: Manifest) -> JobInputs:
    """The inputs as the exported model takes them: samples as they are stored, or already prepared."""
    stored = taken.arrays([0])
    is_stored = all(
        spec.name in stored and datatype_of(stored[spec.name].dtype) == spec.datatype for spec in manifest.inputs
    )
    return taken if is_stored else taken.prepared()


def _rows(taken: JobInputs, samples: Samples, most: int, seed: int) -> Rows:
    """Samples chosen by a keyed permutation, with their targets."""
    permutation = KeyedPermutation(samples.num_at_hand, key_of(Stream.HOLDOUT, seed, len(samples), 1))
    chosen = np.sort(permutation(np.arange(min(most, samples.num_at_hand), dtype=np.int64)))
    at_once = (
        [chosen] if not samples.is_in_memory else [chosen[i : i + _FETCHED] for i in range(0, len(chosen), _FETCHED)]
    )
    inputs = [taken.arrays(part.tolist(), samples) for part in at_once]
    targets = [_targets(taken, samples, part) for part in at_once]
    whole = None if any(one is None for one in targets) else np.concatenate([one for one in targets if one is not None])
    return Rows({name: np.concatenate([part[name] for part in inputs]) for name in inputs[0]}, whole)


def _targets(taken: JobInputs, samples: Samples, rows: Any) -> Any:
    target = taken.fields.target_of(samples.prepare(samples.fetch(rows, 0)))
    return as_array(target) if isinstance(target, torch.Tensor) else None
