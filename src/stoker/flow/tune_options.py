"""What a study may be told, and which of it does not go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stoker.errors import BadJob, nearest
from stoker.records import Plan
from stoker.records.study import PrunerName, SamplerName
from stoker.tuning.population import LEAST_MEMBERS

PLANNED = 3
"""Configurations that are planned for the forecast: both ends of the space, and its middle."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a study goes about it.

    Args:
        trials: configurations in all, those that are pruned or fail included; of a grid, at most its points; of a
            population, its members.
        sampler: what proposes them: `grid`, `random`, `tpe`, `gp`; or `pbt`, a population whose settings change while
            it trains.
        pruner: what gives them up early: `none`, `asha`, `hyperband` or `median`; None for ASHA, except under `pbt` and
            `gp`, which give up none.
        intervals: of a population: after so many parts of a run each do the worst go on from the best; None for five,
            or as many as a run has evaluations.
        objective: what is best: a metric on held-out data, such as `valid/accuracy` (default: what chooses a run's
            best checkpoint).
        parallel: trials at once, at most; None for as many as cores and memory allow.
        seconds: the longest this call may take [s]; what is under way then is saved and goes on the next time.
        seed: of what is proposed.
        storage: URL of a database that several machines share; empty for a file in the study's directory.
        study: its name (default: after the job and the options).
        on: the device, as for `stoker.train`.
        plan: a plan for every trial, instead of the planner's choice for each.
        planned: configurations that are planned beforehand, for the forecast; 0 for none.
        in_processes: each trial in a process of its own; False for this process, one after another.
    """

    trials: int = 20
    sampler: SamplerName = "tpe"
    pruner: PrunerName | None = None
    intervals: int | None = None
    objective: str | None = None
    parallel: int | None = 1
    seconds: float | None = None
    seed: int = 0
    storage: str = ""
    study: str | None = None
    on: str = "here"
    plan: Plan | Path | None = None
    planned: int = PLANNED
    in_processes: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise BadJob(f"--trials {self.trials}: wanted a number from 1 on")
        for option, value, known in (("sampler", self.sampler, SamplerName), ("pruner", self.rule, PrunerName)):
            names = get_args(known)
            if value not in names:
                raise BadJob(f"--{option} {value}: there is no such {option}. {nearest(value, names)}")
        self._require_population()
        if self.seconds is not None and not self.seconds > 0:
            raise BadJob(f"--time: wanted a time above 0, got {self.seconds:g} s")
        if not self.in_processes and self.parallel != 1:
            raise BadJob(f"parallel={self.parallel} needs processes", remedy="Drop in_processes=False.")
        if (self.objective or "").startswith("test/"):
            raise BadJob(
                f"--objective {self.objective}: what is chosen by the test data is not tested by it any more",
                remedy="Choose by valid/…; the test data is for the one model that comes of it.",
            )

    @property
    def rule(self) -> PrunerName:
        """What gives trials up."""
        return self.pruner or ("none" if self.sampler in ("pbt", "gp") else "asha")

    def _require_population(self) -> None:
        """Refuse options that do not go with a population, or only with one.

        Raises:
            BadJob: which.
        """
        if self.sampler != "pbt":
            if self.intervals is not None:
                raise BadJob(f"--intervals {self.intervals} is for a population", remedy="Add --sampler pbt.")
            return
        if self.trials < LEAST_MEMBERS:
            raise BadJob(f"--sampler pbt --trials {self.trials}: of a population, that is its members, and the worst "
                         f"quarter is replaced: wanted {LEAST_MEMBERS} at least")  # fmt: skip
        if self.intervals is not None and self.intervals < 2:
            raise BadJob(f"--intervals {self.intervals}: wanted 2 at least", remedy="Leave it out for 5.")
        if self.rule != "none":
            raise BadJob(f"--pruner {self.rule}: a population replaces its worst members itself",
                         remedy="Leave --pruner out.")  # fmt: skip
        if self.storage:
            raise BadJob("--storage: the members of a population take over each other's checkpoints, on one machine",
                         remedy="Leave --storage out.")  # fmt: skip


def options_from(given: Mapping[str, Any]) -> TuneOptions:
    """The options of these names.

    Raises:
        BadJob: there is no such option, or it cannot have that value.
    """
    known = [one.name for one in dataclasses.fields(TuneOptions)]
    for name in given:
        if name not in known:
            raise BadJob(f"stoker.tune has no option {name!r}. {nearest(name, known)}")
    return TuneOptions(**given)
