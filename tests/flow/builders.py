"""Small jobs, and ways to watch and to stop them."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import nn

import stoker
from stoker.records import Event, Plan

PLAN = Plan(device="cpu", micro_batch=16)
"""One thread, fp32, the whole batch at once: so that two runs under it are bit-equal."""


def blobs(num_samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [N, 6] and the sign of their sum [N]."""
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.sum(1) > 0).long()


def net() -> nn.Module:
    """Two layers with dropout between them."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def blobs_job(**changes: Any) -> stoker.Job:
    """A classifier of 100 points, 20 of them held out: three epochs of five updates, and 30 points to test on."""
    settings: dict[str, Any] = {
        "model": net,
        "data": blobs(100),
        "valid": stoker.holdout(0.2),
        "test": blobs(30, seed=1),
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "optimizer": stoker.SGD(lr=0.1, momentum=0.9),
        "batch": 16,
        "until": stoker.epochs(3),
    }
    return stoker.Job(**(settings | changes))


class Heard(list[Event]):
    """A sink that keeps what it hears."""

    def __call__(self, event: Event) -> None:
        """Keep the event."""
        self.append(event)

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events, in order."""
        return [event.kind for event in self]

    def of(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """The fields of every event of that kind whose fields are as wanted."""
        return [e.fields for e in self if e.kind == kind and all(e.fields[name] == wanted[name] for name in wanted)]


class Stopping(Heard):
    """A sink that asks training to stop, as a supervisor would, when `valid` was evaluated at `samples` or later."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples

    def __call__(self, event: Event) -> None:
        """Keep the event; send the signal once."""
        super().__call__(event)
        if event.kind == "evaluated" and event.fields["samples"] >= self.samples and not self.of("stopped"):
            signal.raise_signal(signal.SIGTERM)


def stopped_run(job: stoker.Job, *, at_samples: int = 80, **options: Any) -> stoker.Run:
    """The job trained under PLAN and stopped in the update after the evaluation at `at_samples`."""
    run = stoker.train(job, plan=PLAN, sink=Stopping(at_samples), **options)
    assert run.status == "unfinished"
    return run


def assert_equal_weights(one: stoker.Run, other: stoker.Run) -> None:
    """The weights that two runs kept are equal bit for bit."""
    assert_equal_tensors(one.weights(), other.weights())


def assert_equal_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """The same names, and the same bits."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name
