"""Loss spikes."""

from __future__ import annotations

import math

from stoker.training.telemetry import SpikeDetector


def falling(updates: int) -> list[float]:
    """A loss curve with a little noise."""
    return [2.0 * math.exp(-n / 20) + 0.02 * math.sin(7 * n) for n in range(updates)]


def test_a_falling_curve_has_no_spike() -> None:
    """Nor does its first value, with nothing to compare it with."""
    detector = SpikeDetector()
    assert [detector.look(loss) for loss in falling(60)] == [None] * 60


def test_a_jump_is_told_once_with_its_numbers() -> None:
    """As long as it lasts; the next jump is another one."""
    detector = SpikeDetector()
    told = [detector.look(loss) for loss in [*falling(40), 9.0, 8.0, 7.0, *falling(40)[20:], 12.0]]
    assert [at for at, sentence in enumerate(told) if sentence] == [40, 63]
    assert "jumped to 9 from a median of" in str(told[40])


def test_a_plateau_is_no_reason_to_cry() -> None:
    """Where nothing moves, a last digit that does is not ten deviations away."""
    detector = SpikeDetector()
    assert [detector.look(loss) for loss in [*[0.5] * 20, 0.5001]] == [None] * 21
