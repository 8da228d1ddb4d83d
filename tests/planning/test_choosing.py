"""Which device to take, within limits, and what is said to somebody who asks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import DoesNotFit
from stoker.planning.model.objectives import PlanLimits, advice, choose, rental_advice
from stoker.records import Candidate
from tests.planning.trials import candidate

H100 = candidate("h100", total_s=3600, cost=3.0)
L4 = candidate("l4", total_s=36000, cost=2.0)
T4 = candidate("t4", total_s=72000, cost=4.0)
HERE = candidate("cpu", total_s=400000, cost=None, is_here=True)


def test_without_limits_the_fastest_is_first() -> None:
    """The others follow, each with what it lacks."""
    (best, *others), rejected = choose([L4, H100, T4], PlanLimits())
    assert (best.device, best.why) == ("h100", "fastest")
    assert [(c.device, c.why) for c in others] == [
        ("l4", "10× the time, 1.5× cheaper"),
        ("t4", "20× the time, 1.3× the cost"),
    ]
    assert rejected == ()


def test_with_a_deadline_the_cheapest_that_keeps_it_is_first() -> None:
    """What takes too long is rejected with its numbers."""
    (best, *others), rejected = choose([H100, L4, T4], PlanLimits(deadline_s=40000))
    assert (best.device, best.why) == ("l4", "cheapest inside the deadline")
    assert [c.device for c in others] == ["h100"]
    assert [(r.device, r.reason) for r in rejected] == [("t4", "takes 20 h, the deadline is 11 h 6 min")]


def test_a_budget_leaves_the_fastest_that_is_affordable() -> None:
    """Two dollars buy the slow one only."""
    (best,), _ = choose([H100, L4, T4], PlanLimits(max_cost_usd=2.5))
    assert (best.device, best.why) == ("l4", "the only one at most $2.50")


def test_energy_may_be_the_objective() -> None:
    """A device whose energy is unknown comes last."""
    candidates = [candidate("a", total_s=1, cost=1, energy=None), candidate("b", total_s=9, cost=1, energy=2.0)]
    assert choose(candidates, PlanLimits(), "energy")[0][0].device == "b"


def test_where_nothing_keeps_the_limits_the_nearest_is_named() -> None:
    """With what it would take."""
    with pytest.raises(DoesNotFit, match=r"nearest is h100 with 1 h and \$3.00: takes 1 h, the deadline is 50 min"):
        choose([H100, L4], PlanLimits(deadline_s=3000, max_cost_usd=20))


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.1, 1e3)), min_size=1, max_size=8),
    st.floats(1, 1e6),
    st.floats(0.1, 1e3),
)
def test_the_chosen_keeps_the_limits_and_nothing_that_keeps_them_is_cheaper(rows, deadline, budget) -> None:
    """For any devices and limits."""
    candidates = [candidate(f"d{i}", total_s=t, cost=c) for i, (t, c) in enumerate(rows)]
    keeping = [(t, c) for t, c in rows if t <= deadline and c <= budget]
    limits = PlanLimits(deadline_s=deadline, max_cost_usd=budget)
    if not keeping:
        with pytest.raises(DoesNotFit):
            choose(candidates, limits)
        return
    chosen = choose(candidates, limits)[0][0].forecast
    assert (chosen.cost_usd.value, chosen.total_s.value) == min((c, t) for t, c in keeping)


def test_who_has_enough_is_told_so() -> None:
    """A run of minutes needs nothing rented."""
    quick = candidate("cpu", total_s=200, cost=None, is_here=True)
    assert advice(quick, [H100]) == "What is here is enough: done in 3 min 20 s (3 min to 3 min 40 s)."


def test_who_waits_days_is_told_what_renting_changes() -> None:
    """The cheapest that is much faster, and the fastest where it is faster still."""
    assert advice(HERE, [H100, L4, T4]) == (
        "It runs here in 4 d 15 h (4 d 4 h to 5 d 2 h); l4 at RunPod takes 10 h for $2.00, "
        "or h100 at RunPod takes 1 h for $3.00."
    )
    slow = candidate("t4", total_s=399999, cost=1.0)
    assert advice(HERE, [slow]).endswith("and nothing for rent would be much faster.")


def with_samples(one: Candidate, total_samples: int) -> Candidate:
    """The same, on so many samples."""
    return dataclasses.replace(one, forecast=dataclasses.replace(one.forecast, total_samples=total_samples))


def test_in_a_run_of_a_stated_time_the_fastest_is_the_one_that_trains_on_the_most_samples() -> None:
    """All take the hour; evaluations make the faster one's a little longer."""
    slow = with_samples(candidate("t4", total_s=3600, cost=0.2), 10**6)
    fast = with_samples(candidate("h100", total_s=3700, cost=3.0), 2 * 10**7)
    (best, other), _ = choose([slow, fast], PlanLimits())
    assert (best.device, best.why) == ("h100", "fastest")
    assert other.why == "19× the time, 15× cheaper"


def test_who_has_an_hour_is_told_how_much_more_a_rented_one_trains_on() -> None:
    """The time is the same everywhere: what renting changes is how far training gets."""
    here = with_samples(candidate("cpu", total_s=3600, cost=None, is_here=True), 10**5)
    rented = with_samples(candidate("l4", total_s=3660, cost=0.7), 3 * 10**6)
    assert (
        advice(here, [rented]) == "It runs here in 1 h (54 min to 1 h 6 min); l4 at RunPod takes 1 h 1 min for $0.70"
        " with 30 times the samples."
    )


def test_who_has_too_little_is_told_the_cheapest_that_fits() -> None:
    """Or that there is none."""
    assert rental_advice("needs 40 GiB", [H100, L4]).endswith(
        "the cheapest that does it: l4 at RunPod takes 10 h for $2.00."
    )
    assert "nor on any one device" in rental_advice("needs 4 TiB", [])
