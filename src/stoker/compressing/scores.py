"""A metric as one score a row, and the drop that a candidate costs, with bounds at a stated confidence.

What: each row has a score under the original and under the candidate; the drop is the mean of the differences. Its
bounds are quantiles of that mean under random weights of the rows (of a uniform Dirichlet distribution), with one row
added that lost all a row can lose. For rows that are kept or lost this is the exact bound of Clopper and Pearson, also
where few were lost: of n unchanged rows, up to about 3/n of all rows may change (the rule of three). That it holds for
every distribution is conjectured, and was not contradicted by experiments.
Use when: the metric is a mean over rows, which are independent draws of what the model will be asked.
Costs: RESAMPLES sums of as many draws as there are rows.
Source: Learned-Miller and Thomas 2019, "A New Confidence Interval for the Mean of a Bounded Random Variable" (Gaffke's
bound; ours takes the largest loss from both models' scores, and integrates over the added row's weight instead of
drawing it); Rubin 1981, "The Bayesian Bootstrap"; Bonferroni for several candidates.

Without targets the metric is `agreement` with the original's answers, 1 if they are the same: for class scores whether
the largest is the same one; for integers and strings the share of equal elements; for other numbers 1 less the distance
relative to the original's root mean square. The output that agrees least counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import is_filled_in
from stoker.errors import BadJob, first_line, nearest
from stoker.loading.lengths import IGNORED_TARGET
from stoker.records.compression import Interval
from stoker.stepping.named_losses import ACCURACIES

RESAMPLES = 4000
CONFIDENCE = 0.95
_CHUNK_DRAWS = 4_000_000
"""Draws in memory at once: 32 MB."""

Scores = NDArray[np.float64]
"""One score a row [N]; higher is better."""


def drop_of(original: Scores, candidate: Scores) -> float:
    """Mean loss of score from the original to the candidate [in the metric's unit]; negative if it is better."""
    return float(np.mean(original - candidate))


def drop_interval(original: Scores, candidate: Scores, *, confidence: float, seed: int = 0) -> Interval:
    """The drop with a lower and an upper bound, each of which holds with `confidence` on its own.

    Args:
        original: scores [N] of the original.
        candidate: scores [N] of the candidate on the same rows.
        confidence: such as 0.95; for several candidates see `corrected`.
        seed: of the draws; equal seeds give equal bounds.
    """
    losses = original - candidate
    worst = largest_loss(original, candidate)
    means, value = _means(losses, seed), drop_of(original, candidate)
    low, high = (_upper_bound(sign * means, len(losses), worst, confidence) for sign in (-1, 1))
    return Interval(value=value, low=min(value, -low), high=max(value, high))


def corrected(confidence: float, num_candidates: int) -> float:
    """Confidence [0 to 1] for each of several candidates, so that all bounds hold together with `confidence`.

    >>> round(corrected(0.95, 2), 4)
    0.975
    """
    return 1 - (1 - confidence) / max(1, num_candidates)


def largest_loss(original: Scores, candidate: Scores) -> float:
    """Largest loss of a row that these rows show: the range of both models' scores [in the metric's unit]."""
    both = np.concatenate([original, candidate])
    spread = float(both.max() - both.min())
    return spread or float(np.abs(both).max()) or 1.0


def rows_needed(max_drop: float, worst: float, confidence: float) -> int:
    """Number of rows that distinguish a candidate without any drop from one that loses more than `max_drop` [rows].

    If a share of rows p = max_drop / worst lost everything, none of n rows would show it with probability (1 - p)^n.

    >>> rows_needed(0.005, 1.0, 0.95)
    598
    """
    share = min(max(max_drop / worst, 1e-15), 1 - 1e-9)
    return max(2, math.ceil(math.log(1 - confidence) / math.log1p(-share)))


def rows_to_tell(original: Scores, candidate: Scores, max_drop: float, confidence: float) -> int | None:
    """About how many rows show that a candidate's drop is within `max_drop` [rows]; None if more would not help.

    Normal approximation: the bound approaches the drop as one over the root of the number of rows.
    """
    losses = original - candidate
    room = max_drop - float(losses.mean())
    if room <= 0:
        return None
    z = NormalDist().inv_cdf(confidence)
    spread = max(float(losses.std()), largest_loss(original, candidate) / len(losses))
    fewest = rows_needed(max_drop, largest_loss(original, candidate), confidence)
    return max(fewest, math.ceil((z * spread / room) ** 2))


def _means(losses: Scores, seed: int) -> Scores:
    """RESAMPLES means of all rows [N], each with random weights."""
    generator = np.random.default_rng(seed)
    values, counts = np.unique(losses, return_counts=True)
    if len(values) <= 64:  # few distinct losses, as of accuracy: draw the weight of each
        return _weighted(generator.standard_gamma(counts, size=(RESAMPLES, len(values))), values)
    chunk = max(1, _CHUNK_DRAWS // len(losses))
    sizes = [min(chunk, RESAMPLES - done) for done in range(0, RESAMPLES, chunk)]
    return np.concatenate([_weighted(generator.standard_exponential((size, len(losses))), losses) for size in sizes])


def _weighted(weights: Scores, values: Scores) -> Scores:
    """Means [R] of `values` [K] by each row of `weights` [R, K]."""
    means: Scores = weights @ values / weights.sum(axis=1)
    return means


def _upper_bound(means: Scores, rows: int, worst: float, confidence: float) -> float:
    """The quantile of the means of `rows` rows and of one more that lost `worst`.

    That row's share of all weight exceeds s with probability (1 - s)^rows.
    """
    room = np.maximum(worst - means, np.finfo(np.float64).tiny)
    low, high = float(means.min()), worst
    for _ in range(60):  # bisection, to the precision of a float
        middle = (low + high) / 2
        exceeds = np.mean(np.minimum(1.0, (worst - middle) / room) ** rows)
        low, high = (middle, high) if exceeds > 1 - confidence else (low, middle)
    return high


Array = Any
"""A NumPy array."""
PerRow = Callable[[Any, Any], Any]
"""`metric(outputs, targets)`: one score a row [N]. `outputs` is an array if the model has one output, else a dict."""


@dataclass(frozen=True)
class Metric:
    """A metric: the mean of the values that `per_row` gives, none above `highest`.

    With `is_agreement` the targets are the original's answers, by output. With `takes_names` `per_row` is given outputs
    by name also where there is one. Labels of `ignored` do not count, as in training; None: all targets do.
    """

    name: str
    per_row: PerRow
    lower_is_better: bool = False
    highest: float = float("inf")
    is_agreement: bool = False
    takes_names: bool = False
    ignored: int | None = None

    def scores(self, outputs: Arrays, targets: Array | None, rows: int) -> Scores:
        """One finite score a row [N], higher is better.

        Raises:
            BadJob: the function raised, or gave another number of scores, or one that is not finite.
        """
        try:
            is_single = len(outputs) == 1 and not self.takes_names
            if self.ignored is not None and isinstance(targets, np.ndarray) and targets.dtype.kind in "iu":
                targets = np.where(targets == self.ignored, IGNORED_TARGET, targets.astype(np.int64))
            values = self.per_row(next(iter(outputs.values())) if is_single else outputs, targets)
            scores = np.asarray(values, dtype=np.float64)
        except Exception as error:
            raise BadJob(
                f"the metric {self.name} raised {type(error).__name__}: {first_line(error)}",
                remedy="It is called as metric(outputs, targets) with NumPy arrays, and returns one score a row.",
            ) from error
        if scores.shape != (rows,):
            raise BadJob(
                f"the metric {self.name} gave scores of shape {list(scores.shape)} for {rows} rows",
                remedy="It has to return one score a row: a row's own loss or hit, not the mean.",
            )
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise BadJob(f"the metric {self.name} gave {scores[row]} for row {row}")
        return -scores if self.lower_is_better else scores

    def value(self, scores: Scores) -> float:
        """The metric [in its own unit], from the result of `scores`."""
        mean = float(np.mean(scores))
        return 0.0 - mean if self.lower_is_better else mean  # of an error of 0, no -0

    def allowed(self, max_drop: str, baseline: float) -> float:
        """Allowed drop in the metric's unit [1], from the user's text.

        A share, such as `0.5%`, is of 1 for a score (half a point of accuracy) and of the original's value for an error
        (mse, l1, a loss), which has its own scale. A plain number is in the metric's unit.

        Raises:
            BadJob: not a positive number, one that allows any candidate, or a share of an error of 0.
        """
        is_share = max_drop.strip().endswith("%")
        try:
            number = float(max_drop.strip().removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise BadJob(f"--max-drop {max_drop}: wanted a positive number or share, such as 0.5%")
        if is_share and number >= 1:
            raise BadJob(
                f"--max-drop {max_drop}: a drop of 100 % or more allows any candidate",
                remedy="Give a share below 100%, such as 0.5%.",
            )
        if not is_share and number >= self.highest:
            raise BadJob(
                f"--max-drop {max_drop}: {self.name} is at most {self.highest:g}, so any candidate is allowed",
                remedy=f"Give a number below {self.highest:g}, or a share such as 0.5%.",
            )
        if not (is_share and self.lower_is_better):
            return number
        if not baseline:
            raise BadJob(
                f"the original's {self.name} is 0 on these rows, and --max-drop {max_drop} of 0 allows nothing",
                remedy=f"Give --max-drop as a number in the unit of {self.name}, or --metric agreement.",
            )
        return number * abs(baseline)


def _accuracy(outputs: Array, targets: Array) -> Array:
    classes = _classes(outputs, targets)
    return _of_labels(outputs.argmax(axis=1) == classes, classes)


def _top5_accuracy(outputs: Array, targets: Array) -> Array:
    classes = _classes(outputs, targets)
    own = np.take_along_axis(outputs, np.maximum(classes, 0)[:, None], axis=1)
    return _of_labels((outputs > own).sum(axis=1) < 5, classes)


def _token_accuracy(outputs: Array, targets: Array) -> Array:
    return _of_labels(outputs.argmax(axis=-1) == targets, targets)


def _of_labels(values: Array, labels: Array) -> Array:
    """The mean over a row [N] of a value for each label [N, ...]; negative ones do not count."""
    counts = (labels >= 0).reshape(len(labels), -1)
    means: Array = (values.reshape(counts.shape) * counts).sum(axis=1) / np.maximum(1, counts.sum(axis=1))
    return means


def _elementwise(function: PerRow) -> PerRow:
    """The mean over a row of a value for each element."""

    def per_row(outputs: Array, targets: Array) -> Array:
        values = function(outputs, targets.reshape(outputs.shape))
        return values.reshape(len(values), -1).mean(axis=1)

    return per_row


def _cross_entropy(outputs: Array, targets: Array) -> Array:
    logits = outputs.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    classes = _classes(outputs, targets)
    picked: Array = np.take_along_axis(logs, np.maximum(classes, 0)[:, None], axis=1)[:, 0]
    return -_of_labels(picked, classes)


def _classes(outputs: Array, targets: Array) -> Array:
    """Class numbers [N, ...] of targets that are numbers, or shares of each class [N, K, ...]; such as those of pixels.

    Raises:
        ValueError: outputs are no scores of two classes or more, of which the largest would always be the first; or
            there is not one target for each.
    """
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"it takes scores of each class [N, classes], got {list(outputs.shape)}; of single logits: binary_accuracy"
        )
    if targets.shape == outputs.shape:
        shares: Array = targets.argmax(axis=1)
        return shares
    classes: Array = targets.reshape(len(outputs), *outputs.shape[2:]).astype(np.int64)
    return classes


def are_own_answers(outputs: Arrays, targets: Array | None) -> bool:
    """Whether targets are the model's own answers, up to rounding."""
    if len(outputs) != 1 or targets is None or isinstance(targets, dict):
        return False
    (own,) = outputs.values()
    if own.dtype.kind not in "fiu" or targets.dtype.kind not in "fiu" or own.size != targets.size:
        return False
    scale = float(np.abs(own).max(initial=0.0))
    return bool(np.allclose(own.reshape(-1), targets.reshape(-1), rtol=0.0, atol=1e-5 * scale))


Likeness = Literal["largest class", "equal values", "relative error"]


def likeness_of(name: str, original: Array, labelled: Collection[str]) -> Likeness:
    """The measure of agreement for an output, by the original's answers [N, ...].

    Class scores are rows of two or more numbers that have labels, are named logits, or are probabilities.
    """
    if original.dtype.kind not in "fV":
        return "equal values"
    if original.ndim != 2 or original.shape[1] < 2:
        return "relative error"
    if name in labelled or "logit" in name.lower():
        return "largest class"
    values = original.astype(np.float64)
    are_shares = bool((values >= 0).all()) and bool(np.allclose(values.sum(axis=1), 1, atol=1e-3))
    return "largest class" if are_shares else "relative error"


def agreement(labelled: Collection[str] = ()) -> Metric:
    """Agreement with the original's answers; `labelled` are outputs with class names."""

    def per_row(outputs: Array, targets: Array) -> Array:
        answers = outputs if isinstance(outputs, dict) else {next(iter(targets)): outputs}
        each = [_agreement(answers[name], own, likeness_of(name, own, labelled)) for name, own in targets.items()]
        return np.min(each, axis=0)

    return Metric("agreement", per_row, highest=1.0, is_agreement=True)


def _agreement(answer: Array, original: Array, kind: Likeness) -> Array:
    """Agreement of each row [N], from 0 to 1."""
    if kind == "largest class":
        return (answer.argmax(axis=1) == original.argmax(axis=1)).astype(np.float64)
    if kind == "equal values":
        return (answer == original).reshape(len(original), -1).astype(np.float64).mean(axis=1)
    a, b = (array.astype(np.float64).reshape(len(original), -1) for array in (answer, original))
    counts = np.isfinite(a) & np.isfinite(b) & ~is_filled_in(np.abs(b))
    differs = ~counts & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    errors = np.square(np.subtract(a, b, where=counts, out=np.zeros_like(a))).mean(axis=1)
    scale = float(np.mean(np.square(b[counts]))) if counts.any() else 0.0
    shares = np.sqrt(errors / scale) if scale else (errors > 0).astype(np.float64)
    return np.where(differs.any(axis=1), 0.0, 1 - np.minimum(1.0, shares))


_NAMED: Mapping[str, tuple[PerRow, bool]] = {
    "accuracy": (_accuracy, False),
    "top5_accuracy": (_top5_accuracy, False),
    "token_accuracy": (_token_accuracy, False),
    "binary_accuracy": (_elementwise(lambda outputs, targets: (outputs > 0) == (targets > 0.5)), False),
    "mse": (_elementwise(lambda outputs, targets: np.square(outputs - targets, dtype=np.float64)), True),
    "l1": (_elementwise(lambda outputs, targets: np.abs(outputs.astype(np.float64) - targets)), True),
    "cross_entropy": (_cross_entropy, True),
}
NAMES = (*_NAMED, "agreement")


def named(name: str, labelled: Collection[str] = ()) -> Metric:
    """A metric of Stoker's; for `labelled` see `agreement`.

    Raises:
        BadJob: there is none of that name.
    """
    if name == "agreement":
        return agreement(labelled)
    if name not in _NAMED:
        raise BadJob(f"{name!r} is no metric. {nearest(name, NAMES)}")
    per_row, lower = _NAMED[name]
    ignored = IGNORED_TARGET if name in (*ACCURACIES, "cross_entropy") else None
    return Metric(name, per_row, lower, float("inf") if lower else 1.0, ignored=ignored)
