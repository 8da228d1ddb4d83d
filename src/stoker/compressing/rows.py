"""Rows that a search calibrates, selects and accepts on, and batches of them as a service would make them.

What a model answers for rows, in batches as a service would make them.

Rows out of a file: arrays of an .npz, or columns of a Parquet table.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import dtype_of
from stoker.artifacts.dtypes import Arrays
from stoker.engines import Engine
from stoker.errors import BadJob, first_line
from stoker.loading.order import Indices, KeyedPermutation
from stoker.loading.randomness import RandomStream, key_of
from stoker.records import BATCH, Manifest, TensorSpec


@dataclass(frozen=True)
class EvaluationRows:
    """Samples of one set, stacked: inputs by the manifest's names [N, ...], and targets [N, ...] where there are any.

    Samples of several sizes are filled up with the manifest's `pad`.
    """

    inputs: Arrays
    targets: NDArray[Any] | Arrays | None = None
    """By output where they are another model's answers."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.inputs.values())))

    def first(self, most: int) -> EvaluationRows:
        """The first rows, at most so many."""
        return self if len(self) <= most else self.take(np.arange(most))

    def take(self, indices: Indices) -> EvaluationRows:
        """The rows of these indices [M], in that order."""
        targets = self.targets
        if isinstance(targets, dict):
            targets = {name: array[indices] for name, array in targets.items()}
        elif targets is not None:
            targets = targets[indices]
        return EvaluationRows({name: array[indices] for name, array in self.inputs.items()}, targets)

    def joined(self, other: EvaluationRows) -> EvaluationRows:
        """These rows, and then others of the same inputs and targets."""
        targets = self.targets
        if isinstance(targets, np.ndarray) and isinstance(other.targets, np.ndarray):
            targets = np.concatenate([targets, other.targets])
        return EvaluationRows(
            {name: np.concatenate([array, other.inputs[name]]) for name, array in self.inputs.items()}, targets
        )


@dataclass(frozen=True)
class EvaluationData:
    """All rows of a search: to calibrate on, to choose by, and to accept by; no row has two of these uses.

    `is_held_out` says that the calibration rows, too, are rows that the model was not trained on.
    """

    calibration: EvaluationRows
    selection: EvaluationRows
    acceptance: EvaluationRows
    seed: int
    is_held_out: bool = False

    def limited(self, *, selection: int, acceptance: int, calibration: int) -> EvaluationData:
        """At most so many rows for each use; what is left over of others serves for acceptance if that lacks rows.

        Parts begin with the same rows, as these lie in the order they were dealt in.
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
        """Validation rows of other uses than acceptance."""
        return len(self.selection) + (len(self.calibration) if self.is_held_out else 0)


def split_rows(
    training: EvaluationRows | None, validation: EvaluationRows, *, seed: int, calibration: int, selection: float = 0.3
) -> EvaluationData:
    """Deal rows out by a keyed permutation.

    Args:
        training: what may be calibrated on; None: a quarter of `validation`, at most, is set aside for it.
        validation: rows the model was not trained on.
        seed: of the permutation; equal seeds deal alike.
        calibration: rows to calibrate with, where there are as many.
        selection: the share of the other validation rows that the search may look at; the rest is for acceptance.

    Raises:
        BadJob: too few rows for three parts.
    """
    order = _order(len(validation), seed)
    if training is None:
        aside = min(calibration, len(validation) // 4)
        calibrating, order = validation.take(order[:aside]), order[aside:]
    else:
        calibrating = training.take(_order(len(training), seed)[:calibration])
    at = round(len(order) * selection)
    if min(len(calibrating), at, len(order) - at) < 2:
        raise BadJob(
            f"{len(validation)} rows are too few to choose a candidate by some and accept it by others",
            remedy="Give more validation data: some hundred rows at least.",
        )
    return EvaluationData(
        calibrating, validation.take(order[:at]), validation.take(order[at:]), seed, is_held_out=training is None
    )


def check_fit(rows: EvaluationRows, manifest: Manifest, what: str) -> EvaluationRows:
    """The rows with the manifest's dtypes, if they are what the model takes.

    Raises:
        BadJob: an input is missing, too much, of another shape, or of a type that cannot stand for the model's.
    """
    names = {spec.name for spec in manifest.inputs}
    if names != set(rows.inputs):
        raise BadJob(f"{what}: the model takes {_listed(names)}, the data has {_listed(set(rows.inputs))}")
    targets = () if rows.targets is None else (rows.targets,)
    counts = {len(array) for array in (*rows.inputs.values(), *targets)}
    if len(counts) > 1:
        raise BadJob(f"{what}: inputs and targets have different numbers of rows: {_listed(map(str, counts))}")
    return EvaluationRows(
        {spec.name: _fitted(rows.inputs[spec.name], spec, what) for spec in manifest.inputs}, rows.targets
    )


def batches(rows: EvaluationRows, manifest: Manifest, size: int) -> Iterator[tuple[Indices, Arrays]]:
    """Which rows, and their inputs cut to the longest among them: rows of like length share a batch."""
    lengths = row_lengths(rows, manifest)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(rows), size):
        chosen = order[start : start + size]
        yield chosen, cut_to(rows.take(chosen).inputs, manifest, int(lengths[chosen].max()))


def row_lengths(rows: EvaluationRows, manifest: Manifest) -> Indices:
    """How far each row goes along the named dimension that is filled up [N]; 0 everywhere where none is.

    A place is filled up where every input that has this dimension holds its `pad`.
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
    """Inputs [B, ...] whose filled-up dimensions are `length` long; as they are where the model has none."""
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
    """The inputs with the one named dimension that can be filled up; none where there are several, such as H and W."""
    found: dict[str, list[TensorSpec]] = {}
    for spec in manifest.inputs:
        for dim in spec.shape[1:]:
            if isinstance(dim, str) and dim != BATCH:
                found.setdefault(dim, []).append(spec)
    can_fill = {name: specs for name, specs in found.items() if all(spec.pad is not None for spec in specs)}
    return can_fill if len(can_fill) == 1 else {}


def _fitted(array: NDArray[Any], spec: TensorSpec, what: str) -> NDArray[Any]:
    wanted = dtype_of(spec.datatype)
    fits = array.ndim == len(spec.shape) and all(
        isinstance(dim, str) or dim == size for dim, size in zip(spec.shape[1:], array.shape[1:], strict=True)
    )
    if not fits:
        raise BadJob(f"{what}: {spec.name} has shape {list(array.shape)}, the model takes {list(spec.shape)}")
    if array.dtype != wanted and not np.can_cast(array.dtype, wanted, "same_kind"):
        raise BadJob(f"{what}: {spec.name} is {array.dtype}, the model takes {spec.datatype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadJob(f"{what}: {spec.name} has values that are not finite")
    fitted = np.ascontiguousarray(array.astype(wanted, copy=False))
    if array.dtype.kind in "iu" and not np.array_equal(fitted, array):
        raise BadJob(f"{what}: {spec.name} has numbers that {spec.datatype} cannot hold")
    return fitted


def _order(size: int, seed: int) -> Indices:
    return KeyedPermutation(size, key_of(RandomStream.HOLDOUT, seed, size))(np.arange(size, dtype=np.int64))


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


Array = NDArray[Any]


def answers(engine: Engine, rows: EvaluationRows, manifest: Manifest, *, batch: int = 32) -> Arrays:
    """Every output for all rows [N, ...], in the rows' order.

    Outputs with a dimension that was cut with the inputs are filled up with zeros, so that rows stack.

    Raises:
        ServiceError: the engine could not.
        BadJob: outputs of different batches do not stack.
    """
    found: Arrays = {}
    for chosen, inputs in batches(rows, manifest, batch):
        for name, part in engine.run(inputs).items():
            if part.shape[:1] != (len(chosen),):
                raise BadJob(f"output {name!r} has shape {list(part.shape)} for {len(chosen)} rows")
            found[name] = _placed(found.get(name), part, chosen, len(rows), name)
    return found


def _placed(whole: Array | None, part: Array, chosen: Indices, rows: int, name: str) -> Array:
    """`part` put into the rows `chosen` of `whole`, which grows to hold it."""
    if whole is None:
        whole = np.zeros((rows, *part.shape[1:]), part.dtype)
    if whole.ndim != part.ndim:
        raise BadJob(f"output {name!r} has {part.ndim} dimensions in one batch and {whole.ndim} in another")
    size = tuple(max(a, b) for a, b in zip(whole.shape[1:], part.shape[1:], strict=True))
    if size != whole.shape[1:]:
        whole = np.pad(whole, [(0, 0), *((0, new - old) for new, old in zip(size, whole.shape[1:], strict=True))])
    region: Any = (chosen, *(slice(0, length) for length in part.shape[1:]))
    whole[region] = part
    return whole


TARGETS = ("target", "targets", "label", "labels", "y")


def read_rows(path: Path, manifest: Manifest) -> EvaluationRows:
    """Inputs by the manifest's names, and the target if there is one.

    Raises:
        BadJob: no such file, of another kind, or without an input.
    """
    if not path.is_file():
        raise BadJob(f"there is no {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        elif path.suffix == ".parquet":
            arrays = _columns(path)
        else:
            raise BadJob(f"{path} is neither .npz nor .parquet")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadJob(f"{path} cannot be read: {first_line(error)}") from error
    names = [spec.name for spec in manifest.inputs]
    if missing := [name for name in names if name not in arrays]:
        raise BadJob(f"{path} has no {missing[0]!r}, which the model takes; it has {', '.join(sorted(arrays))}")
    target = next((arrays[name] for name in TARGETS if name in arrays and name not in names), None)
    return EvaluationRows({name: arrays[name] for name in names}, target)


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    try:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise BadJob("pyarrow is not installed", remedy="pip install 'stoker[predict]'") from error
    table = pq.read_table(path)
    return {name: np.asarray(table.column(name).to_pylist()) for name in table.column_names}
