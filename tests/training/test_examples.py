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

import stoker
from stoker.loading import as_samples
from stoker.records.examples import ExampleSet
from stoker.stepping.world import ALONE
from stoker.training import evaluate
from stoker.training.examples import NUM_EXAMPLES, ExampleWatcher
from stoker.training.png import png_of
from tests.training.builders import blobs, step_of, tiny_job

INPUTS, TARGETS = blobs(37)


def shown(step, samples: tuple[torch.Tensor, ...], size: int, classes: tuple[str, ...] = ()) -> ExampleSet:
    """What a watcher of an evaluation in batches of `size` has to show."""
    watcher = ExampleWatcher("valid", step.objective.fields, classes)
    evaluate(step, as_samples(samples, what="valid"), size, watcher=watcher)
    assert watcher.problem is None
    found = watcher.collected(ALONE)
    assert found is not None
    return found


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
    watcher = ExampleWatcher("valid", stoker.loading.Fields(None, 7))
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10, watcher=watcher)
    assert watcher.problem is None
    broken = ExampleWatcher("valid", stoker.loading.Fields(9, None))
    assert evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10, watcher=broken) == found
    assert broken.problem is not None
    assert "there is no 9" in broken.problem


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_a_png_of_the_images_pixels(channels: int) -> None:
    """Read back by hand: its size, and each row's pixels from black to white; a large one is thinned."""
    image = torch.linspace(-1, 2, channels * 6 * 5).view(channels, 6, 5)
    png = png_of(image, 96)
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
    assert struct.unpack(">II", png_of(torch.zeros(1, 300, 200), 96)[16:24]) == (50, 75)


def test_images_are_shown_as_pictures() -> None:
    """In base64, as the page takes them."""
    images, labels = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
    job = tiny_job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(images, labels), metrics=["accuracy"]
    )
    found = shown(step_of(job), (images, labels), 7)
    assert found.first[3].picture is not None
    assert base64.b64decode(found.first[3].picture) == png_of(images[3], 96)
    assert found.first[3].values == ()
