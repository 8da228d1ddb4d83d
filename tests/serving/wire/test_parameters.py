from __future__ import annotations

import pytest

from stoker.serving.problems import BadRequest
from stoker.serving.wire.parameters import checked, flag, urgency, whole


def test_a_timeout_is_in_microseconds_and_zero_is_none() -> None:
    """As Triton counts it."""
    assert urgency({"timeout": 1_500_000}) == (1.5, 0)
    assert urgency({"timeout": 0, "priority": 1}) == (None, 1)


def test_names_of_ones_own_are_kept() -> None:
    """Strings, numbers and booleans; nothing else is a parameter."""
    mine = {"a": "x", "b": 1, "c": 0.5, "d": True}
    assert checked(mine, "the request") is mine
    for value in (None, [], {}):
        with pytest.raises(BadRequest, match="parameter 'a' of the request"):
            checked({"a": value}, "the request")


def test_a_boolean_is_no_number_and_a_number_no_boolean() -> None:
    """Python would take either for the other."""
    with pytest.raises(BadRequest, match="whole number"):
        whole({"n": True}, "n", "the request")
    with pytest.raises(BadRequest, match="true or false"):
        flag({"n": 1}, "n", "the request", default=False)
