from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.jobs.objective import Objective
from stoker.stepping.coupling import at_first, find_coupling
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.step_failures import remedy_in
from tests.stepping.models import FEATURES, make_job, mlp, samples_of, vectors

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1, 1])


def same(output: torch.Tensor) -> torch.Tensor:
    """A model that hands its input on."""
    return output


def of(target: torch.Tensor, output: torch.Tensor = LOGITS, **changed: Any) -> dict[str, Loss]:
    """The measures of an output that a model gave."""
    return TrainingObjective(make_job(nn.Identity, **changed)).measures(same, (output, target), len(output))


def job_of(loss: Any) -> Job:
    """A job with this loss."""
    return make_job(nn.Identity, loss=loss)


def test_cross_entropy_counts_valid_targets() -> None:
    """Targets of -100 add neither to the sum nor to the count."""
    loss = of(torch.tensor([0, -100, 1]))["loss"]
    expected = F.cross_entropy(LOGITS[[0, 2]], torch.tensor([0, 1]), reduction="sum")
    torch.testing.assert_close(loss.sum, expected)
    assert int(loss.count) == 2


def test_cross_entropy_of_probabilities_counts_samples() -> None:
    """Targets that are probabilities count once a sample."""
    loss = of(torch.softmax(LOGITS, 1))["loss"]
    assert loss.count == 3


def test_token_cross_entropy_has_classes_last() -> None:
    """Tokens count one by one, with their classes in the last dimension."""
    output = LOGITS.expand(2, 3, 3)
    loss = of(LABELS.expand(2, 3), output, loss=Objective("token_cross_entropy", label_smoothing=0.1))["loss"]
    torch.testing.assert_close(loss.sum, 2 * F.cross_entropy(LOGITS, LABELS, reduction="sum", label_smoothing=0.1))
    assert int(loss.count) == 6


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("mse", F.mse_loss), ("l1", F.l1_loss), ("binary_cross_entropy", F.binary_cross_entropy_with_logits)],
)
def test_losses_by_entry_are_pytorchs_means(loss: str, expected: Any) -> None:
    """The sum over the count is PyTorch's mean."""
    target = torch.rand(3, 3)
    found = of(target, loss=loss)["loss"]
    torch.testing.assert_close(found.sum / found.count, expected(LOGITS, target))


def test_metrics_skip_ignored_targets() -> None:
    """Accuracies count valid targets alone."""
    output = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [5, 0, 0, 0, 0, 0]])
    found = of(torch.tensor([0, 0, -100]), output, metrics=["accuracy", "top5_accuracy"])
    assert [(float(m.sum), float(m.count)) for m in (found["accuracy"], found["top5_accuracy"])] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(ignore_index=255), functools.partial(F.cross_entropy, ignore_index=255)]
)
def test_accuracies_leave_out_what_the_loss_ignores(loss: Any) -> None:
    """Pixels that the loss does not count are no errors of the metrics: two of three labels are right."""
    output = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [0, 5, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    target = torch.tensor([0, 0, 1, 255])
    found = of(target, output, loss=loss, metrics=["accuracy", "top5_accuracy", "token_accuracy"])
    assert {name: (float(m.sum), float(m.count)) for name, m in found.items() if name != "loss"} == {
        "accuracy": (2, 3),
        "top5_accuracy": (2, 3),
        "token_accuracy": (2, 3),
    }


@pytest.mark.parametrize(
    ("loss", "form", "total", "count"),
    [
        (lambda output, target: Loss(output.sum(), 2), "sum and count", 6.0, 2),
        (lambda output, target: output.mean(1), "value per sample", 2.0, 3),
        (lambda output, target: output, "value per sample", 6.0, 9),
        (lambda output, target: output.mean(), "scalar", 2.0, 3),
        (lambda model, batch: Loss(model(batch[0]).sum(), 5), "sum and count", 6.0, 5),
        (nn.L1Loss(), "scalar", None, 3),
        (nn.L1Loss(reduction="none"), "value per sample", None, 9),
    ],
)
def test_every_form_of_a_loss_becomes_a_sum_and_a_count(loss: Any, form: str, total: float | None, count: int) -> None:
    """Loss, values and scalars are distinguished; a scalar stands for the mean over the samples given."""
    objective = TrainingObjective(job_of(loss))
    content = (LOGITS, torch.zeros(3, 3))
    found = objective.loss(same, content, 3)
    assert objective.form(same, content) == form
    assert found.count == count
    assert total is None or float(found.sum) == pytest.approx(total)


def test_outputs_of_reduced_precision_are_measured_in_fp32() -> None:
    """A loss never sums in bf16."""
    assert of(LABELS, LOGITS.bfloat16())["loss"].sum.dtype is torch.float32


def test_user_metric_shares_the_pass() -> None:
    """Metrics of the output come from the same pass through the model as the loss."""
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x

    def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.max(1).values

    found = TrainingObjective(make_job(nn.Identity, metrics=[margin, "accuracy"])).measures(model, (LOGITS, LABELS), 3)
    assert len(calls) == 1
    assert float(found["margin"].sum) == 6.5


@pytest.mark.parametrize(
    ("target", "output", "problem"),
    [
        (torch.tensor([0, 1, 3]), LOGITS, r"labels go from 0 to 3, but the model's output has 3 classes"),
        (torch.tensor([0, -1, 1]), LOGITS, r"labels go from -1 to 1"),
        (torch.tensor([-100, 0]), LOGITS, r"raised ValueError: .* \(output \[3, 3\], target \[2\]\)"),
    ],
)
def test_targets_that_do_not_fit_are_named(target: torch.Tensor, output: torch.Tensor, problem: str) -> None:
    """Labels out of range come with the range, other misfits with the shapes; -100 is no label."""
    with pytest.raises(BadJob, match=problem):
        of(target, output)


@pytest.mark.parametrize(
    ("target", "output", "loss", "remedy"),
    [
        (torch.tensor([0, 255, 1]), LOGITS, "cross_entropy", r"ignore_index=255\) leaves it out"),
        (torch.tensor([0, -1, 1]), LOGITS, "cross_entropy", r"from 0, .*ignore_index=-1\)"),
        (torch.tensor([[0], [2], [1]]), LOGITS, "cross_entropy", r"labels.squeeze\(1\)"),
        (LABELS, LOGITS[:, :1], "mse", r"output.squeeze\(1\)"),
        (LABELS, LOGITS[:, :1], "cross_entropy", 'one logit a sample.* loss="binary_cross_entropy"'),
        (LABELS, LOGITS[:, :1], nn.BCEWithLogitsLoss(), 'targets as floats.* loss="binary_cross_entropy"'),
    ],
)
def test_a_misfit_comes_with_a_remedy(target: torch.Tensor, output: torch.Tensor, loss: Any, remedy: str) -> None:
    """What to change in target, output or loss; one score is not taken for one class of several."""
    with pytest.raises(BadJob) as told:
        of(target, output, loss=loss)
    assert re.search(remedy, str(told.value.remedy))
    assert "1 classes" not in str(told.value)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0, 2)])
def test_a_binary_cross_entropy_of_no_probabilities_is_refused(loss: Any, low: int, high: int) -> None:
    """Labels of -1 and 1, or of 1 and 2: the loss would fall without end."""
    inputs, classes = vectors()
    target = torch.where(classes > 0, high, low).float()[:, None]
    job = make_job(lambda: nn.Linear(FEATURES, 1), data=(inputs, target), loss=loss)
    with pytest.raises(BadJob, match=f"targets go from {low} to {high}, and a binary cross-entropy"):
        at_first(job, samples_of(job))


class OfKnown(nn.BCEWithLogitsLoss):
    """Leaves out labels of -1, as of tasks that a sample has no answer for."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Any:  # noqa: A002 - PyTorch's name
        is_known = target >= 0
        return Loss(F.binary_cross_entropy_with_logits(input[is_known], target[is_known], reduction="sum"), len(target))


BY_KIND = {"kind": LABELS, "size": torch.ones(3)}


def by_kind(output: Any, target: Any) -> torch.Tensor:
    """A loss of entries of both."""
    return F.cross_entropy(output["kind"], target["kind"], reduction="none")


@pytest.mark.parametrize(
    ("output", "target", "loss", "remedy"),
    [
        (LOGITS, BY_KIND, "cross_entropy", r"cross_entropy\(output, target\['kind'\], reduction='none'\) \+ …"),
        (LOGITS, {"size": BY_KIND["size"]}, "mse", r"mse_loss\(output, target\['size'\], reduction='none'\)[^+]*$"),
        ({"kind": LOGITS}, BY_KIND, "cross_entropy", r"cross_entropy\(output\['kind'\], target\['kind'\]"),
        ({"kind": LOGITS}, LABELS, by_kind, r"a dict of 'kind' \[3, 3\] as the output, and \[3\] as the target"),
        (LOGITS, BY_KIND, by_kind, r"\[3, 3\] as the output, and a dict of 'kind' \[3\], 'size' \[3\] as the target"),
    ],
)
def test_a_dict_where_a_loss_wants_a_tensor_or_the_reverse_comes_with_the_loss_to_write(
    output: Any, target: Any, loss: Any, remedy: str
) -> None:
    """The error names the entries, and how a loss takes them."""
    with pytest.raises(BadJob) as told:
        TrainingObjective(job_of(loss)).loss(same, (output, target), 3)
    assert re.search(remedy, str(told.value.remedy))


def test_an_error_within_a_loss_of_dicts_keeps_its_line_and_gets_a_remedy() -> None:
    """As of an entry by a wrong name, or of one that is handed to PyTorch whole."""
    loss = TrainingObjective(job_of(lambda output, target: F.mse_loss(output["size"], target["kind"])))
    with pytest.raises(KeyError) as told:
        loss.loss(same, ({"kind": LOGITS}, BY_KIND), 3)
    assert "a dict of 'kind' [3, 3] as the output" in str(remedy_in(told.value))
    with pytest.raises(AttributeError) as told:
        TrainingObjective(job_of(F.l1_loss)).loss(same, (LOGITS, BY_KIND), 3)
    assert "a dict of 'kind' [3], 'size' [3] as the target" in str(remedy_in(told.value))


def test_a_binary_cross_entropy_may_leave_labels_out() -> None:
    """It says so by a forward of its own, and is not refused for what it does not compare."""
    inputs, classes = vectors()
    target = torch.where(classes > 0, 1.0, -1.0)[:, None]
    job = make_job(lambda: nn.Linear(FEATURES, 1), data=(inputs, target), loss=OfKnown())
    assert at_first(job, samples_of(job)).notices == ()


def test_the_forward_of_one_loss_that_was_replaced_is_the_loss() -> None:
    """What it returns is a mean, as its owner wrote it, and no sum to be divided."""
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda output, target: 3 * F.cross_entropy(output, target)  # type: ignore[assignment]
    found = TrainingObjective(job_of(loss)).loss(same, (LOGITS, LABELS), 3)
    torch.testing.assert_close(found.sum / found.count, 3 * F.cross_entropy(LOGITS, LABELS))


@pytest.mark.parametrize(
    "shortage",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["GPU", "CPU"],
)
def test_memory_that_runs_out_in_a_loss_is_no_misfit(shortage: Exception) -> None:
    """A run then takes smaller micro-batches, and a plan that is tried does not fit."""

    def full(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise shortage

    with pytest.raises(RuntimeError) as found:
        TrainingObjective(job_of(full)).loss(same, (LOGITS, LABELS), 3)
    assert found.value is shortage


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda output, target: 0.5, "loss returned a float, wanted a float tensor"),
        (lambda output, target: output.argmax(1), "loss returned a torch.int64 tensor"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, problem: str) -> None:
    """Numbers and whole numbers cannot be differentiated."""
    with pytest.raises(BadJob, match=problem):
        TrainingObjective(job_of(loss)).loss(same, (LOGITS, LABELS), 3)


@pytest.mark.parametrize(("total", "found"), [(LOGITS.sum(1), r"\[3\]"), (1.0, "float")], ids=["by sample", "a number"])
def test_sum_that_is_no_scalar_is_refused(total: Any, found: str) -> None:
    """A sum per sample, or a plain number, is reported by the probe and by evaluation, which come before training."""
    problem = f"with a sum of {found}, wanted a scalar tensor"
    with pytest.raises(BadJob, match=problem):
        of(LABELS, loss=lambda output, target: Loss(total, 3))
    job = make_job(mlp, loss=lambda output, target: Loss(total, 3))
    with pytest.raises(BadJob, match=problem):
        find_coupling(job, samples_of(job))


def test_missing_target_is_told() -> None:
    """A loss of (output, target) over samples without targets says how to give them."""
    with pytest.raises(BadJob, match="needs a target"):
        TrainingObjective(make_job(nn.Identity)).loss(same, LOGITS, 3)


class Margins(nn.Module):
    """A loss that would learn a margin for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.margins = nn.Parameter(torch.zeros(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output - self.margins, target, reduction="none")


def test_a_loss_with_weights_of_its_own_is_refused_unless_they_stay() -> None:
    """No optimiser of the job has them: without a word they would never move."""
    with pytest.raises(BadJob, match=r"Margins has parameters to train \(margins\)") as caught:
        of(LABELS, loss=Margins())
    assert "requires_grad_(False)" in (caught.value.remedy or "")
    with pytest.raises(BadJob, match=r"Margins has parameters to train .* of a copy of the model"):
        of(LABELS, loss=Margins().forward)
    found = of(LABELS, loss=Margins().requires_grad_(requires_grad=False))["loss"]
    torch.testing.assert_close(found.sum, F.cross_entropy(LOGITS, LABELS, reduction="sum"))
