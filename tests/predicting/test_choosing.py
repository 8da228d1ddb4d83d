from __future__ import annotations

import pytest

from stoker.predicting.batch_size import BatchSizeChoice, choose_batch, rows_of_a_part
from stoker.units import MIB


def test_the_smallest_of_equally_fast_batches_is_taken() -> None:
    """A batch that is not faster only needs more memory."""
    found = choose_batch(lambda rows: 0.010 + 0.001 * rows if rows <= 64 else 0.0012 * rows, None)
    assert found.batch_rows == 64
    assert choose_batch(lambda rows: 0.001 * rows, None).batch_rows == 1


def test_trying_ends_where_it_gets_slower() -> None:
    """Two sizes in a row that are clearly slower end it; a single one may be noise."""
    tried = []

    def seconds_of(rows: int) -> float:
        tried.append(rows)
        return {1: 1.0, 2: 9.9, 4: 2.0}.get(rows, 5.0 * rows) / 10

    assert choose_batch(seconds_of, None).batch_rows == 4
    assert tried == [1, 2, 4, 8]
    assert list(choose_batch(lambda rows: 0.01 * rows if rows < 4 else 0.1 * rows, None).tried) == [1, 2, 4, 8]


def test_batches_that_take_seconds_are_not_made_larger() -> None:
    """A model of a second a row is not tried with 256 rows."""
    assert max(choose_batch(lambda rows: 1.0 * rows, None).tried) == 4


def test_the_models_limit_is_kept() -> None:
    """A model that takes four rows is never asked for eight."""
    assert max(choose_batch(lambda rows: 1 + 1e-9 * rows, 4).tried) == 4


@pytest.mark.parametrize(
    ("batch_rows", "rows_per_s", "row_bytes", "num_rows", "rows"),
    [
        (32, 100, 1e3, 1e6, 512),
        (32, 1, 1e3, 1e6, 32),
        (256, 1e9, 1, 1e9, 65_536),
        (8, 1e6, MIB, 1e6, 64),
        (8, 1e6, 1e12, 1e6, 8),
        (4, 1000, 1e3, 10_000, 624),
        (4, 1000, 1e3, 10, 248),
    ],
)
def test_a_part_is_some_seconds_of_little_memory(
    batch_rows: int, rows_per_s: float, row_bytes: float, num_rows: float, rows: int
) -> None:
    """Five seconds, 64 MiB, 65,536 rows or an eighth of an instance's work, whichever is least; whole batches."""
    choice = BatchSizeChoice(batch_rows, rows_per_s, {})
    assert rows_of_a_part(choice, row_bytes=row_bytes, num_rows=num_rows, instances=2) == rows
