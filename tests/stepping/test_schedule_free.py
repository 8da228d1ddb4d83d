"""Schedule-free optimisers: their updates, and the average that is evaluated and kept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker import optimizers, schedules
from stoker.jobs import Job
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, grouped, largest_difference, plan_of, train, trained, whole_stream
from tests.stepping.models import make_job, mlp

BETA, RATE = 0.9, 0.05


class Textbook:
    """Algorithm 1 of the paper, with x, y and z as tensors of their own; no trick of storage."""

    def __init__(self, model: nn.Module, *, beta2: float | None, decay: float, eps: float = 1e-8) -> None:
        self.model, self.beta2, self.decay, self.eps = model, beta2, decay, eps
        self.x = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.z = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.weights = self.steps = 0.0
        self.largest = 0.0

    def step(self, rate: float) -> None:
        """From the gradient at y, which the model holds."""
        self.steps += 1
        self.largest = max(self.largest, rate)
        self.weights += self.largest**2
        share = self.largest**2 / self.weights if self.weights else 0.0
        with torch.no_grad():
            for name, y in self.model.named_parameters():
                direction = y.grad.clone()
                if self.beta2 is not None:
                    self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * y.grad**2
                    direction /= (self.v[name] / (1 - self.beta2**self.steps)).sqrt() + self.eps
                self.z[name] -= rate * (direction + self.decay * y)
                self.x[name] = (1 - share) * self.x[name] + share * self.z[name]
                y.copy_((1 - BETA) * self.z[name] + BETA * self.x[name])


KINDS = {
    "sgd": (optimizers.ScheduleFreeSGD(lr=RATE, beta=BETA, weight_decay=0.01), None),
    "adamw": (optimizers.ScheduleFreeAdamW(lr=RATE, beta=BETA, weight_decay=0.01, beta2=0.99), 0.99),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def job_of(kind: str, **changed: object) -> Job:
    """A perceptron trained by it."""
    return make_job(mlp, optimizer=KINDS[kind][0], **changed)


@each_kind
@pytest.mark.parametrize("schedule", [schedules.constant(), schedules.warmup(0.3)])
def test_updates_are_those_of_the_papers_algorithm(kind: str, schedule: schedules.Schedule) -> None:
    """Both the weights that gradients are taken at and their average, with a warm-up that begins at 0 and without."""
    job = job_of(kind, schedule=schedule)
    mine = trained(job, 16)
    other = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64)
    textbook = Textbook(other.model, beta2=KINDS[kind][1], decay=0.01)
    for update, (inputs, target) in enumerate(whole_stream(job, other, 12)):
        other.model.zero_grad()
        F.cross_entropy(other.model(inputs), target).backward()
        textbook.step(RATE * schedule(update / 30))
    here = {name: p.detach() for name, p in mine.model.named_parameters()}
    assert largest_difference(here, {name: p.detach() for name, p in other.model.named_parameters()}) < 1e-9
    assert mine.average is not None
    assert largest_difference(mine.average.weights, textbook.x) < 1e-9
    assert largest_difference(mine.average.weights, here) > 1e-3


@each_kind
def test_micro_batches_leave_the_updates_as_they_are(kind: str) -> None:
    """Accumulation changes neither the weights nor their average."""
    assert largest_difference(trained(job_of(kind), 5), trained(job_of(kind), 16)) < 1e-9


@each_kind
def test_the_average_is_what_is_evaluated_and_kept(kind: str) -> None:
    """Within an evaluation the model holds it; afterwards the weights that gradients are taken at."""
    step = trained(job_of(kind), 16, updates=8)
    here = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    kept = step.kept_weights()
    with step.evaluation():
        assert all(torch.equal(tensor, kept[name]) for name, tensor in step.model.state_dict().items())
    assert all(torch.equal(tensor, here[name]) for name, tensor in step.model.state_dict().items())
    assert not torch.equal(kept["0.weight"], here["0.weight"])


def test_tied_weights_are_averaged_under_both_names() -> None:
    """A state dict names them twice."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    step = trained(make_job(lambda: model, optimizer=KINDS["sgd"][0]), 16, updates=5)
    kept = step.kept_weights()
    assert torch.equal(kept["0.weight"], kept["2.weight"])
    assert not torch.equal(kept["0.weight"], step.model.state_dict()["0.weight"])


def test_a_parameter_without_gradients_stays_and_has_no_state() -> None:
    """As one that the loss does not reach."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), nn.Linear(2, 2)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.used(x_BF)

    job = make_job(Aside, optimizer=KINDS["adamw"][0])
    step = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64)
    before = step.model.unused.weight.detach().clone()
    losses = train(job, step, 4)
    assert all(map(math.isfinite, losses))
    assert torch.equal(step.kept_weights()["unused.weight"], before)
    assert step.optimizer.state.get(step.model.unused.weight, {}) == {}


def test_statistics_of_a_batch_norm_of_two_names_come_back_under_both() -> None:
    """Saved ones of the average, not the model's in their place."""
    shared = nn.BatchNorm1d(6)
    job = make_job(lambda: nn.Sequential(shared, shared, nn.Linear(6, 4)), optimizer=KINDS["sgd"][0])
    average = Step(job, plan_of(16), grouped(16)).average
    saved = average.weights
    for name in ("0.running_mean", "1.running_mean"):
        saved[name] = torch.full((6,), 7.0)
    average.load(saved)
    assert torch.equal(average.weights["0.running_mean"], saved["0.running_mean"])
    assert torch.equal(average.weights["1.running_mean"], saved["1.running_mean"])
