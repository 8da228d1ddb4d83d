"""Times of several processes put together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.records import RankTimes, SampledUpdates
from stoker.records.bottleneck import FIRST_IN_FULL
from stoker.reporting.rank_section import merged, stretches

PERIOD_S, TALK_S, OPTIMISER_S, DATA_S = 0.1, 0.01, 0.005, 0.001


def noted(
    rank: int, compute: list[float], together: list[float], *, size: int = 2, first: int = 0, **changed: object
) -> RankTimes:
    """What a process noted whose own work took `compute` of each update, `together` being that of the slowest."""
    count = len(compute)
    blocked = [longest - own + TALK_S for own, longest in zip(compute, together, strict=True)]
    began = [1000.0 + PERIOD_S * update for update in range(count)]
    times = RankTimes(
        rank=rank,
        size=size,
        worker=rank,
        host="here",
        began_at=7.0,
        first_update=first,
        updates=count,
        parts_s={
            "compute": sum(compute),
            "blocked": sum(blocked),
            "optimiser": OPTIMISER_S * count,
            "data": DATA_S * count,
            "evaluation": 5.0,
            "checkpoint": 0.5,
            "other": 0.0,
        },
        sample=SampledUpdates(
            update=tuple(range(first, first + count)),
            began_s=tuple(began),
            data_s=(DATA_S,) * count,
            compute_s=tuple(compute),
            blocked_s=tuple(blocked),
            optimiser_s=(OPTIMISER_S,) * count,
        ),
    )
    return replace(times, **changed)  # type: ignore[arg-type]


def pair(count: int = 100, *, slow_in: float = 0.83, **changed: object) -> list[RankTimes]:
    """Two processes; rank 1 takes 24 ms longer in that share of the updates, rank 0 in the others."""
    is_slow = [update % 100 < 100 * slow_in for update in range(count)]
    fast, slow = [0.05] * count, [0.05 + 0.024] * count
    ones = [s if late else f for f, s, late in zip(fast, slow, is_slow, strict=True)]
    others = [f if late else s for f, s, late in zip(fast, slow, is_slow, strict=True)]
    return [noted(0, others, slow, **changed), noted(1, ones, slow, **changed)]


def test_the_slowest_is_named_and_the_others_wait_for_it() -> None:
    """Waiting is the difference of arrivals, what is left of the blocked time is communication."""
    found = merged(pair())
    assert found is not None
    assert found.slowest.times.rank == 1
    assert found.slowest.slowest_in == pytest.approx((83 - FIRST_IN_FULL) / (100 - FIRST_IN_FULL))
    early = found.updates[0]
    assert (early.slowest, early.waiting_s) == (1, pytest.approx(0.024))
    fast, slow = early.lanes
    assert (fast.waiting_s, fast.exposed_s) == (pytest.approx(0.024), pytest.approx(TALK_S))
    assert (slow.waiting_s, slow.exposed_s) == (0.0, pytest.approx(TALK_S))
    assert found.sentence().startswith("Rank 1 is the slowest in 79 % of the updates: the others wait 24 ms (27 %)")


def test_totals_are_those_of_the_whole_run_parted_as_the_sample_is() -> None:
    """Waiting and exposed communication add up to the time blocked, of all updates."""
    one, other = pair()
    long = replace(one, parts_s={part: 10 * seconds for part, seconds in one.parts_s.items()})
    found = merged([long, other])
    assert found is not None
    parts = found.ranks[0].parts_s
    assert parts["waiting"] + parts["exposed"] == pytest.approx(10 * one.parts_s["blocked"])
    assert "blocked" not in parts
    assert found.ranks[0].training_s == pytest.approx(sum(parts.values()) - 55.0)


def test_without_a_common_clock_the_one_that_was_blocked_least_came_last() -> None:
    """Of another host only durations count, however far its clock is off."""
    one, other = pair()
    shifted = replace(
        other,
        uncertainty_s=0.004,
        sample=replace(other.sample, began_s=tuple(at + 30.0 for at in other.sample.began_s)),
    )
    found, exact = merged([one, shifted]), merged([one, other])
    assert found is not None
    assert exact is not None
    assert [update.slowest for update in found.updates] == [update.slowest for update in exact.updates]
    assert found.ranks[0].parts_s["waiting"] == pytest.approx(exact.ranks[0].parts_s["waiting"])


def test_nobody_is_blamed_where_all_are_alike() -> None:
    """Equal processes do not wait; a slowest that changes is reported as such."""
    alike = merged([noted(rank, [0.05] * 50, [0.05] * 50) for rank in (0, 1)])
    assert alike is not None
    assert alike.sentence().startswith("No process holds the others up: they wait 0 % of the time.")
    changing = merged(pair(slow_in=0.6))
    assert changing is not None
    assert "The slowest changes from update to update (rank 0 in 50 % of the updates)" in changing.sentence()


def test_only_updates_that_all_have_are_compared() -> None:
    """One that was killed has left fewer; one that left nothing makes the stretch incomplete."""
    one, other = pair(30)[0], pair(22)[1]
    found = merged([one, other])
    assert found is not None
    assert [update.update for update in found.updates] == list(range(22))
    assert len(found.regular) == 2
    assert merged([one]) is None
    assert merged([replace(one, size=3), replace(other, size=3)]) is None


def test_each_meeting_is_a_stretch_of_its_own() -> None:
    """What was noted before a process was lost is not mixed with what came after."""
    before, alone = pair(30), noted(0, [0.05], [0.05], size=1, first=30, began_at=9.0)
    assert stretches([alone, before[1], before[0]]) == (tuple(before), (alone,))
    assert merged([alone]) is None


def test_busy_is_own_work_over_training_time() -> None:
    """Evaluations and checkpoints are not training time; passes and the optimiser are own work."""
    found = merged([noted(rank, [0.05] * 40, [0.05] * 40) for rank in (0, 1)])
    assert found is not None
    assert found.busy == pytest.approx((0.05 + OPTIMISER_S) / (0.05 + OPTIMISER_S + TALK_S + DATA_S))
