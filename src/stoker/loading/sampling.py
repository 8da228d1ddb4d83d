"""Sampling: drawn with replacement by weight or class, stratified, or in order; and holdouts by class.

Draws are a function of (seed, epoch, number of the draw), so that any position is computed directly and nothing depends
on batches, workers or processes. Settings and costs: `stoker.jobs.sampling`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.data.files.source import stated_classes
from stoker.errors import BadJob
from stoker.jobs import Holdout, Job
from stoker.jobs.fields import TARGETS
from stoker.jobs.sampling import Balanced, InOrder, Stratified, Weighted, as_array
from stoker.loading.dataset_adapters import SourceSamples
from stoker.loading.fields import Content
from stoker.loading.order import (
    Indices,
    RandomStream,
    SequentialOrder,
    key_of,
    keys_of_samples,
    mix_keys,
    require_within,
)
from stoker.loading.samples import (
    ItemSamples,
    OrderedSamples,
    RearrangedSamples,
    Samples,
    SampleSubset,
    drawn_for,
    rows_of,
)

_KEYS = (-1, *TARGETS)
"""Default places of targets: last in a tuple, or under one of these names."""
_ATTRIBUTES = ("targets", "labels")
"""Attributes of map-style datasets that hold all targets: torchvision's have one of these."""
_NAMED = 3


@dataclass(frozen=True)
class Labels:
    """The class of each sample [N], as an index into `names`, the distinct targets in order."""

    classes: Indices
    names: tuple[Any, ...]

    def of(self, rows: Indices) -> Labels:
        """The labels of some samples; classes keep their numbers."""
        return Labels(self.classes[rows], self.names)

    @property
    def counts(self) -> Indices:
        """Samples of each class."""
        return np.bincount(self.classes, minlength=len(self.names))

    def require_all(self, what: str, remedy: str) -> None:
        """Raise BadJob if a class has no samples; `what` begins the message."""
        empty = [str(self.names[index]) for index in np.flatnonzero(self.counts == 0)]
        if empty:
            more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
            raise BadJob(f"{what} no sample of class {', '.join(empty[:_NAMED])}{more}", remedy=remedy)


def labels_of(samples: Samples, job: Job, given: Any = None) -> Labels:
    """The class of each of `samples`, all of the job's data, by `given` targets or the data's own.

    Raises:
        BadJob: targets are not known without reading samples, are no classes, or are not as many as samples; or a class
            named by the data has no samples.
    """
    targets = known_targets(samples, job) if given is None else as_array(given, "targets")
    if len(targets) != len(samples):
        raise BadJob(
            f"there are {len(targets):,} targets for {len(samples):,} samples",
            remedy="Give the class of each sample of data, held-out ones included.",
        )
    if targets.dtype.kind == "f" and not np.array_equal(targets, np.round(targets)):
        raise BadJob(
            f"the targets are no classes, but numbers such as {targets[0]:g}",
            remedy="Name the entry that is the class with stoker.Fields(target=…), or give targets=….",
        )
    targets_of_classes, inverse = np.unique(targets, return_inverse=True)
    classes, names = inverse.astype(np.int64), tuple(targets_of_classes.tolist())
    data_names = stated_classes(job.data)
    count = getattr(job.data, "num_classes", None) or len(data_names)
    is_number = targets.dtype.kind in "iu"
    if not count or not is_number or names[0] < 0 or names[-1] >= count:
        return Labels(classes, names)
    labels = Labels(targets_of_classes[classes].astype(np.int64), data_names or tuple(range(count)))
    labels.require_all("the data have", "Leave the class out of the data's names, or give samples of it.")
    return labels


def held_out_by_class(samples: Samples, holdout: Holdout, labels: Labels) -> tuple[Samples, Samples]:
    """The rest and the part set aside, with nearly the same share of each class.

    Raises:
        BadJob: one of the two would be empty.
    """
    order, aside = drawn_for(holdout, len(samples))
    by_class = order[np.argsort(labels.classes[order], kind="stable")]
    starts = np.cumsum(labels.counts) - labels.counts
    taken = [by_class[start : start + count] for start, count in zip(starts, shares(labels.counts, aside), strict=True)]
    chosen = np.sort(np.concatenate(taken))
    rest = np.setdiff1d(np.arange(len(samples)), chosen)
    rule = f"{holdout.fraction:g} held out of each class, seed {holdout.seed}"
    return SampleSubset(samples, rest, f"without the {rule}"), SampleSubset(samples, chosen, f"the {rule}")


def shares(counts: Sequence[int] | Indices, total: int) -> list[int]:
    """`total` distributed in proportion to `counts`, by largest remainders; ties go to the first.

    >>> shares([50, 30, 20], 11)
    [6, 3, 2]
    """
    whole = [count * total // sum(counts) for count in counts]
    remainders = [count * total % sum(counts) for count in counts]
    for index in sorted(range(len(whole)), key=lambda index: -remainders[index])[: total - sum(whole)]:
        whole[index] += 1
    return [int(part) for part in whole]


def targets_at_hand(samples: Samples, job: Job) -> Any:
    """A number or text for each of `samples` as an array [N]; None where that is not known, or takes more than a look.

    No code of a dataset is run for it: one may decode every sample in a property `labels`.
    """
    if isinstance(samples, SampleSubset | OrderedSamples):
        targets = targets_at_hand(samples.whole, job)
        return None if targets is None else rows_of(samples, targets)
    if isinstance(samples, SourceSamples) and samples.source.reads_labels:
        return None
    try:
        targets = known_targets(samples, job, stored_only=True)
    except Exception:  # noqa: BLE001 - an attribute of this name may hold anything
        return None
    return targets if len(targets) == len(samples) and targets.dtype.kind in "iufbUS" else None


def known_targets(samples: Samples, job: Job, *, stored_only: bool = False) -> Any:
    """All targets [N] as an array; of a dataset, with `stored_only`, only those that it holds as they are.

    Raises:
        BadJob: they are known neither to a source nor to a dataset.
    """
    keys = _KEYS if job.fields.target is None else (job.fields.target,)
    for key in keys:
        with suppress(KeyError, IndexError, TypeError):
            targets = samples.all_of(key)
            if isinstance(targets, torch.Tensor) and targets.dim() == 1:
                return as_array(targets, "targets")
    dataset = samples.dataset if isinstance(samples, ItemSamples) else None
    changed = getattr(dataset, "target_transform", None)  # of torchvision's: the attribute holds targets before it
    for name in () if changed is not None and stored_only else _ATTRIBUTES:
        targets = getattr(dataset, "__dict__", {}).get(name) if stored_only else getattr(dataset, name, None)
        if targets is not None and not callable(targets):
            stored = as_array(targets, "targets")
            return stored if changed is None else _each_changed(stored, changed, samples.name)
    raise BadJob(
        f"the classes of {samples.name} are not known without reading every sample",
        remedy="Give them as targets=…, one for each sample, or let the dataset have an attribute `targets`. "
        "For a holdout by class that is a dataset's attribute.",
    )


def _each_changed(stored: Any, change: Callable[[Any], Any], name: str) -> Any:
    """The targets [N] that samples have: `change`, which is the user's, of each stored one."""
    try:
        return as_array([change(target) for target in stored.tolist()], "targets")
    except Exception as error:
        raise BadJob(
            f"target_transform of {name} makes no array of the data set's targets: {type(error).__name__}: {error}",
            remedy="Give the class of each sample as targets=….",
        ) from error


_EXACT_BITS = 53
"""Bits of a float64's significand: a uniform draw is a multiple of 2^-53."""


def sampled(train: Samples, whole: Samples, job: Job) -> Samples:
    """The training samples `train`, all or a subset of `whole`, as the job's `sampling` takes them.

    Raises:
        BadJob: there are not as many weights or targets as samples, none can be drawn, or a class is empty.
    """
    sampling = job.sampling
    if isinstance(sampling, Weighted):
        if len(sampling.weights) != len(whole):
            raise BadJob(
                f"there are {len(sampling.weights):,} weights for {len(whole):,} samples",
                remedy="Give one for each sample of data, held-out ones included.",
            )
        weights: npt.NDArray[Any] = rows_of(train, sampling.weights)
        if not weights.any():
            raise BadJob(f"all {len(weights)} training samples have the weight 0: there is nothing to draw")
        return WeightedSamples(train, weights, sampling.num_samples, job.seed)
    if isinstance(sampling, Balanced | Stratified):
        labels = labels_of(whole, job, sampling.targets)
        train_labels = labels.of(rows_of(train, np.arange(len(whole), dtype=np.int64)))
        train_labels.require_all("the holdout leaves", "Hold out of each class: stoker.holdout(…, stratify=True).")
        if isinstance(sampling, Balanced):
            return BalancedSamples(train, train_labels, sampling.num_samples, job.seed)
        return OrderedSamples(train, "stratified", partial(StratifiedOrder, train_labels))
    if isinstance(sampling, InOrder):
        return OrderedSamples(train, "in order", partial(_sequential, len(train)))
    return train


def _sequential(size: int, _seed: int) -> SequentialOrder:
    return SequentialOrder(size)


class DrawnSamples(RearrangedSamples):
    """Samples drawn with replacement: sample i of an epoch is its draw number i."""

    def __init__(self, whole: Samples, num_samples: int | None, seed: int, how: str) -> None:
        super().__init__(whole, how)
        self._num_samples = len(whole) if num_samples is None else num_samples
        self._seed = seed

    def __len__(self) -> int:
        """Draws in an epoch."""
        return self._num_samples

    @abstractmethod
    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """The samples of the whole for draws number `draws` [B] of `epoch`."""

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of draws `indices` [B]; each occurrence of a sample has random numbers of its own."""
        return self.whole.fetch_drawn(self.drawn(indices, epoch), epoch, indices)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The samples that were drawn, one by one."""
        return self.whole.items(self.drawn(indices, epoch), epoch)

    def all_of(self, _key: Any) -> torch.Tensor | None:
        """None: the samples differ in each epoch."""
        return None

    def _bits(self, draws: Indices, epoch: int) -> npt.NDArray[np.uint64]:
        return keys_of_samples(key_of(RandomStream.SAMPLING, self._seed, epoch), draws)


class WeightedSamples(DrawnSamples):
    """Each sample drawn in proportion to its weight, by searching the cumulative sum of weights."""

    def __init__(self, whole: Samples, weights: npt.NDArray[Any], num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "weighted")
        scaled = weights / weights.max()  # keeps their sum finite
        self._sums = np.cumsum(scaled)
        self._last = int(np.flatnonzero(scaled)[-1])

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `DrawnSamples.drawn`."""
        uniform = (self._bits(draws, epoch) >> np.uint64(64 - _EXACT_BITS)) * 2.0**-_EXACT_BITS
        places = np.searchsorted(self._sums, uniform * self._sums[-1], side="right")
        drawn: Indices = np.minimum(places, self._last)  # a product may be rounded up to the whole sum
        return drawn


class BalancedSamples(DrawnSamples):
    """A class drawn uniformly, then one of its samples uniformly (to within 2^-32)."""

    def __init__(self, whole: Samples, labels: Labels, num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "balanced")
        self._by_class = np.argsort(labels.classes, kind="stable")
        self._counts = labels.counts
        self._starts = np.cumsum(self._counts) - self._counts

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `DrawnSamples.drawn`."""
        bits = self._bits(draws, epoch)
        classes = _below(np.full(len(draws), len(self._counts)), bits)
        within = _below(self._counts[classes], mix_keys(bits + np.uint64(1)))
        drawn: Indices = self._by_class[self._starts[classes] + within]
        return drawn


class StratifiedOrder:
    """Each class spread evenly over the epoch from a keyed offset, its samples in a keyed order.

    Of any L consecutive samples, a class with n of all N has L·n/N, give or take 1 + C·n/N with C classes.
    """

    def __init__(self, labels: Labels, seed: int) -> None:
        self.size = len(labels.classes)
        self._classes, self._counts, self._seed = labels.classes, labels.counts, seed
        self._epoch: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, which is sorted when it begins."""
        require_within(self.size, start, stop)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._sorted(epoch))
        return self._epoch[1][start:stop]

    def _sorted(self, epoch: int) -> Indices:
        keys = keys_of_samples(
            key_of(RandomStream.SAMPLING, self._seed, epoch, 0), np.arange(self.size, dtype=np.int64)
        )
        by_class = np.lexsort((keys, self._classes))
        classes = self._classes[by_class]
        starts = np.cumsum(self._counts) - self._counts
        places = np.arange(self.size) - starts[classes]
        begins = keys_of_samples(key_of(RandomStream.SAMPLING, self._seed, epoch, 1), np.arange(len(self._counts)))
        within = (begins >> np.uint64(64 - _EXACT_BITS)) * 2.0**-_EXACT_BITS
        return by_class[np.argsort((places + within[classes]) / self._counts[classes], kind="stable")]


def _below(limits: Indices, bits: npt.NDArray[np.uint64]) -> Indices:
    """Whole numbers [B], each at least 0 and below its limit, all equally likely (to within 2^-32)."""
    return (((bits >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
