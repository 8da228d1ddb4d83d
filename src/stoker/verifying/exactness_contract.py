"""`stoker verify`: every question of the exactness contract about one job, and the level that holds.

Here are the questions whether samples are separable, whether the loss adds up over micro-batches, and whether batches
are the same however they are cut.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from stoker.activity import doing
from stoker.devices import attached_devices, planned_devices, resolve_place
from stoker.errors import RunFailed
from stoker.jobs import Entry, Job
from stoker.jobs.sampling import InOrder
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import Datasets
from stoker.loading.fields import tensors_of
from stoker.planning.decision import decide
from stoker.planning.model.search_space import allowed_states
from stoker.planning.resolved_job import ResolvedJob, resolve_job, users_code
from stoker.planning.safe_start import safe_start
from stoker.profiling.ceilings import computing_threads
from stoker.records import FULL_PRECISIONS, NOT_COMPARED, Coupling, Device, Plan, Position, Verdict
from stoker.records.run import DATA_GUARANTEES
from stoker.stepping.coupling import find_coupling
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.training.checkpoints import Checkpointer, restore
from stoker.verifying.plan_equality import check_equality, check_own_step, check_precision, check_states, is_random
from stoker.verifying.resume import ThroughCheckpoint, check_resume
from stoker.verifying.subject import Level, Subject, Timebox, same_bits, verdict


def verify(job: Job, *, on: str = "here", entry: Entry | None = None) -> tuple[Verdict, ...]:
    """Examine the exactness contract for a job, under the plan chosen for it here.

    Args:
        job: what is learned.
        on: the device: `here`, `cpu`, `cuda:0`.
        entry: the job file it was loaded from, if any.

    Raises:
        BadJob, DoesNotFit, NoDevice: as for `plan`.
    """
    prepared = resolve_job(job, entry)
    device = resolve_place(on, attached_devices())
    decision, coupling = decide(prepared, device)
    if coupling.evidence == NOT_COMPARED:  # of a plan kept by a run that was over before they were
        with users_code("the model or the loss", entry):
            coupling = find_coupling(prepared.job, prepared.data.train)
    with (
        TemporaryDirectory(prefix="stoker-verify-") as folder,
        computing_threads(decision.chosen.plan.intra_op_threads),
    ):

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
                begins_under=_begins_under(prepared, device, decision.chosen.plan),
            )


def _begins_under(prepared: ResolvedJob, device: Device, plan: Plan) -> Plan | None:
    """The plan of a run's first updates, where it begins at once under another one than `plan`."""
    start = safe_start(prepared, planned_devices(device.torch_name, (device,))[0])
    if start is None:
        return None
    loading = {name: getattr(plan, name) for name in ("loader", "num_workers", "prefetch_batches", "threads")}
    began = replace(start[0].chosen.plan, **loading)
    built = (
        "checkpointed_blocks",
        "checkpointing",
        "activation_offload",
        "loss_chunks",
        "optimizer_states",
        "optimizer_offload",
    )
    is_same_build = all(getattr(plan, name) == getattr(began, name) for name in built)
    return began if is_same_build and began.in_words() != plan.in_words() else None


_SHARES = {"order": 0.1, "resume": 0.35, "equality": 0.55}
"""Shares of the time limit [0 to 1]."""


def check_contract(  # noqa: PLR0913 - what the questions are asked of
    job: Job,
    data: Datasets,
    plan: Plan,
    coupling: Coupling,
    *,
    through_checkpoint: ThroughCheckpoint,
    gradient_error: float | None = None,
    begins_under: Plan | None = None,
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
        begins_under: the plan of a run's first updates, where it is another one.
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
    questions: dict[str, Callable[[], Verdict]] = {
        "the order of samples": lambda: check_order(subject, timebox("order")),
        "whether samples are separable": lambda: check_separability(subject),
        "the form of the loss": lambda: check_loss_form(subject),
        "resuming": lambda: check_resume(
            replace(subject, begins_under=begins_under), through_checkpoint, timebox("resume")
        ),
        "other plans": lambda: check_equality(subject, timebox("equality")),
    }
    if has_own_step:
        del questions["the form of the loss"]
        questions["other plans"] = lambda: check_own_step(subject)
    verdicts = []
    for number, (what, check) in enumerate(questions.items(), start=1):
        with doing(what, of=len(questions), step=number):
            verdicts.append(check())
    if (precision := check_precision(subject, gradient_error)) is not None:
        verdicts.append(precision)
    if (states := check_states(subject)) is not None:
        verdicts.append(states)
    return (*verdicts, overall_level(subject, verdicts, is_random=not has_own_step and is_random(subject)))


_LEVEL_QUESTION = "Which level holds?"


def overall_level(subject: Subject, verdicts: Sequence[Verdict], *, is_random: bool) -> Verdict:
    """The overall verdict: the level across resumes, and the one across plans."""
    failed = [each for each in verdicts if not each.passed]
    if failed:
        questions = "; ".join(each.question for each in failed)
        answer = "None, until what is marked above is mended."
        return verdict(_LEVEL_QUESTION, answer, f"did not hold: {questions}", None)
    reasons = []  # why plans agree in law only
    if subject.job.step is not None:
        reasons.append("nothing compares the job's own step in exact arithmetic")
    if is_random:
        reasons.append("the model's random draws, such as dropout, differ with the micro-batch")
    if subject.plan.precision not in FULL_PRECISIONS:
        reasons.append(f"{subject.plan.precision} rounds more than fp32")
    if allowed := allowed_states(subject.job.numerics):
        words = allowed[-1].replace("8bit", "8-bit")
        reasons.append(f"{words} optimiser states, which the job allows, round more than full ones")
    if not reasons and any(each.level == "same law" for each in verdicts):
        reasons.append("the model could not be compared in float64")
    # Updates that came out equal on a GPU do not guarantee that the next ones will.
    on_resume = (
        "Bit-equal"
        if subject.plan.device == "cpu"
        else "Same law, though equal in the updates made here (a GPU's kernels may not be deterministic),"
    )
    level: Level = "same law" if reasons else "same mathematics"
    why = f" ({', '.join(reasons)})" if reasons else ""
    return verdict(
        _LEVEL_QUESTION,
        f"{on_resume} on resume under the same plan; {level} across legal plans{why}.",
        "on resume: on this device, with these library versions and threads",
        level,
    )


_QUESTION = "Are samples separable?"
_UNSEEN = "a coupling that shows in none of these batches, such as a capacity that only rare ones exceed, is not found"


def check_separability(subject: Subject) -> Verdict:
    """The coupling of samples that the probe detected, and its remedy."""
    coupling, batch = subject.coupling, subject.job.batch_size
    causes = " and ".join(coupling.causes)
    if subject.job.step is not None:
        answer = f"Not asked: the update is the job's own step, which takes its batch of {batch} samples in one piece."
    elif coupling.kind == "separable" or coupling.group is None:
        answer = f"Yes: any micro-batch from 1 to {batch} samples is legal."
    elif coupling.kind == "batch_norm":
        answer = f"No: coupled by the batch statistics of {causes}, taken over {coupling.group} samples."
        if coupling.group < batch:
            answer += " A micro-batch is a whole number of such groups."
        else:
            answer += (
                f" Only the whole batch is a legal micro-batch. Smaller ones need coupling_group=… below {batch}, "
                "which is another job, or a norm of single samples (GroupNorm, LayerNorm)."
            )
    else:
        answer = (
            f"No: coupled by {causes}. Every group of {coupling.group} samples goes through the model alone. A smaller "
            "coupling_group makes micro-batches smaller, and is another job."
        )
    evidence = coupling.evidence if coupling.kind == "whole_group" else f"{coupling.evidence}; {_UNSEEN}"
    return verdict(_QUESTION, answer, evidence, "same mathematics")


_LOSS_QUESTION = "Does the loss add up over micro-batches?"
_FEW = 4
_FORMS = {
    "sum and count": "it gives a sum and a count, and an update divides once by the count of its whole batch",
    "value per sample": "it gives one value per sample or token; they are summed, and an update divides once by their "
    "number in its whole batch",
    "scalar": "it gives a scalar, and the probe found it to be a mean over samples",
}
_OF_GROUPS = "it gives a scalar, taken for the mean over the samples of each group"


def check_loss_form(subject: Subject) -> Verdict:
    """The form in which the loss function returns its value, and whether it may be accumulated."""
    step = Step(subject.job, subject.plan, subject.coupling)
    samples = min(_FEW if subject.coupling.kind == "separable" else subject.job.batch_size, subject.job.batch_size)
    batch = subject.first_batch(step, samples)
    form = step.objective.form(step.model, batch.cut(0, batch.size))
    blamed = next((cause for cause in subject.coupling.causes if cause.startswith("the loss")), None)
    if blamed is None:
        is_probed = form != "scalar" or subject.coupling.kind != "whole_group"
        answer = f"Yes: {_FORMS[form] if is_probed else _OF_GROUPS}."
    else:
        answer = f"No: {blamed.removeprefix('the loss: ')}. It is never accumulated: {_REMEDIES[form]}"
    evidence = f"returned for {batch.size} samples: {_RETURNED[form]}"
    return verdict(_LOSS_QUESTION, answer, evidence, "same mathematics")


_RETURNED = {
    "sum and count": "stoker.Loss(sum, count)",
    "value per sample": "a tensor of values",
    "scalar": "a scalar tensor",
}
_REMEDIES = {
    "sum and count": "let sum and count be sums over the samples given; weight penalties go into Objective(penalty=…).",
    "value per sample": 'if it compares the samples of a batch on purpose, say so: Objective(loss, scope="batch").',
    "scalar": "return stoker.Loss(sum, count) from it, with the sum over samples or valid tokens and their number; "
    'or, if it compares the samples of a batch on purpose, say so: Objective(loss, scope="batch").',
}


_ORDER_QUESTION = "Is the order of the data fixed?"
_FEWEST, _MOST = 4, 16
"""Batches compared: at least, and as many as time allows."""


def check_order(subject: Subject, timebox: Timebox) -> Verdict:
    """Compare batches from a middle position with those of an uninterrupted stream, bit for bit."""
    step = Step(subject.job, subject.plan, subject.coupling)
    plain = replace(subject.plan, loader=subject.plain_loader, num_workers=0)
    stream: list[Batch] = []
    for batch in replace(subject.source(step), plan=plain).batches(Position(), _MOST):
        stream.append(batch)
        if len(stream) >= _FEWEST and timebox.is_over:
            break
    middle = len(stream) // 2
    problem = (
        _problem_with_order(subject)
        or _problem_with_batches(subject, step, stream, middle)
        or _problem_with_cutting(stream[0], subject.plan.micro_batch)
    )
    is_computed = subject.data.train.data_class == "indexed"
    order = f"the order of {_num_ordered(subject)} samples of two epochs; " if is_computed else ""
    loader = f"{subject.plan.num_workers} loader workers" if subject.plan.num_workers else "this process"
    examined = (
        f"batches {middle + 1} to {len(stream)} fetched by {loader} after a start in the middle, against those of one "
        f"stream fetched in this process: indices and bytes; {order}"
        "the first batch made ready whole and in parts"
    )
    data_class = subject.data.train.data_class
    answer = f"Yes, {data_class}: {DATA_GUARANTEES[data_class]}." if problem is None else f"No: {problem}"
    return verdict(_ORDER_QUESTION, answer, examined, "bit-equal" if problem is None else None)


def _num_ordered(subject: Subject) -> int:
    return min(len(subject.data.train), 2**20)


def _problem_with_order(subject: Subject) -> str | None:
    """Check an epoch's order: every sample once, the same from its middle, another in the next unless in order."""
    train, seed, count = subject.data.train, subject.job.seed, _num_ordered(subject)
    if train.data_class != "indexed":
        return None  # the order of a stream is that of reading
    size, order = len(train), train.order(seed)
    first, second = (order.indices(epoch, 0, count) for epoch in (0, 1))
    if len(np.unique(first)) != count:
        return "an epoch's order holds a sample twice."
    if not np.array_equal(train.order(seed).indices(0, count // 2, count), first[count // 2 :]):
        return "an epoch's order depends on where it is begun."
    if size > 8 and np.array_equal(first, second) and not isinstance(subject.job.sampling, InOrder):
        return "two epochs have the same order."
    return None


def _problem_with_batches(subject: Subject, step: Step, stream: list[Batch], middle: int) -> str | None:
    resumed: BatchSource = subject.source(step)
    with closing(resumed.batches(subject.extent.position(middle), len(stream))) as batches:
        for number, (ours, theirs) in enumerate(itertools.zip_longest(batches, stream[middle:]), middle + 1):
            if ours is None or theirs is None or not np.array_equal(ours.indices, theirs.indices):
                return f"batch {number} holds other samples when training resumes."
            mine, others = tensors_of(ours.content), tensors_of(theirs.content)
            if len(mine) != len(others) or not all(map(same_bits, mine, others)):
                return (
                    f"batch {number} holds the same samples with other content when it is fetched again. Does the "
                    "dataset draw from a generator of its own, or read something that changes? Random draws in "
                    "__getitem__ are keyed if they come from random, numpy.random or torch."
                )
    return None


def _problem_with_cutting(batch: Batch, micro_batch: int) -> str | None:
    """Check that a sample's content does not depend on how the batch is cut, up to rounding at the ends of vectors."""
    if batch.size == 1:
        return None
    middle = micro_batch if micro_batch < batch.size else batch.size // 2
    first, last = tensors_of(batch.cut(0, middle)), tensors_of(batch.cut(middle, batch.size))
    for whole, *parts in zip(tensors_of(batch.cut(0, batch.size)), first, last, strict=True):
        if whole.dim() and whole.shape[0] == batch.size and not _is_close(whole, torch.cat(parts)):
            return (
                "augmentation or preparation gives a sample other content when the batch is cut otherwise. Let it "
                "draw from its second argument, draw.uniform() and draw.integers(low, high), and treat each sample by "
                "itself."
            )
    return None


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() and one.shape == other.shape:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    return same_bits(one, other)
