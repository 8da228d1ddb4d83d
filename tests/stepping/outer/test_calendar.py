"""After which updates fragments are sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stoker.jobs import DiLoCo
from stoker.stepping.diloco import ExchangeSchedule
from stoker.units import updates


@given(data=st.data(), fragments=st.integers(1, 4), early=st.integers(4, 12), whole=st.integers(0, 30))
def test_fragments_are_sent_an_interval_apart(data: st.DataObject, fragments: int, early: int, whole: int) -> None:
    """The early one while it goes, the later one afterwards, and never less than the early one where they meet."""
    interval = data.draw(st.integers(early, 20))
    at_first = (updates(early), updates(whole)) if whole else None
    calendar = ExchangeSchedule.of(DiLoCo(every=updates(interval), early=at_first, fragments=fragments), batch=16)
    ends = calendar.early_updates
    assert ends == (-(-whole // early) * early if whole else 0)
    for fragment in range(fragments):
        due = [count for count in range(-3, ends + 5 * interval) if calendar.is_due(fragment, count)]
        assert due[0] >= 1
        for one, other in pairwise(due):
            if other <= ends:
                assert other - one == early
            elif one > ends:
                assert other - one == interval
            else:
                assert other - one >= early


def test_the_first_fragment_is_sent_at_the_end_of_both_phases() -> None:
    """An early phase ends with an exchange, from which on the later interval counts."""
    calendar = ExchangeSchedule(fragments=1, interval=16, early_interval=4, early_updates=8)
    assert [count for count in range(50) if calendar.is_due(0, count)] == [4, 8, 24, 40]
