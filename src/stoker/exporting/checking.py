"""Holding an exported model against what it came from, in numbers.

Errors are the largest difference of any element, as a share of its output's largest value (`artifacts.difference`).
What cannot be asked at all is infinitely far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from stoker.artifacts import difference
from stoker.artifacts.answers import has_nan
from stoker.artifacts.elements import Arrays
from stoker.artifacts.variations import cut, filled, num_rows, rows, stacked
from stoker.errors import ServiceError
from stoker.exporting.trial import Trial
from stoker.records import Proof, TensorSpec

LIMIT = 1e-3
"""The most that answers may differ. Those of MiniLM and five small networks, in fp32, differed by 1.2e-6."""

Answer = Callable[[Arrays], Arrays]
"""Whatever answers: an engine's `run`."""


def prove_equal(who: str, answer: Answer, oracle: Answer, trial: Trial, limit: float = LIMIT) -> Proof:
    """That it answers as the oracle does, at every size of batch."""
    asked = list(trial.requests())
    errors = [(words, _apart(answer, request, partial(oracle, request))) for words, request in asked]
    return _worst(f"{who}, {'; '.join(words for words, _ in asked)}", errors, limit)


def prove_alone(
    who: str, answer: Answer, trial: Trial, limit: float = LIMIT, sizes: Sequence[int] | None = None
) -> Proof:
    """That every sample has the same answer alone as in batches of these sizes, by default those that are served."""
    sizes = tuple(size for size in (trial.served_sizes if sizes is None else sizes) if size > 1)
    count = num_rows(trial.samples)
    orders = [[at % count for at in range(size)] for size in sizes]
    what = f"{who}: each sample alone and among {', '.join(map(str, sizes))}"
    try:
        each = [answer(rows(trial.samples, slice(at, at + 1))) for at in range(min(count, max(sizes, default=1)))]
    except ServiceError as error:
        return Proof(what=f"{what}: {error.message}", error=math.inf, limit=limit)
    if stray := next((name for one in each for name, array in one.items() if array.shape[:1] != (1,)), None):
        return Proof(what=f"{what}: {stray!r} does not begin with the samples", error=math.inf, limit=limit)
    alone = stacked(each)
    errors = [
        (f"among {len(order)}", _apart(answer, rows(trial.samples, order), partial(rows, alone, order)))
        for order in orders
    ]
    return _worst(what, errors, limit)


def prove_padding(who: str, answer: Answer, trial: Trial, outputs: Iterable[TensorSpec], limit: float = LIMIT) -> Proof:
    """That a sample which is filled up, to share a batch with a longer one, has the answer that it has alone."""
    specs = tuple(outputs)
    short = rows(cut(trial.samples, trial.inputs, trial.shorter), slice(1))
    long = rows(trial.samples, slice(1, 2))
    shared = stacked([filled(short, trial.inputs, trial.sizes), long])

    def cut_back(request: Arrays) -> Arrays:
        return cut(rows(answer(request), slice(1)), specs, trial.shorter)

    sizes = ", ".join(f"{dim} {trial.shorter[dim]} in {size}" for dim, size in trial.sizes.items())
    return _worst(f"{who}: padded ({sizes})", [("", _apart(cut_back, shared, lambda: answer(short)))], limit)


def is_held(proof: Proof) -> bool:
    """Whether what was checked holds."""
    return proof.error <= proof.limit


def _apart(answer: Answer, request: Arrays, wanted: Callable[[], Arrays]) -> tuple[float, str]:
    """How far the answer is from what is wanted, and why where no number says it."""
    try:
        found, right = answer(request), wanted()
    except ServiceError as error:
        return math.inf, error.message
    if has_nan(found):
        return math.inf, "the answer has NaN"
    return difference(found, right), ""


def _worst(what: str, errors: Iterable[tuple[str, tuple[float, str]]], limit: float) -> Proof:
    """One proof of several errors; where it does not hold, with the request that was worst, and the reason."""
    at, (error, why) = max(errors, key=lambda one: one[1][0])
    reason = ": ".join(filter(None, (what, *((at, why) if error > limit else ()))))
    return Proof(what=reason, error=error, limit=limit)
