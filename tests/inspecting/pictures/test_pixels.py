from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image

from bench.data.planted import picture_of
from stoker.inspecting.image_signatures import Unreadable, as_rgb, decode, digest

PICTURE = picture_of("cross", random.Random(0))


def _stored(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def test_equal_pixels_have_one_digest_whatever_stores_them() -> None:
    """PNG, BMP and WebP without loss of one picture agree; another pixel, or another size, does not."""
    same = {
        digest(decode(_stored(PICTURE, "PNG")).image),
        digest(decode(_stored(PICTURE, "BMP")).image),
        digest(decode(_stored(PICTURE, "WEBP", lossless=True)).image),
        digest(decode(np.asarray(PICTURE)).image),
    }
    assert len(same) == 1
    other = PICTURE.copy()
    other.putpixel((3, 3), (1, 2, 3))
    assert digest(other) not in same
    assert digest(Image.new("L", (2, 8))) != digest(Image.new("L", (8, 2)))
    grey = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    assert digest(grey) == digest(grey.convert("RGB"))


def test_what_is_turned_by_exif_is_seen_upright() -> None:
    """A picture and its copy that EXIF turns back have one digest."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise when shown
    turned = PICTURE.transpose(Image.Transpose.ROTATE_90)
    assert digest(decode(_stored(turned, "PNG", exif=exif)).image) == digest(PICTURE)


@pytest.mark.parametrize(
    ("content", "fault", "words"),
    [
        (b"", "empty", "no bytes"),
        (b"hello, world", "corrupt", "is no image"),
        (_stored(PICTURE, "PNG")[:900], "corrupt", "cannot be decoded"),
        (_stored(PICTURE, "JPEG")[:-2], "corrupt", "the end of the JPEG is missing"),
        (np.full((4, 4), np.inf), "not-finite", "16 values"),
    ],
)
def test_what_cannot_be_read_says_why(content, fault: str, words: str) -> None:
    """Each kind of damage has its name and its reason."""
    with pytest.raises(Unreadable, match=words) as caught:
        decode(content)
    assert caught.value.fault == fault


def test_a_bomb_is_not_decoded(monkeypatch) -> None:
    """An image larger than Pillow allows is reported, not loaded."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Unreadable, match="pixels") as caught:
        decode(_stored(PICTURE, "PNG"))
    assert caught.value.fault == "shape"


def test_a_name_that_lies_is_told() -> None:
    """Of what format a file is comes from its content; an ending that promises none is no lie."""
    content = _stored(PICTURE, "PNG")
    assert decode(content, ".jpg").misnamed == "PNG"
    assert decode(content, ".png").misnamed == decode(content, "").misnamed == decode(content, ".xyz").misnamed == ""


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, np.float32])
def test_arrays_of_numbers_become_pictures(dtype) -> None:
    """Bytes, wider integers and fractions of one give the same picture in levels of 0 to 255."""
    grey = np.linspace(0, 255, 256).reshape(16, 16).astype(np.uint8)
    scale = {np.uint8: 1, np.uint16: 257, np.int64: 257, np.float32: 1 / 255}[dtype]
    image = decode((grey * scale).astype(dtype) if dtype is np.float32 else grey.astype(dtype) * dtype(scale)).image
    assert np.abs(np.asarray(image, np.int64) - grey).max() <= 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.linspace(0, 1, 64), np.linspace(0, 1, 64) + 1e-4),
        (np.linspace(10, 200, 64), np.linspace(5, 100, 64)),
        (np.linspace(-2, 2, 64), np.linspace(-1, 1, 64)),
        (np.arange(1000, 1064), np.arange(1001, 1065)),
        (np.arange(0, 64) - 1, np.clip(np.arange(0, 64) - 1, 0, 255)),
    ],
    ids=["fractions", "a scale of its own", "standardised", "16 bits", "negative"],
)
def test_pixels_that_only_look_equal_are_not(one: np.ndarray, other: np.ndarray) -> None:
    """What a picture of 256 levels does not show is part of what is stored; the same numbers are equal in any type."""
    one, other = one.reshape(8, 8), other.reshape(8, 8)
    assert decode(one).content != decode(other).content
    wider = one.astype(np.float64 if one.dtype.kind == "f" else np.int32)
    assert decode(wider).content == decode(one).content


def test_levels_are_one_content_in_any_type_and_in_a_file() -> None:
    """Whole numbers up to 255 are what an image of 8 bits stores."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    stored = {
        decode(_stored(Image.fromarray(grey), "PNG")).content,
        decode(grey).content,
        decode(grey.astype(np.int64)).content,
    }
    assert len(stored) == 1


def test_every_mode_can_be_shown() -> None:
    """Transparency is white, deep values are scaled, and the result is RGB of the same size."""
    for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I", "F", "I;16", "YCbCr"):
        image = Image.new(mode, (5, 4))
        assert (as_rgb(image).mode, as_rgb(image).size) == ("RGB", (5, 4)), mode
    clear = Image.new("RGBA", (1, 1), (9, 9, 9, 0))
    assert as_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
