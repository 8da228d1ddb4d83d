"""What it takes to fetch samples one by one."""

from __future__ import annotations

import torch

from stoker.loading.dataset_adapters import as_samples
from stoker.profiling.job_profile import fetch_seconds
from stoker.testing import FakeClock


class Slow(torch.utils.data.Dataset):
    """Items that each take some seconds of a clock, the first ones more."""

    def __init__(self, clock: FakeClock, num: int = 100) -> None:
        self.clock, self.num = clock, num
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.advance(5.0 if len(self.fetched) < 8 else 0.5)
        self.fetched.append(index)
        return torch.zeros(2)


def test_the_time_of_one_sample_is_measured_once_files_are_open() -> None:
    """Half a second each, but for the first eight."""
    clock = FakeClock()
    assert fetch_seconds(as_samples(Slow(clock), what="data"), clock) == 0.5


def test_a_set_smaller_than_what_is_fetched_is_gone_through_again() -> None:
    """Five samples are enough to tell."""
    clock = FakeClock()
    data = Slow(clock, num=5)
    fetch_seconds(as_samples(data, what="data"), clock)
    assert set(data.fetched) == set(range(5))


def test_what_lies_in_memory_is_not_fetched() -> None:
    """A batch of it is one gathering."""
    assert fetch_seconds(as_samples((torch.zeros(9, 2), torch.zeros(9)), what="data")) == 0.0
