"""Data sets for the tests of loading."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch

from stoker.jobs.fields import Fields
from stoker.jobs.run_length import Extent
from stoker.loading.batches import BatchSource, InputPipeline
from stoker.loading.samples import Samples
from stoker.records import Plan, Position


class Squares(torch.utils.data.Dataset):
    """Sample i is (i, i²)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index**2


class Noisy(Squares):
    """Sample i is (i, i²) and a draw from each generator there is."""

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002 - users draw so
        return {"x": torch.tensor([index, *drawn], dtype=torch.float64), "label": index**2}


class Failing(Squares):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("the disk said: BadSample: no")
        return super().__getitem__(index)


class Growing(Squares):
    """Sample 5 is longer than the others."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4 if index == 5 else 2), index


class Deadly(Squares):
    """The worker that reads sample 9 is killed, as by the kernel when memory is short."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def source_of(samples: Samples, batch: int, loader: str = "inline", **pipeline: Any) -> BatchSource:
    """A source of batches of `batch` samples, fetched as `loader` says, two workers if by workers."""
    plan = Plan(device="cpu", micro_batch=batch, loader=loader, num_workers=2 if loader == "workers" else 0)
    settings = {"device": torch.device("cpu"), "fields": Fields(), "prepare": samples.prepare} | pipeline
    return BatchSource(samples, InputPipeline(**settings), Extent(len(samples), batch), seed=3, plan=plan)


def contents(source: BatchSource, start: int, stop: int) -> list[Any]:
    """The batches of updates start..stop, ready for the model."""
    batches = source.batches(source.extent.position(start) if start else Position(), stop)
    return [batch.cut(0, batch.size) for batch in batches]
