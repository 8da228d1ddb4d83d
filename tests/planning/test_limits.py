"""What a plan must keep, as people write it."""

from __future__ import annotations

import pytest

from stoker.errors import BadJob
from stoker.planning.model.objectives import PlanLimits
from stoker.units import parse_duration, parse_memory, parse_money
from tests.planning.trials import candidate


def test_a_candidate_breaks_what_it_exceeds() -> None:
    """Time and money, each with its numbers."""
    limits = PlanLimits(max_cost_usd=20, deadline_s=3600)
    assert limits.broken_by(candidate("l4", total_s=3000, cost=5)) == ()
    assert limits.broken_by(candidate("l4", total_s=7200, cost=25.5)) == (
        "takes 2 h, the deadline is 1 h",
        "costs $25.50, the limit is $20.00",
    )


def test_what_is_here_costs_nothing_and_what_nobody_offers_too_much() -> None:
    """A limit of money is on what has to be rented."""
    limits = PlanLimits(max_cost_usd=20)
    assert limits.broken_by(candidate("cpu", total_s=1e9, cost=None, is_here=True)) == ()
    assert limits.broken_by(candidate("tpu", total_s=1, cost=None)) == ("the price list has no offer of it",)


def test_with_a_deadline_the_least_money_is_wanted_else_the_least_time() -> None:
    """Unless somebody says otherwise."""
    assert PlanLimits(deadline_s=10).objective == "money"
    assert PlanLimits(max_cost_usd=10).objective == PlanLimits().objective == "time"


def test_the_excess_is_the_worst_ratio() -> None:
    """One where all is kept; an unknown price is infinitely far."""
    limits = PlanLimits(max_cost_usd=10, deadline_s=100)
    assert limits.excess(candidate("a", total_s=50, cost=5)) == 1
    assert limits.excess(candidate("a", total_s=150, cost=40)) == 4
    assert limits.excess(candidate("a", total_s=150, cost=None)) == float("inf")


@pytest.mark.parametrize("text", ["", "free", "-3usd", "0", "20eur", "1e3"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    """With an example of what is wanted."""
    with pytest.raises(BadJob, match="20usd"):
        parse_money(text)


@pytest.mark.parametrize("text", ["", "12", "h", "0h", "12 parsecs", "-1h", "1h later"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """A bare number has no unit."""
    with pytest.raises(BadJob, match="12h"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["six", "6 parsecs", "-6GB", "0GB", "6"])
def test_an_amount_of_memory_that_is_none_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(BadJob, match="6GB"):
        parse_memory(text)
