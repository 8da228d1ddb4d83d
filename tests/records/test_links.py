"""Links as records: between measured sizes, beyond them, and on disk."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.records import dumps, loads
from stoker.records.hardware import LinkCost, Links, line_through

MEASURED = ((4, 1e-3), (1000, 2e-3), (2000, 5e-3))
COST = LinkCost(collective="all-reduce", alpha_s=1e-3, beta_s_per_byte=3e-6, measured=MEASURED)
LINKS = Links(name="a wire", world_size=2, costs=(COST,), basis="measured here", slowdown={"memory": 1.5})


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(1, 1e-3), (4, 1e-3), (1000, 2e-3), (1500, 3.5e-3), (2000, 5e-3), (3000, 8e-3)]
)
def test_times_lie_on_the_lines_between_what_was_measured(num_bytes: int, seconds: float) -> None:
    """Below the smallest size its time, beyond the largest the last line goes on."""
    assert COST.seconds(num_bytes) == pytest.approx(seconds)


def test_a_larger_message_never_takes_less_than_the_one_before() -> None:
    """A size that was measured faster than a smaller one bends nothing below it."""
    cost = LinkCost(collective="all-gather", alpha_s=1e-3, beta_s_per_byte=0, measured=((4, 2e-3), (100, 1e-3)))
    assert cost.seconds(50) == pytest.approx(2e-3)
    assert line_through(cost.measured) == (1e-3, 0.0)


def test_a_collective_that_nobody_measured_is_an_error() -> None:
    """Rather than a guess."""
    assert LINKS.seconds("all-reduce", 1000) == pytest.approx(2e-3)
    with pytest.raises(KeyError, match="all-to-all"):
        LINKS.seconds("all-to-all", 4)


@pytest.mark.parametrize(("arithmetic_s", "wait_s"), [(0, 0), (1e-3, 1e-3), (2e-3, 2e-3), (3e-3, 3e-3), (1, 3e-3)])
def test_waits_begin_at_none_and_end_at_the_last_one_measured(arithmetic_s: float, wait_s: float) -> None:
    """Between them along lines; no rank waits where nothing was measured."""
    known = dataclasses.replace(LINKS, waits=((2e-3, 2e-3), (3e-3, 3e-3)))
    assert known.wait_s(arithmetic_s) == pytest.approx(wait_s)
    assert LINKS.wait_s(arithmetic_s) == 0
    assert loads(dumps(known), Links) == known


def test_links_survive_the_disk_and_refuse_a_spread_below_one() -> None:
    """What is written is read."""
    assert loads(dumps(LINKS), Links) == LINKS
    with pytest.raises(ValueError, match="at least 1"):
        Links(name="", world_size=2, costs=(), basis="unknown", spread=0.5)
