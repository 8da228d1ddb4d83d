"""The colours of the page."""

import pytest

from stoker.reporting.markup import COLOURS, PHASE_COLOURS, repainting
from stoker.reporting.summary import PHASES

TEXT = ("ink", "muted", "ember", "amber", "good", "bad")
AREAS = ("ember", "blue", "teal", "violet", "amber", "grey")


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "surface"])
def test_text_and_areas_stand_out(scheme: int, ground: str) -> None:
    """Text has a contrast of 4.5 to 1 and areas of 3 to 1 against both backgrounds, light and dark."""
    behind = COLOURS[ground][scheme]
    assert min((contrast(COLOURS[name][scheme], behind), name) for name in TEXT)[0] >= 4.5
    assert min((contrast(COLOURS[name][scheme], behind), name) for name in AREAS)[0] >= 3.0


def test_every_light_colour_has_one_dark_one() -> None:
    """Figures are repainted colour by colour, so no two names may share a light one."""
    assert len(repainting()) == len(COLOURS)


def test_every_phase_has_a_colour_of_its_own() -> None:
    """The time bar tells its phases apart."""
    assert set(PHASE_COLOURS) == set(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)
