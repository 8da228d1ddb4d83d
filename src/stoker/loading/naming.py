"""What the data call their samples."""

from __future__ import annotations

import numpy as np

from stoker.loading.order import Indices
from stoker.loading.packing import InRows
from stoker.loading.rearranged import Rearranged
from stoker.loading.samples import Samples, SubsetOf
from stoker.loading.sampling import Drawn
from stoker.loading.sources import SourceSamples


def in_data(samples: Samples, indices: Indices, epoch: int) -> Indices:
    """Where samples `indices` of `epoch` lie in the data that the user gave: of packed rows all that are in them."""
    if isinstance(samples, InRows):
        members = [samples.members(int(row), epoch) for row in indices]
        return in_data(samples.whole, np.concatenate([np.empty(0, np.int64), *members]), epoch)
    if isinstance(samples, Drawn):
        return in_data(samples.whole, samples.drawn(indices, epoch), epoch)
    if isinstance(samples, SubsetOf):
        return in_data(samples.whole, samples.indices[indices], epoch)
    return in_data(samples.whole, indices, epoch) if isinstance(samples, Rearranged) else indices


def sample_name(samples: Samples, index: int) -> str:
    """The file, or file and row, that sample `index` lies in; empty where data have no names for samples."""
    if isinstance(samples, SubsetOf):
        return sample_name(samples.whole, int(samples.indices[index]))
    return samples.named(index) if isinstance(samples, SourceSamples) else ""
