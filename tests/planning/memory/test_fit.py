"""The odds that a plan fits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.model.memory import MemoryResiduals, fit_probability, largest_that_fits, needed

RATIOS = st.lists(st.floats(0.8, 1.25), max_size=40).map(tuple)


@given(RATIOS, st.floats(0.3, 3), st.floats(0.3, 3))
def test_more_memory_is_never_less_likely_to_do(ratios: tuple[float, ...], one: float, other: float) -> None:
    """The probability grows with the memory, between 0 and 1."""
    low, high = sorted((one, other))
    residuals = MemoryResiduals(kind="cuda", ratios=ratios)
    less, more = (fit_probability(1e9, room * 1e9, residuals) for room in (low, high))
    assert 0 <= less <= more <= 1


def test_a_device_never_measured_gets_a_wider_interval() -> None:
    """The same forecast; twenty good residuals make it narrower than none."""
    unseen = needed(1e9, MemoryResiduals(kind="cuda"))
    seen = needed(1e9, MemoryResiduals(kind="cuda", ratios=tuple(1 + 0.001 * (i - 10) for i in range(20))))
    assert unseen.high - unseen.low > 2 * (seen.high - seen.low)
    assert (unseen.basis, seen.basis) == ("datasheet", "calibrated")
    assert unseen.value == seen.value == 1e9


def test_what_a_compiled_plan_needs_of_a_gpu_is_less_certain() -> None:
    """An eighth more room than forecast is enough for a plan, not for a compiled one; on a CPU both need as much."""
    sure = {
        (kind, is_compiled): fit_probability(1e9, 1.125e9, MemoryResiduals(kind=kind, is_compiled=is_compiled))
        for kind in ("cuda", "cpu")
        for is_compiled in (False, True)
    }
    assert sure["cuda", False] >= 0.9 > sure["cuda", True] > 0.5
    assert sure["cpu", False] == sure["cpu", True]


def test_the_first_measurement_narrows_the_prior() -> None:
    """One run that needed just what was forecast: the device is known by then."""
    unseen, seen = (needed(1e9, MemoryResiduals(kind="cpu", ratios=ratios)) for ratios in ((), (1.0,)))
    assert unseen.high - unseen.low > 1.3 * (seen.high - seen.low)


def test_errors_that_were_all_one_sided_move_the_interval() -> None:
    """If every run needed 10 % more than forecast, a device with 5 % more room is unlikely to do."""
    residuals = MemoryResiduals(kind="cpu", ratios=(1.1,) * 30)
    assert fit_probability(1e9, 1.05e9, residuals) < 0.2
    assert fit_probability(1e9, 1.2e9, residuals) > 0.9
    assert needed(1e9, residuals).high == pytest.approx(1.1e9)


def test_the_odds_are_right_on_average() -> None:
    """Plans said to fit with 90 % or more do in at least 88 of 100 cases, whatever the errors' shape."""
    draw = random.Random(0)
    outcomes = []
    for _ in range(3000):
        ratios = [draw.choice((1.0, 1.02, draw.uniform(0.9, 1.1))) for _ in range(31)]
        room = draw.uniform(0.95, 1.12)
        if fit_probability(1.0, room, MemoryResiduals(kind="cuda", ratios=tuple(ratios[1:]))) >= 0.9:
            outcomes.append(ratios[0] <= room)
    assert len(outcomes) > 500
    assert sum(outcomes) / len(outcomes) >= 0.88


def test_half_the_forecast_never_fits_and_twice_always_does() -> None:
    """Beyond that no residual is believed."""
    residuals = MemoryResiduals(kind="cuda")
    assert fit_probability(1e9, 0.49e9, residuals) == 0
    assert fit_probability(1e9, 2.01e9, residuals) == 1


def test_near_the_forecast_nothing_is_certain() -> None:
    """Six tenths may do, and nine tenths more may not: a new case may lie beyond all earlier ones."""
    residuals = MemoryResiduals(kind="cuda", ratios=(1.0,) * 10)
    assert 0 < fit_probability(1e9, 0.6e9, residuals) < 0.1
    assert 0.9 < fit_probability(1e9, 1.9e9, residuals) < 1


def test_the_largest_size_that_fits() -> None:
    """In any order given; the largest, or none."""
    sizes = (64, 1, 8, 32, 2)
    assert largest_that_fits(sizes, lambda size: size <= 40) == 32
    assert largest_that_fits(sizes, lambda _: True) == 64
    assert largest_that_fits(sizes, lambda _: False) is None
    assert largest_that_fits((), lambda _: True) is None
