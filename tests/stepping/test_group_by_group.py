"""Batch statistics of groups, against loops that know nothing of Stoker's step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.jobs import SGD, Job
from stoker.loading import datasets_of
from stoker.stepping import Step, build_model
from stoker.stepping.batch_norm import GroupedBatchNorm
from tests.stepping.driving import grouped, largest_difference, plan_of, train, trained, whole_stream
from tests.stepping.models import VOCAB, NormOfTokens, cnn, images, make_job, mlp, texts, vectors

UPDATES = 30


def by_hand(job: Job, group: int, updates: int = UPDATES) -> dict[str, torch.Tensor]:
    """Weights and statistics after plain PyTorch goes through every batch group by group."""
    model = build_model(job).double()
    settings = job.optimizer
    assert isinstance(settings, SGD)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
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


@pytest.mark.parametrize(
    ("batch", "group", "micro_batch"),
    [(12, 4, 4), (12, 4, 8), (12, 4, 12), (16, 4, 8), (10, 4, 4), (10, 4, 8), (10, 4, 10), (12, 12, 12), (8, 2, 6)],
)
@pytest.mark.parametrize("name", JOBS)
def test_all_legal_micro_batches_go_group_by_group(name: str, batch: int, group: int, micro_batch: int) -> None:
    """Whole groups in one micro-batch, ragged groups and ragged batches: weights and running statistics to 1e-9."""
    job = JOBS[name](batch=batch, coupling_group=group, optimizer=SGD(lr=0.05, momentum=0.9))
    step = trained(job, micro_batch, grouped(group), updates=UPDATES)
    assert largest_difference(step, by_hand(job, group)) < 1e-9


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
    content = step.pipeline(samples, augmented=False)(vectors(34), 0, datasets_of(job).train.fetch.__self__ and None)
    with step.evaluation() as measure:
        whole = measure(content, 34)["loss"]
        parts = [measure((content[0][i : i + 5], content[1][i : i + 5]), 5)["loss"].sum for i in range(0, 30, 5)]
        rest = measure((content[0][30:], content[1][30:]), 4)["loss"].sum
    torch.testing.assert_close(whole.sum, sum(parts) + rest)


def test_rows_that_are_no_multiple_of_samples_are_refused() -> None:
    """Where the groups' rows cannot be told apart, grouping says so instead of mixing them."""
    norm = nn.BatchNorm1d(3)
    groups = GroupedBatchNorm(nn.Sequential(norm), 2)
    groups.micro_batch = 4
    with pytest.raises(ValueError, match="5 rows for 4 samples"):
        norm(torch.randn(5, 3))
