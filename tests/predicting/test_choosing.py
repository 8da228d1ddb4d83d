from __future__ import annotations

import pytest

from stoker.predicting.choosing import choose_batch, rows_of_a_part
from stoker.units import MIB


def test_the_smallest_of_equally_fast_batches_is_taken() -> None:
    """A batch that is not faster only needs more memory."""
    found = choose_batch(lambda rows: 0.010 + 0.001 * rows if rows <= 64 else 0.0012 * rows, None)
    assert found.batch_rows == 64
    assert choose_batch(lambda rows: 0.001 * rows, None).batch_rows == 1


def test_trying_ends_where_it_gets_slower() -> None:
    """Sizes beyond one that is clearly slower are not measured."""
    tried = []

    def seconds_of(rows: int) -> float:
        tried.append(rows)
        return 0.001 * rows if rows < 4 else 0.01 * rows

    assert choose_batch(seconds_of, None).batch_rows == 1
    assert tried == [1, 2, 4]


def test_the_models_limit_is_kept() -> None:
    """A model that takes four rows is never asked for eight."""
    assert max(choose_batch(lambda rows: 1 + 1e-9 * rows, 4).tried) == 4


@pytest.mark.parametrize(
    ("batch_rows", "rows_per_s", "row_bytes", "rows"),
    [(32, 100, 1e3, 512), (32, 1, 1e3, 32), (256, 1e9, 1, 65_536), (8, 1e6, MIB, 64), (8, 1e6, 1e12, 8)],
)
def test_a_part_is_some_seconds_of_little_memory(
    batch_rows: int, rows_per_s: float, row_bytes: float, rows: int
) -> None:
    """Five seconds, 64 MiB or 65,536 rows, whichever is least; whole batches, and one at least."""
    assert rows_of_a_part(batch_rows, rows_per_s, row_bytes) == rows
