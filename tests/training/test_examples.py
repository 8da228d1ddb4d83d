"""Samples to be looked at: the worst and the first ones, and a confusion matrix, whatever the batches."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.jobs.fields import Fields
from stoker.loading.dataset_adapters import as_samples
from stoker.records.run import ExampleSet
from stoker.stepping.world import ALONE
from stoker.training.evaluation import evaluate
from stoker.training.evaluation_examples import NUM_EXAMPLES, ExampleWatcher, collect_examples, png_of, thinned
from tests.training.builders import blobs, step_of, tiny_job

INPUTS, TARGETS = blobs(37)


def shown(step, samples: tuple[torch.Tensor, ...], size: int, classes: tuple[str, ...] = ()) -> ExampleSet:
    """What a watcher of an evaluation in batches of `size` has to show."""
    watcher = ExampleWatcher("valid", step.objective.fields, classes)
    evaluate(step, as_samples(samples, what="valid"), size, watcher=watcher)
    assert watcher.problem is None
    (found,) = collect_examples([watcher], ALONE)
    return found


def test_labels_that_the_loss_ignores_are_not_counted() -> None:
    """With ignore_index=255 the confusion matrix has the other samples, and examples are shown."""
    targets = TARGETS.clone()
    targets[::4] = 255
    step = step_of(tiny_job(loss=nn.CrossEntropyLoss(ignore_index=255)))
    watcher = ExampleWatcher("valid", step.objective.fields, ignored=step.objective.ignored)
    evaluate(step, as_samples((INPUTS, targets), what="valid"), 8, watcher=watcher)
    assert watcher.problem is None
    (found,) = collect_examples([watcher], ALONE)
    assert np.array(found.confusion).sum() == int((targets != 255).sum())


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_without_a_score_are_not_given_to_a_loss(label: int) -> None:
    """Identities of embeddings, or labels that a function leaves out: on a GPU an assertion would end the process."""
    watcher, output = ExampleWatcher("valid", Fields()), torch.zeros(4, 2)
    content = (INPUTS[:4], torch.tensor([0, 1, label, 0]))
    watcher.see(output, content[1], content, np.arange(4))
    assert watcher.problem is not None
    assert "but outputs have 2 scores" in watcher.problem


@settings(max_examples=15)
@given(size=st.integers(1, 40))
def test_what_is_shown_of_a_classifier_is_that_of_the_whole_set(size: int) -> None:
    """The largest losses in order, the first samples, every sample counted once, with the names of classes."""
    step = step_of(tiny_job())
    found = shown(step, (INPUTS, TARGETS), size, ("minus", "plus"))
    with step.evaluation():
        output = step.model(INPUTS)
    losses = F.cross_entropy(output, TARGETS, reduction="none")
    worst = losses.argsort(descending=True)[:NUM_EXAMPLES].tolist()
    assert [one.index for one in found.worst] == worst
    assert [one.loss for one in found.worst] == pytest.approx(losses[worst].tolist(), rel=1e-5)
    assert [one.index for one in found.first] == list(range(NUM_EXAMPLES))
    assert found.num_samples == 37
    assert found.confusion is not None
    matrix = np.array(found.confusion)
    assert matrix.sum() == 37
    assert matrix.trace() == int((output.argmax(1) == TARGETS).sum())
    assert matrix.sum(1).tolist() == torch.bincount(TARGETS, minlength=2).tolist()
    assert found.first[0].target == ("minus", "plus")[int(TARGETS[0])]
    assert found.first[0].values == pytest.approx(INPUTS[0].tolist(), rel=1e-6)


def test_what_is_shown_of_a_regression_is_by_its_squared_error() -> None:
    """Without classes; numbers as they are."""
    targets = INPUTS.sum(1, keepdim=True)
    job = tiny_job(model=lambda: nn.Linear(6, 1), data=(INPUTS, targets), loss="mse", metrics=[])
    step = step_of(job)
    found = shown(step, (INPUTS, targets), 10)
    with step.evaluation():
        errors = (step.model(INPUTS) - targets).square()[:, 0]
    assert [one.index for one in found.worst] == errors.argsort(descending=True)[:NUM_EXAMPLES].tolist()
    assert found.confusion is None
    assert found.first[0].target == f"{float(targets[0]):.4g}"


def test_ignored_targets_are_counted_nowhere() -> None:
    """They confuse no class with another, and are not the worst."""
    targets = TARGETS.clone()
    targets[:10] = -100
    found = shown(step_of(tiny_job()), (INPUTS, targets), 37)
    assert found.confusion is not None
    assert sum(map(sum, found.confusion)) == 27
    assert all(one.index >= 10 for one in found.worst)


def test_what_goes_wrong_is_told_and_costs_nothing() -> None:
    """The evaluation gives what it gives without anybody looking on."""
    step = step_of(tiny_job())
    watcher = ExampleWatcher("valid", Fields(None, 7))
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10, watcher=watcher)
    assert watcher.problem is None
    broken = ExampleWatcher("valid", Fields(9, None))
    assert evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10, watcher=broken) == found
    assert broken.problem is not None
    assert "there is no 9" in broken.problem


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_a_png_of_the_images_pixels(channels: int) -> None:
    """Read back by hand: its size, and each row's pixels from black to white; a large one is thinned."""
    image = torch.linspace(-1, 2, channels * 6 * 5).view(channels, 6, 5)
    png = png_of(image, (-1.0, 2.0))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (width, height, depth, kind) == (5, 6, 8, 2 if channels == 3 else 0)
    start = png.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", png[start - 8 : start - 4])
    rows = np.frombuffer(zlib.decompress(png[start : start + length]), np.uint8).reshape(6, 1 + 5 * channels)
    assert not rows[:, 0].any()
    pixels = rows[:, 1:].reshape(6, 5, channels)
    expected = ((image + 1) / 3 * 255).round().permute(1, 2, 0).numpy()
    np.testing.assert_allclose(pixels, expected, atol=1)
    assert struct.unpack(">II", png_of(thinned(torch.zeros(1, 300, 200), 96), (0, 1))[16:24]) == (50, 75)


def test_images_are_shown_as_pictures() -> None:
    """In base64, as the page takes them."""
    images, labels = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
    job = tiny_job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(images, labels), metrics=["accuracy"]
    )
    found = shown(step_of(job), (images, labels), 7)
    assert found.first[3].picture is not None
    low, high = float(images.min()), float(images.max())
    assert found.scale == (low, high)
    assert base64.b64decode(found.first[3].picture) == png_of(images[3], (low, high))
    assert found.first[3].values == ()


def test_pictures_of_all_sets_are_on_one_scale() -> None:
    """Dark ones stay dark among bright ones, of another set too; each was stretched from black to white."""
    images = torch.rand(20, 1, 8, 8)
    dark, bright = images * 0.2, images * 0.2 + 0.8
    labels = torch.arange(20) % 2
    step = step_of(tiny_job(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(images, labels)))
    watchers = [ExampleWatcher(split, step.objective.fields) for split in ("valid", "test")]
    for watcher, inputs in zip(watchers, (dark, bright), strict=True):
        evaluate(step, as_samples((inputs, labels), what=watcher.split), 7, watcher=watcher)
    valid, test = collect_examples(watchers, ALONE)
    scale = (float(dark.min()), float(bright.max()))
    assert (valid.scale, test.scale) == (scale, scale)
    for shown, inputs in ((valid, dark), (test, bright)):
        for one in (*shown.first, *shown.worst):
            assert one.picture is not None
            assert base64.b64decode(one.picture) == png_of(inputs[one.index], scale)


def test_numbers_that_are_none_are_black_and_widen_no_scale() -> None:
    """One of them would leave all pictures blank."""
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 2
    images[2, 0, 0, 0], images[3, 0, 0, 0] = torch.nan, torch.inf
    job = tiny_job(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(images, labels))
    found = shown(step_of(job), (images, labels), 8)
    finite = images[images.isfinite()]
    assert found.scale == (float(finite.min()), float(finite.max()))


def test_samples_are_called_what_the_data_call_them() -> None:
    """By the name that is given for their index."""
    step = step_of(tiny_job())
    watcher = ExampleWatcher("valid", step.objective.fields, name_of=lambda index: f"cat/{index}.png")
    evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10, watcher=watcher)
    (found,) = collect_examples([watcher], ALONE)
    assert [one.name for one in found.worst] == [f"cat/{one.index}.png" for one in found.worst]


class TwoTowers(nn.Module):
    """Takes two inputs, which a batch does not hand it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.shared(a) * self.shared(b)).sum(1)


def likeness(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A loss that knows how the model is called."""
    a, b, labels = batch
    return F.binary_cross_entropy_with_logits(model(a, b), labels.float(), reduction="none")


def test_a_loss_that_calls_the_model_itself_is_evaluated_as_if_nobody_looked_on() -> None:
    """Without an output there are no examples, and the reason is reported; the run ends as usual."""
    data = (INPUTS, INPUTS.flip(0), TARGETS)
    step = step_of(tiny_job(model=TwoTowers, data=data, loss=likeness, metrics=[]))
    samples = as_samples(data, what="valid")
    watcher = ExampleWatcher("valid", step.objective.fields)
    assert evaluate(step, samples, 10, watcher=watcher) == evaluate(step, samples, 10)
    assert watcher.problem is not None
    assert "TypeError: TwoTowers.forward() missing 1 required positional argument: 'b'" in watcher.problem
    assert "stoker.Fields(inputs=…)" in watcher.problem
    assert collect_examples([watcher], ALONE) == ()


def test_with_its_inputs_named_such_a_job_has_examples() -> None:
    """The remedy that the warning gives."""
    data = (INPUTS, INPUTS.flip(0), TARGETS)
    step = step_of(tiny_job(model=TwoTowers, data=data, loss=likeness, metrics=[], fields=Fields(inputs=[0, 1])))
    assert shown(step, data, 10).num_samples == 37


class Flat(nn.Module):
    """An autoencoder whose reconstructions are flat, and come with a second output, as those of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = images.flatten(1) * self.scale
        return flat, flat[:, :2]


def test_reconstructions_are_shown_as_pictures() -> None:
    """Of an autoencoder the output; a target only where it is another picture; numbers of neither."""
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for targets, num in ((images, 0), (1 - images, 6)):
        watcher = ExampleWatcher("valid", Fields(None, 1))
        watcher.see(Flat()(images), targets, (images, targets), np.arange(6))
        assert watcher.problem is None
        (found,) = collect_examples([watcher], ALONE)
        assert sum(one.target_picture is not None for one in found.first) == num
        assert all((one.output, one.target) == ("", "") for one in found.first)
        expected = base64.b64encode(png_of(images[2] * 0.5, found.scale)).decode()
        assert found.first[2].output_picture == expected
