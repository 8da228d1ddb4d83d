"""How much of requests there may be at a time."""

from __future__ import annotations

import pytest

from stoker.serving.refusals import OverCapacity
from stoker.serving.service import InFlight


def test_bodies_share_what_there_may_be() -> None:
    """What would be too much is refused and not counted; once something was given back there is room again."""
    held = InFlight(100)
    held.take(60)
    with pytest.raises(OverCapacity, match="holds 60 B of requests, of 100 B") as refused:
        held.take(41)
    assert (refused.value.http_status, refused.value.retry_after_s, held.num_bytes) == (429, 1.0, 60)
    held.take(40)
    held.give_back(60)
    held.take(60)


def test_what_is_taken_for_a_while_is_given_back_whatever_happens() -> None:
    """A request that fails holds nothing any more."""
    held = InFlight(100)
    with pytest.raises(ZeroDivisionError), held.taken(100):
        held.num_bytes / 0
    assert held.num_bytes == 0
    with pytest.raises(OverCapacity), held.taken(101):
        pass
    assert held.num_bytes == 0
