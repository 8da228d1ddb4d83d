"""Stochastic depth: skipped blocks are the identity, the mean stays, and other blocks are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker import zoo
from stoker.errors import BadJob, BadSetting
from stoker.jobs import Job
from stoker.jobs.job_description import describe_settings
from stoker.stepping.step import Step
from stoker.stepping.stochastic_depth import SkippedAtRandom, skip_blocks
from tests.stepping.driving import SEPARABLE, are_equal, largest_difference, plan_of, train, trained
from tests.stepping.models import CLASSES, FEATURES, make_job, vectors


class Residual(nn.Module):
    """x + f(x), or, `after`, the activation of that, or without the sum."""

    def __init__(self, form: str = "before") -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(16, 16)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        branch = self.layer(x_BF)
        if self.form == "none":
            return branch
        return F.relu(x_BF + branch) if self.form == "after" else x_BF + F.gelu(branch)


def net(form: str = "before", depth: int = 4) -> nn.Sequential:
    """A classifier of `vectors` with residual blocks."""
    blocks = nn.Sequential(*(Residual(form) for _ in range(depth)))
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), blocks, nn.Linear(16, CLASSES))


def job_of(form: str = "before", rate: float = 0.5) -> Job:
    """A job that skips its last block with that probability."""
    loss = stoker.Objective("cross_entropy", stochastic_depth=rate)
    return make_job(lambda: net(form), data=vectors(150), batch=50, loss=loss)


@pytest.mark.parametrize("form", ["before", "after"])
def test_rates_grow_with_depth_and_the_mean_stays(form: str) -> None:
    """A sample's output is its input, or its branch divided by the chance of staying, in the stated share of draws."""
    torch.manual_seed(0)
    model = net(form)
    skip_blocks(model, 0.4)
    assert [block.forward.rate for block in model[2]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    last = model[2][3]
    x = torch.rand(1, 16).expand(4000, 16)
    output, whole = last(x), last.forward.forward(x)
    is_skipped = (output == x).all(1)
    assert float(is_skipped.double().mean()) == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(output[~is_skipped], (x + (whole - x) / 0.6)[~is_skipped])


def test_evaluation_uses_every_block() -> None:
    """In evaluation the model is the one without it, bit for bit."""
    model = net()
    x = torch.rand(8, FEATURES)
    expected = model.eval()(x)
    skip_blocks(model, 0.9)
    assert torch.equal(model(x), expected)


def test_draws_are_keyed_like_dropout() -> None:
    """A run that goes on in the middle has the bits of one that did not stop; other seeds draw otherwise."""
    step = Step(job_of(), plan_of(50), SEPARABLE, dtype=torch.float64)
    train(job_of(), step, 4)
    torch.manual_seed(12345)  # whatever was drawn in between
    train(job_of(), step, 5, begin=4)
    assert are_equal(step, trained(job_of(), 50, updates=9))
    assert not are_equal(step, trained(job_of(rate=0.0), 50, updates=9))


def test_silenced_it_is_the_same_mathematics() -> None:
    """With draws silenced, micro-batches learn what the whole batch does, and what a job without it does."""
    silent = trained(job_of(), 50, dropout=False)
    assert largest_difference(silent, trained(job_of(), 7, dropout=False)) < 1e-9
    assert largest_difference(silent, trained(job_of(rate=0.0), 50, dropout=False)) < 1e-9


def test_checkpointed_blocks_draw_the_same_again() -> None:
    """Activation checkpointing repeats the draws: the same weights to the bit."""
    assert are_equal(trained(job_of(), 50, checkpointed_blocks=4), trained(job_of(), 50))


def test_blocks_that_are_not_residual_are_refused() -> None:
    """The error names the block and its class."""
    with pytest.raises(BadJob, match=r"'2\.0' \(Residual\) is none"):
        trained(job_of("none"), 50, updates=1)


def test_models_without_blocks_are_refused() -> None:
    """When the step is made."""
    with pytest.raises(BadJob, match="Linear has none"):
        skip_blocks(nn.Linear(3, 3), 0.2)


@pytest.mark.parametrize(
    ("make", "shape", "num_skipped"),
    [
        (lambda: zoo.ResNet(18, classes=4, width=8, stem="small"), (3, 16, 16), 5),
        (lambda: zoo.ViT(image=16, patch=4, layers=3, width=16, heads=2, classes=4), (3, 16, 16), 3),
    ],
    ids=["ResNet", "ViT"],
)
def test_blocks_of_the_zoo_are_residual(
    make: Callable[[], nn.Module], shape: tuple[int, ...], num_skipped: int
) -> None:
    """Those that keep the shape of their input; the three of a ResNet that change it stay whole."""
    model = make()
    skip_blocks(model, 0.2)
    model(torch.randn(4, *shape))
    blocks = [module.forward for module in model.modules() if isinstance(module.forward, SkippedAtRandom)]
    assert sum(block.is_known for block in blocks) == num_skipped


def test_looking_at_a_block_leaves_no_trace() -> None:
    """The first look changes neither running statistics nor weights, nor the wrapped forward."""
    block = Residual()
    block.layer = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))  # type: ignore[assignment]
    skipped = SkippedAtRandom(block, block.forward, "block", 0.5)
    block.forward = skipped  # type: ignore[method-assign,assignment]
    weights = [parameter.clone() for parameter in block.parameters()]
    block(torch.randn(8, 16))
    assert int(block.layer[1].num_batches_tracked) == 1  # type: ignore[index]
    assert all(map(torch.equal, weights, block.parameters()))
    assert block.forward is skipped
    assert skipped.is_known


@pytest.mark.parametrize("rate", [-0.1, 1.0, "0.2"])
def test_rates_out_of_range_are_refused(rate: object) -> None:
    """With the number."""
    with pytest.raises(BadSetting, match=str(rate)):
        stoker.Objective("cross_entropy", stochastic_depth=rate)  # type: ignore[arg-type]


def test_the_rate_is_part_of_the_identity() -> None:
    """Described with the loss that it belongs to."""
    rates = [describe_settings(job)["loss"]["stochastic_depth"] for job in (job_of(), job_of(rate=0.0))]  # type: ignore[index,call-overload]
    assert rates[0] == 0.5
    assert not rates[1]
