"""Sources of `stoker.data` that read files, as samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stoker.data.files.source import IndexedSource
from stoker.errors import StokerError
from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import BadSample, ItemSamples, with_patience


class SourceSamples(ItemSamples):
    """A source of `stoker.data` that reads files: as stored, by the batch where it can, and prepared on the device.

    A collate function of the job's own is given prepared items instead.
    """

    def __init__(self, source: IndexedSource, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        super().__init__(source, collate, seed)
        self.source = source
        self.name = source.name
        self._is_stored = collate is None

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of these samples."""
        rows = self._rows(indices)
        return super().fetch(indices, epoch) if rows is None else rows

    def fetch_drawn(self, indices: Indices, epoch: int, draws: Indices) -> Content:
        """As `fetch`: what is read by the batch draws nothing."""
        rows = self._rows(indices)
        return super().fetch_drawn(indices, epoch, draws) if rows is None else rows

    def _rows(self, indices: Indices) -> Content | None:
        try:
            return with_patience(lambda: self.source.rows(indices)) if self._is_stored else None
        except StokerError as error:
            raise BadSample(str(error)) from error

    def read(self, index: int) -> Any:
        """A sample as the source stores it."""
        return self.source.sample(index) if self._is_stored else self.source[index]

    def named(self, index: int) -> str:
        """Its name in the source."""
        return self.source.sample_id(index)

    def collate(self, items: list[Any], indices: Indices | None = None) -> Content:
        """A batch of items, a tuple where each of them is one."""
        content = super().collate(items, indices)
        return tuple(content) if self._is_stored and isinstance(items[0], tuple) else content

    def fingerprint(self) -> str:
        """What the source states."""
        return self.source.fingerprint

    def prepare(self, content: Content) -> Content:
        """As the source does."""
        return self.source.prepare(content) if self._is_stored else content

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The labels of all samples, if `key` means them and the source has classes."""
        labels = self.source.labels() if key in (self.source.target, None, -1) else None
        return None if labels is None else torch.from_numpy(np.array(labels))
