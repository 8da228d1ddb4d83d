from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.loadtesting.serving_limit import CLOSE_ENOUGH, LEAST_RATE, highest_rate
from stoker.records.service import Held, LoadGenerator, LoadMeasurement


def measured(rate: float, seconds: float, held: Held) -> LoadMeasurement:
    """A measurement that says so."""
    return LoadMeasurement(
        loop="open",
        rate=rate,
        connections=1,
        duration_s=seconds,
        requests=1,
        answered=1,
        good=1,
        rows=1,
        mean_s=0.1,
        quantiles=(),
        held=held,
        generator=LoadGenerator(late_p99_s=0.0, cpu_s_per_request=0.0, most_in_flight=1),
    )


def two(rate: float) -> float:
    """How long a measurement takes [s]."""
    return 2.0


def service(limit: float) -> Callable[[float, float], LoadMeasurement]:
    """Holds every rate up to `limit`."""
    return lambda rate, seconds: measured(rate, seconds, "held" if rate <= limit else "missed")


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_the_limit_is_found_to_five_per_cent(limit: float, first: float) -> None:
    """From wherever it begins, in a number of measurements that goes with the logarithm of how wrong that was."""
    found = highest_rate(service(limit), first=first, has_time=lambda seconds: True, seconds_at=two)
    assert limit / CLOSE_ENOUGH <= found.rate <= limit
    assert len(found.tried) < 45


def test_a_service_that_holds_nothing_is_given_up() -> None:
    """The rates fall to the least that is tried, and the answer is 0."""
    found = highest_rate(service(0.0), first=100, has_time=lambda seconds: True, seconds_at=two)
    assert found.rate == 0
    assert min(one.rate or 0.0 for one in found.tried) >= LEAST_RATE


def test_one_who_cannot_beat_the_best_costs_one_measurement() -> None:
    """A rate to beat is tried first; missing it ends the search."""
    found = highest_rate(service(90), first=50, must_hold=100, has_time=lambda seconds: True, seconds_at=two)
    assert (found.rate, len(found.tried)) == (0.0, 1)
    assert highest_rate(service(150), first=50, must_hold=100, has_time=lambda seconds: True, seconds_at=two).rate > 100


@pytest.mark.parametrize("num_measurements", [1, 2, 4])
def test_the_best_so_far_is_there_when_time_is_over(num_measurements: int) -> None:
    """One measurement is always made; however few there is time for, what was held is found, and nothing else."""
    left = iter([True] * (num_measurements - 1))
    found = highest_rate(service(1000), first=10, has_time=lambda seconds: next(left, False), seconds_at=two)
    assert len(found.tried) == num_measurements
    assert found.rate == max((one.rate or 0.0 for one in found.tried), default=0.0)
    assert "no time was left for the 2.0 s" in found.why


def test_unclear_measurements_are_made_again_for_longer() -> None:
    """Twice as long, once; what is unclear still is not held."""
    seconds: list[float] = []

    def unclear(rate: float, duration_s: float) -> LoadMeasurement:
        seconds.append(duration_s)
        return measured(rate, duration_s, "unclear")

    assert highest_rate(unclear, first=100, must_hold=100, has_time=lambda needed: True, seconds_at=two).rate == 0
    assert seconds[1] == 2 * seconds[0]
    assert len(seconds) == 2
