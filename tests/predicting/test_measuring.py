from __future__ import annotations

import dataclasses
from typing import Any

from stoker.artifacts.dtypes import Arrays
from stoker.errors import ServiceError
from stoker.predicting.batch_size import BatchAndPartSize, choose_sizes
from stoker.predicting.input_conversion import Filled, numbers
from stoker.records import BATCH, DynamicDim
from tests.predicting.builders import ASKED, summing, sums


class _Ticking:
    """A clock that an engine of a fixed cost a call and a row moves on; it takes `most` rows at once."""

    def __init__(self, call_s: float, row_s: float, most: int = 1000) -> None:
        self.now = 0.0
        self.sizes: list[tuple[int, ...]] = []
        self._cost = lambda rows: call_s + row_s * rows
        self._most = most

    def __call__(self) -> float:
        return self.now

    def run(self, inputs: Arrays) -> Arrays:
        rows = len(inputs["ids"])
        if rows > self._most:
            raise ServiceError("out of memory")
        self.sizes.append(inputs["ids"].shape)
        self.now += self._cost(rows)
        return sums(inputs)

    def close(self) -> None:
        """Nothing to give back."""


def _cut(ticking: _Ticking, rows: Any, most_rows: int | None = None, **asked: Any) -> BatchAndPartSize:
    model = summing()
    if most_rows is not None:
        dims = (*model.manifest.dims, DynamicDim(name=BATCH, high=most_rows))
        model = dataclasses.replace(model, manifest=dataclasses.replace(model.manifest, dims=dims))
    filled = Filled({"ids": numbers(rows, model.inputs[0], allow_nan=False)}, {0: ("", "bad")} if rows == [[1]] else {})
    wanted = dataclasses.replace(ASKED, **asked)
    return choose_sizes(filled, len(rows), model, ticking, ticking, wanted, total_rows=1e6, instances=2)


def test_the_batch_is_measured_on_a_row_of_middle_size() -> None:
    """Neither the shortest nor the longest row decides; the basis has what was tried."""
    ticking = _Ticking(0.010, 0.001)
    found = _cut(ticking, [[1] * 9, [1], [1] * 3])
    assert found.batch_rows == 256
    assert {size[1] for size in ticking.sizes} == {3}
    assert found.part_rows % 256 == 0
    assert "256: 962" in found.basis


def test_what_was_asked_for_is_not_measured() -> None:
    """With --batch and --part-rows nothing is computed before the job begins."""
    ticking = _Ticking(0.010, 0.001)
    assert _cut(ticking, [[1]] * 2, batch_rows=3, part_rows=5) == BatchAndPartSize(3, 5, "as asked")
    assert ticking.sizes == []
    assert _cut(ticking, [[1]] * 2, batch_rows=3).batch_rows == 3


def test_a_batch_that_does_not_fit_is_not_chosen() -> None:
    """Where the engine fails for memory, smaller batches are the choice."""
    assert _cut(_Ticking(0.010, 0.001, most=8), [[1]] * 2).batch_rows == 8


def test_without_a_good_row_nothing_is_measured() -> None:
    """A beginning of bad rows does not stop a job whose rest may be good."""
    found = _cut(_Ticking(1, 1), [[1]], most_rows=16)
    assert (found.batch_rows, found.part_rows) == (16, 1024)
    assert found.basis.startswith("not measured")
