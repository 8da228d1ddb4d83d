"""Rows of the job behind a model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.compressing import source_job
from stoker.compressing.compress import _material, _metric_of
from stoker.compressing.source_job import Pruner, _rows, channel_scores, metric_of_job, stored_as
from stoker.errors import BadJob
from stoker.exporting import job_inputs
from stoker.loading.datasets import datasets_of
from stoker.loading.samples import ItemSamples
from stoker.records import Datatype, TensorSpec
from stoker.testing.tiny_models import tiny_artifact


class Stored(ItemSamples):
    """Samples `[i, i]` with the target `i`; prepared, they are halves. What is read and prepared is kept."""

    def __init__(self, count: int) -> None:
        items = [(torch.tensor([index, index]), torch.tensor(index)) for index in range(count)]
        super().__init__(items, None, seed=0)
        self.read_items, self.prepared_rows = list[int](), list[int]()

    def read(self, index: int) -> Any:
        self.read_items.append(index)
        return super().read(index)

    def prepare(self, content: Any) -> Any:
        self.prepared_rows.append(len(content[0]))
        return content[0] / 2, content[1]


@pytest.mark.parametrize("is_prepared", [False, True], ids=["stored", "prepared"])
def test_samples_that_are_read_are_read_once_and_prepared_in_pieces(is_prepared: bool) -> None:
    """20,000 images are decoded once: twice takes twice as long, and as floats all at once no memory holds them."""
    samples = Stored(2500)
    job = stoker.Job(
        model=lambda: nn.Linear(2, 1),
        data=samples,
        loss="mse",
        optimizer=stoker.SGD(lr=0.1),
        batch=2,
        until=stoker.epochs(1),
    )
    inputs = job_inputs(job, nn.Linear(2, 1), samples)
    samples.read_items.clear()
    found = _rows(inputs.prepared() if is_prepared else inputs, samples, 2100, seed=0)
    assert sorted(set(samples.read_items)) == sorted(samples.read_items)
    assert max(samples.prepared_rows) <= 1024
    (values,) = found.inputs.values()
    assert isinstance(found.targets, type(values))
    assert found.targets.tolist() == samples.read_items
    assert (values[:, 1] * (2 if is_prepared else 1)).tolist() == samples.read_items


@pytest.mark.parametrize(
    ("datatype", "takes_prepared", "expected"),
    [("FP32", True, 0.5), ("FP32", False, 1), ("FP32", None, 0.5), ("INT64", True, 0.5), ("INT64", None, 1)],
)
def test_samples_are_prepared_for_a_model_that_takes_them_so(
    datatype: Datatype, takes_prepared: bool | None, expected: float, tmp_path: Path
) -> None:
    """The manifest says it; types, which preparation may keep, only decide for older ones."""
    samples = Stored(4)
    spec = TensorSpec(name="input", datatype=datatype, shape=("batch", 2))
    manifest = tiny_artifact(tmp_path, inputs=(spec,), takes_prepared=takes_prepared).manifest
    taken = stored_as(job_inputs(job_with(data=samples), nn.Linear(2, 1), samples), manifest)
    assert (taken.arrays([1])["input"] == expected).all()


def absolute_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The distance of each sample."""
    return (output - target).abs().mean(1)


class Directed:
    """A metric that says which values are better, in one of the two ways of metrics."""

    def __init__(self, **says: bool) -> None:
        vars(self).update(says)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return absolute_error(output, target)


def job_with(**settings: Any) -> stoker.Job:
    """A job with a loss that compress does not know by name."""
    changed = {"model": lambda: nn.Linear(2, 1), "data": Stored(8), "loss": "binary_cross_entropy", **settings}
    return stoker.Job(optimizer=stoker.SGD(lr=0.1), batch=2, until=stoker.epochs(1), **changed)


@pytest.mark.parametrize(
    ("settings", "is_error"),
    [
        ({"loss": absolute_error}, True),
        ({"loss": stoker.Objective(absolute_error)}, True),
        ({"loss": "mse"}, True),
        ({"metrics": {"mae": Directed(lower_is_better=True)}}, True),
        ({"metrics": {"mae": Directed(higher_is_better=False)}}, True),
        ({"metrics": [Directed(higher_is_better=True)]}, False),
        ({"metrics": ["accuracy"], "loss": absolute_error}, False),
    ],
)
def test_a_candidate_that_raises_an_error_is_worse(settings: dict[str, Any], is_error: bool) -> None:
    """A loss is an error, a metric what it says it is: larger errors are lower scores."""
    metric = metric_of_job(job_with(**settings))
    assert metric.lower_is_better == is_error
    if metric.name != "accuracy":
        near, far = (np.full((4, 2), distance, np.float32) for distance in (0.3, 0.45))
        target = np.zeros((4, 2), np.float32)
        near_scores, far_scores = (metric.scores({"output": answer}, target, 4) for answer in (near, far))
        assert (near_scores > far_scores).all() == is_error


@pytest.mark.parametrize(
    "loss",
    [
        nn.HuberLoss(),
        nn.HuberLoss(reduction="none"),
        lambda output, target: stoker.Loss(F.huber_loss(output, target, reduction="sum"), target.numel()),
    ],
)
def test_a_mean_is_taken_of_each_row_alone(loss: Any) -> None:
    """Of a scalar, of a sum and a count, and of a value for each element, as training divides them."""
    outputs, targets = (torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    scores = metric_of_job(job_with(loss=loss)).scores({"output": outputs.numpy()}, targets.numpy(), 4)
    expected = F.huber_loss(outputs, targets, reduction="none").mean(1)
    torch.testing.assert_close(-torch.from_numpy(scores).float(), expected)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0])), nn.MSELoss(reduction="sum")])
def test_what_is_no_mean_of_rows_is_refused(loss: Any) -> None:
    """A mean by class weights would lose them in a row alone, a sum would be a smaller one."""
    outputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 1, 0]) if isinstance(loss, nn.CrossEntropyLoss) else torch.zeros(4, 2)
    with pytest.raises(BadJob, match="no mean of rows"):
        metric_of_job(job_with(loss=loss)).scores({"output": outputs.numpy()}, targets.numpy(), 4)


def test_a_metric_of_the_model_itself_is_refused() -> None:
    """An exported model has answers, and is no module to call."""

    def hits(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) > 0).float()

    hits.lower_is_better = False  # type: ignore[attr-defined]
    with pytest.raises(BadJob, match="metric hits takes the model itself"):
        metric_of_job(job_with(metrics=[hits]))


def test_a_metric_without_a_direction_is_refused() -> None:
    """Taken for a score, an error that rises would be a gain; the remedy says how to name the direction."""
    with pytest.raises(BadJob, match="mae does not say whether it is a score or an error") as raised:
        metric_of_job(job_with(metrics={"mae": absolute_error}))
    assert "lower_is_better" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("says", "is_error"),
    [("", False), ("metric.lower_is_better = True", True), ("metric.higher_is_better = False", True)],
)
def test_a_metric_in_a_file_says_that_it_is_an_error_in_either_way(says: str, is_error: bool, tmp_path: Path) -> None:
    """As the job's own: else the candidate with the largest error would be the best."""
    path = tmp_path / "distance.py"
    path.write_text(f"def metric(outputs, targets):\n    return abs(outputs - targets).mean(axis=1)\n\n\n{says}\n")
    manifest = tiny_artifact(tmp_path / "models").manifest
    assert _metric_of(path, manifest).lower_is_better == is_error


class Recording(nn.Module):
    """A classifier that keeps what it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.given = x_BCHW
        return self.head(x_BCHW.mean((2, 3)))


def test_channels_are_scored_on_samples_as_the_model_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cropped and standardised where the job's augmentation does that in evaluation, and not as they are stored."""
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    job = job_with(
        data=(images, torch.tensor([0, 1, 0, 1])),
        loss="cross_entropy",
        augment=[stoker.transforms.RandomCrop(6), stoker.transforms.Normalize(0.5, 0.25)],
    )
    data, model = datasets_of(job), Recording()
    pruner = SimpleNamespace(
        prepared=SimpleNamespace(job=job, data=data),
        teacher=model,
        taken=job_inputs(job, model, data.train),
        ask=lambda _module: (),
    )

    def scored(teacher: nn.Module, *_given: Any, gradients: Callable[[nn.Module], Iterator[None]], **_more: Any) -> Any:
        for _ in gradients(teacher):
            assert model.head.weight.grad is not None
        return {}

    monkeypatch.setattr(source_job, "prunable", lambda *_given: ())
    monkeypatch.setattr(source_job, "scores_of", scored)
    channel_scores(cast("Pruner", pruner), "taylor")
    expected = (images[:, :, 1:7, 1:7] / 255 - 0.5) / 0.25
    found, order = model.given, model.given.flatten(1).sum(1).argsort()
    assert torch.allclose(found[order], expected[expected.flatten(1).sum(1).argsort()])


def two_outputs(output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether the class is right and the box near."""
    is_right = output["scores"].argmax(1) == target["kind"]
    return (is_right & ((output["box"] - target["box"]).abs().amax(1) < 0.5)).float()


def test_a_metric_of_several_outputs_is_given_them_and_targets_by_name() -> None:
    """As in training: a metric that the job has is not replaced by agreement."""
    two_outputs.higher_is_better = True  # type: ignore[attr-defined]
    metric = metric_of_job(job_with(metrics=[two_outputs]))
    outputs = {
        "scores": np.array([[1, 0], [0, 1], [1, 0]], np.float32),
        "box": np.array([[0, 0], [0, 0], [0, 9]], np.float32),
    }
    targets = {"kind": np.array([0, 0, 0]), "box": np.zeros((3, 2), np.float32)}
    assert metric.scores(outputs, targets, 3).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["output"], lambda output: output),
        (["output_0", "output_2"], lambda output: output[2]),
        (["logits"], lambda output: output.logits),
        (["a", "b"], lambda output: output["b"]),
    ],
)
def test_a_metric_is_given_what_the_module_returned(names: list[str], read: Callable[[Any], torch.Tensor]) -> None:
    """A tensor, a tuple, or outputs by name that are attributes too: a metric was written for one of them."""

    def last(output: Any, target: torch.Tensor) -> torch.Tensor:
        return read(output)[:, 0] + target

    last.lower_is_better = False  # type: ignore[attr-defined]
    outputs = {name: np.full((2, 1), place, np.float32) for place, name in enumerate(names)}
    found = metric_of_job(job_with(metrics=[last])).scores(outputs, np.zeros(2, np.float32), 2)
    assert found.tolist() == [len(names) - 1] * 2


def test_several_targets_are_kept_by_name() -> None:
    """A job whose samples have them has targets, and is judged by its metric."""
    items = [(torch.tensor([index]), {"kind": torch.tensor(index), "box": torch.zeros(2)}) for index in range(5)]
    samples = ItemSamples(items, None, seed=0)
    job = job_with(data=samples, loss=absolute_error)
    found = _rows(job_inputs(job, nn.Linear(1, 1), samples), samples, 4, seed=0)
    assert isinstance(found.targets, dict)
    assert found.targets["kind"].tolist() == found.inputs["input"][:, 0].tolist()
    assert found.joined(found).take(np.array([5])).targets["kind"].tolist() == found.targets["kind"][1:2].tolist()  # type: ignore[index]


def test_targets_that_cannot_be_scored_are_refused_unless_answers_are_compared() -> None:
    """Judged by agreement in silence, a model could lose what the job measures."""
    samples = ItemSamples([(torch.tensor([i]), [torch.tensor(i), torch.tensor(i)]) for i in range(5)], None, seed=0)
    inputs = job_inputs(job_with(data=samples, loss=absolute_error), nn.Linear(1, 1), samples)
    with pytest.raises(BadJob, match="target is a list") as raised:
        _rows(inputs, samples, 4, seed=0)
    assert "--metric agreement" in str(raised.value.remedy)
    assert _rows(inputs, samples, 4, seed=0, with_targets=False).targets is None


class Shifting(nn.Linear):
    """A model like those of Hugging Face that compare each token with the next label."""

    config, loss_type = SimpleNamespace(), "ForCausalLM"

    def loss_function(self) -> None:
        """Such models have it."""


@pytest.mark.parametrize(("loss", "hits"), [("own", 1.0), ("token_cross_entropy", 0.0)])
def test_labels_that_the_model_shifts_are_shifted_for_its_metric(loss: str, hits: float) -> None:
    """Else each token would be compared with itself, and a good model be as bad as a broken one."""
    tokens = np.array([[1, 2, 3, 4]])
    scores = np.eye(6, dtype=np.float32)[tokens + 1]  # of the next token
    metric = metric_of_job(job_with(model=lambda: Shifting(2, 1), loss=loss, metrics=["token_accuracy"]))
    assert metric.scores({"logits": scores}, tokens, 1).tolist() == [hits]


def test_labels_that_the_loss_leaves_out_count_as_in_training(tmp_path: Path) -> None:
    """Counted as wrong, or padding as right, they would hide what a candidate loses of the others."""
    inputs, labels = torch.zeros(24, 2), torch.tensor([0, 1, 2, 7] * 6)
    job = job_with(
        model=lambda: nn.Linear(2, 3),
        data=(inputs, labels),
        valid=(inputs, labels),
        loss=nn.CrossEntropyLoss(ignore_index=7),
        metrics=["accuracy"],
    )
    spec = TensorSpec(name="input", datatype="FP32", shape=("batch", 2))
    source = tiny_artifact(tmp_path, inputs=(spec,), takes_prepared=True)
    material, _ = _material(source, job, None, None, 0, allow_nan=False)
    judged = np.concatenate([cast("Any", rows.targets) for rows in (material.selection, material.acceptance)])
    assert sorted(judged.tolist()) == [0] * 6 + [1] * 6 + [2] * 6

    tokens = torch.tensor([[0, 1, 2, 7]] * 8 + [[7, 7, 7, 7]] * 8)
    job = job_with(
        data=(torch.zeros(16, 2), tokens),
        valid=(torch.zeros(16, 2), tokens),
        loss=nn.CrossEntropyLoss(ignore_index=7),
        metrics=["token_accuracy"],
    )
    material, metric = _material(source, job, None, None, 0, allow_nan=False)
    rows = len(material.acceptance)
    assert rows + len(material.selection) == 8
    scores = np.eye(8, dtype=np.float32)[np.array([[0, 1, 3, 7]] * rows)]
    assert metric.scores({"output": scores}, material.acceptance.targets, rows) == pytest.approx([2 / 3] * rows)
