"""What the data call their samples."""

from __future__ import annotations

from stoker.loading.samples import Samples, SubsetOf
from stoker.loading.sources import SourceSamples


def sample_name(samples: Samples, index: int) -> str:
    """The file, or file and row, that sample `index` lies in; empty where data have no names for samples."""
    if isinstance(samples, SubsetOf):
        return sample_name(samples.whole, int(samples.indices[index]))
    return samples.named(index) if isinstance(samples, SourceSamples) else ""
