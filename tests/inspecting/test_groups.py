from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.inspecting.findings import groups_of


@given(st.lists(st.integers(0, 5), max_size=30))
def test_groups_are_the_rows_of_equal_content(values: list[int]) -> None:
    """Every content has one first row, and every repeated one the rows that hold it, in order."""
    contents = np.array(values, np.uint8).repeat(4).reshape(len(values), 4)
    first, groups = groups_of(contents)
    assert first.tolist() == sorted(values.index(value) for value in set(values))
    wanted = [[row for row, one in enumerate(values) if one == value] for value in set(values)]
    assert sorted(group.tolist() for group in groups) == sorted(rows for rows in wanted if len(rows) > 1)
