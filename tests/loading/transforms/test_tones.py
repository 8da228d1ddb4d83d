from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.loading.transforms import Autocontrast, OneOf, Posterize, RandomFlip, Solarize, Sometimes, for_evaluation
from tests.loading.transforms.pictures import draw_for, images, one_by_one

ImageOps = pytest.importorskip("PIL.ImageOps", reason="Pillow, what these are compared with, is not installed")


def by_pillow(x_BCHW: torch.Tensor, operation) -> torch.Tensor:
    """The images through Pillow, one by one."""
    from PIL import Image

    found = [operation(Image.fromarray(x.permute(1, 2, 0).numpy())) for x in x_BCHW]
    return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in found])


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_fewer_tones_are_pillows(bits: int) -> None:
    """Bit for bit."""
    x_BCHW = images((4, 3, 5, 6))
    expected = by_pillow(x_BCHW, lambda image: ImageOps.posterize(image, bits))
    assert torch.equal(Posterize(bits)(x_BCHW, draw_for(range(4))), expected)


def test_negative_lights_are_pillows() -> None:
    """Bit for bit: 128 of 255 is the first byte above one half."""
    x_BCHW = images((4, 3, 5, 6))
    assert torch.equal(Solarize()(x_BCHW, draw_for(range(4))), by_pillow(x_BCHW, ImageOps.solarize))


def test_spread_contrast_is_pillows() -> None:
    """Within one step: Pillow cuts off where this rounds. A channel of one colour stays."""
    x_BCHW = images((4, 3, 5, 6)) // 2 + 40
    x_BCHW[0, 1] = 77
    found, expected = Autocontrast()(x_BCHW, draw_for(range(4))), by_pillow(x_BCHW, ImageOps.autocontrast)
    assert int((found.int() - expected.int()).abs().max()) <= 1
    assert bool((found[0, 1] == 77).all())


@pytest.mark.parametrize("transform", [Posterize(3), Solarize(0.3), Autocontrast()])
def test_floating_images_are_treated_like_bytes(transform) -> None:
    """Each by itself, within a step of the bytes; the type is kept."""
    x_BCHW = images((6, 3, 5, 5))
    floating = transform(x_BCHW.float() / 255, draw_for(range(6)))
    assert floating.dtype == torch.float32
    assert float((floating * 255 - transform(x_BCHW, draw_for(range(6))).float()).abs().max()) < 1
    assert torch.equal(transform(x_BCHW, draw_for(range(6))), one_by_one(transform, x_BCHW))


@pytest.mark.parametrize("transform", [Posterize(3), Solarize(0.3), Autocontrast()])
def test_what_every_image_gets_in_training_it_gets_in_evaluation(transform) -> None:
    """A model trained on spread contrast alone would be judged, and served, by images it never saw."""
    x_BCHW, draw = images((6, 3, 5, 5)), draw_for(range(6))
    (kept,) = for_evaluation([RandomFlip(), transform, Sometimes(transform), OneOf([transform, []])])
    assert torch.equal(kept(x_BCHW, draw), transform(x_BCHW, draw))


@pytest.mark.parametrize(("transform", "value"), [(Posterize, 0), (Posterize, 9), (Solarize, 1.5)])
def test_tones_that_cannot_be_meant_are_refused(transform, value) -> None:
    """When they are given, with the value."""
    with pytest.raises(ValueError, match=f"got {value}"):
        transform(value)
