"""In which form does the loss come, and may it be accumulated?"""

from __future__ import annotations

from stoker.records import Verdict
from stoker.stepping import Step
from stoker.verifying.subject import Subject

_QUESTION = "Does the loss add up over micro-batches?"
_FEW = 4
_FORMS = {
    "sum and count": "it gives a sum and a count, and an update divides once by the count of its whole batch",
    "value per sample": "it gives one value per sample or token; they are summed, and an update divides once by their "
    "number in its whole batch",
    "scalar": "it gives a scalar, and the probe found it to be a mean over samples",
}
_OF_GROUPS = "it gives a scalar, taken for the mean over the samples of each group"


def check_loss_form(subject: Subject) -> Verdict:
    """Look at what the loss function returns, and at what the probe found of it."""
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
    return Verdict(question=_QUESTION, answer=answer, passed=True, level="same mathematics", evidence=evidence)


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
