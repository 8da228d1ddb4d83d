from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stoker.pool.bisection import MOST_POINTS, Bisection, Side, points
from stoker.pool.events import Refused, sha256


def chain(start: str, updates: range, wrong: set[int]) -> dict[int, str]:
    """States by number of updates; each follows from the one before, and after a wrong update from another rule."""
    states, state = {}, start
    for update in updates:
        state = sha256(f"{state} {update} {update in wrong}".encode())
        states[update] = state
    return states


def played(search: Bisection, agent: dict[int, str], verifier: dict[int, str]) -> tuple[Bisection, int]:
    """The search after both sides have stated what is asked, and the number of rounds."""
    rounds = 0
    while not (search.update or search.is_void):
        wanted, rounds = points(search.low, search.high), rounds + 1
        search = search.traced("verifier", tuple(verifier[update] for update in wanted), 1.0)
        search = search.traced("agent", tuple(agent[update] for update in wanted), 2.0)
    return search, rounds


def search_in(begin: int, end: int, made: str) -> Bisection:
    """A search at its beginning."""
    return Bisection(begin=begin, low=begin, high=end, agent=Side(), verifier=Side(end=made))


@pytest.mark.parametrize("length", [1, 2, MOST_POINTS, MOST_POINTS + 1, 5_000])
def test_the_first_wrong_update_is_found(length: int) -> None:
    """Wherever it is, whatever comes after it, in as many rounds as the length has digits in base 64."""
    draw = random.Random(length)
    for _ in range(12):
        begin = draw.randrange(1000)
        updates = range(begin + 1, begin + length + 1)
        wrong = set(draw.sample(updates, draw.randrange(1, min(4, length) + 1)))
        true, agent = chain("s", updates, set()), chain("s", updates, wrong)
        found, rounds = played(search_in(begin, updates[-1], true[updates[-1]]), agent, true)
        assert found.update == min(wrong)
        assert found.low_state == ("" if found.update == begin + 1 else true[found.update - 1])
        assert (found.agent.end, found.verifier.end) == (agent[found.update], true[found.update])
        assert rounds <= 1 + (length > MOST_POINTS) + (length > MOST_POINTS**2)


def test_a_side_that_makes_its_states_up_is_caught_at_a_step_that_does_not_follow() -> None:
    """Whatever it states in between, seeing the other's states or not: one step from a right state is wrong."""
    draw = random.Random(3)
    for _ in range(40):
        length = draw.randrange(1, 3 * MOST_POINTS)
        updates = range(1, length + 1)
        true = chain("s", updates, set())
        cheat = {update: draw.choice([true[update], sha256(b"%d" % draw.randrange(3))]) for update in updates}
        cheat[length] = sha256(b"committed")
        for sides in ((cheat, true), (true, cheat)):
            found, _ = played(search_in(0, length, sides[1][length]), *sides)
            before = "s" if found.update == 1 else true[found.update - 1]
            assert found.low_state in ("", before)
            step = sha256(f"{before} {found.update} False".encode())
            is_right = [side.end == step for side in (found.agent, found.verifier)]
            assert is_right == [sides[0] is true, sides[1] is true]


def test_a_verifier_that_states_the_agents_own_state_has_no_case() -> None:
    """There is no update on which they differ."""
    true = chain("s", range(1, 11), set())
    found, _ = played(search_in(0, 10, true[10]), true, true)
    assert found.is_void
    assert not found.update
    assert not found.waits_for("agent")


def test_what_a_side_may_not_state() -> None:
    """Another number of states, another end than before, a second answer, states before any update is found."""
    length = MOST_POINTS * 4
    updates = range(1, length + 1)
    true, agent = chain("s", updates, set()), chain("s", updates, {100})
    search = search_in(0, length, true[length])
    wanted = points(0, length)
    states = tuple(true[update] for update in wanted)
    for wrong, why in ((states[:-1], "63 digests were stated, 64"), ((*states[:-1], sha256(b"x")), "after update 256")):
        with pytest.raises(Refused, match=why):
            search.traced("verifier", wrong, 0.0)
    with pytest.raises(Refused, match="no states are asked"):
        search.supplied("agent", "", sha256(b"x"), 0.0)
    search = search.traced("verifier", states, 0.0)
    with pytest.raises(Refused, match="no digests are asked"):
        search.traced("verifier", states, 0.0)
    search = search.traced("agent", tuple(agent[update] for update in wanted), 7.0)
    assert (search.low, search.high, search.since_s) == (96, 100, 7.0)
    with pytest.raises(Refused, match="before"):
        search.traced("agent", (true[97], true[98], true[99], true[100]), 8.0)
    search, _ = played(search, agent, true)
    with pytest.raises(Refused, match="update 100 is missing"):
        search.supplied("agent", "", sha256(b"after"), 9.0)
    search = search.supplied("agent", sha256(b"before"), sha256(b"after"), 9.0)
    assert not search.is_ready
    assert search.supplied("verifier", sha256(b"before"), sha256(b"other"), 10.0).is_ready
    assert not search.supplied("verifier", "", "", 10.0).is_ready


def test_a_side_that_gives_up_is_asked_no_more() -> None:
    """At either stage."""
    search = search_in(0, 10, sha256(b"x")).traced("agent", (), 0.0)
    assert search.agent.has_given_up
    assert not search.waits_for("agent")
    assert search.waits_for("verifier")
    with pytest.raises(Refused, match="no digests"):
        search.traced("agent", (), 0.0)
    first = replace(search_in(4, 5, sha256(b"x")), agent=Side(end=sha256(b"y")))
    with pytest.raises(Refused, match="committed already"):
        first.supplied("agent", sha256(b"before"), sha256(b"after"), 0.0)
