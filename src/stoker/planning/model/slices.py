"""How many slices a run takes, for places that end every job after a fixed time.

What: a run is cut into processes of equal length; each starts, goes on from the last checkpoint, saves before its time
is over and leaves. Use when: the place ends jobs (serverless GPUs, free notebooks, short queues).
Costs: starting and saving, once in each slice. Source: the limits of such places, as in docs/training.md.
"""

from __future__ import annotations

import dataclasses
import math

from stoker.errors import BadJob
from stoker.records import Decision, Estimate
from stoker.units import Duration, format_seconds, parse_duration

LEAVING_S = 2.0
"""Time from the last save of a slice to the end of its process [s]: closing files, other processes, Python."""

STARTING_S = 10.0
"""Time from the start of a process to its first update, where it is not known [s]: a judgement."""


def reserve_s(*, save_s: float, updates_s: float, evaluate_s: float = 0.0, upload_s: float = 0.0) -> float:
    """Time that has to be left in a slice for it to go on [s].

    Args:
        save_s: the longest save so far, from the copy to the durable file [s]; twice it, since disks vary.
        updates_s: updates until training can stop again [s]; twice it, since machines are shared.
        evaluate_s: an evaluation that is due before then [s].
        upload_s: sending a checkpoint to where it is kept [s].
    """
    return 2 * save_s + 2 * updates_s + 1.25 * evaluate_s + upload_s + LEAVING_S


def expected_slices(total_s: Estimate, slice_s: float, lost_s: float, *, is_guess: bool = False) -> str:
    """The line of a plan that says how many slices its forecast expects.

    Args:
        total_s: of the run [s].
        slice_s: length of a slice [s].
        lost_s: starting and leaving in each slice [s].
        is_guess: the forecast is one.

    >>> total = Estimate(value=9000, low=8000, high=11000, unit="s", basis="measured here")
    >>> expected_slices(total, 3000, 200)
    'slices of 50 min: 4 (3 to 4), each with 3 min 20 s of starting and saving'
    >>> expected_slices(total, 30, 60)
    'slices of 30.0 s: too short to train in, starting and saving alone take 1 min; each makes at least one update'
    """
    useful_s, length = slice_s - lost_s, f"slices of {format_seconds(slice_s)}"
    if useful_s <= 0:
        return (
            f"{length}: too short to train in, starting and saving alone take {format_seconds(lost_s)}; each makes at "
            "least one update"
        )
    low, middle, high = (max(1, math.ceil(part / useful_s)) for part in (total_s.low, total_s.value, total_s.high))
    if high == 1:
        return f"{length}: one is enough"
    guess = ", a guess until a plan is settled on" if is_guess else ""
    interval = f"{middle} ({low} to {high})" if low != high else f"{middle}"
    return f"{length}: {interval}{guess}, each with {format_seconds(lost_s)} of starting and saving"


def sliced(decision: Decision, slice_s: float, starting_s: float = STARTING_S) -> Decision:
    """The decision with a line on how many slices of `slice_s` it takes, each of which starts for `starting_s` [s]."""
    forecast = decision.chosen.forecast
    lost_s = starting_s + reserve_s(save_s=forecast.checkpoint_s.high, updates_s=forecast.step_s.value)
    line = expected_slices(forecast.total_s, slice_s, lost_s, is_guess=not decision.is_settled)
    return dataclasses.replace(decision, explanation=(*decision.explanation, line))


def length_in_s(length: Duration | float | str) -> float:
    """A slice's length [s]; raises BadJob if it is no positive time."""
    if isinstance(length, str):
        return parse_duration(length, "--slice")
    if isinstance(length, Duration):
        if length.unit != "seconds":
            raise BadJob(f"a slice is a time, not {length}", remedy="Give stoker.seconds(3000), or '50min'.")
        return length.value
    if not (math.isfinite(length) and length > 0):
        raise BadJob(f"a slice is a positive number of seconds, got {length}")
    return float(length)
