"""Learning from labels and from a teacher, counted as the job's own loss counts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.compressing.distillation import Distillation
from stoker.errors import BadJob
from stoker.jobs.job_description import describe

INPUTS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


def job(loss: Any = "cross_entropy", target: torch.Tensor = LABELS, **changes: Any) -> stoker.Job:
    """A job whose model has three outputs."""
    return stoker.Job(
        model=nn.Linear(6, 3),
        data=(INPUTS, target),
        loss=loss,
        optimizer=stoker.SGD(lr=0.1),
        batch=4,
        until=stoker.epochs(1),
        **changes,
    )


def networks() -> tuple[nn.Module, nn.Module]:
    """A student and a teacher."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(6, 3), nn.Linear(6, 3)


def test_classes_are_learned_from_labels_and_from_the_softened_teacher() -> None:
    """As in the paper, by hand."""
    student, teacher = networks()
    found = Distillation(
        teacher, job(stoker.Objective("cross_entropy", label_smoothing=0.1)), temperature=2.0, share=0.25
    )(student, (INPUTS, LABELS))
    own = F.cross_entropy(student(INPUTS), LABELS, reduction="sum", label_smoothing=0.1)
    p, q = F.softmax(teacher(INPUTS) / 2, 1), F.log_softmax(student(INPUTS) / 2, 1)
    apart = (p * (p.log() - q)).sum() * 4
    torch.testing.assert_close(found.sum, 0.75 * own + 0.25 * apart)
    assert found.count == 12


def test_ignored_targets_teach_nothing() -> None:
    """Tokens without a target count neither for the label nor for the teacher."""
    student, teacher = networks()
    labels = LABELS.clone()
    labels[:5] = -100
    some = Distillation(teacher, job())(student, (INPUTS, labels))
    rest = Distillation(teacher, job())(student, (INPUTS[5:], labels[5:]))
    torch.testing.assert_close(some.sum, rest.sum)
    assert int(some.count) == int(rest.count) == 7


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("mse", torch.randn(12, 3, generator=torch.Generator().manual_seed(1))),
        ("binary_cross_entropy", (INPUTS[:, :3] > 0).float()),
        (nn.SmoothL1Loss(reduction="none"), torch.zeros(12, 3)),
        (F.l1_loss, torch.zeros(12, 3)),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_halves_add_up_to_the_whole(loss: Any, target: torch.Tensor, share: float) -> None:
    """Of any loss, so that micro-batches may be of any size; a student that is its teacher has nothing to learn."""
    student, teacher = networks()
    distillation = Distillation(teacher, job(loss, target), share=share)
    whole = distillation(student, (INPUTS, target))
    halves = [distillation(student, (INPUTS[at], target[at])) for at in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(whole.sum, halves[0].sum + halves[1].sum)
    assert float(whole.count) == sum(float(half.count) for half in halves)
    if share == 1.0 and loss != "binary_cross_entropy":
        assert float(distillation(teacher, (INPUTS, target)).sum.detach()) == 0.0


def test_the_teacher_is_not_trained() -> None:
    """It answers in evaluation mode, and no gradient reaches it."""
    student, teacher = networks()
    given = nn.Sequential(teacher, nn.Dropout(0.9)).train()
    distillation = Distillation(given, job())
    loss = distillation(student, (INPUTS, LABELS))
    assert given.training
    assert all(parameter.requires_grad for parameter in given.parameters())
    assert not any(parameter.requires_grad for parameter in distillation.parameters())
    assert torch.equal(loss.sum, distillation(student, (INPUTS, LABELS)).sum)
    loss.sum.backward()
    assert all(parameter.grad is None for parameter in distillation.parameters())
    assert student.weight.grad is not None


def test_what_is_learned_is_described_by_the_teachers_weights_and_every_setting() -> None:
    """Another teacher, temperature, share or loss is another job."""
    student, teacher = networks()
    described = [
        describe(Distillation(*arguments))
        for arguments in ((teacher, job()), (student, job()), (teacher, job("mse", INPUTS[:, :3])))
    ]
    described += [describe(Distillation(teacher, job(), **{name: 0.5})) for name in ("temperature", "share")]
    assert all(one != other for at, one in enumerate(described) for other in described[:at])
    assert describe(Distillation(teacher, job())) == described[0]


@pytest.mark.parametrize(
    "changes",
    [{"loss": lambda model, batch: stoker.Loss(model(batch[0]).sum(), 1)}, {"loss": "own"}],
)
def test_losses_that_keep_the_output_to_themselves_are_refused(changes: dict[str, Any]) -> None:
    """With what to do instead."""
    with pytest.raises(BadJob, match="keeps it to itself") as error:
        Distillation(networks()[1], job(**changes))
    assert "loss(output, target)" in str(error.value.remedy)
