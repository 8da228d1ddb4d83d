"""The table of measured seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.serving.batching.queue import LatencyTable

POSITIVE = st.floats(1e-6, 10.0)


def _filled(max_rows: int = 16) -> LatencyTable:
    """A table of 1 ms, and 0.1 ms a position, measured at 8 and 16 positions."""
    table = LatencyTable(max_rows)
    for elements in (8, 16):
        for rows in table.grid:
            table.learn(rows, elements, 1e-3 + rows * elements * 1e-4, 0.0)
    return table


def test_an_empty_table_predicts_nothing() -> None:
    """What was not measured is 0, which callers take for unknown."""
    table = LatencyTable(8)
    assert table.is_empty
    assert table.seconds(4, 8) == table.seconds_a_row(8) == table.seconds_for(100, 8) == 0.0


def test_what_was_measured_is_predicted_and_what_lies_between_is_interpolated() -> None:
    """On and between the points of the grid, in rows and in positions."""
    table = _filled()
    assert table.seconds(4, 8) == pytest.approx(1e-3 + 32e-4)
    assert table.seconds(6, 8) == pytest.approx(1e-3 + 48e-4)
    assert table.seconds(6, 12) == pytest.approx(1e-3 + 72e-4)


def test_sizes_that_were_not_measured_are_in_proportion_to_the_nearest() -> None:
    """Twice the positions, twice the seconds."""
    table = _filled()
    assert table.seconds(4, 64) == pytest.approx(4 * table.seconds(4, 16))


def test_rows_beyond_a_batch_take_several_of_the_fastest() -> None:
    """A thousand rows are as many batches."""
    table = _filled()
    assert table.seconds_for(1600, 8) == pytest.approx(1600 * table.seconds_a_row(8))
    assert table.seconds_a_row(8) == pytest.approx((1e-3 + 16 * 8e-4) / 16)


def test_the_first_measurement_is_taken_as_it_is_and_suggests_that_batching_helps() -> None:
    """Before more is known, larger batches must look better, or they would never be tried."""
    table = LatencyTable(16)
    table.learn(1, 1, 2e-3, 0.0)
    assert table.seconds(1, 1) == pytest.approx(2e-3)
    assert table.seconds(16, 1) < 16 * table.seconds(1, 1)


def test_a_machine_that_slows_down_is_slower_everywhere() -> None:
    """What one cell shows again and again is expected of the others, before they are visited."""
    table = _filled()
    before = table.seconds(16, 16)
    for _ in range(50):
        table.learn(1, 8, 2 * (1e-3 + 8e-4), 1.0)
    assert table.seconds(1, 8) == pytest.approx(2 * (1e-3 + 8e-4), rel=0.01)
    assert table.seconds(16, 16) > 1.2 * before


def test_one_stall_hardly_changes_a_prediction() -> None:
    """A batch that took a hundred times as long, once, is an accident."""
    table = _filled()
    for _ in range(30):
        table.learn(4, 8, 1e-3 + 32e-4, 1.0)
    before = table.seconds(4, 8)
    table.learn(4, 8, 100 * before, 2.0)
    assert table.seconds(4, 8) < 1.5 * before


def test_age_is_that_of_the_latest_measurement_near_a_size() -> None:
    """Refusals rest on measurements, which grow old."""
    table = _filled()
    table.learn(2, 12, 3e-3, 5.0)
    assert table.age(12, 7.0) == pytest.approx(2.0)
    assert table.age(4000, 7.0) == float("inf")


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 512), POSITIVE), min_size=1, max_size=60))
def test_predictions_stay_positive_and_finite(measured: list[tuple[int, int, float]]) -> None:
    """Whatever is measured, in whatever order, no prediction becomes zero, negative or infinite."""
    table = LatencyTable(24)
    for rows, elements, seconds in measured:
        table.learn(rows, elements, seconds, 0.0)
    for rows in (1, 3, 24, 50):
        for elements in (1, 7, 512, 5000):
            assert 0.0 < table.seconds(rows, elements) < float("inf")
            assert 0.0 < table.seconds_for(rows, elements) < float("inf")


@given(st.integers(1, 24), st.integers(1, 300), st.floats(1e-4, 1.0))
def test_a_point_that_is_measured_often_is_predicted_exactly(rows: int, elements: int, seconds: float) -> None:
    """Between the points of the grid too, corrections meet what was measured."""
    table = LatencyTable(24)
    for _ in range(200):
        table.learn(rows, elements, seconds, 0.0)
    assert table.seconds(rows, elements) == pytest.approx(seconds, rel=0.02)
