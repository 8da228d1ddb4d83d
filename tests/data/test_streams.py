from __future__ import annotations

from typing import Any

import pytest

import stoker
from stoker.errors import BadJob


def test_what_is_said_of_a_stream_is_kept() -> None:
    """Its length, and the blocks it is shuffled in."""
    source = range(10)
    assert stoker.data.stream(source, length=7).length == 7
    both = stoker.data.shuffled(source, buffer=4, length=8)
    assert (both.source, both.length, both.buffer) == (source, 8, 4)


@pytest.mark.parametrize("source", [iter([1, 2]), (i for i in range(3)), 17])
def test_what_can_be_read_only_once_is_refused(source: Any) -> None:
    """A run that is resumed has to read it again."""
    with pytest.raises(BadJob, match="cannot be read from its beginning again and again"):
        stoker.data.stream(source)


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_lengths_and_buffers_are_positive_whole_numbers(value: Any) -> None:
    """Of samples."""
    with pytest.raises(BadJob, match="length is a number of samples"):
        stoker.data.stream(range(3), length=value)
    with pytest.raises(BadJob, match="buffer is a number of samples"):
        stoker.data.shuffled(range(3), buffer=value)
