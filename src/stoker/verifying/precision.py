"""Is reduced precision close enough to fp32?"""

from __future__ import annotations

from stoker.records import FULL_PRECISIONS, LARGEST_GRADIENT_ERROR, Verdict
from stoker.verifying.subject import Subject


def check_precision(subject: Subject, gradient_error: float | None) -> Verdict | None:
    """Judge the gradient's relative error against fp32 from the same state; None where the plan is fp32."""
    precision = subject.plan.precision
    if precision in FULL_PRECISIONS:
        return None
    question = f"Is {precision} close enough to fp32?"
    if gradient_error is None:
        answer = "Unknown: its gradient was not compared with that of fp32."
        return Verdict(question=question, answer=answer, passed=False, level="none", evidence="not measured")
    passed = gradient_error <= LARGEST_GRADIENT_ERROR
    compared = f"gradients are {gradient_error:.2%} off those of fp32, limit {LARGEST_GRADIENT_ERROR:.0%}"
    return Verdict(
        question=question,
        answer=f"{'Yes' if passed else 'No'}: {compared}.",
        passed=passed,
        level="same law" if passed else "none",
        evidence="norm of the difference over the norm, in one update from equal weights; the worst of three batches",
    )
