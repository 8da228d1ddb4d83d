from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.data.reading.table_readers import RowFault
from stoker.inspecting import table_columns
from stoker.inspecting.table_columns import ColumnProfile, RowSample, robust_spread
from stoker.inspecting.table_files import RowBatch

cells = st.lists(st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3), st.floats(), st.lists(st.integers())))


@given(cells, st.integers(0, 20))
def test_batches_do_not_change_a_profile(values: list, cut: int) -> None:
    """Counting in two parts counts the same, and every value is counted once."""
    whole, parts = ColumnProfile("x"), ColumnProfile("x")
    whole.add(values, is_typed=True)
    parts.add(values[:cut], is_typed=True)
    parts.add(values[cut:], is_typed=True)
    assert (whole.missing, whole.values, sum(whole.kinds.values())) == (
        parts.missing,
        parts.values,
        sum(parts.kinds.values()),
    )
    assert whole.missing + sum(whole.values.values()) == whole.num_rows == len(values)


def test_prose_and_categories_are_told_apart() -> None:
    """Long and different is prose, few and frequent is a category, names are neither."""
    prose, category, names = (ColumnProfile(name) for name in "abc")
    prose.add([f"this is the sentence with the number {n}" for n in range(50)], is_typed=True)
    category.add(["red", "green"] * 25, is_typed=True)
    names.add([f"N{n}" for n in range(50)], is_typed=True)
    assert [(one.is_prose, one.is_category) for one in (prose, category, names)] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_different_values_are_counted_to_a_limit(monkeypatch) -> None:
    """A column of names does not fill memory; that there are more is said."""
    monkeypatch.setattr(table_columns, "MOST_DISTINCT", 10)
    column = ColumnProfile("x")
    column.add(list(range(100)), is_typed=True)
    facts = column.facts(median=1.0)
    assert (facts.distinct, facts.is_distinct_capped) == (10, True)


def test_a_sample_of_rows_is_bounded_and_even(monkeypatch) -> None:
    """However many rows come, few are kept, from all over."""
    monkeypatch.setattr(table_columns, "_SAMPLE_ROWS", 10)
    sample = RowSample()
    for first in range(0, 1000, 50):
        rows = list(range(first, first + 50))
        sample.add(RowBatch(first, {"x": rows}, 50, {3: RowFault("ragged", "")}))
    kept = sample.column("x")
    assert len(kept) <= 10
    assert kept[0] == 0
    assert kept[-1] > 800


def test_robust_deviations() -> None:
    """One wild value moves neither median nor deviation; where most are equal the mean deviation stands in."""
    spread = robust_spread([*range(-50, 51), 10**9], is_typed=True)
    assert spread is not None
    assert abs(spread.median) <= 1
    assert spread.z(10**9) > 1e6
    equal = robust_spread([5] * 20 + [6], is_typed=True)
    assert equal is not None
    assert equal.deviation > 0
    assert robust_spread([1, 2], is_typed=True) is None
