"""The update rule: how one optimiser batch moves the weights; chosen once for a job.

It is the optimiser's step (`OptimizerUpdate`), the step of an optimiser that computes the loss itself
(`ClosureUpdate`, both in `stepping/step.py`), the job's own step (`stepping/own_step.py`), or the update of a site's
part of the batch (`stepping/diloco.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from stoker.loading.batches import Batch


class UpdateRule(abc.ABC):
    """One update at a time."""

    is_moving = False
    """Whether the weights may have begun to move in the update under way: then it cannot be rolled back."""

    @property
    def rate_factor(self) -> float:
        """Factor of the job's learning rate in this process [1]."""
        return 1.0

    def together(self, batches: Sequence[Batch], first: int, rates: Sequence[Sequence[float]]) -> list[float]:
        """Make several updates from number `first` on in one call, at the learning rates of each group.

        Returns the mean losses of the updates that were made; the others are to be made one by one.
        """
        del batches, first, rates
        return []

    @abc.abstractmethod
    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """Make update number `update` (from 0); returns the batch's mean loss before it, a detached scalar.

        Raises:
            NotFinite: the loss or, where clipped, the gradient is not finite.
        """
