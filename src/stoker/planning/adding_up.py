"""Where bytes and time go, as parts that add up to what is forecast: what no trace knows is a part by its name."""

from __future__ import annotations

import dataclasses

from stoker.records import Breakdown, Forecast, Share

_LEAST = 0.01
"""What is missing is told where it is at least this share of the whole; below, it is rounding."""


def adding_up(breakdown: Breakdown, forecast: Forecast, *, is_cpu: bool) -> Breakdown:
    """The breakdown of a trace with what the forecast has beside it, largest parts first.

    On a CPU the peak is that of the whole process, most of which is PyTorch's own where the model is small; and a time
    that was measured has all that happens between operations. Where a trace expects more than was measured, its parts
    stay as they are.

    Args:
        breakdown: what one traced update takes.
        forecast: of the same plan.
        is_cpu: whether it runs on a CPU.
    """
    if is_cpu:
        memory = Share(what="the process besides", value=0.0, where="PyTorch itself, code, data in memory")
    else:
        memory = Share(what="beside the update", value=0.0, where="data kept on the device")
    is_measured = forecast.step_s.basis == "measured here"
    where = "measured: Python, waiting, other processes" if is_measured else "fetching samples"
    time = Share(what="between traced operations", value=0.0, where=where)
    return dataclasses.replace(
        breakdown,
        peak_bytes=_filled(breakdown.peak_bytes, forecast.peak_bytes.value, memory),
        step_s=_filled(breakdown.step_s, forecast.step_s.value, time),
    )


def _filled(shares: tuple[Share, ...], whole: float, rest: Share) -> tuple[Share, ...]:
    """The parts of `whole`, with what is missing as `rest`."""
    missing = whole - sum(share.value for share in shares)
    if missing < _LEAST * whole:
        return shares
    return tuple(sorted((*shares, dataclasses.replace(rest, value=missing)), key=lambda share: -share.value))
