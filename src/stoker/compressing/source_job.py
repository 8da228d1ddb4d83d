"""The job behind an exported model: its rows and metric, and all that pruning needs of its run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stoker import exporting
from stoker.artifacts import Artifact, datatype_of, read
from stoker.artifacts.dtypes import Arrays
from stoker.compressing.channel_cuts import prunable
from stoker.compressing.channel_importance import scores_of
from stoker.compressing.contender import Examination
from stoker.compressing.distillation import require_output
from stoker.compressing.rows import EvaluationRows
from stoker.compressing.scores import NAMES, Metric, PerRow, named
from stoker.errors import BadArtifact, BadJob
from stoker.exporting import About, JobInputs, job_inputs, named_outputs
from stoker.exporting.torch_export import as_array, as_tensor
from stoker.jobs import Job, Loss
from stoker.jobs.metrics import Named, is_stateful, metric_name, says_lower_is_better
from stoker.loading.datasets import datasets_of
from stoker.loading.fields import cut
from stoker.loading.lengths import IGNORED_TARGET, ignored_target
from stoker.loading.order import KeyedPermutation, RandomStream, generators_kept, key_of
from stoker.loading.samples import Samples
from stoker.planning.resolved_job import ResolvedJob, resolve_job, users_code
from stoker.recipes import resolved
from stoker.records import BATCH, EngineName, Manifest, ServingPrecision
from stoker.records.compression import Importance
from stoker.stepping.foreign_models import shifts_labels
from stoker.stepping.losses import TrainingObjective, takes_model
from stoker.stepping.model import meta_model
from stoker.training.run_handle import Run, load

_SAME = 1e-3
"""Relative difference of a value of all rows and the mean of theirs that is rounding."""
_FETCHED = 1024
"""Samples fetched at once, where they are in memory, and prepared at once."""
_PLACE = re.compile(r"output_(\d+)")
_BATCHES, _ROWS = 16, 64
"""Number of training batches for gradients, and samples in each."""


def run_of(artifact: Artifact) -> Run:
    """The run that an artifact was exported from, directly or through other versions of the model.

    Raises:
        BadJob: it was imported from an ONNX file, or its source version is gone.
        BadRun: the run is gone.
    """
    source = artifact.manifest.source
    if source.kind == "artifact":
        try:
            return run_of(read(artifact.path.parent / source.name.rpartition("/")[2]))
        except BadArtifact as error:
            raise BadJob(f"the version it was made of is gone: {source.name}", remedy="Give --job FILE.") from error
    if source.kind == "onnx":
        raise BadJob(
            f"{artifact.path} was made elsewhere: its training and validation data are not known",
            remedy="Give rows with --data FILE (.npz or .parquet) and --metric, or the job with --job FILE.",
        )
    return load(source.name)


def rows_of_job(
    job: Job,
    manifest: Manifest,
    calibration: int,
    most: int,
    seed: int,
    run: Run | None = None,
    *,
    with_targets: bool = True,
) -> tuple[EvaluationRows, EvaluationRows]:
    """Training rows, at most `calibration`, and validation rows, at most `most`, as the exported model takes them.

    With `run`, the data have to be those it was trained on. Training rows have no targets.

    Raises:
        BadJob: the job has neither validation nor test data, the data changed since the run began, or targets are of a
            form that cannot be scored.
    """
    job = resolved(job)
    data = datasets_of(job)
    if run is not None and not data.were_of(run.directory.read_spec().data_fingerprint):
        raise BadJob(
            f"the data changed since {run.name} began: rows that are held out now may be rows it was trained on",
            remedy="Put them back; or give rows that it was not trained on with --data FILE, or, if the held-out rows "
            "are the same, the job with --job FILE.",
        )
    validation = data.valid or data.test
    if validation is None:
        raise BadJob(
            "the job has no validation data to choose and accept by", remedy="Give Job(valid=…), or rows with --data."
        )
    taken = stored_as(job_inputs(job, meta_model(job), validation), manifest)
    calibrating = _rows(taken, data.train, calibration, seed, with_targets=False)
    return calibrating, _rows(taken, validation, most, seed, with_targets=with_targets)


def metric_of_job(job: Job) -> Metric:
    """The job's first metric, or without metrics its loss, which is an error.

    Raises:
        BadJob: it has neither as a function or a name of Stoker's, or does not say whether lower values are better.
    """
    first = next(iter(job.metrics), job.objective.loss)
    if isinstance(first, str) and first in NAMES:
        known = named(first)
        is_shifted = job.objective.loss == "own" and shifts_labels(meta_model(resolved(job)))
        return dataclasses.replace(known, per_row=_of_scores(known.per_row, is_shifted=is_shifted), takes_names=True)
    if first is None or isinstance(first, str):
        raise BadJob(
            "the job has no metric to keep", remedy=f"Give --metric FILE, or one of {', '.join(NAMES)} with --metric."
        )

    name = metric_name(first)
    is_lower_better = says_lower_is_better(first) if job.metrics else True
    if is_lower_better is None:
        raise BadJob(
            f"the job's metric {name} does not say whether it is a score or an error",
            remedy="Give --metric; or --job with a metric that has an attribute lower_is_better, False or True.",
        )

    function = first.metric if isinstance(first, Named) else first
    if takes_model(function.forward if isinstance(function, nn.Module) else function):
        raise BadJob(
            f"the job's {'metric' if job.metrics else 'loss'} {name} takes the model itself, and an exported one is no "
            "module",
            remedy="Give --metric FILE with metric(outputs, targets), or a name with --metric.",
        )
    return Metric(name, _by_row(function), is_lower_better, takes_names=True)


def _by_row(function: Callable[..., Any]) -> PerRow:
    """A function of the job's as one value a row: a scalar, or a sum and a count, of each row alone.

    Raises:
        ValueError: when called, if that is another measure, as of a mean by class weights.
    """

    def values_of(outputs: Arrays, targets: Any) -> Any:
        return function(_as_returned(outputs), _tensors(targets))

    def per_row(outputs: Arrays, targets: Any) -> Any:
        values, rows = values_of(outputs, targets), len(next(iter(outputs.values())))
        is_whole = isinstance(values, Loss) or (isinstance(values, torch.Tensor) and not values.dim())
        if is_whole and not is_stateful(function):  # what has a state sees a whole set
            parts = [slice(row, row + 1) for row in range(rows)]
            each = [values_of({key: item[row] for key, item in outputs.items()}, _taken(targets, row)) for row in parts]
            whole, *alone = [float(v.sum / v.count if isinstance(v, Loss) else v) for v in (values, *each)]
            if not math.isclose(whole, mean := float(np.mean(alone)), rel_tol=_SAME):
                raise ValueError(
                    f"of all rows it is {whole:.4g}, and of each alone {mean:.4g} on average: no mean of rows"
                )
            return alone
        if isinstance(values, torch.Tensor):
            return (values.flatten(1).double().mean(1) if values.dim() > 1 else values).detach().numpy()
        return values

    return per_row


def label_left_out(job: Job) -> int:
    """The label that the job's loss leaves out, and accuracies with it."""
    ignored = ignored_target(job.objective.loss)
    return ignored if isinstance(ignored, int) else IGNORED_TARGET


def _of_scores(per_row: PerRow, *, is_shifted: bool) -> PerRow:
    """A metric of Stoker's, of the output that training computes it from: the logits where there are several.

    `is_shifted`: the model compares each token's logits with the next label.
    """

    def of_scores(outputs: Arrays, targets: Any) -> Any:
        scores = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
        if len(outputs) > 1 and "logits" not in outputs:
            raise ValueError(f"it takes one output or one called logits, the model has {', '.join(outputs)}")
        if is_shifted and scores.ndim == 3:
            return per_row(scores[:, :-1], targets[:, 1:])
        return per_row(scores, targets)

    return of_scores


class _ByName(dict[str, torch.Tensor]):
    """Outputs by name, also as attributes, as models of Hugging Face return them."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the exported model has no output {name!r}, it has {', '.join(self)}") from None


def _as_returned(outputs: Arrays) -> Any:
    """Outputs in the form in which the module returned them, by the names that an export gives."""
    tensors = {name: torch.from_numpy(array) for name, array in outputs.items()}
    if list(tensors) == ["output"]:
        return tensors["output"]
    places = {int(match[1]): tensors[match[0]] for match in map(_PLACE.fullmatch, tensors) if match}
    if len(places) == len(tensors):
        return tuple(places.get(place) for place in range(max(places) + 1))
    return _ByName(tensors)


def _taken(targets: Any, rows: slice) -> Any:
    """Some rows of targets."""
    return {name: array[rows] for name, array in targets.items()} if isinstance(targets, Mapping) else targets[rows]


def _tensors(targets: Any) -> Any:
    """Targets as tensors."""
    if isinstance(targets, Mapping):
        return {name: torch.from_numpy(array) for name, array in targets.items()}
    return torch.from_numpy(targets)


def stored_as(inputs: JobInputs, manifest: Manifest) -> JobInputs:
    """The inputs as the exported model takes them: samples as they are stored, or already prepared."""
    takes_prepared = manifest.takes_prepared
    if takes_prepared is None:  # not written down: by names and types
        stored = inputs.arrays([0])
        takes_prepared = not all(
            spec.name in stored and datatype_of(stored[spec.name].dtype) == spec.datatype for spec in manifest.inputs
        )
    return inputs.prepared() if takes_prepared else inputs


def _rows(inputs: JobInputs, samples: Samples, most: int, seed: int, *, with_targets: bool = True) -> EvaluationRows:
    """Samples chosen by a keyed permutation, with their targets.

    Raises:
        BadJob: targets are neither tensors nor dicts of tensors.
    """
    permutation = KeyedPermutation(samples.num_at_hand, key_of(RandomStream.HOLDOUT, seed, len(samples), 1))
    chosen = np.sort(permutation(np.arange(min(most, samples.num_at_hand), dtype=np.int64)))
    step = _FETCHED if samples.is_in_memory else max(1, len(chosen))
    arrays: list[dict[str, NDArray[Any]]] = []
    targets: list[Any] = []
    for start in range(0, len(chosen), step):
        part = chosen[start : start + step]
        content = samples.fetch(part, 0)  # items of any length in one piece, padded to the longest
        for first in range(0, len(part), _FETCHED):  # prepared images are four times as large
            rows = cut(content, first, first + _FETCHED, len(part))
            arrays.append(inputs.of_content(rows, samples))
            target = inputs.fields.target_of(samples.prepare(rows)) if with_targets else None
            if target is not None:
                targets.append(_target_arrays(target))
    whole: Any = None
    if targets and isinstance(targets[0], dict):
        whole = {name: np.concatenate([part[name] for part in targets]) for name in targets[0]}
    elif targets:
        whole = np.concatenate(targets)
    return EvaluationRows({name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}, whole)


def _target_arrays(target: Any) -> Any:
    """The targets of some samples as an array, or as arrays by name.

    Raises:
        BadJob: they are of another form.
    """
    if isinstance(target, torch.Tensor):
        return as_array(target)
    if isinstance(target, Mapping) and all(isinstance(part, torch.Tensor) for part in target.values()):
        return {str(name): as_array(part) for name, part in target.items()}
    raise BadJob(
        f"the job's target is a {type(target).__name__}; compress scores targets that are a tensor, or tensors by name",
        remedy="Give --metric agreement, or rows with --data FILE and --metric FILE.",
    )


@dataclass(frozen=True)
class Pruner:
    """All that pruning needs: the run, its resolved job, the model with its exported inputs, and the examination."""

    run: Run
    prepared: ResolvedJob
    teacher: nn.Module
    taken: JobInputs
    course: Examination
    runs_in: tuple[EngineName, ServingPrecision]
    proved_on: str
    tell: Callable[[str], None]

    def ask(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """Outputs of a network like the teacher for the first training rows."""
        rows = self.taken.arrays(range(4), self.prepared.data.train)
        return tuple(named_outputs(self.taken.call(module, *map(as_tensor, rows.values()))).values())

    def export(self, module: nn.Module, out: Path) -> Artifact:
        """Export a network like the teacher, with the signature of the original.

        Raises:
            BadArtifact: it cannot be exported.
        """
        manifest = self.course.source.manifest
        named = {
            spec.name: {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str) and dim != BATCH}
            for spec in manifest.inputs
        }
        about = About(
            name=manifest.name,
            dynamic={name: dims for name, dims in named.items() if dims},
            dims=manifest.dims,
            labels=manifest.labels,
            columns={spec.name: spec.columns for spec in manifest.inputs if spec.columns},
            takes_prepared=manifest.takes_prepared,
        )
        rows = self.taken.arrays(np.linspace(0, self.taken.samples.num_at_hand - 1, num=8).astype(np.int64))
        return exporting.export_call(module.eval(), self.taken.call, rows, out, about)


def pruner_of(
    source: Artifact,
    job: Job | None,
    course: Examination,
    *,
    fast_dtypes: Sequence[str],
    proved_on: str,
    tell: Callable[[str], None],
) -> Pruner:
    """The pruner of a version that was exported from a run.

    Raises:
        BadJob: it was not exported from a run, or the job's loss or step does not go with a teacher.
        BadRun: its run is gone.
    """
    origin = source.manifest.source
    if origin.kind != "run":
        raise BadJob(
            f"{source.path} was not exported from a run (it came from {origin.kind} {origin.name}): what is left after "
            "pruning has to be trained on, and there is no job to train it by",
            remedy="Prune the version that `stoker export RUN` wrote, or leave --prune out.",
        )
    run = load(origin.name)
    with users_code("the job's data", None), generators_kept():
        prepared = resolve_job(job or run.job())
        require_output(prepared.job)
        teacher = run.model(prepared.job)
        samples = prepared.data.valid or prepared.data.test or prepared.data.train
        taken = stored_as(job_inputs(prepared.job, teacher, samples), source.manifest)
    engine: tuple[EngineName, ServingPrecision] = (source.manifest.engine, source.manifest.precision)
    if "bf16" in fast_dtypes and engine[0] == "openvino":
        engine = ("openvino", "bf16")
    return Pruner(run, prepared, teacher, taken, course, engine, proved_on, tell)


def channel_scores(pruner: Pruner, importance: Importance) -> dict[str, NDArray[np.float64]]:
    """Importance per cost of each channel that can go; see `scores_of`.

    Raises:
        CannotPrune: none can go.
    """

    def gradients(module: nn.Module) -> Iterator[None]:
        """Leave the gradient of the job's loss on one training batch after another in `module`'s parameters."""
        job, samples = pruner.prepared.job, pruner.prepared.data.train
        objective, count = TrainingObjective(job), samples.num_at_hand
        order = KeyedPermutation(count, key_of(RandomStream.HOLDOUT, job.seed, len(samples), 2))
        for start in range(0, min(count, _BATCHES * _ROWS), _ROWS):
            rows = order(np.arange(start, min(start + _ROWS, count), dtype=np.int64))
            module.zero_grad(set_to_none=True)
            loss = objective.loss(module, pruner.taken.for_model(samples.fetch(rows, 0), samples), len(rows))
            (loss.sum / loss.count).backward()
            yield

    groups = prunable(pruner.teacher, pruner.ask)
    return scores_of(pruner.teacher, pruner.ask, groups, importance=importance, gradients=gradients)
