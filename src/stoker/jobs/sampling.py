"""Which samples an epoch is made of: settings of a Job, carried out in `loading/sampling.py`.

What: samples drawn with replacement, by class or by weight; or every sample once, each batch with the classes in their
shares of the data; or every sample once in the order of the data.
Use when: classes are rare, a batch of few samples misses some, or a batch continues the one before.
Costs: next to nothing; `stratified` sorts once an epoch.
Does not combine with: streams, bucketing and packing by length.
Sources: class-balanced draws, Kang et al. 2020, https://arxiv.org/abs/1910.09217, section 4.1.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from stoker.errors import BadJob
from stoker.jobs.numeric_settings import is_count

__all__ = [
    "Balanced",
    "InOrder",
    "Sampling",
    "Stratified",
    "Weighted",
    "balanced",
    "in_order",
    "stratified",
    "weighted",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Base of all ways of choosing samples: `balanced`, `weighted`, `stratified` and `in_order`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balanced(Sampling):
    """Draw each sample of an epoch with replacement: first a class, all equally likely, then one of its samples.

    Args:
        num_samples: draws in an epoch (default: the number of training samples).
        targets: the class of each sample of `data`, for data whose targets cannot be read without reading all of it.

    Raises:
        BadJob: `num_samples` is not a positive integer.
    """

    num_samples: int | None = None
    targets: Any = None

    def __post_init__(self) -> None:
        _require_count(self.num_samples)
        object.__setattr__(self, "targets", as_array(self.targets, "targets"))


balanced = Balanced


@dataclass(frozen=True, eq=False)
class Weighted(Sampling):
    """Draw each sample of an epoch with replacement, with the probability of its share of all `weights`.

    Args:
        weights: one for each sample of `data`, held-out ones included; none negative, not all zero.
        num_samples: draws in an epoch (default: the number of training samples).

    Raises:
        BadJob: a weight is negative or not finite, all are zero, or `num_samples` is not a positive integer.
    """

    weights: Any
    _: KW_ONLY
    num_samples: int | None = None

    def __post_init__(self) -> None:
        _require_count(self.num_samples)
        object.__setattr__(self, "weights", _weights(self.weights))


weighted = Weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class Stratified(Sampling):
    """Take every sample once an epoch, in an order whose every stretch has the classes in their shares of the whole.

    Args:
        targets: the class of each sample of `data`, for data whose targets cannot be read without reading all of it.
    """

    targets: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", as_array(self.targets, "targets"))


stratified = Stratified


@dataclass(frozen=True, kw_only=True, eq=False)
class InOrder(Sampling):
    """Take every sample once an epoch, in the order of the data, the same in every epoch.

    For models that carry a state from batch to batch, as in truncated back-propagation through time: batch b of an
    epoch is samples b * batch to (b + 1) * batch. See docs/sampling.md.
    """


in_order = InOrder


def as_array(values: Any, what: str) -> Any:
    """`values` [N] as a NumPy array, which a JobSpec describes by its digest; None stays None.

    Raises:
        BadJob: they are not one value per sample.
    """
    if values is None:
        return None
    import numpy as np  # noqa: PLC0415 - a job's settings are imported without NumPy

    on_cpu = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        array = np.asarray(on_cpu)
    except ValueError as problem:
        raise BadJob(f"{what} are no array: {problem}", remedy="Give one value for each sample.") from problem
    if array.ndim != 1:
        raise BadJob(f"{what} are of shape {list(array.shape)}", remedy="Give one value for each sample.")
    return array


def _weights(given: Any) -> Any:
    weights = as_array(given, "weights")
    if weights is None or weights.dtype.kind not in "iufb":
        raise BadJob(f"weights are no numbers, got {type(given).__name__}", remedy="Give one for each sample.")
    weights = weights.astype("float64")
    wrong = (~(weights >= 0) | (weights == float("inf"))).nonzero()[0]
    if len(wrong):
        raise BadJob(
            f"{len(wrong)} of {len(weights)} weights are negative or not finite: number {wrong[0]} is "
            f"{weights[wrong[0]]:g}",
            remedy="A weight is 0 for a sample that is never to be drawn, and more for all others.",
        )
    if not weights.any():
        raise BadJob(f"all {len(weights)} weights are 0: there is nothing to draw")
    return weights


def _require_count(num_samples: object) -> None:
    if num_samples is not None and not is_count(num_samples):
        raise BadJob(f"num_samples is how many samples an epoch draws, 1 or more, got {num_samples!r}")
