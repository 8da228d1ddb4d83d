"""Are samples separable, or coupled through what? And does the loss add up over micro-batches?"""

from __future__ import annotations

from stoker.records import Verdict
from stoker.stepping.step import Step
from stoker.verifying.subject import Subject

_QUESTION = "Are samples separable?"
_UNSEEN = "a coupling that shows in none of these batches, such as a capacity that only rare ones exceed, is not found"


def check_separability(subject: Subject) -> Verdict:
    """The coupling of samples that the probe detected, and its remedy."""
    coupling, batch = subject.coupling, subject.job.batch
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
    return Verdict(
        question=_QUESTION,
        answer=answer,
        passed=True,
        level="same mathematics",
        evidence=coupling.evidence if coupling.kind == "whole_group" else f"{coupling.evidence}; {_UNSEEN}",
    )


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
    samples = min(_FEW if subject.coupling.kind == "separable" else subject.job.batch, subject.job.batch)
    batch = subject.first_batch(step, samples)
    form = step.objective.form(step.model, batch.cut(0, batch.size))
    blamed = next((cause for cause in subject.coupling.causes if cause.startswith("the loss")), None)
    if blamed is None:
        is_probed = form != "scalar" or subject.coupling.kind != "whole_group"
        answer = f"Yes: {_FORMS[form] if is_probed else _OF_GROUPS}."
    else:
        answer = f"No: {blamed.removeprefix('the loss: ')}. It is never accumulated: {_REMEDIES[form]}"
    evidence = f"returned for {batch.size} samples: {_RETURNED[form]}"
    return Verdict(question=_LOSS_QUESTION, answer=answer, passed=True, level="same mathematics", evidence=evidence)


_RETURNED = {
    "sum and count": "stoker.Loss(sum, count)",
    "value per sample": "a tensor of values",
    "scalar": "a scalar tensor",
}
_REMEDIES = {
    "sum and count": "let sum and count be sums over the samples given, and weight penalties go into Job(penalty=…).",
    "value per sample": 'if it compares the samples of a batch on purpose, say so: loss_scope="batch".',
    "scalar": "return stoker.Loss(sum, count) from it, with the sum over samples or valid tokens and their number; "
    'or, if it compares the samples of a batch on purpose, say so: loss_scope="batch".',
}
