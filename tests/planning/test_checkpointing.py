from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.checkpointing import ONCE_S, WRITING_ONCE_S, checkpoint_estimate

SIZES, APART = st.floats(0, 1e12), st.floats(0, 1e5)


def test_a_small_state_takes_what_every_checkpoint_takes() -> None:
    """Milliseconds, not the microseconds that its bytes take."""
    assert checkpoint_estimate(100e3, apart_s=30.0).value == pytest.approx(ONCE_S, rel=0.05)


def test_a_large_state_takes_what_its_copy_takes() -> None:
    """At two gigabytes a second."""
    assert checkpoint_estimate(20e9, apart_s=600.0).value == pytest.approx(10.0, rel=0.01)


def test_checkpoints_one_upon_another_wait_for_the_disk() -> None:
    """The one before has to be written first."""
    assert checkpoint_estimate(100e3, apart_s=0.0).value == pytest.approx(ONCE_S + WRITING_ONCE_S, rel=0.05)


@given(SIZES, APART, APART)
def test_more_room_between_checkpoints_never_costs_more(size: float, one: float, other: float) -> None:
    """And the interval has the value in it."""
    near, far = sorted((one, other))
    assert checkpoint_estimate(size, far).value <= checkpoint_estimate(size, near).value
    found = checkpoint_estimate(size, near)
    assert 0 < found.low <= found.value <= found.high
