from __future__ import annotations

import dataclasses
import math
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stoker.jobs import SGD, AdamW, Loss
from stoker.stepping.coupling import find_coupling
from stoker.stepping.step import Step
from stoker.verifying.plan_equality import (
    affordable_batch,
    check_equality,
    check_states,
    is_random,
    reference_micro_batch,
    relative_difference,
    scaled,
)
from tests.stepping import models
from tests.stepping.driving import SEPARABLE, grouped
from tests.stepping.layouts.conformance import few_bits_job
from tests.stepping.models import cnn, images, make_job, mlp, samples_of, texts, token_mean, vectors
from tests.verifying.examining import ample_time, no_time, subject_of


class Masked(nn.Module):
    """A model with infinities in a buffer, as masks of attention have them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF)


def test_infinities_in_a_buffer_are_equal_to_themselves() -> None:
    """They have no difference, which is not the same as one that is no number."""
    verdict = check_equality(subject_of(make_job(Masked, data=vectors(50)), 8), no_time())
    assert verdict.passed, verdict.answer


def test_weights_that_are_no_numbers_are_a_difference() -> None:
    """Wherever in the model they are: to `max` NaN is the least of all."""
    job = make_job(mlp, data=vectors(50))
    subject = subject_of(job, 8)
    one, other = (Step(job, subject.plan, subject.coupling) for _ in range(2))
    assert relative_difference(one, other) == 0
    with torch.no_grad():
        list(one.model.parameters())[-1][0] = torch.nan
    assert math.isnan(relative_difference(one, other))


def test_plans_that_come_apart_to_no_numbers_are_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal at first, and NaN after some updates: the smallest difference is not the verdict."""
    differences = chain(repeat(1e-16, 4), repeat(math.nan))
    monkeypatch.setattr("stoker.verifying.plan_equality.relative_difference", lambda *_: next(differences))
    job = make_job(lambda: mlp(dropout=0.3), data=vectors(50))
    verdict = check_equality(subject_of(job, 8), ample_time())
    assert not verdict.passed
    assert "move the weights by nan after" in verdict.answer


def test_separable_job_is_equal_under_every_micro_batch() -> None:
    """Thirty updates in float64 under the plan and another micro-batch, ragged batches included, dropout silenced."""
    job = make_job(lambda: mlp(dropout=0.3), data=vectors(50), optimizer=AdamW(lr=1e-2), average=0.9)
    verdict = check_equality(subject_of(job, 8, optimizer_implementation="fused"), ample_time())
    assert (verdict.passed, verdict.level) == (True, "same mathematics"), verdict.answer
    assert "30 updates of 16 samples, the ragged batch among them, in float64" in verdict.evidence
    assert (
        "micro-batches of 8 with fused optimiser and micro-batches of 7, against micro-batches of 16"
        in verdict.evidence
    )


def test_groups_are_compared_with_each_group_alone() -> None:
    """With batch norm the reference takes group by group, and whole batches are tried as well."""
    job = make_job(lambda: cnn(nn.BatchNorm2d), data=images(50), coupling_group=4)
    verdict = check_equality(subject_of(job, 8, grouped(4), memory_format="channels_last"), ample_time())
    assert verdict.passed, verdict.answer
    assert (
        "micro-batches of 8 with channels-last and micro-batches of 16, against micro-batches of 4" in verdict.evidence
    )


def test_one_legal_micro_batch_leaves_nothing_to_compare() -> None:
    """Where the plan is the reference, the page says so instead of comparing it with itself."""
    job = make_job(models.BatchAttention)
    verdict = check_equality(subject_of(job, 16, find_coupling(job, samples_of(job))), ample_time())
    assert verdict.passed
    assert verdict.answer == "Yes: the plan takes 16 samples at once, as what it is compared with does."


@pytest.mark.parametrize("model", [models.BatchAttention, models.Queue, lambda: mlp(norm=nn.BatchNorm1d)])
def test_coupling_that_the_probe_missed_is_found(model: Any) -> None:
    """Were a coupled job taken for separable, training it in micro-batches would show it."""
    verdict = check_equality(subject_of(make_job(model, data=vectors(50)), 8), no_time())
    assert (verdict.passed, verdict.level) == (False, "none")
    assert verdict.answer.startswith("No: micro-batches of ")


def test_mean_over_tokens_is_found_by_training_too() -> None:
    """A mean over tokens taken for one over samples moves the weights."""
    job = make_job(lambda: nn.Embedding(12, 12), data=texts(50, masked=0.5), loss=token_mean)
    assert not check_equality(subject_of(job, 8), no_time()).passed


def test_micro_batch_that_leaves_a_rest_betrays_a_wrong_count() -> None:
    """A mean that claims to be a sum shows only in micro-batches of unequal sizes; such a one is tried."""
    job = make_job(mlp, data=vectors(50), loss=models.mean_as_sum)
    assert not check_equality(subject_of(job, 16), no_time()).passed


def test_ragged_batch_is_among_the_updates() -> None:
    """What goes wrong in the last batch of an epoch alone shows even where there is time for three updates only."""

    class MixesFour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.last(x_BF + (x_BF.mean(0) if len(x_BF) == 4 else 0))

    job = make_job(MixesFour, data=vectors(28), batch=8)  # batches of 8, 8, 8 and 4
    verdict = check_equality(subject_of(job, 3), no_time())
    assert not verdict.passed
    assert "2 updates of 8 samples, the ragged batch among them," in verdict.evidence


def test_unsilenceable_draws_are_told() -> None:
    """Draws from Python and NumPy cannot be silenced: nothing is claimed beyond the law."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.last(x_BF) * (1 + 0.1 * np.random.rand())  # noqa: NPY002 - as users do

    verdict = check_equality(subject_of(make_job(Noisy), 8), no_time())
    assert (verdict.passed, verdict.level) == (True, "same law")
    assert "cannot be silenced" in verdict.answer


def test_models_of_a_fixed_type_are_compared_in_it() -> None:
    """Where float64 is refused, fp32 is used, with a wider limit and a humbler level."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.last(x_BF) @ torch.eye(4, dtype=torch.float32)

    verdict = check_equality(subject_of(make_job(Fixed), 8), no_time())
    assert (verdict.passed, verdict.level) == (True, "same law"), verdict.answer
    assert "3 updates of 8 samples (of the job's 16, for time) in float32" in verdict.evidence


def test_a_loss_that_rounds_to_float32_is_compared_in_it() -> None:
    """As those of Hugging Face's language models: what float64 shows there is their rounding, no fault of the plan."""

    def rounding(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        inputs, targets = batch
        losses = nn.functional.cross_entropy(model(inputs).float(), targets, reduction="none")
        last_bits = 1 + len(targets) * torch.finfo(torch.float32).eps  # off by as much as sums of other lengths are
        return Loss((losses * last_bits).sum(), len(targets))

    verdict = check_equality(subject_of(make_job(mlp, loss=rounding, data=vectors(50)), 5), no_time())
    assert verdict.passed, verdict
    assert "float32" in verdict.evidence


def test_training_that_amplifies_rounding_is_not_blamed_on_the_plan() -> None:
    """A learning rate far too high blows rounding up gradually; a difference that comes at once is another case."""
    job = make_job(lambda: mlp(width=64), data=vectors(64), optimizer=SGD(lr=60.0))
    verdict = check_equality(subject_of(job, 5), ample_time())
    assert verdict.passed, verdict.answer
    assert "amplifies its own rounding" in verdict.answer


@pytest.mark.parametrize(
    ("model", "expected"),
    [(mlp, False), (lambda: mlp(dropout=0.1), True), (models.FunctionalDropout, True)],
    ids=["plain", "dropout", "functional"],
)
def test_random_models_are_told_from_others(model: Any, *, expected: bool) -> None:
    """Whether a model draws at random decides between same mathematics and same law."""
    assert is_random(subject_of(make_job(model), 8)) is expected
    assert not is_random(subject_of(make_job(model), 8), silenced=True)


@pytest.mark.parametrize(
    ("coupling", "micro_batch", "expected"),
    [(SEPARABLE, 100, (None, 7)), (grouped(64), 128, (4, 8)), (grouped(512), 512, (32, 32)), (SEPARABLE, 1, (None, 1))],
)
def test_scaled_subjects_keep_their_shares(coupling: Any, micro_batch: int, expected: tuple[int | None, int]) -> None:
    """A batch of 512 made 32 takes its group, micro-batch and learning rate along, and the plan stays legal."""
    job = make_job(mlp, batch=512, data=vectors(600))
    small = scaled(subject_of(job, micro_batch, coupling), 32)
    assert (small.coupling.group, small.plan.micro_batch) == expected
    assert small.job.schedule(0.5) == 1 / 16
    assert small.coupling.problem_with(small.plan.micro_batch, 32) is None
    assert small.coupling.problem_with(reference_micro_batch(small.coupling, 32), 32) is None


def test_batches_shrink_to_what_time_allows() -> None:
    """Halving stops at eight samples, and small batches stay whole."""
    assert [affordable_batch(512, allowed) for allowed in (1e9, 300, 1, 0)] == [512, 256, 8, 8]
    assert affordable_batch(12, 0) == 12


@pytest.mark.slow  # `stoker verify` of such a job is tested in flow/test_low_bit_runs
def test_states_of_few_bits_are_the_same_mathematics_under_other_plans() -> None:
    """The reference has such states too; how far they are from full ones is a verdict of its own."""
    subject = subject_of(few_bits_job(), 8, optimizer_states="8bit")
    verdict = check_equality(subject, ample_time())
    assert (verdict.passed, verdict.level) == (True, "same mathematics"), verdict.answer
    states = check_states(subject)
    assert states is not None
    assert (states.passed, states.level) == (True, "same law"), states.answer
    assert check_states(subject_of(dataclasses.replace(few_bits_job(), numerics=()), 8)) is None
