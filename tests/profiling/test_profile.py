"""The facts of a job that planning rests on."""

from __future__ import annotations

import torch
from torch import nn

import stoker
from stoker.loading import datasets_of
from stoker.profiling import profile
from stoker.profiling.profile import saved_bytes_per_sample
from stoker.records import Coupling, Plan, Profile
from stoker.stepping import Step
from stoker.testing import fake_device

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


class Items(torch.utils.data.Dataset):
    """Images fetched one by one."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 8, 8), index % 2


def profiled(**changes) -> tuple[stoker.Job, Profile]:
    """A job and its profile."""
    settings = {
        "model": lambda: nn.Sequential(nn.Linear(10, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False)),
        "data": (torch.zeros(100, 10), torch.zeros(100, 5)), "valid": stoker.holdout(0.25), "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1), "batch": 8, "until": stoker.epochs(1),
    }  # fmt: skip
    job = stoker.Job(**(settings | changes))
    return job, profile(job, datasets_of(job), fake_device(), SEPARABLE)


def test_counts_and_sizes_are_the_jobs() -> None:
    """Samples of each set, the batch, parameters and their bytes; arrays lie in memory."""
    _, found = profiled(test=(torch.zeros(7, 10), torch.zeros(7, 5)))
    assert (found.num_train, found.num_valid, found.num_test, found.batch) == (75, 25, 7, 8)
    assert (found.parameters, found.parameter_bytes) == (300, 1200)
    assert found.is_in_memory
    assert not found.has_convolutions
    assert found.coupling == SEPARABLE
    assert found.optimizer_implementations == ("fused", "default")


def test_a_dataset_of_items_with_a_convolution_under_a_users_optimiser() -> None:
    """What the planner may try follows from it: loaders, memory formats, one implementation."""
    _, found = profiled(
        model=lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2)), data=Items(), valid=None,
        loss="cross_entropy", optimizer=torch.optim.Rprop,
    )  # fmt: skip
    assert found.has_convolutions
    assert not found.is_in_memory
    assert (found.num_valid, found.optimizer_implementations) == (0, ("default",))


def test_what_a_forward_pass_keeps_is_counted_once_and_without_the_weights() -> None:
    """Inputs (10 floats), the result of tanh (20), kept by two layers, and what the loss keeps (5 and 5)."""
    job, found = profiled()
    floats = found.saved_bytes_per_sample / 4
    assert 10 + 20 + 5 <= floats <= 10 + 20 + 3 * 5
    data = datasets_of(job)
    whole = Step(job, Plan(device="cpu", micro_batch=8), SEPARABLE)
    assert saved_bytes_per_sample(whole, data) == found.saved_bytes_per_sample
