"""The law behind every plan: in exact arithmetic, updates do not depend on how a batch is cut."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Adam, AdamW, Loss
from stoker.jobs.objective import Objective
from stoker.jobs.schedules import one_cycle, warmup_linear
from stoker.stepping.layouts.base import SingleProcess
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, grouped, largest_difference, plan_of, trained, whole_stream
from tests.stepping.models import (
    ComplexNet,
    FunctionalDropout,
    cnn,
    gradient_penalty,
    images,
    make_job,
    mlp,
    sample_mean,
    texts,
    token_mean,
    vectors,
)

LIMIT = 1e-9


def tokens_model() -> nn.Module:
    """A language model whose tokens do not see each other."""
    return nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))


def squares(model: nn.Module) -> torch.Tensor:
    """A penalty on all weights."""
    return 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())


def masked_sum(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """Cross-entropy over valid tokens as a sum and a count tensor."""
    inputs, targets = batch
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return Loss(total, (targets != -100).sum())


WHOLE_BATCH = {
    "cross entropy, momentum": {"optimizer": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)},
    "label smoothing, clipped": {"loss": Objective("cross_entropy", label_smoothing=0.1), "clip_norm": 0.2},
    "squares of every entry": {"loss": "mse", "data": (vectors(150)[0], vectors(150, seed=5)[0][:, :4])},
    "penalty and average": {
        "loss": Objective("cross_entropy", penalty=squares),
        "average": 0.9,
        "schedule": one_cycle(),
    },
    "AdamW with groups": {"optimizer": AdamW(lr=1e-2, groups={"*.bias": {"weight_decay": 0.0, "lr": 1e-3}})},
    "masked tokens": {"model": tokens_model, "data": texts(150, masked=0.6), "loss": "token_cross_entropy"},
    "a gradient penalty": {"loss": gradient_penalty},
    "complex weights": {"model": ComplexNet, "optimizer": AdamW(lr=1e-2), "clip_norm": 0.2, "average": 0.9},
    "counts from the user": {"model": tokens_model, "data": texts(150, masked=0.6), "loss": masked_sum},
}


@functools.cache
def after_three_epochs(name: str, micro_batch: int) -> Step:
    """The job of that name after nine updates, every third of a ragged batch."""
    job = make_job(**{"model": mlp, "data": vectors(150), "batch": 70, **WHOLE_BATCH[name]})
    return trained(job, micro_batch, updates=9)


@pytest.mark.parametrize("micro_batch", [1, 7, 64])
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_every_micro_batch_learns_what_the_whole_batch_does(name: str, micro_batch: int) -> None:
    """Micro-batches of 1, 7 and 64 of 70 samples: equal to 1e-9 after three epochs."""
    assert largest_difference(after_three_epochs(name, micro_batch), after_three_epochs(name, 70)) < LIMIT


@pytest.mark.parametrize("model", [lambda: mlp(dropout=0.4), FunctionalDropout], ids=["nn.Dropout", "functional"])
def test_dropout_is_silenced_for_proofs(model: Any) -> None:
    """With random draws silenced, dropout by module or by function leaves the equality exact."""
    job = make_job(model, data=vectors(40), batch=16)
    assert largest_difference(trained(job, 3, dropout=False), trained(job, 16, dropout=False)) < LIMIT
    assert largest_difference(trained(job, 3), trained(job, 16)) > 1e-3


@dataclass(frozen=True)
class Settings:
    """What an example of the property varies."""

    count: int
    batch: int
    micro_batch: int
    job: dict[str, Any]


OPTIMIZERS = st.sampled_from(
    [
        SGD(lr=0.1),
        SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=1e-2),
        SGD(lr=0.05, momentum=0.9, nesterov=True),
        Adam(lr=1e-2, weight_decay=1e-2),
        AdamW(lr=1e-2, betas=(0.8, 0.95)),
    ]
)
LOSSES = st.sampled_from(["labels", "smooth", "vectors", "tokens", "scalar"])


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    """Sizes, a loss with its model and data, an optimiser, and what else touches an update."""
    count = draw(st.integers(3, 24))
    batch = draw(st.integers(2, count))
    chosen = {
        "labels": {"model": mlp, "data": vectors(count), "loss": "cross_entropy"},
        "smooth": {"model": mlp, "data": vectors(count), "loss": "cross_entropy", "smoothing": 0.2},
        "vectors": {"model": lambda: nn.Linear(6, 6), "data": (vectors(count)[0], vectors(count, 3)[0]), "loss": "l1"},
        "tokens": {"model": tokens_model, "data": texts(count, masked=0.5), "loss": "token_cross_entropy"},
        "scalar": {
            "model": mlp,
            "data": vectors(count),
            "loss": sample_mean,
        },
    }[draw(LOSSES)]
    chosen |= {
        "optimizer": draw(OPTIMIZERS),
        "clip_norm": draw(st.sampled_from([None, 0.05, 1.0])),
        "average": draw(st.sampled_from([None, 0.9])),
        "schedule": draw(st.sampled_from([one_cycle(), warmup_linear()])),
        "seed": draw(st.integers(0, 3)),
    }
    smoothing, penalty = chosen.pop("smoothing", 0.0), draw(st.sampled_from([None, squares]))
    chosen["loss"] = Objective(chosen["loss"], label_smoothing=smoothing, penalty=penalty)
    return Settings(count, batch, draw(st.integers(1, batch)), {**chosen, "batch": batch})


@settings(max_examples=30)
@given(all_settings())
def test_any_cut_is_the_whole(example: Settings) -> None:
    """For any sizes, loss, optimiser, clipping, average, penalty and schedule: eight updates equal to 1e-9."""
    job = make_job(**example.job)
    cut, whole = (trained(job, size, updates=8) for size in (example.micro_batch, example.batch))
    assert largest_difference(cut, whole) < LIMIT


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=1e-2), AdamW(lr=1e-2)], ids=lambda o: type(o).__name__
)
def test_implementations_of_an_optimiser_agree(optimizer: object, implementation: str) -> None:
    """PyTorch's fused and foreach optimisers make the updates of the default one."""
    job = make_job(mlp, optimizer=optimizer, clip_norm=1.0)
    assert largest_difference(trained(job, 16, optimizer_implementation=implementation), trained(job, 16)) < LIMIT


def test_sparse_gradients_accumulate() -> None:
    """An embedding with sparse gradients is trained in micro-batches as at once."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 12))

    job = make_job(model, data=texts(40, masked=0.3), loss="token_cross_entropy", optimizer=SGD(lr=0.1))
    assert largest_difference(trained(job, 3), trained(job, 16)) < LIMIT


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_sparse_gradients_are_clipped_as_dense_ones(max_norm: float) -> None:
    """Rows that occur several times in a batch count once, with their sum."""

    def model(*, sparse: bool) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 12))

    def after(*, sparse: bool) -> Step:
        settings = {"data": texts(40), "loss": "token_cross_entropy", "optimizer": SGD(lr=0.1), "clip_norm": max_norm}
        return trained(make_job(functools.partial(model, sparse=sparse), **settings), 16)

    assert largest_difference(after(sparse=True), after(sparse=False)) < LIMIT


def test_norm_of_sparse_gradients_is_that_of_dense_ones() -> None:
    """As events of progress show it, which scale nothing."""
    norms: list[torch.Tensor] = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=sparse)
        table(torch.tensor([0, 0, 4])).square().sum().backward()
        process = SingleProcess(table)
        norms += [process.norm([table.weight]), process.clip([table.weight], math.inf)]
    for norm in norms[1:]:
        assert torch.allclose(norm, norms[0])


def test_channels_last_agrees() -> None:
    """The memory format of convolutions changes no update."""
    job = make_job(cnn, data=images(40), batch=16)
    assert largest_difference(trained(job, 5, memory_format="channels_last"), trained(job, 16)) < LIMIT


CLOSURES = {
    "steps of one length": (lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4), None),
    "line search on a penalised loss": (
        lambda p: torch.optim.LBFGS(p, lr=1, max_iter=4, line_search_fn="strong_wolfe"),
        squares,
    ),
}


@pytest.mark.parametrize("micro_batch", [1, 5, 16])
@pytest.mark.parametrize("name", CLOSURES)
def test_closure_optimisers_run_all_micro_batches_inside(name: str, micro_batch: int) -> None:
    """L-BFGS, which asks for the loss several times an update, takes the steps of a loop written by hand."""
    make, penalty = CLOSURES[name]
    job = make_job(mlp, data=vectors(20), optimizer=make, batch=16, loss=Objective("cross_entropy", penalty=penalty))
    model = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64).model
    optimizer = make(list(model.parameters()))
    step = Step(job, plan_of(micro_batch), SEPARABLE, dtype=torch.float64)
    for inputs, targets in whole_stream(job, step, 10):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) + (0.0 if penalty is None else penalty(model))
            loss.backward()
            return loss

        optimizer.step(closure)
    ours = trained(job, micro_batch, updates=10)
    assert largest_difference(ours, dict(model.state_dict())) < LIMIT


def test_a_plan_that_would_change_the_job_is_refused() -> None:
    """A micro-batch that cuts a group, or is larger than the batch, makes no step."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d))
    for micro_batch, coupling in ((6, grouped(4)), (8, grouped(16)), (17, SEPARABLE)):
        with pytest.raises(BadJob, match="would change what is learned"):
            Step(job, plan_of(micro_batch), coupling)


def test_the_law_can_be_broken() -> None:
    """What the probe separates does differ: a mean over tokens in micro-batches is another training."""
    job = make_job(tokens_model, data=texts(40, masked=0.6), loss=token_mean)
    assert largest_difference(trained(job, 4), trained(job, 16)) > 1e-4
