from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.training.elastic.membership import Membership, MembershipState, TooFewWorkers


def everybody(workers: int, least: int = 1, usable=lambda number: number) -> Membership:
    """A membership in its first generation."""
    roster = Membership(workers, least, usable)
    for worker in range(workers):
        roster.came(worker)
    assert roster.form() is not None
    return roster


def test_the_first_generation_waits_for_all() -> None:
    """No member begins while another one still starts."""
    roster = Membership(2, 1, lambda number: number)
    roster.came(1)
    assert roster.form() is None
    roster.came(0)
    formed = roster.form()
    assert formed is not None
    assert (formed.number, formed.workers, formed.num_veterans) == (1, (0, 1), 0)


def test_survivors_do_not_wait_for_the_one_that_starts_again() -> None:
    """They keep their order, and the number of those with weights is theirs."""
    roster = everybody(3)
    roster.died(1, returns=True)
    roster.reported(2, {"update": 5})
    assert roster.form() is None
    assert roster.missed == [0]
    roster.reported(0, {"update": 4})
    formed = roster.form()
    assert formed is not None
    assert (formed.workers, formed.num_veterans, formed.notes) == ((0, 2), 2, {"update": 4})


def test_a_larger_generation_is_wanted_when_somebody_comes_whom_the_layout_can_use() -> None:
    """Members are called for a newcomer only if it makes a difference."""
    roster = everybody(4, usable=lambda number: 1 << (number.bit_length() - 1))
    for worker in (1, 2, 3):
        roster.died(worker, returns=True)
    roster.reported(0, {})
    assert roster.form() is not None
    roster.came(3)
    assert roster.is_wanted
    roster.reported(0, {})
    formed = roster.form()
    assert formed is not None
    assert (formed.workers, formed.num_veterans) == ((0, 3), 1)
    roster.came(1)
    assert not roster.is_wanted


def test_if_nobody_has_the_weights_all_are_waited_for() -> None:
    """After the loss of everybody, the first that is back does not begin alone."""
    roster = everybody(2)
    roster.died(0, returns=True)
    roster.died(1, returns=True)
    roster.came(0)
    assert roster.form() is None
    roster.came(1)
    formed = roster.form()
    assert formed is not None
    assert (formed.workers, formed.num_veterans) == ((0, 1), 0)


def test_a_spare_has_no_weights() -> None:
    """A member that sat out a generation comes after those that trained in it."""
    roster = everybody(3, usable=lambda number: min(number, 2))
    assert roster.those(MembershipState.WAITING) == [2]
    roster.died(0, returns=False)
    roster.reported(1, {})
    formed = roster.form()
    assert formed is not None
    assert (formed.workers, formed.num_veterans) == ((1, 2), 1)


def test_too_few_fail_only_if_nobody_else_comes() -> None:
    """One that starts again is waited for; one that is left out is not."""
    roster = everybody(2, least=2)
    roster.died(0, returns=True)
    roster.reported(1, {})
    assert roster.form() is None
    roster.died(0, returns=False)
    with pytest.raises(TooFewWorkers) as caught:
        roster.form()
    assert caught.value.left == 1


def test_a_worker_that_starts_again_has_no_rank() -> None:
    """It had one until it died."""
    roster = everybody(2)
    assert roster.rank_of(1) == 1
    roster.died(1, returns=True)
    assert roster.rank_of(1) is None


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_whatever_happens_generations_are_of_waiting_workers(workers: int, happenings: list[tuple[int, bool]]) -> None:
    """Numbers rise by one, no member is in a generation twice, and those with weights were in the one before."""
    roster = everybody(workers)
    for worker, dies in happenings:
        state = roster.states[worker % workers]
        before = roster.generation
        if dies:
            roster.died(worker % workers, returns=True)
        elif state is MembershipState.STARTING:
            roster.came(worker % workers)
        elif state is MembershipState.MEMBER:
            roster.reported(worker % workers, {})
        waiting = roster.those(MembershipState.WAITING)
        formed = roster.form()
        if formed is not None:
            assert sorted(formed.workers) == waiting
            assert formed.number == before.number + 1
            assert len(set(formed.workers)) == len(formed.workers) > 0
            assert set(formed.workers[: formed.num_veterans]) <= set(before.workers)
            assert all(roster.states[one] is MembershipState.MEMBER for one in formed.workers)
