"""Which samples an epoch is made of: settings of a Job, carried out in `loading/sampling.py`.

What: samples drawn with replacement, all classes alike or by weight; or every sample once, each batch with the classes
in the shares that they have of the data; or every sample once in the order of the data. Use when: classes are rare, a
batch of few samples misses some, or a batch goes on where the one before it ended.
Costs: nothing to speak of; `stratified` sorts once an epoch.
Does not combine with: streams, bucketing and packing by length.
Sources: class-balanced draws, Kang et al. 2020, https://arxiv.org/abs/1910.09217, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.errors import BadJob

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
    """What all ways of choosing samples have in common; see `balanced`, `weighted`, `stratified` and `in_order`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balanced(Sampling):
    """Every class as likely as any other; see `balanced`."""

    num_samples: int | None = None
    targets: Any = None

    def __post_init__(self) -> None:
        _require_count(self.num_samples)
        object.__setattr__(self, "targets", as_array(self.targets, "targets"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(Sampling):
    """Every sample as likely as its weight says; see `weighted`."""

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        _require_count(self.num_samples)
        object.__setattr__(self, "weights", _weights(self.weights))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stratified(Sampling):
    """Every sample once, classes in equal shares everywhere; see `stratified`."""

    targets: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", as_array(self.targets, "targets"))


@dataclass(frozen=True, kw_only=True, eq=False)
class InOrder(Sampling):
    """Every sample once, in the order of the data; see `in_order`."""


def in_order() -> InOrder:
    """Take every sample once an epoch, in the order of the data, which is then the same in every epoch.

    For models that carry a state from batch to batch, as in truncated back-propagation through time: batch b of an
    epoch is samples b * batch to (b + 1) * batch. See docs/sampling.md.
    """
    return InOrder()


def balanced(*, num_samples: int | None = None, targets: Any = None) -> Balanced:
    """Draw each sample of an epoch with replacement: first a class, all alike, then one of its samples.

    Args:
        num_samples: draws in an epoch (default: as many as there are training samples).
        targets: the class of each sample of `data`, for data whose targets are not known without reading them all.

    Raises:
        BadJob: `num_samples` is no positive whole number.
    """
    return Balanced(num_samples=num_samples, targets=targets)


def weighted(weights: Any, *, num_samples: int | None = None) -> Weighted:
    """Draw each sample of an epoch with replacement, as likely as its share of all `weights`.

    Args:
        weights: one for each sample of `data`, held-out ones included; none negative, not all zero.
        num_samples: draws in an epoch (default: as many as there are training samples).

    Raises:
        BadJob: a weight is negative or not finite, all are zero, or `num_samples` is no positive whole number.
    """
    return Weighted(weights=weights, num_samples=num_samples)


def stratified(*, targets: Any = None) -> Stratified:
    """Take every sample once an epoch, in an order in which each stretch has the classes in the shares of the whole.

    Args:
        targets: the class of each sample of `data`, for data whose targets are not known without reading them all.
    """
    return Stratified(targets=targets)


def as_array(values: Any, what: str) -> Any:
    """`values` [N] as a NumPy array, which a JobSpec describes by its digest; None stays None.

    Raises:
        BadJob: they are not one value for each sample.
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
    is_count = isinstance(num_samples, int) and not isinstance(num_samples, bool) and num_samples > 0
    if num_samples is not None and not is_count:
        raise BadJob(f"num_samples is how many samples an epoch draws, 1 or more, got {num_samples!r}")
