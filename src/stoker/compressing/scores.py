"""A metric as one score a row, higher is better: Stoker's by name, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.artifacts.elements import Arrays
from stoker.compressing.drops import Scores
from stoker.errors import BadJob, first_line, nearest

Array = Any
"""An array of NumPy's."""
PerRow = Callable[[Any, Any], Any]
"""`metric(outputs, targets)`: one score a row [N]. `outputs` is an array if the model has one output, else a dict."""


@dataclass(frozen=True)
class Metric:
    """A metric by name; `per_row` gives values a row, of which the mean is the metric."""

    name: str
    per_row: PerRow
    lower_is_better: bool = False

    def scores(self, outputs: Arrays, targets: Array | None, rows: int) -> Scores:
        """One finite score a row [N], higher is better.

        Raises:
            BadJob: the function raised, gave another number of scores, or one that is no finite number.
        """
        try:
            found = self.per_row(next(iter(outputs.values())) if len(outputs) == 1 else outputs, targets)
            scores = np.asarray(found, dtype=np.float64)
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
            at = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise BadJob(f"the metric {self.name} gave {scores[at]} for row {at}")
        return -scores if self.lower_is_better else scores

    def value(self, scores: Scores) -> float:
        """The metric itself, of scores as `scores` gives them."""
        mean = float(np.mean(scores))
        return -mean if self.lower_is_better else mean

    def allowed(self, max_drop: str, baseline: float) -> float:
        """The drop that a user's words allow, in the metric's unit.

        A share, such as `0.5%`, is of 1 for a score (half a point of accuracy) and of the original's value for an error
        (mse, l1, a loss), which has a scale of its own. A plain number is in the metric's unit.

        Raises:
            BadJob: no positive number.
        """
        is_share = max_drop.strip().endswith("%")
        try:
            number = float(max_drop.strip().removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise BadJob(f"--max-drop {max_drop}: wanted a positive number or share, such as 0.5%")
        return number * abs(baseline) if is_share and self.lower_is_better else number


def _accuracy(outputs: Array, targets: Array) -> Array:
    return outputs.argmax(axis=1) == _classes(outputs, targets)


def _top5_accuracy(outputs: Array, targets: Array) -> Array:
    classes = _classes(outputs, targets)
    own = np.take_along_axis(outputs, classes[:, None], axis=1)
    return (outputs > own).sum(axis=1) < 5


def _token_accuracy(outputs: Array, targets: Array) -> Array:
    counts = (targets >= 0).reshape(len(targets), -1)
    hits = (outputs.argmax(axis=-1) == targets).reshape(len(targets), -1) & counts
    shares: Array = hits.sum(axis=1) / np.maximum(1, counts.sum(axis=1))
    return shares


def _binary_accuracy(outputs: Array, targets: Array) -> Array:
    hits: Array = ((outputs > 0) == (targets > 0.5).reshape(outputs.shape)).reshape(len(outputs), -1)
    return hits.mean(axis=1)


def _mse(outputs: Array, targets: Array) -> Array:
    errors: Array = np.square(outputs - targets.reshape(outputs.shape), dtype=np.float64)
    return errors.reshape(len(outputs), -1).mean(axis=1)


def _l1(outputs: Array, targets: Array) -> Array:
    errors: Array = np.abs(outputs.astype(np.float64) - targets.reshape(outputs.shape))
    return errors.reshape(len(outputs), -1).mean(axis=1)


def _cross_entropy(outputs: Array, targets: Array) -> Array:
    logits = outputs.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    picked: Array = np.take_along_axis(logs, _classes(outputs, targets)[:, None], axis=1)[:, 0]
    return -picked


def _classes(outputs: Array, targets: Array) -> Array:
    """Class numbers [N], whether targets are numbers or shares of each class [N, K]."""
    is_one_hot = targets.ndim == 2 and targets.shape == outputs.shape
    classes: Array = targets.argmax(axis=1) if is_one_hot else targets.reshape(len(targets)).astype(np.int64)
    return classes


_NAMED: Mapping[str, tuple[PerRow, bool]] = {
    "accuracy": (_accuracy, False),
    "top5_accuracy": (_top5_accuracy, False),
    "token_accuracy": (_token_accuracy, False),
    "binary_accuracy": (_binary_accuracy, False),
    "mse": (_mse, True),
    "l1": (_l1, True),
    "cross_entropy": (_cross_entropy, True),
}
NAMES = tuple(_NAMED)


def named(name: str) -> Metric:
    """A metric of Stoker's.

    Raises:
        BadJob: there is none of that name.
    """
    if name not in _NAMED:
        raise BadJob(f"{name!r} is no metric. {nearest(name, NAMES)}")
    per_row, lower = _NAMED[name]
    return Metric(name, per_row, lower)
