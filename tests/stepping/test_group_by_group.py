"""Batch statistics of groups, against loops that know nothing of Stoker's step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.jobs import SGD, Job
from stoker.loading.batches import in_order
from stoker.loading.datasets import datasets_of
from stoker.stepping.batch_norm import GroupedBatchNorm
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from tests.stepping.driving import grouped, largest_difference, plan_of, trained, whole_stream
from tests.stepping.models import NormOfTokens, cnn, images, make_job, mlp, texts, vectors

UPDATES = 9


def by_hand(job: Job, group: int, updates: int = UPDATES) -> dict[str, torch.Tensor]:
    """Weights and statistics after plain PyTorch goes through every batch group by group."""
    model = build_model(job).double()
    assert isinstance(job.optimizer, SGD)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.optimizer.lr, momentum=job.optimizer.momentum)
    batches = whole_stream(job, Step(job, plan_of(group), grouped(group), dtype=torch.float64), updates)
    for inputs, targets in batches:
        optimizer.zero_grad()
        for x, y in zip(inputs.split(group), targets.split(group), strict=True):
            output = model(x)
            flat = (output.flatten(0, 1), y.flatten()) if output.dim() == 3 else (output, y)
            (F.cross_entropy(*flat, reduction="sum") / targets.numel()).backward()
        optimizer.step()
    return dict(model.state_dict())


JOBS: dict[str, Callable[..., Job]] = {
    "cnn": lambda **changed: make_job(lambda: cnn(nn.BatchNorm2d), data=images(34), **changed),
    "mlp": lambda **changed: make_job(lambda: mlp(norm=nn.BatchNorm1d), data=vectors(34), **changed),
    "cumulative statistics": lambda **changed: make_job(
        lambda: mlp(norm=lambda width: nn.BatchNorm1d(width, momentum=None)), data=vectors(34), **changed
    ),
    "flattened tokens": lambda **changed: make_job(
        lambda: NormOfTokens(time_first=False), data=texts(34), loss="token_cross_entropy", **changed
    ),
}


@functools.cache
def expected(name: str, batch: int, group: int) -> dict[str, torch.Tensor]:
    """As `by_hand`, of a job of JOBS with momentum."""
    return by_hand(JOBS[name](batch=batch, coupling_group=group, optimizer=SGD(lr=0.05, momentum=0.9)), group)


@pytest.mark.parametrize(
    ("batch", "group", "micro_batch"),
    [(12, 4, 4), (12, 4, 8), (12, 4, 12), (16, 4, 8), (10, 4, 4), (10, 4, 8), (10, 4, 10), (12, 12, 12), (8, 2, 6)],
)
@pytest.mark.parametrize("name", JOBS)
def test_all_legal_micro_batches_go_group_by_group(name: str, batch: int, group: int, micro_batch: int) -> None:
    """Whole groups in one micro-batch, ragged groups and ragged batches: weights and running statistics to 1e-9."""
    job = JOBS[name](batch=batch, coupling_group=group, optimizer=SGD(lr=0.05, momentum=0.9))
    step = trained(job, micro_batch, grouped(group), updates=UPDATES)
    assert largest_difference(step, expected(name, batch, group)) < 1e-9


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_any_groups_go_one_by_one(data: st.DataObject) -> None:
    """For any batch, group and legal micro-batch, groups of one image and ragged ones included."""
    batch = data.draw(st.integers(2, 16), label="batch")
    group = data.draw(st.integers(1, batch), label="group")
    micro_batch = data.draw(st.sampled_from([*range(group, batch, group), batch]), label="micro_batch")
    job = JOBS["cnn"](batch=batch, coupling_group=group, optimizer=SGD(lr=0.05, momentum=0.9))
    step = trained(job, micro_batch, grouped(group), updates=8)
    assert largest_difference(step, by_hand(job, group, updates=8)) < 1e-9


def test_statistics_count_every_group() -> None:
    """BatchNorm's own count of batches is the number of groups it saw, however many a micro-batch held."""
    job = JOBS["mlp"](batch=12, coupling_group=4)
    step = trained(job, 12, grouped(4), updates=3)  # batches of 12, 12 and 10 samples
    assert int(step.model.state_dict()["1.num_batches_tracked"]) == 3 + 3 + 3


def test_larger_groups_are_another_job() -> None:
    """Statistics over the whole batch and over groups of it train different weights."""
    job = JOBS["mlp"](batch=12, coupling_group=4)
    assert largest_difference(trained(job, 12, grouped(4)), trained(job, 12, grouped(12))) > 1e-3


def test_evaluation_ignores_groups() -> None:
    """In evaluation the running statistics normalise, whatever the size of a batch."""
    job = JOBS["mlp"](batch=12, coupling_group=4)
    step = trained(job, 12, grouped(4), updates=2)
    samples = datasets_of(job).train

    def total(size: int) -> torch.Tensor:
        with step.evaluation() as measure:
            batches = in_order(samples, step.pipeline(samples, augmented=False), size)
            return sum(measure(batch.cut(0, batch.size), batch.size)["loss"].sum for batch in batches)

    torch.testing.assert_close(total(34), total(5), rtol=1e-12, atol=0)


def test_rows_that_are_no_multiple_of_samples_are_refused() -> None:
    """Where the groups' rows cannot be distinguished, grouping says so instead of mixing them."""
    norm = nn.BatchNorm1d(3)
    groups = GroupedBatchNorm(nn.Sequential(norm), 2)
    groups.micro_batch = 4
    with pytest.raises(ValueError, match="5 rows for 4 samples"):
        norm(torch.randn(5, 3))
