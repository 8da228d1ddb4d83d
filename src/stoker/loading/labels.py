"""The class of every sample of a set, as numbers from 0, and what is held out of each class."""

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
"""Where targets are, unless a job says so: last in a tuple, or under one of these names."""
_ATTRIBUTES = ("targets", "labels")
"""What data sets of items call all their targets: torchvision's have one of these."""
_NAMED = 3


@dataclass(frozen=True)
class Labels:
    """The class of each sample [N], a place in `names`, which are the targets that there are, in order."""

    classes: Indices
    names: tuple[Any, ...]

    def of(self, rows: Indices) -> Labels:
        """Those of some samples; classes keep their places."""
        return Labels(self.classes[rows], self.names)

    @property
    def counts(self) -> Indices:
        """Samples of each class."""
        return np.bincount(self.classes, minlength=len(self.names))

    def require_all(self, what: str, remedy: str) -> None:
        """Refuse a class without samples.

        Raises:
            BadJob: there is one; `what` says where it is missed.
        """
        empty = [str(self.names[at]) for at in np.flatnonzero(self.counts == 0)]
        if empty:
            more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
            raise BadJob(f"{what} no sample of class {', '.join(empty[:_NAMED])}{more}", remedy=remedy)


def labels_of(samples: Samples, job: Job, given: Any = None) -> Labels:
    """The class of each of `samples`, all of the job's data, by `given` targets or by those that are at hand.

    Raises:
        BadJob: they are not at hand, are no classes, or not as many as there are samples; or a class that the data name
            has no samples.
    """
    targets = as_array(_found(samples, job) if given is None else given, "targets")
    if len(targets) != len(samples):
        raise BadJob(f"there are {len(targets):,} targets for {len(samples):,} samples",
                     remedy="Give the class of each sample of data, held-out ones included.")  # fmt: skip
    if targets.dtype.kind == "f" and not np.array_equal(targets, np.round(targets)):
        raise BadJob(f"the targets are no classes, but numbers such as {targets[0]:g}",
                     remedy="Name the entry that is the class with Job(target=…), or give targets=….")  # fmt: skip
    names, classes = np.unique(targets, return_inverse=True)
    labels = Labels(classes.astype(np.int64), tuple(names.tolist()))
    stated = _stated(job.data, names)
    if stated is not None:
        places = np.searchsorted(stated, names)
        named = getattr(job.data, "classes", ()) or stated.tolist()
        labels = Labels(places[labels.classes].astype(np.int64), tuple(named))
        labels.require_all("the data have", "Leave the class out of the data's names, or give samples of it.")
    return labels


def held_out_by_class(samples: Samples, holdout: Holdout, labels: Labels) -> tuple[Samples, Samples]:
    """The rest and the part set aside, of each class as nearly the same share as whole samples allow.

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
    """`total` shared out in proportion to `counts`, by largest remainders; the first of equal ones goes first.

    >>> shares([50, 30, 20], 11)
    [6, 3, 2]
    """
    whole = [count * total // sum(counts) for count in counts]
    remainders = [count * total % sum(counts) for count in counts]
    for at in sorted(range(len(whole)), key=lambda at: -remainders[at])[: total - sum(whole)]:
        whole[at] += 1
    return [int(part) for part in whole]


def _found(samples: Samples, job: Job) -> Any:
    keys = _KEYS if job.target is None else (job.target,)
    for key in keys:
        with suppress(KeyError, IndexError, TypeError):
            found = samples.all_of(key)
            if isinstance(found, torch.Tensor) and found.dim() == 1:
                return found
    dataset = samples.dataset if isinstance(samples, ItemSamples) else None
    for name in _ATTRIBUTES:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return found
    raise BadJob(
        f"the classes of {samples.name} are not known without reading every sample",
        remedy="Give them as targets=…, one for each sample, or let the dataset have an attribute `targets`. "
        "For a holdout by class that is a dataset's attribute.",
    )


def _stated(data: Any, names: Any) -> Any:
    """All classes that the data say they have, as labels in order; None where they do not say, or labels are others."""
    count = getattr(data, "num_classes", None) or len(getattr(data, "classes", None) or ())
    is_number = names.dtype.kind in "iu"
    if not count or not is_number or names.min() < 0 or names.max() >= count:
        return None
    return np.arange(count)
