import pytest
import torch
from torch import nn

import stoker
from stoker.jobs import EMA
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.named_losses import LOSSES, METRICS
from stoker.stepping.weight_averaging import ExponentialAverage


@pytest.mark.parametrize("name", ["mse", "l1"])
def test_errors_are_not_stretched_over_each_other(name: str) -> None:
    """[8, 1] against [8] would compare every sample with every target."""
    with pytest.raises(ValueError, match="differ in shape"):
        LOSSES[name](torch.zeros(8, 1), torch.zeros(8))


@pytest.mark.parametrize(("output", "target"), [((8, 1), (8,)), ((8, 1), (8, 1)), ((8,), (8,)), ((8, 3), (8, 3))])
def test_accuracy_wants_classes_and_labels(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    """One logit has no argmax worth a name: it is refused, not counted as 0 or 300 %."""
    with pytest.raises(ValueError, match="binary_accuracy"):
        METRICS["accuracy"](torch.zeros(output), torch.zeros(target, dtype=torch.int64))


def test_the_best_five_of_four_classes_are_refused() -> None:
    """With how many classes there are, and not as an index out of range."""
    with pytest.raises(ValueError, match="5 classes or more, and there are 4"):
        METRICS["top5_accuracy"](torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))


def test_binary_accuracy_is_the_share_of_logits_on_the_right_side() -> None:
    """Logits above 0 against targets above one half, whatever of the two has a dimension of one."""
    output, target = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert METRICS["binary_accuracy"](output, target).mean() == 0.5


@pytest.mark.parametrize("measure", [LOSSES["binary_cross_entropy"], METRICS["binary_accuracy"]])
@pytest.mark.parametrize("target", [(8, 3, 3, 2), (8, 18), (8, 2, 9)])
def test_labels_in_another_order_are_no_labels(measure, target: tuple[int, ...]) -> None:
    """Masks with their channels last, say: as many numbers as logits with channels first, and each at another place."""
    with pytest.raises(ValueError, match="differ in shape"):
        measure(torch.zeros(8, 2, 3, 3), torch.zeros(target))


@pytest.mark.parametrize("measure", [LOSSES["binary_cross_entropy"], METRICS["binary_accuracy"]])
@pytest.mark.parametrize(
    ("output", "target"), [((4, 18), (4, 2, 3, 3)), ((4, 9), (4, 1, 3, 3)), ((4, 1, 3, 3), (4, 9)), ((4, 1, 3), (4, 3))]
)
def test_entries_of_one_order_may_be_flat(measure, output: tuple[int, ...], target: tuple[int, ...]) -> None:
    """As of an autoencoder that returns images as vectors, or of masks that are kept as such."""
    logits = torch.linspace(-1, 1, 4 * 18)[: torch.Size(output).numel()]
    labels = (logits > 0).float().reshape(target)
    assert torch.equal(measure(logits.reshape(output), labels).flatten(), measure(logits, labels.flatten()))


@pytest.mark.parametrize("name", ["accuracy", "top5_accuracy", "binary_accuracy"])
def test_what_is_not_a_number_is_no_right_answer(name: str) -> None:
    """PyTorch takes a NaN for the largest, so that the first class would be chosen, or the largest five."""
    nan, right = torch.full((1, 8), torch.nan), torch.eye(8)[:1]
    output, target = torch.cat([nan, right]), torch.tensor([0, 0])
    if name == "binary_accuracy":
        output, target = torch.tensor([torch.nan, -1.0]), torch.tensor([0.0, 0.0])
    measured = METRICS[name](output, target)
    share = measured.mean() if isinstance(measured, torch.Tensor) else measured.sum / measured.count
    assert share == 0.5


def test_a_scalar_metric_is_refused() -> None:
    """The mean of means over pieces would depend on the plan's micro-batch."""

    def rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean().sqrt()

    data = (torch.rand(8, 2), torch.rand(8, 1))
    job = stoker.Job(
        model=lambda: nn.Linear(2, 1),
        data=data,
        loss="mse",
        metrics=[rmse],
        optimizer=stoker.SGD(lr=0.1),
        batch=4,
        until=stoker.updates(1),
    )
    with pytest.raises(stoker.BadJob, match="rmse returned a scalar"):
        TrainingObjective(job).measures(nn.Linear(2, 1), data, 8)


def test_an_average_follows_a_buffer_that_the_model_replaces() -> None:
    """`self.mean = …` in a forward pass puts another tensor in the buffer's place."""
    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.zeros(2))
    average = ExponentialAverage(EMA(0.9), model)
    model.mean = torch.ones(2)
    average.update(0)
    assert average.weights["mean"].tolist() == [1.0, 1.0]
