from __future__ import annotations

import pytest

from tests.cases import each_of


def test_every_case_that_fails_is_named() -> None:
    """The others are tried too."""
    tried = []

    @each_of([1, 2, 3, 4], name=lambda number: f"number {number}")
    def is_odd(number: int) -> None:
        tried.append(number)
        assert number % 2

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        is_odd()
    assert tried == [1, 2, 3, 4]
    assert [one.__notes__ for one in caught.value.exceptions] == [
        ["in the case of number 2"],
        ["in the case of number 4"],
    ]


def test_a_table_without_a_failure_passes() -> None:
    """So does an empty one."""
    each_of([1, 3])(int.bit_length)()
    each_of([])(int.bit_length)()
