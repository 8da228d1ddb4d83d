from __future__ import annotations

import pytest

from stoker.serving.protocol import checked_parameters, flag_parameter, urgency, whole_parameter
from stoker.serving.refusals import BadRequest


def test_a_timeout_is_in_microseconds_and_zero_is_none() -> None:
    """As Triton counts it."""
    assert urgency({"timeout": 1_500_000}) == (1.5, 0)
    assert urgency({"timeout": 0, "priority": 1}) == (None, 1)


def test_names_of_ones_own_are_kept() -> None:
    """Strings, numbers and booleans; nothing else is a parameter."""
    mine = {"a": "x", "b": 1, "c": 0.5, "d": True}
    assert checked_parameters(mine, "the request") is mine
    for value in (None, [], {}):
        with pytest.raises(BadRequest, match="parameter 'a' of the request"):
            checked_parameters({"a": value}, "the request")


def test_a_boolean_is_no_number_and_a_number_no_boolean() -> None:
    """Python would take either for the other."""
    with pytest.raises(BadRequest, match="whole number"):
        whole_parameter({"n": True}, "n", "the request")
    with pytest.raises(BadRequest, match="true or false"):
        flag_parameter({"n": 1}, "n", "the request", default=False)
