"""How far forecasts have been off on a device, from what runs wrote down of themselves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from stoker.records import Calibration

TO_SPEAK_OF_S = 5.0
"""Runs that were shorter [s], by forecast and by the clock, are left out: starting and stopping is most of them."""

_BEYOND_PER_CENT = 10.0
"""Factors above which a figure per cent says less than words do."""


def errors_so_far(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    """One line on how far forecasts have been off, before trials and after them; none where there is nothing to tell.

    Args:
        calibrations: of one device.
    """
    words = []
    for when, is_tried in (("from traces alone", False), ("after trials", True)):
        for quantity, name in (("total_s", "time"), ("peak_bytes", "memory")):
            found = [c for c in calibrations if c.quantity == quantity and (c.basis == "measured here") == is_tried]
            if error := typical_error(found):
                words.append(f"{name} {when} {error}")
    return (f"errors of forecasts here so far (median): {', '.join(words)}",) if words else ()


def typical_error(calibrations: Sequence[Calibration]) -> str:
    """The median error in words, half as much as wrong as twice as much; empty where no run is worth counting."""
    factors = [
        abs(math.log(c.measured / c.forecast))
        for c in calibrations
        if min(c.measured, c.forecast) > 0
        and (c.quantity != "total_s" or max(c.measured, c.forecast) >= TO_SPEAK_OF_S)
    ]  # fmt: skip
    if not factors:
        return ""
    factor = math.exp(statistics.median(factors))
    return "over ten times off" if factor > _BEYOND_PER_CENT else f"{factor - 1:.1%}"
