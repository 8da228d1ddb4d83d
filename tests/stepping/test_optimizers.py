"""Optimisers as settings are PyTorch's own, whatever the micro-batch and the implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker import optimizers
from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job, Muon, Optimizer
from stoker.records import Plan
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import build_optimizer, implementations
from tests.stepping.driving import SEPARABLE, are_equal, largest_difference, plan_of, train, trained, whole_stream
from tests.stepping.models import make_job, mlp

TORCH: dict[str, tuple[Optimizer, Any]] = {
    "rmsprop": (
        optimizers.RMSprop(lr=1e-2, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.01),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.01),
    ),
    "adagrad": (
        optimizers.Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.01),
    ),
    "adadelta": (optimizers.Adadelta(rho=0.8), lambda p: torch.optim.Adadelta(p, rho=0.8)),
    "adamax": (optimizers.Adamax(lr=1e-2), lambda p: torch.optim.Adamax(p, lr=1e-2)),
    "nadam": (
        optimizers.NAdam(lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    ),
    "radam": (optimizers.RAdam(lr=1e-2), lambda p: torch.optim.RAdam(p, lr=1e-2)),
    "adafactor": (optimizers.Adafactor(lr=1e-2), lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "amsgrad": (
        optimizers.Adam(lr=1e-2, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    ),
    "amsgrad, decoupled": (
        optimizers.AdamW(lr=1e-2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    ),
}

every_one = pytest.mark.parametrize("name", TORCH)


def by_hand(job: Job, make: Any) -> dict[str, torch.Tensor]:
    """The weights after twelve updates of PyTorch's own loop over the same batches, in float64."""
    step = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64)
    model, batches = step.model, whole_stream(job, step, 12)
    optimizer = make(model.parameters())
    for inputs, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@every_one
def test_updates_are_those_of_pytorchs_own_loop(name: str) -> None:
    """By the implementation of one parameter at a time, and by any other that there is."""
    settings, make = TORCH[name]
    job = make_job(mlp, optimizer=settings)
    expected = by_hand(job, make)
    for implementation in implementations(job, mlp(), "cpu"):
        mine = trained(job, 16, optimizer_implementation=implementation)
        found = {key: tensor.detach() for key, tensor in mine.model.state_dict().items()}
        assert largest_difference(found, expected) < 1e-9, implementation


@every_one
def test_micro_batches_leave_the_updates_as_they_are(name: str) -> None:
    """Accumulated in threes, with a ragged part, they are those of whole batches."""
    job = make_job(mlp, optimizer=TORCH[name][0])
    assert largest_difference(trained(job, 5), trained(job, 16)) < 1e-9


@every_one
def test_an_update_moves_something(name: str) -> None:
    """So that the equalities above are of steps that were made."""
    job = make_job(mlp, optimizer=TORCH[name][0])
    step = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64)
    before = {key: tensor.detach().clone() for key, tensor in step.model.state_dict().items()}
    train(job, step, 1)
    assert all(not torch.equal(tensor, before[key]) for key, tensor in step.model.state_dict().items())


def test_a_schedule_sets_the_rate_of_every_optimiser() -> None:
    """With a factor of nothing nothing moves, though the state does."""
    job = make_job(mlp, optimizer=optimizers.NAdam(lr=0.1), schedule=lambda _: 0.0)
    step = trained(job, 16, updates=2)
    assert are_equal(step, Step(job, plan_of(16), SEPARABLE, dtype=torch.float64))


def test_an_implementation_that_there_is_not_is_refused() -> None:
    """With the name of the optimiser, and what to do."""
    job = make_job(mlp, optimizer=optimizers.RMSprop(lr=0.1))
    with pytest.raises(BadJob, match="fused implementation, and RMSprop has none") as caught:
        Step(job, Plan(device="cpu", micro_batch=16, optimizer_implementation="fused"), SEPARABLE)
    assert "default" in (caught.value.remedy or "")
    assert implementations(job, mlp(), "cpu") == ("foreach", "default")
    on_gpu = "fused" if torch.__version__ >= "2.12" else "foreach"
    assert implementations(make_job(mlp, optimizer=optimizers.Adagrad(lr=0.1)), mlp(), "cuda") == (on_gpu, "default")
    free = make_job(mlp, optimizer=optimizers.ScheduleFreeSGD(lr=0.1))
    assert implementations(free, mlp(), "cuda") == ("default",)


def test_no_fused_kernel_is_proposed_for_sparse_gradients() -> None:
    """PyTorch's take dense ones alone: the first update failed."""
    job = make_job(mlp, optimizer=SGD(lr=0.1))
    sparse = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True), nn.Linear(3, 2))
    assert implementations(job, sparse, "cpu") == ("foreach", "default")
    assert implementations(job, nn.Sequential(nn.EmbeddingBag(5, 3)), "cpu") == ("fused", "default")


class Mixed(nn.Module):
    """A table with sparse gradients, and layers with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (AdamW(lr=0.1), "gradients of table are sparse, and the optimiser takes no such gradients"),
        (Muon(lr=0.1, rest=AdamW(lr=0.1)), "takes no such gradients"),
        (SGD(lr=0.1, weight_decay=0.1), "takes no such gradients: "),
        (torch.optim.SparseAdam, "gradients of table are sparse, .* takes only such"),
    ],
)
def test_an_optimizer_that_does_not_take_sparse_gradients_is_refused(optimizer: Any, said: str) -> None:
    """Before anything is trained, with the module whose gradients they are and what goes with them."""
    with pytest.raises(BadJob, match=said) as caught:
        build_optimizer(make_job(Mixed, optimizer=optimizer), Mixed(), plan_of(16))
    assert "sparse=False" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1, momentum=0.9),
        optimizers.Adagrad(lr=0.1),
        lambda parameters: torch.optim.SparseAdam(parameters[:1]),
        torch.optim.LBFGS,
    ],
)
def test_an_optimizer_that_may_take_sparse_gradients_has_made_no_step(optimizer: Any) -> None:
    """Those of PyTorch that take them, and those that cannot be asked, are left without a state."""
    model = Mixed()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = build_optimizer(make_job(Mixed, optimizer=optimizer), model, plan_of(16))
    assert all(state["step"] == 0 for state in made.state.values())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_an_optimizer_of_parameters_outside_the_model_is_refused() -> None:
    """They were trained, but neither a checkpoint nor the trained model had them."""
    head = nn.Linear(3, 2)
    job = make_job(mlp, optimizer=lambda parameters: torch.optim.SGD([*parameters, *head.parameters()], lr=0.1))
    with pytest.raises(BadJob, match=r"SGD steps 2 parameters that are not the model's \(of shape \[2, 3\], \[2\]\)"):
        build_optimizer(job, mlp(), Plan(device="cpu", micro_batch=16))


def test_the_remedy_for_parameters_of_the_model_that_was_given_is_the_list() -> None:
    """The model of a job is a copy: a function that closes over the original would train that one."""
    model = mlp()
    job = make_job(model, optimizer=lambda _parameters: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BadJob, match="not the model's") as caught:
        build_optimizer(job, build_model(job), Plan(device="cpu", micro_batch=16))
    assert "that Job(optimizer=…) is called with" in (caught.value.remedy or "")


class Spectral(nn.Module):
    """Has complex and real weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.filter = nn.Linear(6, 8), nn.Parameter(torch.ones(8, 8, dtype=torch.complex64))
        self.out = nn.Linear(8, 4)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.out((self.into(x_BF).to(torch.complex64) @ self.filter).abs())


@pytest.mark.parametrize(
    "optimizer",
    [optimizers.ScheduleFreeAdamW(lr=0.1), optimizers.Muon(lr=0.1, rest=optimizers.SGD(lr=0.1))],
    ids=["schedule-free", "muon"],
)
def test_complex_weights_are_left_to_pytorchs_own(optimizer: Optimizer) -> None:
    """Stoker's own would take the square of a complex number for that of its size."""
    with pytest.raises(BadJob, match=f"{type(optimizer).__name__} is for real weights, and filter is complex"):
        Step(make_job(Spectral, optimizer=optimizer), plan_of(16), SEPARABLE)
    job = make_job(Spectral)
    train(job, Step(job, plan_of(16), SEPARABLE), 1)


def is_matrix(_name: str, parameter: nn.Parameter) -> bool:
    """Two or more dimensions."""
    return parameter.dim() >= 2


def test_groups_by_predicate_are_those_of_pytorchs_own_loop() -> None:
    """Decay of matrices alone, in float64, over twelve updates at another micro-batch; the rest has its own."""
    groups = {is_matrix: {"weight_decay": 0.3}, "*bias": {"lr": 0.02}}
    job = make_job(mlp, optimizer=AdamW(lr=0.01, weight_decay=0.0, groups=groups))

    def make(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in known if p.dim() >= 2], "weight_decay": 0.3},
                {"params": [p for p in known if p.dim() < 2], "lr": 0.02},
            ],
            lr=0.01,
            weight_decay=0.0,
        )

    step = trained(job, 4)
    assert largest_difference(dict(step.model.state_dict()), by_hand(job, make)) < 1e-9


@pytest.mark.parametrize(
    ("predicate", "problem"),
    [
        (lambda _name, parameter: parameter.dim() > 7, "matches no parameter that is left. It was asked about"),
        (lambda name, _parameter: None, "matches no parameter that is left"),
        (lambda _name, parameter: parameter.dims, "raised AttributeError for .*'dims'"),
        (lambda name, _parameter: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_predicate_that_finds_nothing_or_raises_is_refused(predicate: Any, problem: str) -> None:
    """With the place of its code, so that one of many is found."""
    with pytest.raises(BadJob, match=rf"lambda> \(test_optimizers.py, line \d+\) {problem}"):
        Step(make_job(mlp, optimizer=SGD(lr=0.1, groups={predicate: {"lr": 1.0}})), plan_of(4), SEPARABLE)


@pytest.mark.parametrize(
    ("defaults", "given"), [({}, "has no learning rate"), ({"lr": None}, "has the learning rate None")]
)
def test_an_optimizer_without_a_rate_is_refused(defaults: dict[str, Any], given: str) -> None:
    """It was a KeyError or TypeError of the model or the loss."""
    job = make_job(mlp, optimizer=lambda parameters: torch.optim.Optimizer(parameters, defaults))
    with pytest.raises(BadJob, match=f"made a Optimizer of which a parameter group {given}"):
        build_optimizer(job, mlp(), Plan(device="cpu", micro_batch=16))


def test_a_rate_may_be_any_real_number() -> None:
    """As of a setting that NumPy has computed, which is no float of Python's."""
    rate = np.float32(0.25)
    job = make_job(mlp, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))  # type: ignore[arg-type]  # stubs
    optimizer = build_optimizer(job, mlp(), Plan(device="cpu", micro_batch=16))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
