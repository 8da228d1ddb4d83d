"""The share of channels for a speed is found with few measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.compressing.pruning import CLOSE, LARGEST, RatioProbe, fast_enough, next_ratio


@given(power=st.floats(0.3, 4), limit=st.floats(0.3, 2.5), target=st.sampled_from([1.25, 1.5, 2.0]))
def test_the_share_is_found_where_there_is_one(power: float, limit: float, target: float) -> None:
    """Whatever the curve, few measurements end near the speed, or show that the largest share does not reach it."""

    def speed(ratio: float) -> float:
        return float(1 + (2**limit - 1) * (ratio / LARGEST) ** power)

    probes: list[RatioProbe] = []
    while (ratio := next_ratio(probes, target)) is not None:
        assert 0 < ratio <= LARGEST
        probes.append(RatioProbe(ratio, speed(ratio)))
        assert len(probes) <= 25
    best = fast_enough(probes, target)
    if speed(LARGEST) < target:
        assert best is None
        assert probes[-1].ratio == LARGEST
    else:
        assert best is not None
        slower = max((probe.ratio for probe in probes if probe.ratio < best.ratio), default=0.0)
        assert best.speed_up <= CLOSE * target or best.ratio - slower < 0.02


@pytest.mark.parametrize(
    ("probes", "target", "ratio"),
    [
        ([], 2.0, 0.5),
        ([RatioProbe(0.5, 1.53)], 1.5, None),
        ([RatioProbe(0.5, 1.2), RatioProbe(LARGEST, 1.9)], 2.0, None),
        ([RatioProbe(0.5, 1.0)], 1.5, 0.75),
    ],
)
def test_steps(probes: list[RatioProbe], target: float, ratio: float | None) -> None:
    """Half first; near enough ends it; so does the largest share that is too slow; else further out."""
    assert next_ratio(probes, target) == pytest.approx(ratio)


def test_measurements_for_one_speed_serve_the_next() -> None:
    """What was measured for 1.5 brackets 1.25 at once."""
    probes = [RatioProbe(0.5, 1.6), RatioProbe(0.42, 1.52)]
    ratio = next_ratio(probes, 1.25)
    assert ratio is not None
    assert 0.05 < ratio < 0.42
