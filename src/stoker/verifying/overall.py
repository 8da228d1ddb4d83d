"""Which level of the exactness contract holds for the job?"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.records import FULL_PRECISIONS, Verdict
from stoker.verifying.subject import Level, Subject

_QUESTION = "Which level holds?"


def judge(subject: Subject, verdicts: Sequence[Verdict], *, is_random: bool) -> Verdict:
    """Sum the verdicts up: the level across resumes, and the one across plans."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        questions = "; ".join(verdict.question for verdict in failed)
        return Verdict(
            question=_QUESTION,
            answer="None, until what is marked above is mended.",
            passed=False,
            level="none",
            evidence=f"did not hold: {questions}",
        )
    reasons = _reasons(subject, verdicts, is_random=is_random)
    level: Level = "same law" if reasons else "same mathematics"
    why = f" ({', '.join(reasons)})" if reasons else ""
    return Verdict(
        question=_QUESTION,
        answer=f"{_on_resume(subject)} on resume under the same plan; {level} across legal plans{why}.",
        passed=True,
        level=level,
        evidence="on resume: on this device, with these library versions and threads",
    )


def _on_resume(subject: Subject) -> str:
    """The level across resumes: updates that came out equal on a GPU do not promise that the next ones will."""
    if subject.plan.device == "cpu":
        return "Bit-equal"
    return "Same law, though equal in the updates made here (a GPU's kernels may not be deterministic),"


def _reasons(subject: Subject, verdicts: Sequence[Verdict], *, is_random: bool) -> list[str]:
    """Why plans agree in law only."""
    reasons = []
    if subject.job.step is not None:
        reasons.append("nothing compares the job's own step in exact arithmetic")
    if is_random:
        reasons.append("the model's random draws, such as dropout, differ with the micro-batch")
    if subject.plan.precision not in FULL_PRECISIONS:
        reasons.append(f"{subject.plan.precision} rounds more than fp32")
    if not reasons and any(verdict.level == "same law" for verdict in verdicts):
        reasons.append("the model could not be compared in float64")
    return reasons
