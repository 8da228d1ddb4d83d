"""Many names in one piece of memory."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.files.source import Names

anything = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=20)


@given(anything)
def test_names_are_the_list_they_were_made_of(names: list[str]) -> None:
    """By place, from the end, in order, as a slice, and as a copy."""
    made = Names(names)
    assert [*made] == names
    assert [made[at] for at in range(-len(names), len(names))] == names + names
    assert [*made[1:4]] == names[1:4]
    assert [*copy.deepcopy(made)] == names
    assert [*Names.of_parts(made.blob, made.ends)] == names


def test_a_name_that_is_no_utf8_comes_back_as_it_was() -> None:
    """File systems allow any bytes in names."""
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    assert Names([name])[0] == name


@pytest.mark.parametrize("index", [-3, 2])
def test_a_place_outside_is_refused(index: int) -> None:
    """As in any sequence."""
    with pytest.raises(IndexError, match="2 names"):
        Names(["a", "b"])[index]
