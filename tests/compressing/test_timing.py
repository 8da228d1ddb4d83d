"""Rounds of several contestants, on a clock of the test's own."""

import itertools

import pytest

from stoker.compressing.contender import FEWEST_ROUNDS, MOST_ROUNDS, InterleavedTimes, gain_of, time_interleaved


class Track:
    """A clock that contestants move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def runner(self, name: str, seconds: float):
        """A contestant that takes so long, and three times as long in every fourth call of any."""

        def run() -> None:
            self.order.append(name)
            self.now += seconds * (3 if len(self.order) % 4 == 0 else 1)

        return run


def test_contestants_take_turns_and_each_begins_as_often() -> None:
    """Every round has each of them once, and who is first changes from round to round."""
    track = Track()
    found = time_interleaved({"a": track.runner("a", 0.2), "b": track.runner("b", 0.3)}, track, seconds=0.0)
    rounds = track.order[2:]
    assert rounds[:6] == ["a", "b", "b", "a", "a", "b"]
    assert len(found.seconds["a"]) == len(found.seconds["b"]) == FEWEST_ROUNDS


def test_rounds_fill_the_time_and_not_more() -> None:
    """Quick contestants are asked more often, up to a limit."""
    track = Track()
    found = time_interleaved({"a": track.runner("a", 0.2)}, track, seconds=1e9)
    assert len(found.seconds["a"]) == MOST_ROUNDS


def test_short_calls_are_repeated_within_a_timed_run() -> None:
    """A call of 10 microseconds is timed in runs of many, and its time is reported for one."""
    track = Track()
    track_call = itertools.count()

    def call() -> None:
        next(track_call)
        track.now += 1e-5

    found = time_interleaved({"a": call}, track, seconds=0.0)
    assert found.latency("a") == pytest.approx(1e-5)
    assert next(track_call) > 10 * FEWEST_ROUNDS


def test_a_disturbed_round_does_not_move_the_ratio() -> None:
    """The median of paired ratios forgets the round in which something else took the core."""
    own, rival = [1.0] * 9, [2.0] * 9
    own[3], rival[3] = 30.0, 2.0
    found = gain_of([InterleavedTimes({"own": tuple(own), "rival": tuple(rival)})], 0.95)
    assert found.value == found.low == pytest.approx(2.0)


def test_bounds_widen_with_the_spread_and_races_count_alike() -> None:
    """Over batch sizes the gain is the geometric mean; uncertain rounds make the lower bound fall."""
    steady = InterleavedTimes({"own": (1.0,) * 9, "rival": (4.0,) * 9})
    shaky = InterleavedTimes({"own": (1.0,) * 9, "rival": (0.5, 2.0, 1.0, 0.7, 1.4, 0.8, 1.2, 0.6, 1.9)})
    found = gain_of([steady, shaky], 0.95)
    assert found.value == pytest.approx(2.0)
    assert found.low < 1.95
    assert found.high > 2.05
