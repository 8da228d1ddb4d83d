from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.devices import attached_devices, resolve_place
from stoker.errors import RunFailed
from stoker.jobs import SGD, AdamW
from stoker.jobs.objective import Objective, SelectiveBackprop
from stoker.loading.batches import Batch
from stoker.planning.resolved_job import resolve_job
from stoker.stepping import loss_pass
from stoker.stepping.selective_backprop import selected
from stoker.stepping.step import Step
from stoker.units import updates
from stoker.verifying.exactness_contract import _begins_under
from stoker.verifying.plan_equality import check_equality
from stoker.verifying.resume import check_resume, first_difference, state_of
from stoker.zoo import GPT
from tests.stepping.driving import SEPARABLE, grouped, plan_of, train
from tests.stepping.models import (
    TOKENS,
    VOCAB,
    DrawsElsewhere,
    Memory,
    Moody,
    OwnGenerator,
    cnn,
    images,
    make_job,
    mlp,
    texts,
)
from tests.verifying.examining import (
    ChangesInEvaluation,
    ForgetfulSGD,
    ForgottenBuffer,
    HiddenCount,
    ample_time,
    no_time,
    on_disk,
    subject_of,
)


def test_updates_are_made_at_their_share_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on it, such as selective backprop, takes part in both comparisons."""
    kept: list[bool] = []

    def noted(batch: Batch, *others: Any) -> Batch:
        found = selected(batch, *others)
        kept.append(found.size < batch.size)
        return found

    monkeypatch.setattr(loss_pass, "selected", noted)
    chooses = SelectiveBackprop(keep=0.5, start=0.0, end=1.0, interrupt=0)
    subject = subject_of(make_job(mlp, loss=Objective("cross_entropy", selective_backprop=chooses)), 8)
    checks = check_equality, lambda subject, timebox: check_resume(subject, on_disk(tmp_path), timebox)
    for check in checks:
        verdict = check(subject, no_time())
        assert verdict.passed, verdict.answer
        assert kept
        assert all(kept)
        kept.clear()


_PASSES = 0


class CountingLoss:
    """Weighs by how often it, and any of its kind, was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        global _PASSES  # noqa: PLW0603 - as users do
        self.calls += torch.is_grad_enabled()
        _PASSES += torch.is_grad_enabled()
        return F.cross_entropy(output, target, reduction="none") * (1 + 1 / (1 + self.calls) + 1 / (1 + _PASSES))


EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cnn with batch norm, augmentation and average": (
        {
            "model": lambda: cnn(nn.BatchNorm2d),
            "data": images(50),
            "average": 0.9,
            "optimizer": AdamW(lr=1e-2),
            "augment": [lambda x, draw: x + draw.uniform().view(-1, 1, 1, 1)],
        },
        {"micro_batch": 16, "coupling": grouped(16)},
    ),
    "gpt with dropout": (
        {
            "model": lambda: GPT(1, 8, 2, TOKENS, VOCAB, 0.2),
            "data": texts(50, masked=0.4),
            "loss": "token_cross_entropy",
            "optimizer": AdamW(lr=1e-2),
        },
        {"micro_batch": 5},
    ),
    "bf16, fused": (
        {"model": cnn, "data": images(50)},
        {"micro_batch": 8, "precision": "bf16", "optimizer_implementation": "fused", "memory_format": "channels_last"},
    ),
    "thawing, captured and fused": (
        {
            "model": cnn,
            "data": images(50),
            "freeze": {"0.*": updates(3), "3.*": updates(1)},
            "optimizer": SGD(lr=0.1, momentum=0.9),
        },
        {"micro_batch": 16, "captured": True, "optimizer_implementation": "fused"},
    ),
    "draws from Python and NumPy": ({"model": DrawsElsewhere}, {"micro_batch": 16}),
    "a count in the model": ({"model": HiddenCount}, {"micro_batch": 16}),
    "counts in the loss and around it": ({"model": mlp, "loss": CountingLoss()}, {"micro_batch": 16}),
    "L-BFGS": ({"model": mlp, "optimizer": lambda p: torch.optim.LBFGS(p, max_iter=3)}, {"micro_batch": 16}),
}


@pytest.mark.parametrize("name", EXACT)
def test_stokers_own_training_is_exact(name: str, tmp_path: Path) -> None:
    """With all that is random or stateful in it, over the ends of epochs: every tensor comes back bit for bit."""
    job, plan = EXACT[name]
    verdict = check_resume(subject_of(make_job(**job), **plan), on_disk(tmp_path), ample_time())
    assert (verdict.passed, verdict.level) == (True, "bit-equal"), verdict.answer
    assert "30 updates straight, and 15, a checkpoint on disk and 15" in verdict.evidence


BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "a buffer that is not saved": (
        {"model": ForgottenBuffer},
        "weight last.weight",
        r"do not hold this buffer: register it with .*\(seen\)",
    ),
    "evaluation that moves training": (
        {"model": ChangesInEvaluation},
        "weight last.weight",
        "A pass in evaluation mode changes buffer shift",
    ),
    "a mean in an attribute": ({"model": Memory}, "weight last.weight", "state in a Python attribute"),
    "a generator of the model's own": ({"model": OwnGenerator}, "weight last.weight", "a generator of its own"),
    "an optimiser with state outside": (
        {"model": mlp, "optimizer": lambda p: ForgetfulSGD(p, lr=0.1)},
        "weight 0.weight",
        "outside its state_dict",
    ),
    "chance": ({"model": Moody}, "weight last.weight", "Two runs that are never stopped differ as well"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_come_back_is_named_with_its_reason(name: str, tmp_path: Path) -> None:
    """State that checkpoints miss is found by what it moves, and the reason is found in parts of the run."""
    job, tensor, reason = BROKEN[name]
    verdict = check_resume(subject_of(make_job(**job), 16), on_disk(tmp_path), no_time())
    assert (verdict.passed, verdict.level) == (False, "none")
    assert verdict.answer.startswith(f"No: {tensor} is the first that differs. ")
    assert re.search(reason, verdict.answer), verdict.answer


def test_a_schedule_of_plans_is_replayed(tmp_path: Path) -> None:
    """A run that begins under one plan and settles on another, interrupted before that, is bit-equal."""
    job = make_job(lambda: cnn(nn.BatchNorm2d), data=images(50), average=0.9, optimizer=AdamW(lr=1e-2))
    settled = subject_of(job, 16, grouped(16), precision="bf16", memory_format="channels_last", captured=True)
    subject = dataclasses.replace(settled, begins_under=plan_of(16))
    verdict = check_resume(subject, on_disk(tmp_path), ample_time())
    assert (verdict.passed, verdict.level) == (True, "bit-equal"), verdict.answer
    assert "the first" in verdict.evidence


def test_a_run_does_not_begin_under_other_optimizer_states() -> None:
    """They are built once, as blocks that are checkpointed: no run goes from one to the other."""
    job = make_job(mlp, optimizer=AdamW(lr=1e-3), numerics=["8bit-states"])
    prepared, device = resolve_job(job), resolve_place("cpu", attached_devices())
    assert _begins_under(prepared, device, plan_of(4)) is not None
    assert _begins_under(prepared, device, plan_of(4, optimizer_states="8bit")) is None


def test_what_the_probe_found_no_checkpoint_holds_is_a_failure(tmp_path: Path) -> None:
    """Also where the updates that there was time for came out equal."""
    coupling = dataclasses.replace(SEPARABLE, unsaved=("the attribute 'mean' of Memory",))
    verdict = check_resume(subject_of(make_job(mlp), 16, coupling), on_disk(tmp_path), no_time())
    assert (verdict.passed, verdict.level) == (False, "none")
    assert "checkpoints do not hold the attribute 'mean' of Memory" in verdict.answer


def test_without_time_four_updates_are_made(tmp_path: Path) -> None:
    """However little time there is, two updates lie before the checkpoint and two after it, and the page says so."""
    verdict = check_resume(subject_of(make_job(mlp), 16), on_disk(tmp_path), no_time())
    assert verdict.passed
    assert verdict.evidence.startswith("4 updates straight, and 2, a checkpoint on disk and 2 in a fresh model")


def test_checkpoint_that_cannot_be_written_is_a_verdict() -> None:
    """What a checkpoint cannot hold is an answer, not an error."""

    def refuse(_saved: Step, _fresh: Step) -> None:
        raise RunFailed("the state holds a function, which a checkpoint cannot keep")

    verdict = check_resume(subject_of(make_job(mlp), 16), refuse, no_time())
    assert not verdict.passed
    assert verdict.answer == "No: the state holds a function, which a checkpoint cannot keep."


def test_every_part_of_the_state_is_compared() -> None:
    """A difference of one bit in a weight, a buffer, the optimiser's state or the average is found and named."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d), optimizer=AdamW(lr=1e-2), average=0.9)
    step = Step(job, plan_of(16), SEPARABLE)
    train(job, step, 1)
    before = {name: tensor.clone() for name, tensor in state_of(step).items()}
    assert first_difference(before, state_of(step)) is None
    for name in (
        "weight 0.weight",
        "buffer 1.running_var",
        "optimiser state of 4.bias exp_avg_sq",
        "average of 4.bias",
    ):
        changed = dict(before)
        changed[name] = before[name].clone()
        changed[name].view(-1).view(torch.uint8)[0] ^= 1
        assert first_difference(before, changed) == name
    assert first_difference(before, {}) == "weight 0.weight"
