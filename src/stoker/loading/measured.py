"""The length of every sample of a set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.errors import BadJob
from stoker.loading.order import Indices
from stoker.loading.samples import Samples

_AT_ONCE = 256
"""Samples that are read together where lengths have to be looked at."""


def lengths_of(samples: Samples, length_of: Any, what: str) -> Indices:
    """The length of each of `samples` [N], as `length_of` says: an array, a function of a sample, or None.

    None is the first dimension of a sample's first entry. A function reads every sample, as the first epoch has it.

    Raises:
        BadJob: there are not as many as samples, or one is no whole number of at least 1; `what` names the data.
    """
    if length_of is None or callable(length_of):
        found = _asked(samples, first_dimension if length_of is None else length_of)
    else:
        found = np.asarray(length_of)
    if len(found) != len(samples):
        raise BadJob(f"there are {len(found):,} lengths for {len(samples):,} samples of {what}",
                     remedy="Give one for each sample of data, held-out ones included.")  # fmt: skip
    if found.dtype.kind not in "iu":
        raise BadJob(f"the lengths of {what} are no whole numbers, but {found.dtype}")
    short = np.flatnonzero(found < 1)
    if len(short):
        raise BadJob(f"sample {short[0]} of {what} has a length of {found[short[0]]}",
                     remedy="Leave empty samples out of the data.")  # fmt: skip
    return found.astype(np.int64)


def first_dimension(sample: Any) -> int:
    """The first dimension of a sample's first entry, such as its number of tokens; letters of a text are none.

    Raises:
        BadJob: it has none.
    """
    entry = sample
    if isinstance(sample, Mapping):
        entry = next(iter(sample.values()))
    elif isinstance(sample, tuple):
        entry = sample[0]
    try:
        if isinstance(entry, str | bytes | Mapping):
            raise TypeError(type(entry))
        return len(entry)
    except TypeError as problem:
        raise BadJob(
            f"the first entry of a sample is a {type(entry).__name__}, which has no length",
            remedy="Say how long samples are with length_of=…, a function of a sample or one number for each.",
        ) from problem


def _asked(samples: Samples, length_of: Any) -> Indices:
    found: list[int] = []
    for start in range(0, len(samples), _AT_ONCE):
        indices = np.arange(start, min(start + _AT_ONCE, len(samples)), dtype=np.int64)
        found += [length_of(item) for item in samples.items(indices, 0)]
    return np.array(found)
