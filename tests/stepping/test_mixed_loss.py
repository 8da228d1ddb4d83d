from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Loss
from stoker.jobs.objective import Objective
from stoker.loading.mixing import MixedTarget
from stoker.loading.transforms import CutMix, Mixup
from stoker.records import Layout, Plan
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of, source_of, trained
from tests.stepping.layouts.conformance import Learned, taught
from tests.stepping.models import CLASSES, cnn, images, make_job, mlp, texts, vectors

EITHER = [Mixup(0.4), CutMix(1.0, p=0.8)]
IGNORED = torch.where(torch.arange(150) % 3 == 0, -100, images(150)[1])


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One value per sample."""
    return (output - F.one_hot(target, CLASSES)).square().sum(1)


JOBS = {
    "mixup": {
        "model": mlp,
        "data": vectors(150),
        "mix": Mixup(0.4),
        "loss": Objective("cross_entropy", label_smoothing=0.1),
    },
    "cutmix": {"model": cnn, "data": images(150), "mix": CutMix()},
    "either": {"model": cnn, "data": images(150), "mix": EITHER, "clip_norm": 0.2},
    "some labels ignored": {"model": cnn, "data": (images(150)[0], IGNORED), "mix": Mixup(1.0)},
    "a function": {"model": cnn, "data": images(150), "mix": CutMix(), "loss": squared},
    "numbers": {
        "model": lambda: nn.Linear(6, 4),
        "data": (vectors(150)[0], vectors(150, 5)[0][:, :4]),
        "loss": "mse",
        "mix": Mixup(),
    },
    "a module": {"model": mlp, "data": vectors(150), "mix": Mixup(), "loss": nn.CrossEntropyLoss(reduction="none")},
}


@functools.cache
def after_three_epochs(name: str, micro_batch: int) -> Step:
    """The job of that name after nine updates, every third of a ragged batch."""
    return trained(make_job(**{"batch": 70, **JOBS[name]}), micro_batch, updates=9)


@pytest.mark.parametrize(("name", "micro_batch"), [*((name, 7) for name in JOBS), ("mixup", 1), ("either", 64)])
def test_every_micro_batch_learns_what_the_whole_batch_does(name: str, micro_batch: int) -> None:
    """Micro-batches of 7 of 70 samples, of some jobs 1 and 64: equal after three epochs."""
    assert largest_difference(after_three_epochs(name, micro_batch), after_three_epochs(name, 70)) < 1e-9


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(3, 24), st.data())
def test_any_cut_is_the_whole(count: int, data: st.DataObject) -> None:
    """For any sizes and shares."""
    batch = data.draw(st.integers(2, count))
    job = make_job(mlp, data=vectors(count), batch=batch, mix=Mixup(data.draw(st.sampled_from([0.1, 1.0, 3.0]))))
    micro_batch = data.draw(st.integers(1, batch))
    assert largest_difference(trained(job, micro_batch, updates=8), trained(job, batch, updates=8)) < 1e-9


def learned_by(world: World, name: str, plan: Plan) -> Learned:
    """Train a job of JOBS in this process."""
    return taught(
        world, make_job(**{"batch": 16, **JOBS[name], "data": JOBS[name]["data"]}), plan, SEPARABLE, torch.float64, 12
    )


def test_two_processes_learn_what_one_does() -> None:
    """Partners that belong to the other process are fetched along; losses and weights equal to 1e-9."""
    alone = trained(make_job(**{"batch": 16, **JOBS["either"]}), 16, updates=12)
    plan = Plan(device="cpu", micro_batch=3, layout=Layout(replicas=2))
    for one in on_ranks(Layout(replicas=2), learned_by, "either", plan):
        assert largest_difference(one.weights, dict(alone.model.state_dict())) < 1e-9


def test_an_update_is_that_of_a_loop_written_by_hand() -> None:
    """The mixed batch through the model, both cross-entropies, weighted; its gradient by autograd."""
    job = make_job(cnn, data=images(64), mix=Mixup(0.4))
    step = Step(job, plan_of(5), SEPARABLE, dtype=torch.float64)
    batch = next(iter(source_of(job, step).batches(source_of(job, step).extent.position(0), 1)))
    (x, target), model = batch.cut(0, 16), step.model
    share = target.share.double()
    losses = [F.cross_entropy(model(x), labels, reduction="none") for labels in (target.first, target.second)]
    mean = (share * losses[0] + (1 - share) * losses[1]).mean()
    expected = torch.autograd.grad(mean, list(model.parameters()))
    assert float(step.gradients(batch, 0)) == pytest.approx(mean.item(), abs=1e-12)
    assert all(torch.allclose(p.grad, e, atol=1e-12) for p, e in zip(model.parameters(), expected, strict=True))


def test_what_is_not_counted_is_not_counted_in_its_share() -> None:
    """A sample whose partner's label is ignored counts with its own share, and the other way round."""
    objective = TrainingObjective(make_job(mlp, mix=Mixup()))
    output = torch.randn(3, CLASSES, dtype=torch.float64)
    first, second = torch.tensor([1, -100, 2]), torch.tensor([0, 3, -100])
    share = torch.tensor([0.25, 0.5, 0.75])
    loss = objective.loss(lambda _: output, (torch.zeros(3, 1), MixedTarget(first, second, share)), 3)
    entropies = -output.log_softmax(1)
    expected = 0.25 * entropies[0, 1] + 0.75 * entropies[0, 0] + 0.5 * entropies[1, 3] + 0.75 * entropies[2, 2]
    assert float(loss.sum) == pytest.approx(float(expected))
    assert float(loss.count) == 1 + 0.5 + 0.75


def test_tokens_share_the_proportion_of_their_sample() -> None:
    """Cross-entropy over tokens of samples that are floating features."""
    objective = TrainingObjective(make_job(mlp, loss="token_cross_entropy", mix=Mixup()))
    output, targets = torch.randn(5, 8, 12, dtype=torch.float64), texts(10, masked=0.5)[1]
    share = torch.rand(5)
    target = MixedTarget(targets[:5], targets[5:], share)
    loss = objective.loss(lambda _: output, (torch.zeros(5, 1), target), 5)
    total = count = 0.0
    for labels, weight in ((targets[:5], share), (targets[5:], 1 - share)):
        values = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
        total += float((values * weight[:, None]).sum())
        count += float(((labels != -100) * weight[:, None]).sum())
    assert float(loss.sum) == pytest.approx(total)
    assert float(loss.count) == pytest.approx(count)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (F.cross_entropy, r"the loss gives a tensor of shape \[\] for a batch"),
        (lambda output, target: Loss(output.sum(), 3), "the loss gives Loss for a batch"),
        (lambda model, batch: Loss(model(batch[0]).sum(), 3), r"loss\(model, batch\) gives one for all"),
    ],
    ids=["mean", "sum and count", "model and batch"],
)
def test_a_loss_that_is_not_by_sample_is_a_bad_job(loss: Any, problem: str) -> None:
    """It cannot be mixed in each sample's own proportion; what to return instead is said."""
    with pytest.raises(BadJob, match=problem):
        trained(make_job(mlp, loss=loss, mix=Mixup()), 16, updates=1)


def test_a_loss_in_chunks_is_not_mixed() -> None:
    """The plan's way of computing it has no place for two targets."""
    job = make_job(lambda: nn.Linear(6, 4), loss="token_cross_entropy", mix=Mixup())
    with pytest.raises(BadJob, match="and not with mix"):
        Step(job, plan_of(16, loss_chunks=2), SEPARABLE)


def test_a_captured_pass_learns_what_an_ordinary_one_does() -> None:
    """Mixed targets are tensors like others."""
    job = make_job(**{"batch": 50, **JOBS["cutmix"]})
    assert largest_difference(trained(job, 50, updates=9, captured=True), trained(job, 50, updates=9)) < 1e-9
