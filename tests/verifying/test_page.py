from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.jobs import Job
from stoker.jobs.objective import Objective
from stoker.loading.datasets import datasets_of
from stoker.records import Verdict, dumps, loads
from stoker.stepping.coupling import find_coupling
from stoker.testing import FakeClock
from stoker.verifying.exactness_contract import check_contract, overall_level
from stoker.verifying.subject import Subject
from tests.stepping import models
from tests.stepping.driving import SEPARABLE, plan_of
from tests.stepping.models import Memory, cnn, images, make_job, mlp, sample_mean, texts, token_mean
from tests.verifying.examining import on_disk

QUESTIONS = [
    "Is the order of the data fixed?",
    "Are samples separable?",
    "Does the loss add up over micro-batches?",
    "Is a resumed run equal to one never stopped?",
    "Is training the same under every legal plan?",
    "Which level holds?",
]


def page_of(
    job: Job, micro_batch: int, folder: Path, *, gradient_error: float | None = None, **plan: Any
) -> list[Verdict]:
    """The verdicts on a job under a plan, in no time at all."""
    data = datasets_of(job)
    coupling = find_coupling(job, data.train)
    return list(
        check_contract(
            job,
            data,
            plan_of(micro_batch, **plan),
            coupling,
            through_checkpoint=on_disk(folder),
            budget_s=0.0,
            clock=FakeClock(),
            gradient_error=gradient_error,
        )
    )


def test_the_page_answers_every_question(tmp_path: Path) -> None:
    """A separable job in fp32: six answers in order, the best levels, and each verdict survives the codec."""
    page = page_of(make_job(mlp), 8, tmp_path)
    assert [verdict.question for verdict in page] == QUESTIONS
    assert all(verdict.passed for verdict in page)
    assert page[-1].level == "same mathematics"
    assert page[-1].answer == "Bit-equal on resume under the same plan; same mathematics across legal plans."
    assert [loads(dumps(verdict), Verdict) for verdict in page] == page


def test_on_a_gpu_a_resume_is_not_called_bit_equal() -> None:
    """Its kernels may not be deterministic; that a few updates came out equal is said, and promises nothing."""
    job = make_job(mlp)
    subject = Subject(job, datasets_of(job), replace(plan_of(8), device="cuda:0"), SEPARABLE)
    answer = overall_level(subject, [], is_random=False).answer
    assert answer.startswith("Same law, though equal in the updates made here")
    assert "it-equal" not in answer


@pytest.mark.parametrize(
    ("job", "plan", "reason"),
    [
        (lambda: make_job(lambda: mlp(dropout=0.2)), {}, "random draws, such as dropout, differ with the micro-batch"),
        (lambda: make_job(mlp), {"precision": "bf16", "gradient_error": 0.02}, "bf16 rounds more than fp32"),
    ],
    ids=["dropout", "bf16"],
)
def test_draws_and_reduced_precision_leave_the_law(job: Any, plan: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Dropout and bf16 agree between plans in law alone, and the page says which of them is why."""
    last = page_of(job(), 8, tmp_path, **plan)[-1]
    assert (last.passed, last.level) == (True, "same law")
    assert reason in last.answer


@pytest.mark.parametrize(
    ("error", "passed", "answer"),
    [
        (0.02, True, "Yes: gradients are 2.00% off"),
        (0.3, False, "No: gradients are 30.00% off"),
        (float("nan"), False, "No: gradients are nan% off"),
        (None, False, "Unknown"),
    ],
)
def test_reduced_precision_is_judged_by_its_gradient(
    error: float | None, passed: bool, answer: str, tmp_path: Path
) -> None:
    """A gradient error over 10 %, or an unknown one, fails the plan."""
    page = page_of(make_job(mlp), 8, tmp_path, precision="bf16", gradient_error=error)
    verdict = next(one for one in page if one.question == "Is bf16 close enough to fp32?")
    assert verdict.passed is passed
    assert verdict.answer.startswith(answer)
    assert page[-1].passed is passed


def test_one_failure_leaves_no_level(tmp_path: Path) -> None:
    """A job that does not resume holds no level until that is mended, and the last verdict names what failed."""
    page = page_of(make_job(Memory), 16, tmp_path)
    assert (page[-1].passed, page[-1].level) == (False, "none")
    assert "Is a resumed run equal to one never stopped?" in page[-1].evidence


SEPARABILITY: dict[str, tuple[Any, int, str]] = {
    "separable": (lambda: make_job(mlp), 8, "Yes: any micro-batch from 1 to 16 samples is legal."),
    "batch norm": (
        lambda: make_job(lambda: cnn(nn.BatchNorm2d), data=images()),
        16,
        "No: coupled by the batch statistics of 2 BatchNorm2d, taken over 16 samples. Only the whole batch",
    ),
    "groups": (
        lambda: make_job(lambda: cnn(nn.BatchNorm2d), data=images(), coupling_group=4),
        8,
        "No: coupled by the batch statistics of 2 BatchNorm2d, taken over 4 samples. A micro-batch is a whole number",
    ),
    "mixture of experts": (
        lambda: make_job(models.moe, data=texts(), loss="token_cross_entropy"),
        16,
        "No: coupled by MixtureOfExperts '1'. Every group of 16 samples",
    ),
    "declared": (
        lambda: make_job(mlp, loss=Objective(models.info_nce, scope="batch")),
        16,
        "No: coupled by the loss. Every group",
    ),
}


@pytest.mark.parametrize("name", SEPARABILITY)
def test_coupling_is_told_with_what_can_be_done(name: str, tmp_path: Path) -> None:
    """The second answer says by what samples are coupled and which micro-batches that leaves; the contract holds."""
    job, micro_batch, answer = SEPARABILITY[name]
    page = page_of(job(), micro_batch, tmp_path)
    assert page[1].answer.startswith(answer)
    assert page[-1].passed, [verdict.answer for verdict in page if not verdict.passed]


LOSSES: dict[str, tuple[Any, int, str]] = {
    "named": (lambda: make_job(mlp), 8, "Yes: it gives a sum and a count"),
    "per entry": (lambda: make_job(mlp, loss=nn.CrossEntropyLoss(reduction="none")), 8, "Yes: it gives one value"),
    "scalar": (lambda: make_job(mlp, loss=sample_mean), 8, "Yes: it gives a scalar, and the probe found it"),
    "mean over tokens": (
        lambda: make_job(lambda: nn.Embedding(12, 12), data=texts(masked=0.5), loss=token_mean),
        16,
        "No: its scalar is a mean over valid tokens, of which groups of equal size have",
    ),
    "contrastive": (
        lambda: make_job(mlp, loss=models.info_nce),
        16,
        "No: its scalar is not a mean over samples. It is never",
    ),
    "scalar of a coupled model": (
        lambda: make_job(models.BatchAttention, loss=sample_mean),
        16,
        "Yes: it gives a scalar, taken for the mean",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_form_of_the_loss_is_told(name: str, tmp_path: Path) -> None:
    """The third answer says what the loss returns and whether it may be accumulated."""
    job, micro_batch, answer = LOSSES[name]
    assert page_of(job(), micro_batch, tmp_path)[2].answer.startswith(answer)


def test_remedy_for_a_mean_over_tokens_is_given(tmp_path: Path) -> None:
    """For a scalar mean over tokens the remedy is to return its sum and its count."""
    job = make_job(lambda: nn.Embedding(12, 12), data=texts(masked=0.5), loss=token_mean)
    assert "return stoker.Loss(sum, count)" in page_of(job, 16, tmp_path)[2].answer


def test_verifying_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """The default type and the number of threads are the caller's again."""
    threads = torch.get_num_threads()
    page_of(make_job(mlp), 8, tmp_path)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads
