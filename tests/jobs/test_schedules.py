from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.jobs.schedules import Ramp, bound, constant, one_cycle, warmup_cosine, warmup_linear
from stoker.units import epochs, updates

SHARES = st.floats(0, 1)
RAMPS = st.builds(
    Ramp, warmup=st.floats(0, 0.95), initial=SHARES, final=SHARES, shape=st.sampled_from(["cosine", "linear"])
)
TINY = 1e-12


@given(RAMPS, SHARES)
def test_factors_stay_between_the_ends_and_one(ramp: Ramp, progress: float) -> None:
    """A schedule never exceeds the learning rate that was set, nor falls below its lower end."""
    assert min(ramp.initial, ramp.final) - TINY <= ramp(progress) <= 1 + TINY


@given(RAMPS, st.tuples(SHARES, SHARES).map(sorted))
def test_the_rate_rises_to_its_peak_and_then_falls(ramp: Ramp, pair: list[float]) -> None:
    """Monotonic on either side of the end of the warm-up."""
    earlier, later = pair
    if later <= ramp.warmup:
        assert ramp(earlier) <= ramp(later) + TINY
    if earlier >= ramp.warmup:
        assert ramp(earlier) >= ramp(later) - TINY


@given(RAMPS, SHARES)
def test_small_steps_of_progress_make_small_steps_of_the_rate(ramp: Ramp, progress: float) -> None:
    """Continuous, at the end of the warm-up too: no slope is steeper than a straight rise, or than pi / 2 of a fall."""
    step = 1e-7
    rise = 1 / ramp.warmup if ramp.warmup > 0 else 0.0
    steepest = max(rise, math.pi / 2 / (1 - ramp.warmup))
    after = min(1.0, progress + step)
    if progress < ramp.warmup < after and ramp.warmup < step:
        return  # the rise lies within the step
    assert abs(ramp(after) - ramp(progress)) <= steepest * step + TINY


@given(RAMPS)
def test_ends_and_peak_are_as_stated(ramp: Ramp) -> None:
    """It begins at `initial` (where there is a warm-up), peaks at 1 and ends at `final`."""
    assert ramp(0.0) == pytest.approx(ramp.initial if ramp.warmup > 0 else 1.0)
    assert ramp(ramp.warmup) == pytest.approx(1.0)
    assert ramp(1.0) == pytest.approx(ramp.final, abs=TINY)


def test_the_usual_schedules() -> None:
    """Values one can check by hand."""
    assert [constant()(progress) for progress in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
    assert one_cycle()(0.25) == 1.0
    assert one_cycle()(0.125) == pytest.approx((0.04 + 1) / 2)
    assert warmup_cosine(warmup=0.0)(0.5) == pytest.approx(0.5)
    assert warmup_linear(warmup=0.2, final=0.1)(0.6) == pytest.approx(0.55)


@pytest.mark.parametrize("make", [one_cycle, warmup_cosine, warmup_linear])
def test_a_warm_up_may_be_as_long_as_a_number_of_updates(make) -> None:
    """As places of the other schedules: of a run of 2,000 updates 500 are a quarter."""
    timed, share = bound(make(warmup=updates(500)), updates(2000)), make(warmup=0.25)
    assert [timed(at / 10) for at in range(10)] == [share(at / 10) for at in range(10)]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: bound(warmup_cosine(warmup=updates(500)), epochs(3)), "500 updates is no place in a run of 3 epochs"),
        (lambda: bound(warmup_cosine(warmup=epochs(3)), epochs(3)), "warmup .* got 3 epochs of 3 epochs"),
        (lambda: one_cycle(warmup=1.0), r"warmup .* in \[0, 1\), .* got 1.0"),
        (lambda: one_cycle(warmup=-0.1), "got -0.1"),
        (lambda: warmup_cosine(initial=2.0), "initial is a factor of the learning rate, .* got 2.0"),
        (lambda: warmup_linear(final=math.nan), "final is a factor of the learning rate, .* got nan"),
        (lambda: Ramp(0.1, 0.0, 0.0, "square"), "cosine.*linear.*got 'square'"),
    ],
)
def test_a_ramp_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """The error has the name, the range and the value."""
    with pytest.raises(ValueError, match=problem):
        make()
