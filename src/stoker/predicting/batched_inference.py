"""Inference for the rows of a part with one engine: batches, padding, and rows that the engine cannot compute.

Batches depend only on the rows, never on time.
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
"""An output of many rows: one array if all have one shape."""


@dataclass
class ComputeCounts:
    """Counts of batches, rows, elements of the inputs, and padding among these."""

    num_batches: int = 0
    num_rows: int = 0
    num_elements: int = 0
    num_padding: int = 0


@dataclass
class RowOutputs:
    """Outputs of `rows` (numbers within the part, ascending), and why others have none."""

    rows: list[int]
    outputs: dict[str, Values]
    bad: dict[int, tuple[str, str]]
    work: ComputeCounts = field(default_factory=ComputeCounts)


@dataclass(frozen=True)
class PredictionModel:
    """A model's manifest and inputs, and the batch size [rows]."""

    manifest: Manifest
    inputs: tuple[Input, ...]
    batch_rows: int

    @property
    def is_padded(self) -> bool:
        """True if samples of several sizes may share a batch."""
        return all(spec.pad is not None for spec in self.inputs if spec.count is None)


def answer(
    filled: Filled, num_rows: int, model: PredictionModel, run: Run, after_batch: Callable[[int], None] = lambda _: None
) -> RowOutputs:
    """Outputs of all good rows; a batch that the engine fails on is halved until the bad rows are found.

    `after_batch` is called with the number of rows of each batch; its exceptions end the work.

    Raises:
        RunFailed: the engine's outputs contradict the manifest.
    """
    good = [row for row in range(num_rows) if row not in filled.bad]
    varying = any(spec.count is None for spec in model.inputs)
    sizes = {row: filled.sizes(row, model.inputs) if varying else {} for row in good}
    collecting = _Collecting(model, filled, sizes, run)
    for batch in batches([tuple(sizes[row].values()) for row in good], model.batch_rows, is_padded=model.is_padded):
        collecting.compute([good[index] for index in batch])
        after_batch(len(batch))
    return collecting.answers(good)


def stacked(filled: Filled, rows: Sequence[int], model: PredictionModel) -> Arrays:
    """The inputs of these rows as one batch, padded to one size."""
    batch: Arrays = {}
    for spec in model.inputs:
        samples = filled.inputs[spec.name]
        if isinstance(samples.values, np.ndarray):
            batch[spec.name] = samples.values[list(rows)]
        else:
            batch[spec.name] = stack([samples[row] for row in rows], spec.pad)
    return batch if model.manifest.is_batched else {name: array[0, ...] for name, array in batch.items()}


class _Collecting:
    def __init__(self, model: PredictionModel, filled: Filled, sizes: Mapping[int, dict[str, int]], run: Run) -> None:
        self._model = model
        self._filled = filled
        self._sizes = sizes
        self._run = run
        self._work = ComputeCounts()
        self._rows: list[int] = []
        self._outputs: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in model.manifest.outputs}
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
        self._work.num_batches += 1
        self._work.num_rows += len(rows)
        for name, array in inputs.items():
            self._work.num_elements += array.size
            samples = self._filled.inputs[name]
            if isinstance(samples.values, list):
                self._work.num_padding += array.size - sum(samples[row].size for row in rows)
        self._rows += rows
        for spec in self._model.manifest.outputs:
            self._outputs[spec.name].append(self._checked(spec, outputs, len(rows)))

    def answers(self, good: Sequence[int]) -> RowOutputs:
        """The outputs, in the rows' order."""
        rows = [row for row in good if row not in self._failed]
        outputs = {spec.name: self._in_order(spec) for spec in self._model.manifest.outputs}
        return RowOutputs(rows, outputs, self._filled.bad | self._failed, self._work)

    def _in_order(self, spec: TensorSpec) -> Values:
        """An output of all computed rows, in the order of the rows instead of the batches."""
        shape = sample_shape(spec, self._model.manifest)
        outputs = self._outputs[spec.name]
        if any(isinstance(size, str) for size in shape):
            rows = zip(self._rows, (output for batch in outputs for output in batch), strict=True)
            by_row = {row: cut_back(output, shape, self._sizes[row]) for row, output in rows}
            return [by_row[row] for row in sorted(by_row)]
        if not outputs:
            return np.empty((0, *(int(size) for size in shape)), dtype_of(spec.datatype))
        return np.concatenate(outputs)[np.argsort(self._rows)]

    def _checked(self, spec: TensorSpec, outputs: Arrays, num_rows: int) -> NDArray[Any]:
        """An output of one batch; raises RunFailed if it is missing or has another shape than in the manifest."""
        output = outputs.get(spec.name)
        manifest = self._model.manifest
        if output is not None and not manifest.is_batched:
            output = output[None]
        expected = (num_rows, *sample_shape(spec, manifest))
        if output is None or not _fits(output.shape, expected):
            got = "nothing" if output is None else f"the shape {list(output.shape)}"
            raise RunFailed(
                f"{manifest.name} gave {got} for {num_rows} rows of its output {spec.name} {list(spec.shape)}",
                remedy="The graph is not what its manifest says: export the model again.",
            )
        return output


def _fits(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    """True if the shapes are equal where the expected one has numbers; names stand for any size."""
    return len(shape) == len(expected) and all(
        isinstance(size, str) or actual == size for actual, size in zip(shape, expected, strict=True)
    )


Sizes = tuple[int, ...]
"""Sizes of the varying dimensions of one row."""


def batches(sizes: Sequence[Sizes], most_rows: int, *, is_padded: bool) -> tuple[tuple[int, ...], ...]:
    """Rows (from 0) in batches of at most `most_rows`, sorted by size, then by row.

    Without padding, all rows of a batch have one size.
    """
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    cut: list[list[int]] = []
    for row in order:
        if not cut or len(cut[-1]) == most_rows or (not is_padded and sizes[cut[-1][0]] != sizes[row]):
            cut.append([])
        cut[-1].append(row)
    return tuple(map(tuple, cut))


def stack(samples: Sequence[NDArray[Any]], pad: float | None) -> NDArray[Any]:
    """Samples in one array, each padded with `pad` to the largest size of every dimension."""
    shape = tuple(max(sizes) for sizes in zip(*(sample.shape for sample in samples), strict=True))
    if all(sample.shape == shape for sample in samples):
        return np.stack(samples)
    batch = np.full((len(samples), *shape), 0 if pad is None else pad, samples[0].dtype)
    for row, sample in enumerate(samples):
        own: tuple[int | slice, ...] = (row, *map(slice, sample.shape))
        batch[own] = sample
    return batch


def cut_back(answer: NDArray[Any], shape: Sequence[int | str], sizes: dict[str, int]) -> NDArray[Any]:
    """One row's part of an output without padding: named dimensions have the row's own sizes."""
    own = tuple(slice(sizes.get(size)) if isinstance(size, str) else slice(None) for size in shape)
    part: NDArray[Any] = answer[own]
    return part
