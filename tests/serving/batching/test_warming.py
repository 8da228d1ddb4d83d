"""Measuring before the first request."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadInput
from stoker.records import DynamicDim
from stoker.serving.batching.batcher import resized, warm_up, warm_up_points
from stoker.serving.batching.queue import LatencyTable, Shapes
from stoker.testing.fakes import FakeClock
from tests.serving.batching.models import FIXED, TOKENS, TokenEngine, token_inputs

SHAPES = Shapes(TOKENS)


class Slow(TokenEngine):
    """Takes 1 ms and 0.01 ms a token, on a clock that only it moves; ten times that the first time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def run(self, inputs: Arrays) -> Arrays:
        rows, length = inputs["input_ids"].shape
        is_first = (rows, length) not in self.shapes
        self._clock.advance((10 if is_first else 1) * (1e-3 + rows * length * 1e-5))
        return super().run(inputs)


def test_golden_inputs_are_measured_at_all_rows_and_sizes() -> None:
    """Powers of two up to what a batch may have, and the sizes that the manifest allows."""
    found = set(warm_up_points(TOKENS, SHAPES, token_inputs(2, 10), (1, 2, 4)))
    assert found == {(rows, (size,)) for rows in (1, 2, 4) for size in (8, 16, 32, 64, 128)}
    assert list(warm_up_points(FIXED, Shapes(FIXED), {"x": np.ones((2, 4))}, (1, 2))) == [(1, ()), (2, ())]


def test_short_dimensions_are_measured_as_they_are() -> None:
    """Limits are kept: nothing is asked of a model that it does not take."""
    narrow = dataclasses.replace(TOKENS, dims=(DynamicDim(name="tokens", low=2, high=5),))
    sizes = {size for _, (size,) in warm_up_points(narrow, Shapes(narrow), token_inputs(1, 3), (1,))}
    assert sizes == {2, 4, 5}


def test_golden_values_are_repeated_or_cut_to_size() -> None:
    """Real values, since what is not a token may not be computed at all."""
    batch = resized(token_inputs(2, 3), TOKENS, SHAPES, 3, (5,))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [1, 2, 3, 1, 2]]


def test_the_table_holds_what_batches_take_after_the_first_time() -> None:
    """Engines prepare each shape once; that is not what the next request waits for."""
    clock, table = FakeClock(), LatencyTable(8)
    warm_up(Slow(clock), token_inputs(2, 10), TOKENS, SHAPES, table, clock=clock, budget_s=1e9)
    assert table.seconds(4, 64) == pytest.approx(1e-3 + 256e-5)
    assert table.seconds(8, 128) == pytest.approx(1e-3 + 1024e-5)


class Positions(TokenEngine):
    """Takes as many tokens as it has positions, of which its manifest says nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def run(self, inputs: Arrays) -> Arrays:
        if inputs["input_ids"].shape[1] > self._count:
            raise BadInput("there is no such position")
        return super().run(inputs)


def test_a_limit_that_the_manifest_does_not_know_is_found() -> None:
    """A model of 64 positions is served; what it cannot compute is left to the requests that ask for it."""
    unlimited, table = dataclasses.replace(TOKENS, dims=(DynamicDim(name="tokens"),)), LatencyTable(4)
    engine = Positions(40)
    warm_up(engine, token_inputs(2, 10), unlimited, Shapes(unlimited), table, clock=FakeClock(), budget_s=1e9)
    assert {length for _, length in engine.shapes} == {8, 16, 32}
    with pytest.raises(BadInput):
        warm_up(Positions(7), token_inputs(2, 10), TOKENS, SHAPES, table, clock=FakeClock(), budget_s=1e9)


def test_warming_up_stops_when_its_time_is_over() -> None:
    """Large shapes of slow models are extrapolated from small ones."""
    clock, table = FakeClock(), LatencyTable(8)
    engine = Slow(clock)
    started = clock()
    warm_up(engine, token_inputs(2, 10), TOKENS, SHAPES, table, clock=clock, budget_s=0.05)
    assert clock() - started < 0.1
    assert max(rows * length for rows, length in engine.shapes) < 1024
    assert table.seconds(8, 128) > table.seconds(8, 32)
