from __future__ import annotations

import pytest

from stoker.inspecting.table_columns import brief, encoding_fault, key_of, kind_of, number_of, same_as, shown


def test_numbers_are_told_from_how_they_look_only_where_all_is_text() -> None:
    """A string of digits is a number in a CSV, and text where values have types."""
    assert number_of("3.5", is_typed=False) == 3.5
    assert number_of("3.5", is_typed=True) is None
    assert number_of(True, is_typed=True) is None
    assert number_of(10**400, is_typed=True) == float("inf")
    assert (kind_of("3", is_typed=False), kind_of("3", is_typed=True), kind_of([1], is_typed=True)) == (
        "number",
        "text",
        "list",
    )


def test_equal_values_have_equal_keys() -> None:
    """Lists and objects can be counted, NaN is missing, and long values are compared by their digests."""
    assert key_of({"a": [1], "b": 2}) == key_of({"b": 2, "a": [1]})
    assert key_of(float("nan")) is None
    assert key_of("x" * 500) == key_of("x" * 500) != key_of("x" * 501)
    assert len(brief(b"1" * 10_000)) == 16
    assert same_as("3", is_typed=False) == same_as(3, is_typed=True) == 3.0
    assert repr(same_as("1e3", is_typed=False)) == repr(same_as(1000, is_typed=True))


@pytest.mark.parametrize("is_typed", [True, False])
def test_numbers_that_no_float_holds_are_not_equal_to_their_neighbours(is_typed: bool) -> None:
    """Two accounts of 17 figures are two accounts; a number in a CSV is the one in a file of types."""
    low, high = 2**53, 2**53 + 1
    assert float(low) == float(high)
    found = [same_as(value if is_typed else str(value), is_typed=is_typed) for value in (low, high, 10**400)]
    assert len(set(map(repr, found))) == 3
    assert repr(same_as(str(high), is_typed=False)) == repr(same_as(high, is_typed=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [("caf\udce9", "is not UTF-8"), ("caf\ufffd", "lost"), ("cafÃ©", "Latin-1"), ("a\x00b", "NUL"), ("café “so”", "")],
)
def test_broken_encodings_are_told(text: str, words: str) -> None:
    """Undecoded bytes, replaced characters and text decoded twice are found; text that is merely not ASCII is not."""
    assert (words in encoding_fault(text)) if words else encoding_fault(text) == ""


def test_values_are_shown_short_and_printable() -> None:
    """What cannot be encoded is escaped, what is long is cut."""
    assert shown("caf\udce9") == "caf\\udce9"
    assert shown("x" * 99, 5) == "xxxx…"
