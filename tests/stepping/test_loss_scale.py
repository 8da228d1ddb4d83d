"""fp16 under a dynamic loss scale: what overflows is made again, nothing is left out, and all processes agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob, RunFailed
from stoker.jobs import SGD, AdamW, Job, Loss
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan, Position
from stoker.stepping.loss_scale import GROWTH_INTERVAL, LossScale
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT
from tests.stepping.driving import SEPARABLE, are_equal, grouped, plan_of, train
from tests.stepping.models import cnn, images, make_job, mlp, texts

TOO_LARGE = 2.0**34
"""A scale at which every gradient of these jobs overflows fp16."""


def cnn_job(**changed: Any) -> Job:
    """A network with batch norm, whose running statistics a pass changes."""
    return make_job(
        lambda: cnn(nn.BatchNorm2d),
        data=images(64),
        optimizer=SGD(lr=0.05, momentum=0.9),
        batch=16,
        numerics=["fp16"],
        **changed,
    )


def gpt_job() -> Job:
    """A GPT of two blocks."""
    return make_job(
        lambda: GPT(layers=2, width=32, heads=4, context=8, vocab=12),
        data=texts(64),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
        numerics=["fp16"],
    )


def cnn_step(scale: float | None = None) -> Step:
    """A step in fp16, which begins at a scale of the loss."""
    step = Step(cnn_job(), plan_of(8, precision="fp16"), grouped(8))
    if scale is not None:
        step.loss_scale.value = scale
    return step


def test_an_update_that_overflows_is_made_again_from_the_same_state() -> None:
    """Weights, statistics and optimiser are those of a run whose scale fitted at once; overflows are reported."""
    overflowing, told = cnn_step(TOO_LARGE), list[tuple[int, float]]()
    overflowing.loss_scale.on_overflow = lambda update, scale: told.append((update, scale))
    losses = train(cnn_job(), overflowing, 6)
    fitting = cnn_step(overflowing.loss_scale.value)
    assert train(cnn_job(), fitting, 6) == losses
    assert are_equal(overflowing, fitting)
    assert [scale for _, scale in told] == [TOO_LARGE / 2**n for n in range(len(told))]
    assert told[0][0] == 0
    assert overflowing.loss_scale.value == told[-1][1] / 2 <= TOO_LARGE / 4


def test_gradients_are_close_to_those_of_fp32() -> None:
    """The scale is divided out of gradients and loss; passes were in fp16."""
    gradients = []
    for precision in ("fp32", "fp16"):
        step = Step(gpt_job(), plan_of(4, precision=precision), SEPARABLE)
        dtypes: set[torch.dtype] = set()
        step.model.blocks[0].register_forward_hook(lambda m, i, o, seen=dtypes: seen.add(m.attention(i[0]).dtype))
        loss = step.gradients(next(batches_of(step)), 0)
        gradients.append((float(loss), torch.cat([p.grad.flatten() for p in step.model.parameters()])))
        assert dtypes == {torch.float16 if precision == "fp16" else torch.float32}
    (exact_loss, exact), (loss, gradient) = gradients
    assert loss == pytest.approx(exact_loss, rel=1e-3)
    error = float((gradient - exact).norm() / exact.norm())
    assert 1e-5 < error < 5e-3


@pytest.mark.parametrize("form", [lambda mean: mean, lambda mean: Loss(16 * mean, 16)], ids=["a mean", "a sum"])
def test_a_loss_in_fp16_does_not_overflow_by_the_scale(form: Any) -> None:
    """A critic's mean of what a layer computed in fp16, times 2^16, is more than fp16 holds."""

    def loss(model: nn.Module, batch: Any) -> Any:
        mean = 2 - model(batch[0]).mean()
        assert mean.dtype == torch.float16
        return form(mean)

    step = Step(make_job(mlp, loss=loss, metrics=[], numerics=["fp16"]), plan_of(16, precision="fp16"), SEPARABLE)
    assert float(step.gradients(next(batches_of(step)), 0)) > 1
    assert step.loss_scale.value >= 2**11  # of 2^12, at which the last gradient in fp16 is 2^16


def almost_learned() -> nn.Module:
    """Scores of 12 tokens that give the first a probability so large that the loss's gradients are below 1e-6."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    nn.init.constant_(model[1].bias, 0.0)
    model[1].bias.data[0] = 17.0
    return model


def test_gradients_of_a_loss_in_chunks_are_scaled_before_they_are_rounded() -> None:
    """Those that fp16 does not hold without a scale are as close to fp32's as others."""
    tokens = torch.randint(0, 12, (16, 8), generator=torch.Generator().manual_seed(0))
    job = make_job(
        almost_learned, data=(tokens, torch.zeros_like(tokens)), loss="token_cross_entropy", batch=16, numerics=["fp16"]
    )
    gradients = []
    for precision, chunks in (("fp32", 1), ("fp16", 4)):
        step = Step(job, plan_of(16, precision=precision, loss_chunks=chunks), SEPARABLE)
        step.gradients(next(batches_of(step)), 0)
        gradients.append(torch.cat([p.grad.flatten() for p in step.model.parameters()]))
    exact, found = gradients
    assert float(exact.abs().max()) < 1e-6
    assert float((found - exact).norm() / exact.norm()) < 5e-3


def test_a_gradient_that_is_not_finite_at_any_scale_ends_the_update() -> None:
    """Not in an endless loop: the scale has an end. It is then as before, since the next update may be in order."""

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.float().sum(1) * 0).sqrt() + target

    step = Step(cnn_job(loss=broken), plan_of(16, precision="fp16"), grouped(16))
    step.loss_scale.num_good, before = 7, [step.loss_scale.value, 7]
    with pytest.raises(NotFinite, match="gradient's norm"):
        train(step.job, step, 1)
    assert step.loss_scale.state() == before


class ChangesItsTable(nn.Module):
    """A layer with a table of 2 MiB, which the third pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = mlp(), 0
        self.register_buffer("table", torch.zeros(2**19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer."""
        self.passes += 1
        if self.passes == 3:
            self.table.add_(1)
        return self.layer(x)


def test_an_overflow_that_cannot_be_put_back_is_told() -> None:
    """Of a large buffer that had been constant there is no copy; that is no gradient that is infinite at any scale."""
    step = Step(make_job(ChangesItsTable, numerics=["fp16"]), plan_of(16, precision="fp16"), SEPARABLE)
    train(step.job, step, 2)
    step.loss_scale.value = TOO_LARGE
    with pytest.raises(RunFailed, match=r"update 3 overflowed fp16 .* buffer of more than 1.0 MiB"):
        train(step.job, step, 1, begin=2)


def test_the_scale_grows_after_many_good_updates_and_is_kept() -> None:
    """Doubled once in 2,000; a restored one goes on where it was."""
    scale = LossScale(16)
    assert scale.value == 2.0**12
    for _ in range(GROWTH_INTERVAL - 1):
        scale.passed()
    again = LossScale(16)
    again.load(scale.state())
    again.passed()
    assert (scale.value, again.value) == (2.0**12, 2.0**13)


def test_fp16_is_for_jobs_that_allow_it() -> None:
    """A plan of fp16 for another job, a captured one, and jobs it does not go with, are refused."""
    with pytest.raises(BadJob, match=r'numerics=\["fp16"\]'):
        Step(make_job(mlp), plan_of(8, precision="fp16"), SEPARABLE)
    with pytest.raises(ValueError, match="captured"):
        plan_of(8, precision="fp16", captured=True)
    with pytest.raises(BadJob, match="'fp16'"):
        make_job(mlp, numerics=["fp61"])


def batches_of(step: Step) -> Any:
    """This process's parts of the first batches."""
    data = datasets_of(step.job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(step.job),
        step.job.seed,
        step.plan,
        split=step.split(),
    )
    return source.batches(Position(), 6)


def learned(world: World, layout: Layout, overflowing_rank: int | None) -> tuple[list[float], list[float]]:
    """Losses of six updates and the scale after each; in one rank a gradient overflows in the third."""
    plan = Plan(device="cpu", micro_batch=16 // layout.world_size, precision="fp16", layout=layout)
    step = Step(gpt_job(), plan, SEPARABLE, world=world)
    losses, scales = [], []
    for update, batch in enumerate(batches_of(step)):
        if update == 2 and world.rank == overflowing_rank:
            handle = step.model.head.register_full_backward_hook(lambda m, i, o: (i[0] * math.inf,))
            step.loss_scale.on_overflow = lambda update, scale, hook=handle: hook.remove()
        losses.append(float(step.update(batch, update, update / 6)))
        scales.append(step.loss_scale.value)
    return losses, scales


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shards=2)], ids=["replicated", "sharded"])
def test_all_processes_halve_the_scale_if_one_overflows(layout: Layout) -> None:
    """And make the same update again: losses are those of one process without an overflow."""
    expected, _ = learned(ALONE, Layout(), None)
    (first, first_scales), (second, second_scales) = on_ranks(layout, learned, layout, 1)
    assert first == second == pytest.approx(expected, rel=2e-3)
    assert first_scales == second_scales
    before = first_scales[0]
    assert first_scales == [before] * 2 + [before / 2] * 4
