"""What is known of a step of the job's own, and what cannot be promised of it."""

from __future__ import annotations

from stoker.records import Verdict
from stoker.verifying.subject import Subject

_QUESTION = "Is training the same under every legal plan?"


def check_own_step(subject: Subject) -> Verdict:
    """Say what follows from the step being atomic; what it computes is not looked into."""
    batch = subject.job.batch
    return Verdict(
        question=_QUESTION,
        answer=f"In law: the update is the job's own step, which every plan gives all {batch} samples at once with the "
        "same random draws. Whether it divides by the right counts is not examined, nor compared in exact arithmetic.",
        passed=True,
        level="same law",
        evidence="declared: step=…, which is never cut; that a run resumes to the same bits is examined above",
    )
