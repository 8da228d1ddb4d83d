"""Answering the rows of a part with one engine: batches, padding, and rows that the engine cannot compute.

Which rows share a batch, and how they are put together and taken apart. A law of the rows alone, never of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.errors import RunFailed, ServiceError, first_line
from stoker.predicting.column_mapping import Input, sample_shape
from stoker.predicting.input_conversion import Filled
from stoker.records import Manifest, TensorSpec

Run = Callable[[Arrays], Arrays]
"""An engine's `run`."""

Values = NDArray[Any] | list[NDArray[Any]]
"""An output of many rows: one array where all have one shape."""


@dataclass
class ComputeCounts:
    """What was computed: batches, rows in them, and elements of the inputs, of which some were padding."""

    num_batches: int = 0
    num_rows: int = 0
    num_elements: int = 0
    num_padding: int = 0


@dataclass
class RowOutputs:
    """Outputs of the rows in `rows` (numbers within the part, rising), and why others have none."""

    rows: list[int]
    outputs: dict[str, Values]
    bad: dict[int, tuple[str, str]]
    work: ComputeCounts = field(default_factory=ComputeCounts)


@dataclass(frozen=True)
class PredictionModel:
    """What has to be known of a model to answer rows."""

    manifest: Manifest
    inputs: tuple[Input, ...]
    batch_rows: int

    @property
    def is_padded(self) -> bool:
        """Whether samples of several sizes may share a batch."""
        return all(one.pad is not None for one in self.inputs if one.count is None)


def answer(
    filled: Filled, num_rows: int, model: PredictionModel, run: Run, after_batch: Callable[[int], None] = lambda _: None
) -> RowOutputs:
    """Answers to all rows that are not bad; a batch the engine fails on is halved until the rows at fault are found.

    `after_batch` is called with the rows of each batch; what it raises ends the work.

    Raises:
        RunFailed: the engine's outputs are not what the manifest says.
    """
    good = [row for row in range(num_rows) if row not in filled.bad]
    varying = any(one.count is None for one in model.inputs)
    sizes = {row: filled.sizes(row, model.inputs) if varying else {} for row in good}
    collecting = _Collecting(model, filled, sizes, run)
    for batch in batches([tuple(sizes[row].values()) for row in good], model.batch_rows, is_padded=model.is_padded):
        collecting.compute([good[index] for index in batch])
        after_batch(len(batch))
    return collecting.answers(good)


def stacked(filled: Filled, rows: Sequence[int], model: PredictionModel) -> Arrays:
    """The inputs of these rows as one batch, padded where they differ in size."""
    batch: Arrays = {}
    for one in model.inputs:
        samples = filled.inputs[one.name]
        if isinstance(samples.values, np.ndarray):
            batch[one.name] = samples.values[list(rows)]
        else:
            batch[one.name] = stack([samples[row] for row in rows], one.pad)
    return batch if model.manifest.is_batched else {name: array[0, ...] for name, array in batch.items()}


class _Collecting:
    def __init__(self, model: PredictionModel, filled: Filled, sizes: Mapping[int, dict[str, int]], run: Run) -> None:
        self._model = model
        self._filled = filled
        self._sizes = sizes
        self._run = run
        self._work = ComputeCounts()
        self._rows: list[int] = []
        self._found: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in model.manifest.outputs}
        self._failed: dict[int, tuple[str, str]] = {}

    def compute(self, rows: Sequence[int]) -> None:
        """Run the rows as one batch; if that fails, each half."""
        inputs = stacked(self._filled, rows, self._model)
        try:
            outputs = self._run(inputs)
        except ServiceError as error:
            if len(rows) == 1:
                self._failed[rows[0]] = ("", f"cannot be computed: {first_line(error)}")
                return
            self.compute(rows[: len(rows) // 2])
            self.compute(rows[len(rows) // 2 :])
            return
        self._count(inputs, rows)
        self._rows += rows
        for spec in self._model.manifest.outputs:
            self._found[spec.name].append(self._checked(spec, outputs, len(rows)))

    def answers(self, good: Sequence[int]) -> RowOutputs:
        """All that was found, in the rows' order."""
        rows = [row for row in good if row not in self._failed]
        outputs = {spec.name: self._in_order(spec) for spec in self._model.manifest.outputs}
        return RowOutputs(rows, outputs, self._filled.bad | self._failed, self._work)

    def _in_order(self, spec: TensorSpec) -> Values:
        """An output of all rows that were computed, in the order of the rows instead of the batches."""
        shape = sample_shape(spec, self._model.manifest)
        found = self._found[spec.name]
        if any(isinstance(size, str) for size in shape):
            answers = (answer for batch in found for answer in batch)
            by_row = {row: cut_back(one, shape, self._sizes[row]) for row, one in zip(self._rows, answers, strict=True)}
            return [by_row[row] for row in sorted(by_row)]
        if not found:
            return np.empty((0, *(int(size) for size in shape)), dtype_of(spec.datatype))
        return np.concatenate(found)[np.argsort(self._rows)]

    def _count(self, inputs: Arrays, rows: Sequence[int]) -> None:
        self._work.num_batches += 1
        self._work.num_rows += len(rows)
        for name, array in inputs.items():
            self._work.num_elements += array.size
            samples = self._filled.inputs[name]
            if isinstance(samples.values, list):
                self._work.num_padding += array.size - sum(samples[row].size for row in rows)

    def _checked(self, spec: TensorSpec, outputs: Arrays, num_rows: int) -> NDArray[Any]:
        """An output of one batch, with the shape that the manifest says.

        Raises:
            RunFailed: it is absent, or has another shape.
        """
        found = outputs.get(spec.name)
        manifest = self._model.manifest
        shape = sample_shape(spec, manifest)
        if found is not None and not manifest.is_batched:
            found = found[None]
        if found is None or found.shape[:1] != (num_rows,) or not _fits(found.shape[1:], shape):
            got = "nothing" if found is None else f"the shape {list(found.shape)}"
            raise RunFailed(
                f"{manifest.name} gave {got} for {num_rows} rows of its output {spec.name} {list(spec.shape)}",
                remedy="The graph is not what its manifest says: export the model again.",
            )
        return found


def _fits(shape: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(size, str) or found == size for found, size in zip(shape, wanted, strict=True)
    )


Sizes = tuple[int, ...]
"""Sizes of the varying dimensions of one row."""


def batches(sizes: Sequence[Sizes], most_rows: int, *, is_padded: bool) -> tuple[tuple[int, ...], ...]:
    """Rows (from 0) in batches of at most `most_rows`, of like sizes together, in order where sizes are equal.

    Where nothing can be padded, all rows of a batch have one size.
    """
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    cut: list[list[int]] = []
    for row in order:
        if not cut or len(cut[-1]) == most_rows or (not is_padded and sizes[cut[-1][0]] != sizes[row]):
            cut.append([])
        cut[-1].append(row)
    return tuple(map(tuple, cut))


def stack(samples: Sequence[NDArray[Any]], pad: float | None) -> NDArray[Any]:
    """Samples in one array, each filled up with `pad` to the largest along every dimension."""
    shape = tuple(max(sizes) for sizes in zip(*(one.shape for one in samples), strict=True))
    if all(one.shape == shape for one in samples):
        return np.stack(samples)
    batch = np.full((len(samples), *shape), 0 if pad is None else pad, samples[0].dtype)
    for row, one in enumerate(samples):
        own: tuple[int | slice, ...] = (row, *map(slice, one.shape))
        batch[own] = one
    return batch


def cut_back(answer: NDArray[Any], shape: Sequence[int | str], sizes: dict[str, int]) -> NDArray[Any]:
    """One row's part of an output, without what belongs to padding: named dimensions have the row's own sizes."""
    own = tuple(slice(sizes.get(size)) if isinstance(size, str) else slice(None) for size in shape)
    part: NDArray[Any] = answer[own]
    return part
