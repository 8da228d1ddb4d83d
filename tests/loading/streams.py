"""Streams for the tests of loading and of training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class Counted(torch.utils.data.IterableDataset):
    """Samples (i, i²) one after the other; `reads` counts how many were read in all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            self.reads += 1
            yield torch.tensor([float(index)]), index**2


class Sized(Counted):
    """One that says how many samples it has."""

    def __len__(self) -> int:
        return self.size


class Drawing(Sized):
    """It draws from each global generator there is, when it begins and for each sample, and keeps what it drew."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        sum_of_draws = random.random()
        for index in range(self.size):
            self.reads += 1
            drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002 - users draw so
            sum_of_draws += drawn[0]
            yield torch.tensor([index, sum_of_draws, *drawn], dtype=torch.float64), index


class Stateful(Sized):
    """It can be put where it was, as torchdata's and Hugging Face's can."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0
        self.total = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            index = self.at
            self.at += 1
            self.total += index  # what a resumed reader has to know of all that was read
            self.reads += 1
            yield torch.tensor([float(index), float(self.total)]), index

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "inner": {"total": self.total}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.total = state["at"], state["inner"]["total"]
