"""Lessons from earlier runs at a place: how long they queued, and how far their forecasts were off.

What: a line for each run that came home, in the cache. The next estimate for that place takes the median wait where the
place itself cannot say when a job would start, and multiplies the forecast of the run by the median of measured over
forecast. Costs: nothing. It may be deleted; the next estimate then knows less.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import ClassVar

from stoker.errors import StokerError
from stoker.records import Launch
from stoker.reporting.launch_text import launch_waits
from stoker.store import RunDirectory, cache_root
from stoker.store.record_caches import RecordLog

NEWEST = 20
"""Runs of a place that count: the newest."""

FEWEST_RATIOS = 2
"""One run alone may have met a bad day: forecasts are corrected from so many on."""


@dataclass(frozen=True, kw_only=True)
class PlaceRun:
    """A run that came home, and what was expected of it.

    Attributes:
        place: kind and address, such as `slurm:gpu`.
        word: the whole word of `--on`.
        queue_s: from the submission to the first sign of the run's processes [s]; None: not seen.
        first_update_s: from there to the first progress of training [s]; None: not seen.
        forecast_s, measured_s: total time of training [s]; None: not forecast, or it did not finish.
        spent: cost, in `currency`; None: unknown.
        at: when it was submitted, ISO 8601 in UTC.
    """

    schema: ClassVar[int] = 1

    place: str
    word: str
    run: str
    at: str
    sent_bytes: int = 0
    queue_s: float | None = None
    first_update_s: float | None = None
    forecast_s: float | None = None
    measured_s: float | None = None
    spent: float | None = None
    currency: str = "USD"


@dataclass(frozen=True, kw_only=True)
class PlaceLessons:
    """Statistics of the newest runs of a place.

    Attributes:
        num_runs: runs that count.
        queue_s: median wait [s]; None: never seen.
        first_update_s: median time from the start of processes to the first progress [s]; None: never seen.
        longest_start_s: longest of these times [s]; None: never seen.
        ratio: by what to multiply a forecast [1]; 1 where too few runs compare.
        num_ratios: runs that were compared with their forecast.
        mean_error: mean distance of measured from forecast times, as a factor above 1; None: too few.
    """

    num_runs: int = 0
    queue_s: float | None = None
    first_update_s: float | None = None
    longest_start_s: float | None = None
    ratio: float = 1.0
    num_ratios: int = 0
    mean_error: float | None = None


NO_LESSONS = PlaceLessons()


def place_history() -> RecordLog[PlaceRun]:
    """Runs at places elsewhere, oldest first."""
    return RecordLog(cache_root() / "places" / "runs.jsonl", PlaceRun, what="what a place showed")


def place_of(word: str) -> str:
    """Kind and address of a word of `--on`, without the shape of the job.

    >>> place_of("slurm:me@login:gpu/2x4xa100"), place_of("ssh:box")
    ('slurm:me@login:gpu', 'ssh:box')
    """
    return word.partition("/")[0]


def remember_run(directory: RunDirectory, launch: Launch) -> None:
    """Add a run that came home; what cannot be read or written is left out: it is only for the next estimate."""
    with suppress(StokerError):
        if any((run.run, run.at) == (launch.run, launch.submitted_at) for run in place_history().read()):
            return
        events = directory.read_events() if directory.events_path.exists() else ()
        finished = directory.read_run() if directory.is_run else None
        is_whole = finished is not None and finished.status == "finished" and finished.ended_early is None
        queue_s, first_update_s = launch_waits(launch, events)
        decision = directory.read_decision() if is_whole else None
        forecast_s = launch.forecast_s
        if forecast_s is None and decision is not None and decision.is_settled:
            forecast_s = decision.chosen.forecast.total_s.value
        place_history().append(
            PlaceRun(
                place=place_of(launch.place),
                word=launch.place,
                run=launch.run,
                at=launch.submitted_at,
                sent_bytes=launch.sent_bytes,
                queue_s=queue_s,
                first_update_s=first_update_s,
                forecast_s=forecast_s,
                measured_s=finished.wall_s if finished is not None and is_whole else None,
                spent=launch.spent,
                currency=launch.currency,
            )
        )


def lessons_of(place: str, runs: Iterable[PlaceRun] | None = None) -> PlaceLessons:
    """Statistics of the newest runs of a place (`place_of`); `runs` default to the history here."""
    known = [run for run in (place_history().read() if runs is None else runs) if run.place == place][-NEWEST:]
    queued = [run.queue_s for run in known if run.queue_s is not None]
    first = [run.first_update_s for run in known if run.first_update_s is not None]
    ratios = [run.measured_s / run.forecast_s for run in known if run.measured_s and run.forecast_s]
    is_enough = len(ratios) >= FEWEST_RATIOS
    return PlaceLessons(
        num_runs=len(known),
        queue_s=median(queued) if queued else None,
        first_update_s=median(first) if first else None,
        longest_start_s=max(first, default=None),
        ratio=median(ratios) if is_enough else 1.0,
        num_ratios=len(ratios),
        mean_error=geometric_mean([max(ratio, 1 / ratio) for ratio in ratios]) if is_enough else None,
    )
