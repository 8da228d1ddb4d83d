"""Losses that call the model in their own way, from planning to the report; and held-out sets that cannot be used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.errors import BadJob
from tests.flow.builders import PLAN, Heard, blobs, blobs_job


class Towers(nn.Module):
    """Two inputs through one batch norm and one layer; the similarity of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.shared(self.norm(a)) * self.shared(self.norm(b))).sum(1)


def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> stoker.Loss:
    """Takes the entries that it needs out of a dict, a weight for each sample among them."""
    output = model(batch["first"], batch["second"])
    losses = F.binary_cross_entropy_with_logits(output, batch["label"].float(), reduction="none")
    return stoker.Loss((losses * batch["weight"]).sum(), batch["weight"].sum())


def towers_job(**changes: Any) -> stoker.Job:
    """Three epochs of such samples, with a set to validate and one to test on."""

    def samples(count: int, seed: int) -> dict[str, torch.Tensor]:
        inputs, label = blobs(count, seed)
        return {"first": inputs, "second": inputs.flip(1), "weight": inputs[:, 0].abs(), "label": label}

    settings: dict[str, Any] = {
        "model": Towers,
        "data": samples(80, 0),
        "valid": samples(20, 1),
        "test": samples(30, 2),
        "loss": weighted,
        "metrics": [],
    }
    return blobs_job(**(settings | changes))


@pytest.mark.parametrize("changes", [{}, {"average": stoker.SWA(start=0.5)}], ids=["plain", "averaged"])
def test_a_loss_that_calls_the_model_its_own_way_comes_to_its_end(changes: dict[str, Any]) -> None:
    """With metrics and weights; what cannot be shown is reported, and cost the run everything."""
    heard = Heard()
    run = stoker.train(towers_job(**changes), plan=PLAN, sink=heard)
    assert run.status == "finished"
    assert run.metrics.keys() == {"valid/loss", "test/loss"}
    assert run.weights().keys() == Towers().state_dict().keys()
    assert run.directory.read_examples() == ()
    words = [fields["message"] for fields in heard.of("warned")]
    for split in ("valid", "test"):
        (said,) = [one for one in words if one.startswith(f"samples of {split} cannot be shown in the report")]
        assert "forward() got an unexpected keyword argument 'first'" in said


def test_with_its_inputs_named_it_has_examples() -> None:
    """As the warning says."""
    run = stoker.train(
        towers_job(fields=stoker.Fields(inputs=["first", "second"]), model=Renamed), plan=PLAN, sink=Heard()
    )
    assert [one.split for one in run.directory.read_examples()] == ["valid", "test"]


class Renamed(Towers):
    """The towers with arguments that are called as entries of the samples."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return super().forward(first, second)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_what_is_wrong_with_a_held_out_set_is_told_as_of_that_set(split: str) -> None:
    """Before training: its labels, or the shape of its inputs."""
    inputs, labels = blobs(30)
    with pytest.raises(BadJob, match=rf"evaluating {split}=…: loss: labels go from 7 to 8"):
        stoker.train(blobs_job(**{split: (inputs, labels + 7)}), plan=PLAN, sink=Heard())
    with pytest.raises(BadJob, match=rf"raised RuntimeError evaluating {split}=….*: mat1 and mat2"):
        stoker.train(blobs_job(**{split: (inputs[:, :4], labels)}), plan=PLAN, sink=Heard())


class Forces(nn.Module):
    """An energy, and its slope by the input, which the model itself takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        energy = self.layer(self.norm(x))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, slope


def physics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> stoker.Loss:
    """A derivative by the input in the loss, as of networks that are informed by physics."""
    inputs, target = batch
    inputs = inputs.requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return stoker.Loss(F.cross_entropy(output, target, reduction="sum") + slope.square().sum(), len(target))


def slopes(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """How far the slopes are from the target."""
    return output[1].square().sum(1) + (output[0][:, 0] - target).square()


DIFFERENTIATING: dict[str, dict[str, Any]] = {
    "by the loss": {"loss": physics},
    "by the model": {"loss": slopes, "model": Forces, "metrics": [], "average": stoker.SWA(start=0.5)},
    "of complex weights": {"model": lambda: Complex(6, 3)},
}


class Complex(nn.Module):
    """A layer of complex weights."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(features, classes, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


@pytest.mark.parametrize("name", DIFFERENTIATING)
def test_derivatives_by_inputs_and_complex_weights_train_as_any_other(name: str) -> None:
    """Planned, trained, evaluated and shown; the contract holds for them. Nothing is asked of the user."""
    heard = Heard()
    job = blobs_job(**DIFFERENTIATING[name])
    run = stoker.train(job, sink=heard)
    assert run.status == "finished"
    assert {"valid/loss", "test/loss"} <= run.metrics.keys()
    verdicts = stoker.verify(job)
    assert all(verdict.passed for verdict in verdicts), verdicts


class Language(nn.Module):
    """Returns its scores and its own loss, in one of the ways that there are."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.table, self.head = form, nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.head(self.table(tokens))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        forms = {
            "logits, loss": (logits, loss),
            "loss, logits": (loss, logits),
            "loss": loss,
            "dict": {"logits": logits, "total": loss},
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["logits, loss", "loss, logits", "loss", "dict"])
def test_a_model_returns_its_own_loss_in_any_usual_form(form: str) -> None:
    """With samples that are pairs, as well as those that are dicts; its scores go to metrics, and batches are cut."""
    tokens = torch.arange(60 * 9).view(60, 9) % 12
    metrics = [] if form == "loss" else ["token_accuracy"]
    settings: dict[str, Any] = {"loss": "own", "metrics": metrics, "model": lambda: Language(form)}
    for data in ((tokens[:, :-1], tokens[:, 1:]), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}):
        target = {"fields": stoker.Fields(target="targets")} if isinstance(data, dict) else {}
        heard = Heard()
        plan = dataclasses.replace(PLAN, micro_batch=5)
        job = blobs_job(**settings, **target, data=data, valid=data, test=None)
        run = stoker.train(job, plan=plan, sink=heard, new=True)
        assert run.metrics.keys() == {"valid/loss", *(f"valid/{name}" for name in metrics)}


def test_several_scalars_are_no_loss_of_its_own() -> None:
    """Nothing says which it is; the error says what there was."""

    class Both(nn.Linear):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
            output = super().forward(x)
            return {"boxes": output.sum(), "classes": F.cross_entropy(output, target)}

    with pytest.raises(BadJob, match="a dict with the entries 'boxes', 'classes': 2 scalars, none of them called"):
        stoker.train(blobs_job(loss="own", metrics=[], model=lambda: Both(6, 3)), plan=PLAN, sink=Heard())


TWICE: dict[str, tuple[Any, Any, str | None]] = {
    "softmax": (nn.Softmax(1), "cross_entropy", "softmax"),
    "softmax, PyTorch's loss": (nn.Softmax(1), nn.CrossEntropyLoss(), "softmax"),
    "its logarithm": (nn.LogSoftmax(1), "cross_entropy", None),
    "scores": (nn.Identity(), "cross_entropy", None),
}


@pytest.mark.parametrize("name", TWICE)
def test_probabilities_given_to_a_loss_that_makes_them_are_told_of(name: str) -> None:
    """Before training; not a logarithm of them, which the loss leaves as it is."""
    last, loss, word = TWICE[name]
    heard = Heard()
    stoker.train(
        blobs_job(model=lambda: nn.Sequential(nn.Linear(6, 3), last), loss=loss, metrics=[]), plan=PLAN, sink=heard
    )
    words = [fields["message"] for fields in heard.of("warned")]
    assert any(f"the model ends in {word}" in one for one in words) is (word is not None)


def test_a_loss_that_begins_below_zero_has_no_factor_to_rise_by() -> None:
    """As of a likelihood: from -0.01 to 5 is 500 times its first value, and no divergence for that."""
    heard, values = Heard(), torch.full((96,), 5.0)
    values[:16] = -0.01
    job = blobs_job(
        data=(torch.randn(96, 6), values),
        loss=lambda output, target: 0 * output.sum(1) + target,
        sampling=stoker.sampling.in_order(),
        batch=16,
        until=stoker.epochs(1),
        valid=None,
        test=None,
        metrics=[],
    )
    stoker.train(job, plan=PLAN, sink=heard)
    assert heard.of("finished")[0]["loss"] > 0
    assert not any("diverged" in fields["message"] for fields in heard.of("warned"))


def test_a_rate_that_trains_nothing_is_told_of_and_so_is_what_came_of_it() -> None:
    """Where the loss stays finite; without held-out data the last event has the loss of training."""
    heard = Heard()
    model = lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
    job = blobs_job(model=model, optimizer=stoker.Adam(lr=1e9), valid=None, test=None, metrics=[])
    stoker.train(job, plan=PLAN, sink=heard)
    words = [fields["message"] for fields in heard.of("warned")]
    assert any("the learning rate of Adam goes up to 1e+09, and is hardly ever above 1" in one for one in words)
    assert any("the run diverged" in one for one in words)
    assert heard.of("finished")[0]["loss"] > 1e3


def test_a_schedule_that_seems_to_count_updates_is_doubted() -> None:
    """As written for LambdaLR, whose warm-up of ten updates would keep the rate below a tenth throughout."""
    for schedule, is_doubted in ((lambda step: min(1.0, step / 10), True), (lambda progress: 1 - progress, False)):
        heard = Heard()
        stoker.train(blobs_job(schedule=schedule, valid=None, test=None, metrics=[]), plan=PLAN, sink=heard)
        assert any("calls it 'step'" in fields["message"] for fields in heard.of("warned")) is is_doubted


def test_planning_leaves_what_a_step_of_its_own_counts() -> None:
    """Trials call it on copies; training began in the middle of what it counts, as of which network is in turn."""
    calls = 0

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    seen: list[int] = []
    hook = stoker.on("updated", lambda _update: seen.append(calls))
    job = blobs_job(step=step, loss=None, valid=None, test=None, metrics=[])
    stoker.train(job, sink=Heard(), hooks=[hook], run_dir="run")
    assert seen == list(range(1, 3 * 7 + 1))
