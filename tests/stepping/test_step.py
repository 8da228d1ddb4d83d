from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob, RunFailed
from stoker.jobs import SGD, Adam, AdamW, Job, Loss
from stoker.jobs.schedules import one_cycle
from stoker.loading.batches import in_order
from stoker.loading.order import seed_generators
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, are_equal, plan_of, source_of, tensors_of, train, whole_stream
from tests.stepping.models import FunctionalDropout, cnn, images, make_job, mlp, samples_of, texts, vectors

PLAIN: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    ),
    "Adam": (Adam(lr=1e-2, weight_decay=1e-2), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2)),
    "AdamW": (AdamW(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "a user's own": (lambda p: torch.optim.RMSprop(p, lr=1e-2), lambda p: torch.optim.RMSprop(p, lr=1e-2)),
}


def plain_loop(job: Job, optimizer_of: Callable[..., torch.optim.Optimizer], updates: int) -> dict[str, torch.Tensor]:
    """The weights after a loop as PyTorch's tutorials write it, in fp32, over the job's batches."""
    model = build_model(job)
    optimizer = optimizer_of(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    for update, (inputs, targets) in enumerate(whole_stream(job, Step(job, plan_of(job.batch), SEPARABLE), updates)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.schedule(update / 30)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "changed", [{}, {"clip_norm": 0.1}, {"schedule": one_cycle()}], ids=["plain", "clipped", "scheduled"]
)
def test_whole_batches_are_trained_as_plain_pytorch_does(name: str, changed: dict[str, Any]) -> None:
    """With a micro-batch of the whole batch, 30 updates in fp32 are bit-equal to the usual loop's, ragged ones too."""
    ours, theirs = PLAIN[name]
    job = make_job(mlp, data=vectors(50), optimizer=ours, **changed)
    step = Step(job, plan_of(16), SEPARABLE)
    train(job, step, 30)
    expected = plain_loop(job, theirs, 30)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in step.model.state_dict().items())


def test_parameter_groups_are_pytorchs() -> None:
    """Settings by name pattern give the updates of PyTorch's parameter groups."""
    groups = {"*.bias": {"weight_decay": 0.0, "lr": 0.05}}
    job = make_job(mlp, optimizer=SGD(lr=0.1, weight_decay=0.1, groups=groups))

    def by_hand(parameters: Any) -> torch.optim.Optimizer:
        first, first_bias, last, last_bias = parameters
        settings = [{"params": [first, last]}, {"params": [first_bias, last_bias], "weight_decay": 0.0, "lr": 0.05}]
        return torch.optim.SGD(settings, lr=0.1, weight_decay=0.1)

    step = Step(job, plan_of(16), SEPARABLE)
    train(job, step, 10)
    expected = plain_loop(job, by_hand, 10)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in step.model.state_dict().items())


def test_loss_returned_is_the_mean_before_the_update() -> None:
    """What an update reports is the mean over its batch, whatever the micro-batch."""
    job = make_job(mlp, data=vectors(50))
    inputs, targets = next(iter(whole_stream(job, Step(job, plan_of(16), SEPARABLE), 1)))
    expected = float(F.cross_entropy(build_model(job)(inputs), targets).detach())
    for micro_batch in (5, 16):
        (loss,) = train(job, Step(job, plan_of(micro_batch), SEPARABLE), 1)
        assert loss == pytest.approx(expected, rel=1e-6)


def test_gradients_are_gone_after_an_update() -> None:
    """No gradient is left, not even of a parameter that the user's optimiser leaves out."""
    job = make_job(mlp, optimizer=lambda parameters: torch.optim.SGD(parameters[:2], lr=0.1))
    step = Step(job, plan_of(8), SEPARABLE)
    train(job, step, 2)
    assert [parameter.grad for parameter in step.model.parameters()] == [None] * 4


@pytest.mark.parametrize("model", [lambda: mlp(dropout=0.5), FunctionalDropout], ids=["nn.Dropout", "functional"])
def test_random_draws_are_keyed_by_update_and_first_sample(model: Any) -> None:
    """The same update and first sample draw the same masks whatever was drawn before; others draw others."""
    job = make_job(model)
    step = Step(job, plan_of(16), SEPARABLE)
    content = (vectors()[0][:4], vectors()[1][:4])

    def loss(update: int, first: int) -> float:
        torch.rand(7)
        return float(step.loss_of(content, 4, update, first).sum.detach())

    assert loss(3, 0) == loss(3, 0)
    assert len({loss(3, 0), loss(4, 0), loss(3, 4)}) == 3


def test_augmentation_outside_its_keys_is_at_least_seeded() -> None:
    """A transform that draws from PyTorch's generator sees the same draws again when an update is made again."""
    job = make_job(mlp, augment=[lambda x, draw: x + torch.randn_like(x)])
    one, two = (Step(job, plan_of(8), SEPARABLE) for _ in range(2))
    train(job, one, 3)
    seed_generators(99)
    train(job, two, 3)
    assert are_equal(one, two)


@pytest.mark.parametrize("changed", [{}, {"average": 0.9}], ids=["weights", "average"])
def test_evaluation_does_not_move_training(changed: dict[str, Any]) -> None:
    """With dropout and batch norm, a run that evaluates after every update is bit-equal to one that never does."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d, dropout=0.3), **changed)
    evaluated, left_alone = (Step(job, plan_of(16), SEPARABLE) for _ in range(2))
    for update in range(6):
        train(job, evaluated, 1, begin=update)
        train(job, left_alone, 1, begin=update)
        samples = samples_of(job)
        with evaluated.evaluation() as measure:
            for batch in in_order(samples, evaluated.pipeline(samples, augmented=False), 5):
                measure(batch.cut(0, batch.size), batch.size)
        assert evaluated.model.training
    assert are_equal(evaluated, left_alone)


class ClosureSGD(torch.optim.SGD):
    """SGD that needs a closure, as L-BFGS does, and keeps the norm of each gradient that its closure leaves."""

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Call the closure once, and step."""
        loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norms = [*getattr(self, "norms", []), float(torch.stack([g.norm() for g in gradients]).norm())]
        super().step()
        return loss


def test_a_closure_leaves_clipped_gradients() -> None:
    """An optimiser that computes the loss itself gets its gradients clipped too."""
    step = Step(make_job(mlp, optimizer=lambda p: ClosureSGD(p, lr=0.1), clip_norm=0.05), plan_of(5), SEPARABLE)
    train(step.job, step, 3)
    assert isinstance(step.optimizer, ClosureSGD)
    assert step.optimizer.norms == pytest.approx([0.05] * 3, rel=1e-3)


def test_evaluation_uses_the_average() -> None:
    """Where weights are averaged, it is the average that is measured, and the model's own weights come back."""
    job = make_job(mlp, average=0.9)
    step = Step(job, plan_of(16), SEPARABLE)
    train(job, step, 5)
    assert step.average is not None
    before = copy.deepcopy(step.model.state_dict())
    averaged = build_model(job)
    averaged.load_state_dict(step.kept_weights())
    content = vectors()
    with step.evaluation() as measure:
        found = measure(content, 64)["loss"]
    expected = F.cross_entropy(averaged.eval()(content[0]), content[1], reduction="sum")
    torch.testing.assert_close(found.sum, expected.detach())
    assert all(torch.equal(before[name], tensor) for name, tensor in step.model.state_dict().items())


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_loss_that_is_not_finite_stops_before_the_weights_move(clip_norm: float | None) -> None:
    """An infinite loss raises RunFailed with the update's number, and the weights are what they were."""
    job = make_job(mlp, loss=lambda output, target: output.sum(1) / 0.0, clip_norm=clip_norm)
    step = Step(job, plan_of(16), SEPARABLE)
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(RunFailed, match=r"the loss is (nan|inf|-inf) at update 1"):
        train(job, step, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in step.model.state_dict().items())


def test_gradient_that_is_not_finite_stops_where_it_is_clipped() -> None:
    """A finite loss with an infinite gradient is caught by the norm that clipping needs."""

    def root(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return (output * 0).clamp_min(0).sum(1).sqrt()

    job = make_job(mlp, loss=root, clip_norm=1.0)
    with pytest.raises(RunFailed, match=r"gradient's norm is nan at update 1"):
        train(job, Step(job, plan_of(16), SEPARABLE), 1)


def test_bf16_plans_keep_fp32_weights() -> None:
    """Autocast computes in bf16; weights, gradients and the loss stay in fp32, and training gets close to fp32's."""
    job = make_job(cnn, data=images(), optimizer=SGD(lr=0.05))
    reduced, plain = (Step(job, plan_of(16, precision=precision), SEPARABLE) for precision in ("bf16", "fp32"))
    (loss,), (expected,) = train(job, reduced, 1), train(job, plain, 1)
    assert loss == pytest.approx(expected, rel=2e-2)
    assert loss != expected
    assert {tensor.dtype for tensor in tensors_of(reduced).values()} == {torch.float32}


def test_proofs_compute_in_their_type_throughout() -> None:
    """Tensors that a model makes on its way follow a proof's type, and the default type is put back."""
    seen: list[torch.dtype] = []

    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.zeros(1).dtype)
            return self.last(x)

    job = make_job(Making)
    train(job, Step(job, plan_of(16), SEPARABLE, dtype=torch.float64), 1)
    assert seen == [torch.float64]
    assert torch.get_default_dtype() is torch.float32


def test_class_weights_of_a_loss_follow_the_model() -> None:
    """A loss that is a module is used in the type of a proof, and the user's own is left as it was."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="none")
    job = make_job(mlp, loss=loss)
    train(job, Step(job, plan_of(16), SEPARABLE, dtype=torch.float64), 1)
    assert loss.weight.dtype is torch.float32


def test_batch_without_any_valid_target_fails_loudly() -> None:
    """A mean over nothing is not taken for a loss of zero."""
    inputs, targets = texts(16)
    job = make_job(
        lambda: nn.Embedding(12, 12), data=(inputs, torch.full_like(targets, -100)), loss="token_cross_entropy"
    )
    with pytest.raises(RunFailed, match=r"the loss is nan at update 1"):
        train(job, Step(job, plan_of(4), SEPARABLE), 1)


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_count_of_zero_fails_loudly(micro_batch: int) -> None:
    """A user's count that is the number 0 is no error in arithmetic, but a loss that is not finite."""
    job = make_job(mlp, loss=lambda output, target: Loss(output.sum(), 0))
    with pytest.raises(RunFailed, match=r"the loss is (nan|inf|-inf) at update 1"):
        train(job, Step(job, plan_of(micro_batch), SEPARABLE), 1)


def test_micro_batch_without_any_valid_target_is_harmless() -> None:
    """Masked samples that happen to fill a micro-batch add nothing to sum or count."""
    inputs, targets = texts(16)
    targets[:8] = -100
    job = make_job(lambda: nn.Embedding(12, 12), data=(inputs, targets), loss="token_cross_entropy", batch=16)
    cut, whole = (Step(job, plan_of(size), SEPARABLE, dtype=torch.float64) for size in (1, 16))
    assert train(job, cut, 2) == pytest.approx(train(job, whole, 2), rel=1e-12)


@pytest.mark.parametrize("schedule", [one_cycle(), lambda progress: 1 - progress], ids=["ours", "a user's"])
def test_rates_follow_progress(schedule: Callable[[float], float]) -> None:
    """Every group's rate is its own times the schedule's factor, set again at each update."""
    groups = {"*.bias": {"lr": 0.01}}
    job = make_job(mlp, optimizer=SGD(lr=0.1, groups=groups), schedule=schedule)
    step = Step(job, plan_of(16), SEPARABLE)
    for progress in (0.0, 0.2, 0.9):
        assert step.set_rates(progress) == pytest.approx(0.1 * schedule(progress))
        assert step.optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * schedule(progress))


def test_batches_of_dicts_reach_the_loss() -> None:
    """A loss of the form (model, batch) gets the batch as its collate function made it, cut into micro-batches."""
    data = {"x": vectors()[0], "y": vectors()[1]}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

    job = make_job(mlp, data=data, loss=loss)
    expected = train(make_job(mlp), Step(make_job(mlp), plan_of(16), SEPARABLE), 3)
    assert train(job, Step(job, plan_of(4), SEPARABLE), 3) == pytest.approx(expected, rel=1e-5)


def test_optimiser_function_that_makes_none_is_refused() -> None:
    """An optimiser must come out of the user's function."""
    with pytest.raises(BadJob, match=r"made a float, wanted a torch\.optim\.Optimizer"):
        Step(make_job(mlp, optimizer=lambda parameters: 0.1), plan_of(16), SEPARABLE)


def test_group_pattern_that_matches_nothing_is_refused() -> None:
    """A pattern that no parameter is left for names the nearest parameter."""
    job = make_job(mlp, optimizer=SGD(lr=0.1, groups={"0.weigt": {"lr": 0.2}}))
    with pytest.raises(BadJob, match=r"'0.weigt' matches no parameter that is left. Did you mean '0.weight'"):
        Step(job, plan_of(16), SEPARABLE)


def test_fresh_steps_begin_alike() -> None:
    """Two steps of one job begin with the same weights, whatever was drawn in between."""
    job = make_job(mlp)
    one = Step(job, plan_of(16), SEPARABLE)
    torch.rand(100)
    assert are_equal(one, Step(job, plan_of(16), SEPARABLE))
    assert source_of(job, one).order.indices(0, 0, 64).tolist() == source_of(job, one).order.indices(0, 0, 64).tolist()
