"""Image files as pixels, and pixels as what a model takes."""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.data.files.image_files import ImageForm, image_form
from stoker.errors import BadJob
from tests.data.files.making import pixels_of, png_of


def form(**changes: object) -> ImageForm:
    """RGB as it is."""
    given = {"size": None, "channels": 3, "resize": "stretch", "mean": None, "std": None} | changes
    return image_form(**given)  # type: ignore[arg-type]


def encoded(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_an_image_comes_as_channels_height_and_width() -> None:
    """The very pixels."""
    assert np.array_equal(form().decoded(png_of(3)), pixels_of(3).transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_may_be_written_to(channels: int) -> None:
    """PyTorch warns of an array that may not, as every grey image was one."""
    assert form(channels=channels).decoded(png_of(3)).flags.writeable


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
@pytest.mark.parametrize("stored", ["L", "RGB", "RGBA", "P", "1", "CMYK", "LA"])
def test_every_mode_becomes_the_channels_asked_for(channels: int, mode: str, stored: str) -> None:
    """As Pillow converts."""
    image = Image.fromarray(pixels_of(1)).convert(stored)
    kind = "tiff" if stored == "CMYK" else "png"
    found = form(channels=channels).decoded(encoded(image, kind))
    wanted = np.asarray(image.convert(mode)).reshape(6, 6, channels)
    assert np.array_equal(found, wanted.transpose(2, 0, 1))


def test_a_palette_with_transparency_is_decoded_without_a_warning() -> None:
    """Pillow warns where it would lose the table; warnings are errors here."""
    image = Image.fromarray(pixels_of(1)).quantize(4)
    found = form().decoded(encoded(image, "png", transparency=bytes([0, 255, 128, 255])))
    assert found.shape == (3, 6, 6)


def test_resizing_is_one_of_three() -> None:
    """Stretched to the corners, cut at the longer sides, or put on black."""
    wide = Image.fromarray(np.tile(np.array([255, 0], np.uint8).repeat(8), (4, 1)))  # white left, black right: 4 × 16
    stretched, cut, padded = (
        form(size=4, channels=1, resize=word).decoded(encoded(wide))[0] for word in ("stretch", "crop", "pad")
    )
    assert stretched[:, 0].min() > 200
    assert stretched[:, 3].max() < 50
    assert cut.shape == padded.shape == (4, 4)
    assert (padded.max(axis=1) > 0).sum() == 1
    assert padded[0].max() == padded[3].max() == 0
    assert cut[:, 0].min() == 255


def test_an_image_is_upright_by_its_exif() -> None:
    """A camera held upright stores the picture lying."""
    image = Image.fromarray(np.zeros((4, 8, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert form().decoded(encoded(image, "jpeg", exif=exif)).shape == (3, 8, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png_of(1)[:80], "truncated|broken"),
        (b"", "it has no bytes"),
        (b"hi", "it is no image: it begins with 68 69"),
        (encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16))), "more than 8 bits"),
    ],
)
def test_what_cannot_be_decoded_is_told_in_words(content: bytes, message: str) -> None:
    """Cut off, empty, no image at all, or of 16 bits; without an address in memory."""
    with pytest.raises(ValueError, match=message) as caught:
        form().decoded(content)
    assert "0x" not in str(caught.value)


def deep_png(color_type: int, channels: int) -> bytes:
    """A PNG of 2 x 2 pixels with 16 bits a channel, all of the value 1000, which Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + np.full(2 * channels, 1000, ">u2").tobytes()) * 2
    head = struct.pack(">IIBBBBB", 2, 2, 16, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_tiff() -> bytes:
    """An RGB TIFF of 2 x 2 pixels with 16 bits a channel."""
    tags = [(256, 3, 1, 2), (257, 3, 1, 2), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 128)]
    tags += [(277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, 24)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0)
    return head + struct.pack("<HHH", 16, 16, 16) + np.full(12, 1000, "<u2").tobytes()


@pytest.mark.parametrize(
    "content",
    [
        deep_png(2, 3),
        deep_png(4, 2),
        deep_png(6, 4),
        deep_tiff(),
        b"P6 2 2 65535\n" + np.full(12, 1000, ">u2").tobytes(),
        b"P3 2 2 4095\n" + b"1000 " * 12,
    ],
    ids=["png rgb", "png grey alpha", "png rgba", "tiff rgb", "ppm", "ppm text"],
)
def test_colours_of_16_bits_are_refused_though_pillow_reads_them(content: bytes) -> None:
    """Of 1000 it would keep 3: an image of 12 bits would have 16 levels left, without a word."""
    assert Image.open(io.BytesIO(content)).mode in {"RGB", "RGBA"}
    with pytest.raises(ValueError, match="more than 8 bits a channel"):
        form().decoded(content)


def test_an_image_of_16_bits_a_pixel_is_read() -> None:
    """Five or six bits a channel, as bitmaps may have."""
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    info = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    bitmap = b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + info + masks + struct.pack("<HH", 0xF800, 0x001F)
    assert form().decoded(bitmap)[:, 0].tolist() == [[255, 0], [0, 0], [0, 255]]


def test_an_image_of_too_many_pixels_is_refused_whatever_becomes_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have restored their filters in between: no row is good or bad by chance."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with warnings.catch_warnings(action="ignore"):
        monkeypatch.setattr(warnings, "simplefilter", lambda *_given: None)
        with pytest.raises(ValueError, match="it has 6 × 6 pixels, and 20 are"):
            image_form(None, 3, "stretch", None, None).decoded(png_of(1))


@pytest.mark.parametrize(("mean", "std"), [(123.7, 0.2), ((0.5, 0.5, 104.0), 0.2), (-0.5, 0.2), (None, 255)])
def test_a_mean_of_pixels_up_to_255_is_refused(mean: object, std: float) -> None:
    """Taken off pixels from 0 to 1 it would leave nearly the same for every image, of which nothing is learned."""
    with pytest.raises(BadJob, match=r"are not of pixels from 0 to 1, to which") as raised:
        form(mean=mean, std=std)
    assert "by 255" in str(raised.value.remedy)


def test_preparing_standardises_each_channel() -> None:
    """As (pixel / 255 − mean) / std; the batch given stays as it is."""
    batch = torch.from_numpy(np.stack([pixels_of(at).transpose(2, 0, 1) for at in range(2)]))
    before = batch.clone()
    found = form(mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2)).prepare(batch)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    torch.testing.assert_close(found, (batch / 255 - mean) / std)
    torch.testing.assert_close(form().prepare(batch), batch / 255)
    assert torch.equal(batch, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": (3,)}, "no size"),
        ({"size": 0}, "no size"),
        ({"channels": 2}, "channels=2"),
        ({"resize": "zoom"}, "Give one of stretch"),
        ({"mean": (0.5, 0.5)}, "does not go with 3 channels"),
        ({"std": 0.0}, "not positive"),
        ({"mean": float("nan")}, "does not go"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(given: dict[str, object], message: str) -> None:
    """Before anything is read."""
    with pytest.raises(BadJob, match=message):
        form(**given)


def test_without_pillow_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings it."""
    monkeypatch.delattr("stoker.data.reading.image_decoding")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "stoker.data.reading.image_decoding", raising=False)
    with pytest.raises(BadJob, match=r"pip install 'stoker\[data\]'"):
        form().decoded(b"")
