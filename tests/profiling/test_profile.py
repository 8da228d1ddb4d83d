"""The facts of a job that planning rests on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker
from stoker.loading.datasets import datasets_of
from stoker.profiling.job_profile import job_profile
from stoker.records import Coupling, Profile
from stoker.stepping.model import meta_model

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


class Items(torch.utils.data.Dataset):
    """Images fetched one by one."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 8, 8), index % 2


def profiled(**changes) -> Profile:
    """The profile of a job."""
    settings = {
        "model": lambda: nn.Sequential(nn.Linear(10, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False)),
        "data": (torch.zeros(100, 10), torch.zeros(100, 5)),
        "valid": stoker.holdout(0.25),
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 8,
        "until": stoker.epochs(1),
    }
    job = stoker.Job(**(settings | changes))
    return job_profile(job, datasets_of(job), SEPARABLE, meta_model(job), device_kind="cpu")


def test_counts_and_sizes_are_the_jobs() -> None:
    """Samples of each set, the batch, parameters and their bytes, though the weights are never made."""
    found = profiled(test=(torch.zeros(7, 10), torch.zeros(7, 5)))
    assert (found.num_train, found.num_valid, found.num_test, found.batch) == (75, 25, 7, 8)
    assert (found.parameters, found.parameter_bytes) == (300, 1200)
    assert found.is_in_memory
    assert not found.has_convolutions
    assert found.coupling == SEPARABLE
    assert found.optimizer_implementations == ("fused", "default")


def test_a_dataset_of_items_with_a_convolution_under_a_users_optimiser() -> None:
    """What the planner may try follows from it: loaders, memory formats, one implementation."""
    found = profiled(
        model=lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2)),
        data=Items(),
        valid=None,
        loss="cross_entropy",
        optimizer=torch.optim.Rprop,
    )
    assert found.has_convolutions
    assert not found.is_in_memory
    assert (found.num_valid, found.optimizer_implementations) == (0, ("default",))


def test_weights_in_float64_are_told_from_others() -> None:
    """All of them have to be."""
    assert profiled(model=lambda: nn.Linear(10, 5).double()).is_double
    assert not profiled(model=lambda: nn.Sequential(nn.Linear(10, 10).double(), nn.Linear(10, 5))).is_double


def test_blocks_that_can_be_checkpointed_are_counted() -> None:
    """Six equal layers of a transformer."""
    gpt = stoker.zoo.GPT(vocab=32, layers=6, heads=2, width=16, context=8)
    assert profiled(model=gpt, data=torch.zeros(20, 9, dtype=torch.int64), loss="token_cross_entropy").num_blocks == 6


def test_shapes_and_costs_that_change_over_the_run_are_known() -> None:
    """Progressive resizing and selective backprop: more than one shape, and a cheaper mean update."""
    images = {
        "model": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "data": (torch.zeros(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)),
        "valid": None,
    }
    keep = stoker.SelectiveBackprop(keep=0.5, start=0.5, end=0.9, interrupt=2)
    loss = stoker.Objective("cross_entropy", selective_backprop=keep)
    resizing = stoker.transforms.ProgressiveResizing(initial_scale=0.5, delay_fraction=0.5, finetune_fraction=0.5)
    plain, both = (
        profiled(**images, **more) for more in ({"loss": "cross_entropy"}, {"loss": loss, "augment": [resizing]})
    )
    assert (plain.has_one_shape, plain.relative_cost) == (True, 1.0)
    assert not both.has_one_shape
    assert both.relative_cost == pytest.approx((0.5 * 0.25 + 0.5) * (1 - 0.4 / 2 / 6))
