"""What the tests of verifying share: real checkpoints, subjects, and jobs that break the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.jobs import Job
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.testing import FakeClock
from stoker.training.checkpoints import Checkpointer, restore
from stoker.verifying.subject import Subject, Timebox
from tests.stepping.driving import SEPARABLE
from tests.stepping.models import CLASSES, FEATURES


def on_disk(folder: Path) -> Callable[[Step, Step], None]:
    """A checkpoint of the first step, written to `folder` and restored into the second."""

    def through_checkpoint(saved: Step, fresh: Step) -> None:
        store = CheckpointStore(folder)
        checkpointer = Checkpointer(store, spec_digest="of a test", version="0")
        checkpointer.save(saved, Position(), {}, best=False)
        checkpointer.close()
        found = store.newest()
        assert found is not None
        restore(fresh, *found)

    return through_checkpoint


def subject_of(job: Job, micro_batch: int, coupling: Coupling = SEPARABLE, **plan: Any) -> Subject:
    """A job with its data under a plan for the CPU."""
    return Subject(job, datasets_of(job), Plan(device="cpu", micro_batch=micro_batch, **plan), coupling)


def no_time() -> Timebox:
    """A box that is over at once, so that as little is done as possible."""
    return Timebox(0.0, FakeClock())


def ample_time() -> Timebox:
    """A box that is never over."""
    return Timebox(1.0, FakeClock())


class ForgottenBuffer(nn.Module):
    """Normalises by a running mean that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(FEATURES), persistent=False)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x_BF.detach().mean(0)
        return self.last(x_BF - self.seen)


class ChangesInEvaluation(nn.Module):
    """Moves its inputs by a saved buffer that grows in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.shift += 0.0 if self.training else 0.1
        return self.last(x_BF + self.shift)


class HiddenCount(nn.Module):
    """Warms up by a count that is a plain number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.calls = 0

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.last(x_BF) * (1 + 1 / (1 + self.calls))


class ForgetfulSGD(torch.optim.SGD):
    """Slows down by a count, a tensor that its state_dict does not hold."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.count
        return super().step(closure)
