"""What all sites hold alike: the shared weights, their momentum, and which exchanges are due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.jobs import SGD

NEVER = -1
"""In place of an update, of which 0 is the first."""


class Shared:
    """The shared weights by fragment, each a row of numbers, and what moves them.

    Args:
        settings: of the outer optimiser.
        start: each fragment's weights to begin with.
        statistics: running statistics of batch norms to begin with.
    """

    def __init__(self, settings: SGD, start: Sequence[torch.Tensor], statistics: torch.Tensor) -> None:
        self._settings = settings
        self.start = list(start)
        self.momentum = [torch.zeros_like(one) for one in start]
        self.statistics = statistics
        self.update = NEVER
        """The last update that was made."""
        self.applied = 0
        """Exchanges that were taken over."""
        self.sent = [NEVER] * len(self.start)
        """After which update each fragment was last sent."""
        self.due = [NEVER] * len(self.start)
        """After which update what is on its way is to be taken over."""

    def step(self, fragment: int, gradient: torch.Tensor) -> None:
        """Move a fragment's shared weights: SGD as `torch.optim.SGD`, in the row's own dtype."""
        rate, momentum = self._settings.lr, self._settings.momentum
        velocity = self.momentum[fragment].mul_(momentum).add_(gradient)
        direction = gradient.add(velocity, alpha=momentum) if self._settings.nesterov else velocity
        self.start[fragment].add_(direction, alpha=-rate)

    def tensors(self) -> list[torch.Tensor]:
        """All of it that is long, in one order on every site."""
        return [*self.start, *self.momentum, self.statistics]

    def calendar(self) -> list[int]:
        """All of it that is dates, in one order on every site."""
        return [self.update, self.applied, *self.sent, *self.due]

    def set_calendar(self, dates: Sequence[int]) -> None:
        """Take over what `calendar` gave."""
        count = len(self.start)
        self.update, self.applied = dates[0], dates[1]
        self.sent, self.due = list(dates[2 : 2 + count]), list(dates[2 + count :])

    def state(self) -> dict[str, Any]:
        """Copies of all of it."""
        return {"tensors": [one.clone() for one in self.tensors()], "calendar": self.calendar()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave.

        Raises:
            ValueError: it is of another model, or of another number of fragments.
        """
        here, there = self.tensors(), state["tensors"]
        if [one.numel() for one in here] != [one.numel() for one in there]:
            sizes = [sum(one.numel() for one in some) for some in (here, there)]
            raise ValueError(f"shared weights and momenta of {len(here)} parts with {sizes[0]} numbers cannot be had "
                             f"from {len(there)} parts with {sizes[1]}")  # fmt: skip
        for mine, theirs in zip(here, there, strict=True):
            mine.copy_(theirs)
        self.set_calendar(state["calendar"])
