"""`stoker verify`: every question of the exactness contract about one job, and the level that holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from stoker.devices import attached_devices, resolve_place
from stoker.errors import RunFailed
from stoker.jobs import Entry, Job
from stoker.loading.datasets import Datasets
from stoker.planning.decision import decide
from stoker.planning.resolved_job import resolve_job, users_code
from stoker.profiling.ceilings import computing_threads
from stoker.records import FULL_PRECISIONS, Coupling, Plan, Position, Verdict
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.training.checkpoints import Checkpointer, restore
from stoker.verifying.plan_equality import check_equality, check_own_step, check_precision, is_random
from stoker.verifying.resume import ThroughCheckpoint, check_resume
from stoker.verifying.separability import check_loss_form, check_order, check_separability
from stoker.verifying.subject import Level, Subject, Timebox


def verify(job: Job, *, on: str = "here", entry: Entry | None = None) -> tuple[Verdict, ...]:
    """Examine the exactness contract for a job, under the plan chosen for it here.

    Raises:
        BadJob, DoesNotFit, NoDevice: as for `plan`.
    """
    prepared = resolve_job(job, entry)
    device = resolve_place(on, attached_devices())
    decision, coupling = decide(prepared, device)
    with TemporaryDirectory(prefix="stoker-verify-") as folder, computing_threads(decision.chosen.plan.threads):

        def through_checkpoint(saved: Step, fresh: Step) -> None:
            store = CheckpointStore(Path(folder))
            checkpointer = Checkpointer(store, spec_digest=prepared.spec.digest(), version=version("stoker"))
            checkpointer.save(saved, Position(), {}, best=False)
            written = checkpointer.close()
            newest = store.newest()
            if newest is None or not written:
                raise RunFailed(f"the checkpoint in {folder} vanished")
            restore(fresh, *newest)

        with users_code("the model or the loss", entry):
            return check_contract(
                prepared.job,
                prepared.data,
                decision.chosen.plan,
                coupling,
                through_checkpoint=through_checkpoint,
                gradient_error=decision.chosen.forecast.gradient_error,
            )


_SHARES = {"order": 0.1, "resume": 0.35, "equality": 0.55}
"""Shares of the time limit [0 to 1]."""


def check_contract(
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
    """Examine the exactness contract for `job` under `plan`; every verdict names its evidence.

    Args:
        job: the job.
        data: its samples.
        plan: the plan.
        coupling: how samples influence each other.
        through_checkpoint: writes the first step's state to disk as a checkpoint and restores it into the second.
        gradient_error: relative error of a reduced precision's gradient against fp32 [0 to 1].
        budget_s: approximate time limit [s]; a few updates are made in any case.
        clock: monotonic [s].

    Returns:
        One verdict a question; the last one is the level that holds.

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
    return (*verdicts, overall_level(subject, verdicts, is_random=not has_own_step and is_random(subject)))


_LEVEL_QUESTION = "Which level holds?"


def overall_level(subject: Subject, verdicts: Sequence[Verdict], *, is_random: bool) -> Verdict:
    """The overall verdict: the level across resumes, and the one across plans."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        questions = "; ".join(verdict.question for verdict in failed)
        return Verdict(
            question=_LEVEL_QUESTION,
            answer="None, until what is marked above is mended.",
            passed=False,
            level="none",
            evidence=f"did not hold: {questions}",
        )
    reasons = []  # why plans agree in law only
    if subject.job.step is not None:
        reasons.append("nothing compares the job's own step in exact arithmetic")
    if is_random:
        reasons.append("the model's random draws, such as dropout, differ with the micro-batch")
    if subject.plan.precision not in FULL_PRECISIONS:
        reasons.append(f"{subject.plan.precision} rounds more than fp32")
    if not reasons and any(verdict.level == "same law" for verdict in verdicts):
        reasons.append("the model could not be compared in float64")
    # Updates that came out equal on a GPU do not guarantee that the next ones will.
    on_resume = (
        "Bit-equal"
        if subject.plan.device == "cpu"
        else "Same law, though equal in the updates made here (a GPU's kernels may not be deterministic),"
    )
    level: Level = "same law" if reasons else "same mathematics"
    why = f" ({', '.join(reasons)})" if reasons else ""
    return Verdict(
        question=_LEVEL_QUESTION,
        answer=f"{on_resume} on resume under the same plan; {level} across legal plans{why}.",
        passed=True,
        level=level,
        evidence="on resume: on this device, with these library versions and threads",
    )
