"""Rows that a search calibrates, selects and accepts on: read from a file, split, batched as in a service, answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import dtype_of
from stoker.artifacts.dtypes import Arrays
from stoker.data.reading.array_files import BadArrayFile, npz_arrays
from stoker.engines import Engine
from stoker.errors import BadJob, first_line
from stoker.loading.order import Indices, KeyedPermutation, RandomStream, key_of
from stoker.records import BATCH, Manifest, TensorSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class EvaluationRows:
    """Stacked samples: inputs by the manifest's names [N, ...], padded with its `pad`, and targets [N, ...] if any."""

    inputs: Arrays
    targets: Array | Arrays | None = None
    """A dict by output if they are another model's answers, by name if a job's samples have several targets."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.inputs.values())))

    def first(self, most: int) -> EvaluationRows:
        """The first rows, at most `most`."""
        return self if len(self) <= most else self.take(np.arange(most))

    def take(self, indices: Indices) -> EvaluationRows:
        """Rows by index [M], in that order."""
        targets = self.targets
        if isinstance(targets, dict):
            targets = {name: array[indices] for name, array in targets.items()}
        elif targets is not None:
            targets = targets[indices]
        return EvaluationRows({name: array[indices] for name, array in self.inputs.items()}, targets)

    def joined(self, other: EvaluationRows) -> EvaluationRows:
        """These rows followed by others with the same inputs and targets."""
        targets = self.targets
        if isinstance(targets, np.ndarray) and isinstance(other.targets, np.ndarray):
            targets = np.concatenate([targets, other.targets])
        elif isinstance(targets, dict) and isinstance(other.targets, dict):
            targets = {name: np.concatenate([array, other.targets[name]]) for name, array in targets.items()}
        inputs = {name: np.concatenate([array, other.inputs[name]]) for name, array in self.inputs.items()}
        return EvaluationRows(inputs, targets)


@dataclass(frozen=True)
class EvaluationData:
    """All rows of a search: for calibration, selection and acceptance; no row has two uses.

    `is_held_out`: the calibration rows, too, are rows that the model was not trained on.
    """

    calibration: EvaluationRows
    selection: EvaluationRows
    acceptance: EvaluationRows
    seed: int
    is_held_out: bool = False

    def limited(self, *, selection: int, acceptance: int, calibration: int) -> EvaluationData:
        """At most this many rows for each use; unused rows of other uses serve for acceptance if that lacks rows.

        Parts keep their first rows, which are in the order of the split.
        """
        rows = self.acceptance
        spare = [(self.selection, selection), *([(self.calibration, calibration)] if self.is_held_out else [])]
        for part, used in spare:
            lacking = min(acceptance - len(rows), len(part) - used)
            if lacking > 0:
                rows = rows.joined(part.take(np.arange(used, used + lacking)))
        return dataclasses.replace(
            self,
            calibration=self.calibration.first(calibration),
            selection=self.selection.first(selection),
            acceptance=rows.first(acceptance),
        )

    @property
    def num_others(self) -> int:
        """Number of validation rows for other uses than acceptance [rows]."""
        return len(self.selection) + (len(self.calibration) if self.is_held_out else 0)


SELECTION_SHARE = 0.3
"""Share of validation rows, without those that calibrate, that a search may look at; the rest is for acceptance."""


def split_rows(
    training: EvaluationRows | None, validation: EvaluationRows, *, seed: int, calibration: int
) -> EvaluationData:
    """Split rows by a keyed permutation.

    Args:
        training: rows to calibrate on; None: up to a quarter of `validation` is used instead.
        validation: rows that the model was not trained on.
        seed: of the permutation; equal seeds give equal splits.
        calibration: number of rows to calibrate on, at most.

    Raises:
        BadJob: too few rows for three parts.
    """
    order = _order(len(validation), seed)
    if training is None:
        aside = min(calibration, len(validation) // 4)
        calibrating, order = validation.take(order[:aside]), order[aside:]
    else:
        calibrating = training.take(_order(len(training), seed)[:calibration])
    num_selection = round(len(order) * SELECTION_SHARE)
    if min(len(calibrating), num_selection, len(order) - num_selection) < 2:
        raise BadJob(
            f"{len(validation)} rows are too few to choose a candidate by some and accept it by others",
            remedy="Give more validation data: some hundred rows at least.",
        )
    selecting, accepting = validation.take(order[:num_selection]), validation.take(order[num_selection:])
    return EvaluationData(calibrating, selecting, accepting, seed, is_held_out=training is None)


def _order(size: int, seed: int) -> Indices:
    return KeyedPermutation(size, key_of(RandomStream.HOLDOUT, seed, size))(np.arange(size, dtype=np.int64))


def check_fit(rows: EvaluationRows, manifest: Manifest, what: str, *, allow_nan: bool = False) -> EvaluationRows:
    """The rows in the manifest's dtypes, if the model can take them; with `allow_nan` it takes NaN and infinities.

    Raises:
        BadJob: an input is missing or unknown, or has another shape, or a dtype that cannot be converted.
    """
    names = {spec.name for spec in manifest.inputs}
    if names != set(rows.inputs):
        raise BadJob(f"{what}: the model takes {_listed(names)}, the data has {_listed(set(rows.inputs))}")
    targets = (
        rows.targets.values() if isinstance(rows.targets, dict) else () if rows.targets is None else (rows.targets,)
    )
    counts = {len(array) for array in (*rows.inputs.values(), *targets)}
    if len(counts) > 1:
        raise BadJob(f"{what}: inputs and targets have different numbers of rows: {_listed(map(str, counts))}")
    return EvaluationRows(
        {spec.name: _fitted(rows.inputs[spec.name], spec, what, allow_nan=allow_nan) for spec in manifest.inputs},
        rows.targets,
    )


def batches(rows: EvaluationRows, manifest: Manifest, size: int) -> Iterator[tuple[Indices, Arrays]]:
    """Indices of the rows of each batch, and their inputs cut to the longest: rows of similar length share a batch."""
    lengths = row_lengths(rows, manifest)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(rows), size):
        chosen = order[start : start + size]
        yield chosen, cut_to(rows.take(chosen).inputs, manifest, int(lengths[chosen].max()))


def row_lengths(rows: EvaluationRows, manifest: Manifest) -> Indices:
    """Length of each row without padding, along the padded dimension [N]; 0 if there is no such dimension.

    A position is padding if every input with this dimension holds its `pad` there.
    """
    longest = np.zeros(len(rows), np.int64)
    for name, specs in _padded(manifest).items():
        used = np.zeros((len(rows), 0), bool)
        for spec in specs:
            axis, array = spec.shape.index(name), rows.inputs[spec.name]
            differs = array != np.asarray(spec.pad).astype(array.dtype)
            along = np.moveaxis(differs, axis, 1).reshape(len(rows), array.shape[axis], -1).any(axis=2)
            used = along if used.shape[1] == 0 else used | along
        places = np.arange(1, used.shape[1] + 1)
        longest = np.maximum(longest, np.max(used * places, axis=1, initial=1))
    return longest


def cut_to(inputs: Arrays, manifest: Manifest, length: int) -> Arrays:
    """Inputs [B, ...] with padded dimensions cut to `length`; unchanged if the model has none."""
    out = dict(inputs)
    for name, specs in _padded(manifest).items():
        low = next((dim.low for dim in manifest.dims if dim.name == name), 1)
        for spec in specs:
            axis = spec.shape.index(name)
            keep = [slice(None)] * out[spec.name].ndim
            keep[axis] = slice(0, max(length, low))
            out[spec.name] = np.ascontiguousarray(out[spec.name][tuple(keep)])
    return out


def _padded(manifest: Manifest) -> dict[str, list[TensorSpec]]:
    """The inputs with the one named dimension that can be padded; none if there are several, such as H and W."""
    named: dict[str, list[TensorSpec]] = {}
    for spec in manifest.inputs:
        for dim in spec.shape[1:]:
            if isinstance(dim, str) and dim != BATCH:
                named.setdefault(dim, []).append(spec)
    padded = {name: specs for name, specs in named.items() if all(spec.pad is not None for spec in specs)}
    return padded if len(padded) == 1 else {}


def _fitted(array: Array, spec: TensorSpec, what: str, *, allow_nan: bool) -> Array:
    dtype = dtype_of(spec.datatype)
    fits = array.ndim == len(spec.shape) and all(
        isinstance(dim, str) or dim == size for dim, size in zip(spec.shape[1:], array.shape[1:], strict=True)
    )
    if not fits:
        raise BadJob(f"{what}: {spec.name} has shape {list(array.shape)}, the model takes {list(spec.shape)}")
    are_whole = array.dtype.kind in "iu" and dtype.kind in "iu"  # as int64 from a table: their values decide, below
    if not (are_whole or np.can_cast(array.dtype, dtype, "same_kind")):
        raise BadJob(f"{what}: {spec.name} is {array.dtype}, the model takes {spec.datatype}")
    if array.dtype.kind == "f" and not allow_nan and not np.isfinite(array).all():
        raise BadJob(
            f"{what}: {spec.name} has values that are not finite",
            remedy='If the model takes them, say so in its service.json: {"allow_nan": true}.',
        )
    fitted = np.ascontiguousarray(array.astype(dtype, copy=False))
    if array.dtype.kind in "iu" and not np.array_equal(fitted, array):
        raise BadJob(f"{what}: {spec.name} has numbers that {spec.datatype} cannot hold")
    return fitted


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


def answers(engine: Engine, rows: EvaluationRows, manifest: Manifest, *, batch: int = 32) -> Arrays:
    """Every output for all rows [N, ...], in the rows' order, in batches as in a service.

    Outputs with a dimension that was cut with the inputs are padded with zeros, so that rows stack.

    Raises:
        ServiceError: the engine could not answer.
        BadJob: outputs of different batches do not stack.
    """
    outputs: Arrays = {}
    for chosen, inputs in batches(rows, manifest, batch):
        for name, part in engine.run(inputs).items():
            if part.shape[:1] != (len(chosen),):
                raise BadJob(f"output {name!r} has shape {list(part.shape)} for {len(chosen)} rows")
            whole = outputs.get(name)
            if whole is None:
                whole = np.zeros((len(rows), *part.shape[1:]), part.dtype)
            if whole.ndim != part.ndim:
                raise BadJob(f"output {name!r} has {part.ndim} dimensions in one batch and {whole.ndim} in another")
            missing = [max(0, new - old) for new, old in zip(part.shape[1:], whole.shape[1:], strict=True)]
            if any(missing):
                whole = np.pad(whole, [(0, 0), *((0, count) for count in missing)])
            region: Any = (chosen, *(slice(0, length) for length in part.shape[1:]))
            whole[region] = part
            outputs[name] = whole
    return outputs


TARGETS = ("target", "targets", "label", "labels", "y")


def read_rows(path: Path, manifest: Manifest) -> EvaluationRows:
    """Inputs by the manifest's names, and the target if there is one, from an .npz or a Parquet table.

    Raises:
        BadJob: no such file, another kind of file, or an input is missing.
    """
    if not path.is_file():
        raise BadJob(f"there is no {path}")
    try:
        if path.suffix == ".npz":
            arrays = npz_arrays(path)
        elif path.suffix == ".parquet":
            try:
                import pyarrow.parquet as pq  # noqa: PLC0415 - an extra, which is loaded where it is used
            except ImportError as error:
                raise BadJob("pyarrow is not installed", remedy="pip install 'stoker[predict]'") from error
            table = pq.read_table(path)
            arrays = {name: np.asarray(table.column(name).to_pylist()) for name in table.column_names}
        else:
            raise BadJob(f"{path} is neither .npz nor .parquet")
    except BadArrayFile as error:
        raise BadJob(f"{path} {error}") from error
    except (OSError, ValueError) as error:
        raise BadJob(f"{path} cannot be read: {first_line(error)}") from error
    names = [spec.name for spec in manifest.inputs]
    if missing := [name for name in names if name not in arrays]:
        raise BadJob(f"{path} has no {missing[0]!r}, which the model takes; it has {', '.join(sorted(arrays))}")
    target = next((arrays[name] for name in TARGETS if name in arrays and name not in names), None)
    return EvaluationRows({name: arrays[name] for name in names}, target)
