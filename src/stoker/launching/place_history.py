"""Lessons from earlier runs at a place: how long they queued, took to start, and trained, against their forecasts.

What: a line for each run that came home, in the cache. The next estimate for that place takes the median of each part
of the time there: the submission, the wait where the place itself cannot say when a job would start, and the start of
the processes. A run is expected to train at the pace of earlier runs of the same job on the same devices there, in the
same setting: another image, partition or number of CPUs may run at another pace. Of another job, as its forecast times
the median of measured over forecast says, where both are forecasts for the place before any correction. Costs: nothing.
It may be deleted; the next estimate then knows less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist, geometric_mean, median, stdev
from typing import ClassVar

from stoker.errors import StokerError
from stoker.launching import parse_target
from stoker.launching.launcher import LaunchTarget, Submission
from stoker.launching.start_up import FEWEST_UPDATES, TRIED_S
from stoker.records import Estimate, Forecast, Launch, digest
from stoker.reporting.launch_text import launch_waits
from stoker.store import RunDirectory, cache_root
from stoker.store.record_caches import RecordLog

NEWEST = 20
"""Runs of a place that count: the newest."""

NEWEST_PACES = 3
"""Runs of the same job that count for its pace: what else its devices do changes."""

_PACELESS = frozenset({"account", "clock", "time"}) | {
    *("bond", "deadline", "forwarding", "key", "move", "p2p", "pool", "value", "verify", "window")  # of a pool
}
"""Options of places that say who pays, for how long, and who is trusted: the pace does not depend on them."""

UNSEEN_FACTOR = 1.7
"""By how much a run may take longer than was measured on this machine for a place that has shown nothing yet [1]: seven
took 1.03 to 1.73 of that (bench/results/place_start_*.json, and one of 30 s of 2026-11-27)."""

PACE_DEVIATION = 0.1
"""Standard deviation of the logarithm of a pace between runs of the same job, where fewer differ less [1]: of nine runs
on two shared cores (bench/results/place_start_*_2026-11-27.json)."""

_EIGHT_OF_TEN = NormalDist().inv_cdf(0.9)

FEWEST_RATIOS = 2
"""One run alone may have met a bad day: forecasts are corrected from so many on."""


@dataclass(frozen=True, kw_only=True)
class PlaceRun:
    """A run that came home, and what was expected of it.

    Attributes:
        place: kind and address, such as `slurm:gpu`.
        word: the whole word of `--on`.
        job: what it trained and how (`job_key`); "": unknown.
        device: as `stoker plan --on` names it; "": unknown.
        setting: in which it ran (`setting_key`); "": unknown.
        submit_s: from the command to the submission [s]; None: not measured, or files were sent.
        queue_s: from the submission to the start of the run's processes [s]; None: not seen.
        startup_s: from there to the beginning of training [s]; None: not seen.
        forecast_s: total time of training, as forecast for the place when it was submitted [s]; None: it was not.
        measured_s: total time of training [s]; None: it did not finish, or not all of it there.
        tried_s: part of it in which the run tried plans [s]: the next run of the job there begins under the one chosen.
        samples: trained on in that time.
        spent: cost, in `currency`; None: unknown.
        at: when it was submitted, ISO 8601 in UTC.
    """

    schema: ClassVar[int] = 2

    place: str
    word: str
    run: str
    at: str
    job: str = ""
    device: str = ""
    setting: str = ""
    sent_bytes: int = 0
    submit_s: float | None = None
    queue_s: float | None = None
    startup_s: float | None = None
    forecast_s: float | None = None
    measured_s: float | None = None
    tried_s: float = 0.0
    samples: int = 0
    spent: float | None = None
    currency: str = "USD"


@dataclass(frozen=True, kw_only=True)
class PlaceLessons:
    """Statistics of the newest runs of a place.

    Attributes:
        num_runs: runs that count.
        submit_s: median time from the command to the submission, where nothing was sent [s]; None: never seen.
        queue_s: median wait [s]; None: never seen.
        startup_s: median time from the start of processes to the beginning of training [s]; None: never seen.
        longest_start_s: longest of these times [s]; None: never seen.
        ratio: by what to multiply a forecast [1]; 1 where too few runs compare.
        num_ratios: runs that were compared with their forecast.
        mean_error: mean distance of measured from forecast times, as a factor above 1; None: too few.
        pace_s: median time per sample of the same job on the same devices, in one setting [s]; None: it never ran so.
        num_paces: runs that it was measured in.
        is_sent: whether the files of the job were sent there before.
        pace_factor: in 8 of 10 runs the pace is between it divided and it multiplied by this [1].
    """

    num_runs: int = 0
    submit_s: float | None = None
    queue_s: float | None = None
    startup_s: float | None = None
    longest_start_s: float | None = None
    ratio: float = 1.0
    num_ratios: int = 0
    mean_error: float | None = None
    pace_s: float | None = None
    num_paces: int = 0
    is_sent: bool = False
    pace_factor: float = 1.0

    def run_time(self, forecast: Forecast) -> Estimate:
        """The time of training there [s]: at the pace of the same job, or else the forecast, corrected."""
        if self._is_unseen(forecast):
            total = forecast.total_s
            tried_s = TRIED_S if forecast.total_updates >= FEWEST_UPDATES and forecast.trials_s is None else 0.0
            value, low = total.value + tried_s, total.low + tried_s
            return replace(total, value=value, low=low, high=max(total.high + tried_s, UNSEEN_FACTOR * value))
        if self.pace_s is None or not forecast.total_samples:
            return forecast.total_s.scaled(self.ratio)
        value = self.pace_s * forecast.total_samples
        low, high = value / self.pace_factor, value * self.pace_factor
        return Estimate(value=value, low=low, high=high, unit="s", basis="calibrated")

    def in_words(self, forecast: Forecast) -> str:
        """What `run_time` rests on beyond the forecast; "" for nothing."""
        if self._is_unseen(forecast):
            return f"measured here and not there, so up to × {UNSEEN_FACTOR:g}"
        runs = f"{self.num_paces} earlier run{'s' if self.num_paces > 1 else ''}"
        if self.pace_s is not None and forecast.total_samples:
            ratio = self.run_time(forecast).value / forecast.total_s.value
            return f"at the pace of {runs} of this job there (forecast × {ratio:.2f})"
        if self.num_ratios and self.ratio != 1:
            return f"forecast × {self.ratio:.2f}, as {self.num_ratios} earlier runs took"
        return ""

    def _is_unseen(self, forecast: Forecast) -> bool:
        """Whether no run there says how what was measured on this machine differs there."""
        return self.mean_error is None and self.pace_s is None and forecast.total_s.basis == "measured here"


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


def job_key(code_digest: str, arguments: Iterable[str], target: LaunchTarget) -> str:
    """SHA-256 (hex) of what is trained and how: files, arguments of `train`, nodes, options of the word."""
    options = sorted(option for option in target.options if option.partition("=")[0] not in _PACELESS)
    return digest([code_digest, list(arguments), target.num_nodes, *options])


def setting_key(submission: Submission) -> str:
    """SHA-256 (hex) of what the pace of a job depends on beyond place and devices: environment and options there."""
    environment = submission.environment
    return digest(
        [
            environment if isinstance(environment, str) else environment.digest,
            submission.image,
            sorted(submission.variables.items()),
            sorted((name, value) for name, value in submission.options.items() if name not in _PACELESS),
        ]
    )


def remember_run(directory: RunDirectory, launch: Launch) -> None:
    """Add a run that came home; what cannot be read or written is left out: it is only for the next estimate."""
    with suppress(StokerError):
        if any((run.run, run.at) == (launch.run, launch.submitted_at) for run in place_history().read()):
            return
        events = directory.read_events() if directory.events_path.exists() else ()
        finished = directory.read_run() if directory.is_run else None
        is_whole = (
            finished is not None
            and finished.status == "finished"
            and finished.ended_early is None
            and finished.forked_from is None
            and not launch.continued_here_at
        )
        queue_s, startup_s = launch_waits(launch, events)
        decision = directory.read_decision() if is_whole else None
        tried_s = 0.0 if decision is None else decision.chosen.forecast.trials_s or 0.0
        place_history().append(
            PlaceRun(
                place=launch.place_taken or place_of(launch.place),
                word=launch.place,
                run=launch.run,
                at=launch.submitted_at,
                job=job_key(launch.code_digest, launch.arguments, parse_target(launch.place)),
                device=launch.device,
                setting=launch.setting,
                sent_bytes=launch.sent_bytes,
                submit_s=None if launch.sent_bytes else launch.submit_s,
                queue_s=queue_s,
                startup_s=startup_s,
                forecast_s=launch.forecast_s,
                measured_s=finished.wall_s if finished is not None and is_whole else None,
                tried_s=tried_s,
                samples=finished.samples if finished is not None and is_whole else 0,
                spent=launch.spent,
                currency=launch.currency,
            )
        )


def lessons_of(place: str, *, job: str = "", device: str = "", setting: str | None = None) -> PlaceLessons:
    """Statistics of the newest runs of a place (`place_of`), for a job (`job_key`) on a device, where these are known.

    Args:
        place: kind and address.
        job: of which the pace is wanted; "": of none.
        device: on which, as `stoker plan --on` names it.
        setting: in which (`setting_key`); None: in that of its newest run there.
    """
    history = [run for run in place_history().read() if run.place == place]
    known = history[-NEWEST:]
    startups = _values(run.startup_s for run in known)
    ratios = [run.measured_s / run.forecast_s for run in known if run.measured_s and run.forecast_s]
    same = [run for run in history if job and (run.job, run.device) == (job, device) and run.samples]
    if setting is None and same:
        setting = same[-1].setting
    measured = [(run, run.measured_s) for run in same if run.setting == setting and run.measured_s]
    paces = [(measured_s - run.tried_s) / run.samples for run, measured_s in measured][-NEWEST_PACES:]
    is_enough = len(ratios) >= FEWEST_RATIOS
    return PlaceLessons(
        num_runs=len(known),
        submit_s=_median(run.submit_s for run in known),
        queue_s=_median(run.queue_s for run in known),
        startup_s=_median(startups),
        longest_start_s=max(startups, default=None),
        ratio=median(ratios) if is_enough else 1.0,
        num_ratios=len(ratios),
        mean_error=geometric_mean([max(ratio, 1 / ratio) for ratio in ratios]) if is_enough else None,
        pace_s=_median(paces),
        num_paces=len(paces),
        is_sent=any(run.job == job for run in history if job),
        pace_factor=_factor_of(paces),
    )


def usual_start(kind: str) -> tuple[float | None, float | None]:
    """Median time to submit, and to start up, of the newest runs at all places of a kind [s]; None: never seen.

    For a place that has shown nothing: what starts is Python and PyTorch everywhere.
    """
    known = [run for run in place_history().read() if run.place.partition(":")[0] == kind][-NEWEST:]
    return _median(run.submit_s for run in known), _median(run.startup_s for run in known)


def _factor_of(paces: Sequence[float]) -> float:
    """By how much the next pace may differ from the median of these, as a factor in 8 of 10 runs [1]."""
    logs = [math.log(pace) for pace in paces if pace > 0]
    if not logs:
        return 1.0
    deviation = max(PACE_DEVIATION, stdev(logs) if len(logs) > 1 else 0.0)
    return math.exp(_EIGHT_OF_TEN * deviation * math.sqrt(1 + 1 / len(logs)))


def _values(measured: Iterable[float | None]) -> list[float]:
    return [value for value in measured if value is not None]


def _median(measured: Iterable[float | None]) -> float | None:
    values = _values(measured)
    return median(values) if values else None
