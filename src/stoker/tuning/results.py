"""A study as records: every trial, and what mattered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from stoker.records.codec import JSON
from stoker.records.study import StudyTrial
from stoker.records.study import TrialState as State
from stoker.tuning.library import without_experimental_warnings

STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
"""Optuna's states in our words; a trial that waits has none, for nobody here makes one."""

HANDED_ON = "handed_on"
"""The mark of a trial that came to the end of its interval."""

LEAST_FOR_IMPORTANCE = 6
"""Finished trials from which on importance says something: two of them are the best, the others what they are not."""


def read_trials(study: optuna.Study) -> tuple[StudyTrial, ...]:
    """All trials of a study, in order."""
    return tuple(trial_of(one) for one in study.get_trials(deepcopy=False) if one.state in STATES)


def trial_of(frozen: FrozenTrial) -> StudyTrial:
    """A trial as it is in the storage."""
    known: dict[str, Any] = {**frozen.user_attrs.get("began", {}), **frozen.user_attrs.get("spent", {})}
    began, ended = frozen.datetime_start, frozen.datetime_complete
    reached = max(int(known.get("samples", 0)), frozen.last_step or 0)
    return StudyTrial(
        number=frozen.number,
        state=_state_of(frozen),
        parameters=dict(frozen.params),
        value=frozen.value if frozen.values else None,
        curve=tuple(sorted((int(step), float(value)) for step, value in frozen.intermediate_values.items())),
        samples=max(0, reached - int(known.get("from_samples", 0))),
        wall_s=float(known.get("wall_s", 0.0)),
        peak_bytes=int(known.get("peak_bytes", 0)),
        reason=str(known.get("reason", "")),
        run=str(known.get("run", "")),
        worker=str(known.get("worker", "")),
        began_at=began.timestamp() if began is not None else 0.0,
        ended_at=ended.timestamp() if ended is not None else None,
        member=known.get("member"),
        interval=known.get("interval"),
        parent=known.get("parent"),
    )


def _state_of(frozen: FrozenTrial) -> State:
    """A trial's state; what Optuna takes for pruned may have been handed on to the next interval of a population."""
    is_handed_on = frozen.state == TrialState.PRUNED and frozen.user_attrs.get(HANDED_ON, False)
    return "handed on" if is_handed_on else STATES[frozen.state]


def best_of(trials: Sequence[StudyTrial], *, higher_is_better: bool) -> dict[str, JSON] | None:
    """The best finished trial's number and value; None before there is one."""
    finished = [one for one in trials if one.state == "finished" and one.value is not None]
    if not finished:
        return None
    sign = -1.0 if higher_is_better else 1.0
    best = min(finished, key=lambda one: (sign * (one.value or 0.0), one.number))
    return {"trial": best.number, "value": best.value}


def importance(study: optuna.Study) -> dict[str, float]:
    """Each parameter's share in being among the best tenth of finished trials; empty where there are too few.

    Source: S. Watanabe, A. Bansal, F. Hutter, "PED-ANOVA", IJCAI 2023, as Optuna has it.
    """
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(finished) < LEAST_FOR_IMPORTANCE or len({one.value for one in finished}) < 2:
        return {}
    with without_experimental_warnings():
        found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: float(share) for name, share in found.items() if math.isfinite(share)}
