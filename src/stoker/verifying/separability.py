"""Do samples influence each other, through what, and which micro-batches does that leave?"""

from __future__ import annotations

from stoker.records import Coupling, Verdict
from stoker.verifying.subject import Subject

_QUESTION = "Are samples separable?"
_UNSEEN = "a coupling that shows in none of these batches, such as a capacity that only rare ones exceed, is not found"


def check_separability(subject: Subject) -> Verdict:
    """Say what the probe found of the job, and what a user can do."""
    coupling, batch = subject.coupling, subject.job.batch
    atomic = f"Not asked: the update is the job's own step, which takes its batch of {batch} samples in one piece."
    return Verdict(
        question=_QUESTION,
        answer=_answer(coupling, batch) if subject.job.step is None else atomic,
        passed=True,
        level="same mathematics",
        evidence=coupling.evidence if coupling.kind == "whole_group" else f"{coupling.evidence}; {_UNSEEN}",
    )


def _answer(coupling: Coupling, batch: int) -> str:
    if coupling.kind == "separable" or coupling.group is None:
        return f"Yes: any micro-batch from 1 to {batch} samples is legal."
    causes = " and ".join(coupling.causes)
    if coupling.kind == "batch_norm":
        how = f"No: coupled by the batch statistics of {causes}, taken over {coupling.group} samples."
        if coupling.group < batch:
            return f"{how} A micro-batch is a whole number of such groups."
        return (
            f"{how} Only the whole batch is a legal micro-batch. Smaller ones need coupling_group=… below {batch}, "
            "which is another job, or a norm of single samples (GroupNorm, LayerNorm)."
        )
    return (
        f"No: coupled by {causes}. Every group of {coupling.group} samples goes through the model alone. A smaller "
        "coupling_group makes micro-batches smaller, and is another job."
    )
