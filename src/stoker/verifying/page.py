"""The page: every question about a job, asked in turn."""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.jobs import Job
from stoker.loading import Datasets
from stoker.records import Coupling, Plan, Verdict
from stoker.verifying.equality import check_equality, is_random
from stoker.verifying.loss_form import check_loss_form
from stoker.verifying.order import check_order
from stoker.verifying.overall import judge
from stoker.verifying.own_step import check_own_step
from stoker.verifying.precision import check_precision
from stoker.verifying.resume import ThroughCheckpoint, check_resume
from stoker.verifying.separability import check_separability
from stoker.verifying.subject import Subject, Timebox

_SHARES = {"order": 0.1, "resume": 0.35, "equality": 0.55}
"""Of the time there is."""


def verify(
    job: Job,
    data: Datasets,
    plan: Plan,
    coupling: Coupling,
    *,
    through_checkpoint: ThroughCheckpoint,
    gradient_error: float | None = None,
    budget_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Verdict, ...]:
    """Examine what the exactness contract says of `job` under `plan`; every verdict says what was looked at.

    Args:
        job: what is learned.
        data: its samples.
        plan: how it would be executed.
        coupling: what the probe found of it.
        through_checkpoint: writes the first step's state to disk as a checkpoint and restores it into the second.
        gradient_error: of a plan of reduced precision, the gradient's relative error against fp32 [fraction].
        budget_s: about how long it may take [s]; a few updates are made in any case.
        clock: seconds that go by.

    Returns:
        One verdict a question, the level that holds last.

    Raises:
        BadJob: the job cannot be trained as it is.
        RunFailed: the loss is not finite.
    """
    subject = Subject(job, data, plan, coupling)

    def timebox(name: str) -> Timebox:
        return Timebox(_SHARES[name] * budget_s, clock)

    has_own_step = job.step is not None
    verdicts = [
        check_order(subject, timebox("order")),
        check_separability(subject),
        *([] if has_own_step else [check_loss_form(subject)]),
        check_resume(subject, through_checkpoint, timebox("resume")),
        check_own_step(subject) if has_own_step else check_equality(subject, timebox("equality")),
    ]
    if (precision := check_precision(subject, gradient_error)) is not None:
        verdicts.append(precision)
    return (*verdicts, judge(subject, verdicts, is_random=not has_own_step and is_random(subject)))
