"""The class of every sample of a set, and the stratified holdout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.data.files.source import TARGETS
from stoker.errors import BadJob
from stoker.jobs import Holdout, Job
from stoker.jobs.sampling import as_array
from stoker.loading.order import Indices
from stoker.loading.samples import ItemSamples, Samples, SampleSubset, drawn_for

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
    targets = as_array(_known_targets(samples, job) if given is None else given, "targets")
    if len(targets) != len(samples):
        raise BadJob(
            f"there are {len(targets):,} targets for {len(samples):,} samples",
            remedy="Give the class of each sample of data, held-out ones included.",
        )
    if targets.dtype.kind == "f" and not np.array_equal(targets, np.round(targets)):
        raise BadJob(
            f"the targets are no classes, but numbers such as {targets[0]:g}",
            remedy="Name the entry that is the class with Job(target=…), or give targets=….",
        )
    targets_of_classes, inverse = np.unique(targets, return_inverse=True)
    classes, names = inverse.astype(np.int64), tuple(targets_of_classes.tolist())
    data_names = getattr(job.data, "classes", None) or ()
    count = getattr(job.data, "num_classes", None) or len(data_names)
    is_number = targets.dtype.kind in "iu"
    if not count or not is_number or names[0] < 0 or names[-1] >= count:
        return Labels(classes, names)
    labels = Labels(targets_of_classes[classes].astype(np.int64), tuple(data_names or range(count)))
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


def _known_targets(samples: Samples, job: Job) -> Any:
    """All targets, if they are known without reading samples."""
    keys = _KEYS if job.target is None else (job.target,)
    for key in keys:
        with suppress(KeyError, IndexError, TypeError):
            targets = samples.all_of(key)
            if isinstance(targets, torch.Tensor) and targets.dim() == 1:
                return targets
    dataset = samples.dataset if isinstance(samples, ItemSamples) else None
    for name in _ATTRIBUTES:
        targets = getattr(dataset, name, None)
        if targets is not None and not callable(targets):
            return targets
    raise BadJob(
        f"the classes of {samples.name} are not known without reading every sample",
        remedy="Give them as targets=…, one for each sample, or let the dataset have an attribute `targets`. "
        "For a holdout by class that is a dataset's attribute.",
    )
