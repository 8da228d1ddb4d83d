"""Samples of a job that are taken otherwise than each once an epoch in a keyed order."""

from __future__ import annotations

from typing import Any

import torch

from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import Samples, SubsetOf


class Rearranged(Samples):
    """The samples of another, of which only the choice or the order is new; `how` goes into its name."""

    def __init__(self, whole: Samples, how: str) -> None:
        self.whole = whole
        self.how = how
        self.name = f"{whole.name} ({how})"
        self.data_class = whole.data_class
        self.is_in_memory = whole.is_in_memory

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.whole)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The whole's batch."""
        return self.whole.fetch(indices, epoch)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The whole's samples."""
        return self.whole.items(indices, epoch)

    def fingerprint(self) -> str:
        """The whole's: how its samples are taken is told by the job's settings."""
        return self.whole.fingerprint()

    def prepare(self, content: Content) -> Content:
        """As the whole does."""
        return self.whole.prepare(content)

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The whole's entry."""
        return self.whole.all_of(key)

    @property
    def num_bytes(self) -> int | None:
        """The whole's."""
        return self.whole.num_bytes


def rows_of(samples: Samples, given: Indices) -> Indices:
    """Of values `given` for all of a job's data [N], those of `samples`, which may be what a holdout left of them."""
    return given[samples.indices] if isinstance(samples, SubsetOf) else given
