"""Losses of one's own that PyTorch stretches over all pairs of samples, and those that are meant to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.jobs.objective import Objective
from stoker.stepping.coupling import at_first, find_coupling
from stoker.stepping.loss_checks import require_by_sample
from stoker.stepping.losses import TrainingObjective
from tests.stepping.models import FEATURES, make_job, samples_of, vectors

INPUTS = vectors()[0]
SUMS = INPUTS.sum(1)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One value for each entry of what comes of output less target."""
    return (output - target) ** 2


def of_pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each pair is from the order of its targets [B, B]; meant to compare all of them."""
    return torch.relu(1 - (output - output.T) * (target[:, None] - target[None]).sign())


def regression(loss: Callable[..., Any] | Objective, **changed: Any) -> Job:
    """One output a sample, [B, 1], for targets [B]."""
    return make_job(lambda: nn.Linear(FEATURES, 1), **({"data": (INPUTS, SUMS), "loss": loss} | changed))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [squares, nn.MSELoss(reduction="none")], ids=["function", "module"])
def test_values_of_all_pairs_are_refused_before_training(loss: Callable[..., Any]) -> None:
    """With both shapes; such a job was trained to its end."""
    job = regression(loss)
    with pytest.raises(BadJob, match=r"loss gave \[16, 16\] values for 16 samples: an output \[16, 1\]") as told:
        find_coupling(job, samples_of(job))
    with pytest.raises(BadJob, match=r"loss gave \[16, 16\] values for 16 samples"):
        at_first(job, samples_of(job))
    assert "output.squeeze(1)" in str(told.value.remedy)
    assert 'scope="batch"' in str(told.value.remedy)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [lambda o, t: squares(o, t).mean(), nn.MSELoss(), lambda o, t: Loss(squares(o, t).sum(), len(o))],
    ids=["function", "module", "sum and count"],
)
def test_their_mean_is_refused_too(loss: Callable[..., Any]) -> None:
    """It is a number like any other, but it does not tell whose target is whose."""
    job = regression(loss)
    for check in (at_first, find_coupling):
        with pytest.raises(BadJob, match=r"gave .*, whichever sample each target belongs to: an output \[\d+, 1\]"):
            check(job, samples_of(job))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.functional.l1_loss], ids=["module", "function"])
def test_a_mean_of_distances_is_refused_too(loss: Callable[..., Any]) -> None:
    """Where all targets are larger than all outputs it is the same for any pairing, the right one included."""
    job = regression(loss, data=(INPUTS, SUMS.abs() + 100))
    for check in (at_first, find_coupling):
        with pytest.raises(BadJob, match=r"gave .*, whichever sample each target belongs to: an output \[\d+, 1\]"):
            check(job, samples_of(job))


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: squares(o.squeeze(1), t),
        lambda o, t: squares(o.squeeze(1), t).mean(),
        lambda o, t: squares(o.view(-1), t).mean(),
        lambda o, t: squares(o, t[:, None]).mean(),
        lambda o, t: squares(o, t.view_as(o)),
        lambda o, t: (o.squeeze(1) - t).abs().mean(),
    ],
    ids=["squeezed", "its mean", "viewed", "targets widened", "targets viewed", "distances"],
)
def test_a_loss_that_gives_both_one_shape_is_let_alone(loss: Callable[..., Any]) -> None:
    """Whichever way it does so: the samples are separable."""
    job = regression(loss)
    assert find_coupling(job, samples_of(job)).kind == "separable"


def test_a_loss_of_pairs_says_so() -> None:
    """By the scope of the loss; its mean is known for what it is."""
    with pytest.raises(BadJob, match="compares every sample with every target"):
        find_coupling(regression(of_pairs), samples_of(regression(of_pairs)))
    declared = regression(Objective(of_pairs, scope="batch"))
    assert find_coupling(declared, samples_of(declared)).kind == "whole_group"
    mean = regression(lambda o, t: of_pairs(o, t).mean())
    assert find_coupling(mean, samples_of(mean)).kind == "whole_group"


@pytest.mark.parametrize(
    ("output", "target", "value"),
    [
        ((4, 5, 3), (4, 5), (4, 5)),  # tokens
        ((4, 3), (4, 1), (4, 3)),  # one target for several outputs
        ((4, 1, 3), (4, 2, 1), (4, 2, 3)),  # stretched within each sample
        ((4, 4), (4,), (4, 4)),  # as large as the output: of classes, or of each one's own
        ((1, 1), (1,), (1, 1)),
    ],
)
def test_values_within_samples_are_no_pairs(
    output: tuple[int, ...], target: tuple[int, ...], value: tuple[int, ...]
) -> None:
    """Only what pairs a sample with another's target is refused."""
    require_by_sample("loss", torch.zeros(value), torch.zeros(output), torch.zeros(target))


def test_a_metric_of_all_pairs_is_refused_by_its_name() -> None:
    """Its mean over pairs is no mean over samples either."""
    job = regression(lambda o, t: squares(o.squeeze(1), t), metrics=[squares])
    with pytest.raises(BadJob, match=r"squares gave \[5, 5\] values for 5 samples"):
        TrainingObjective(job).measures(nn.Linear(FEATURES, 1), (INPUTS[:5], SUMS[:5]), 5)


def test_a_loss_of_sets_is_let_alone() -> None:
    """Of means: it does not look at whose target is whose, in whichever shape."""
    job = regression(lambda o, t: (o.mean() - t.mean()) ** 2)
    assert find_coupling(job, samples_of(job)).kind == "whole_group"
