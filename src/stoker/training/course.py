"""The course of a run: what its evaluations make of the learning rate, and of its end.

It is part of the state: kept with every checkpoint, so that a run that goes on decides what one never stopped decides.
Several processes know the same metrics, and each of them decides for itself, alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from stoker.jobs import Job
from stoker.jobs.extent import Extent
from stoker.jobs.habits import measure_of, plateau_of
from stoker.jobs.metrics import direction_of
from stoker.jobs.stopping import EarlyStopping, Stop
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.training.plateau import PlateauWatch
from stoker.training.stopping import Reaching, Waiting


class Course:
    """What a run's evaluations have decided so far.

    `verdict` is why the run ended before its time, None as long as it goes on.
    """

    def __init__(self, plateau: PlateauWatch | None = None, stops: tuple[Waiting | Reaching, ...] = ()) -> None:
        self._plateau, self._stops = plateau, stops
        self._judged = 0
        self.verdict: str | None = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """At the beginning of a job's run."""
        found = plateau_of(job)
        lower = None if found is None else _is_lower_better(job, found.metric, found.lower_is_better)
        plateau = None if found is None else PlateauWatch(found, lower_is_better=bool(lower))
        return cls(plateau, tuple(_watching(job, rule) for rule in job.stop))

    @property
    def rate_factor(self) -> float:
        """What the schedule's rate is multiplied by."""
        return 1.0 if self._plateau is None else self._plateau.factor

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Take in an evaluation of `valid`; what is to be told of it, if anything was decided.

        An evaluation that is made again, since what followed it was cut off, decides nothing a second time.

        Raises:
            RunFailed: a measure that the job waits for is not there.
        """
        if now.updates <= self._judged:
            return None
        self._judged = now.updates
        words = [words for one in self._stops if (words := one.judge(metrics, now, extent)) is not None]
        self.verdict = words[0] if words else None
        if self._plateau is not None and self._plateau.judge(metrics, now, extent):
            factor, at = self._plateau.factor, now.samples
            return f"a plateau at {at:,} samples: the learning rate is {factor:.3g} of its schedule's from here on"
        return None

    def state(self) -> dict[str, JSON]:
        """What is kept with a checkpoint; empty where there is nothing to decide."""
        if self._plateau is None and not self._stops:
            return {}
        return {
            "judged": self._judged, "verdict": self.verdict, "stops": [one.state() for one in self._stops],
            "plateau": None if self._plateau is None else self._plateau.state(),
        }  # fmt: skip

    def load(self, state: Mapping[str, JSON]) -> None:
        """Go on from what was kept; nothing, from where nothing was. A fork waits anew: its `stops` are None."""
        if not state:
            return
        self._judged, self.verdict = int(state["judged"]), state["verdict"]
        if state["stops"] is not None:
            for one, kept in zip(self._stops, state["stops"], strict=True):
                one.load(kept)
        if self._plateau is not None and state["plateau"] is not None:
            self._plateau.load(state["plateau"])


def _watching(job: Job, rule: Stop) -> Waiting | Reaching:
    lower = _is_lower_better(job, rule.metric, rule.lower_is_better)
    if isinstance(rule, EarlyStopping):
        return Waiting(rule, lower_is_better=lower)
    return Reaching(rule, lower_is_better=lower)


def _is_lower_better(job: Job, metric: str, given: bool | None) -> bool:  # noqa: FBT001 - a job's setting
    """Whether lower is better; the job has seen to it that somebody says."""
    return bool(direction_of(measure_of(job, metric), list(job.metrics), given))
