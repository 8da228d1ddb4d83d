from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker.errors import BadJob
from stoker.predicting.column_mapping import Input
from stoker.predicting.image_inputs import image_of, parse_pixels
from stoker.records.prediction import PixelSettings

GREY = Input("image", "UINT8", (1, 2, 4), None)
COLOUR = Input("image", "FP32", (2, 4, 3), None)


def _png(array: Any, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def _read(value: Any, one: Input, values: str = "", resize: Any = "", folder: Path = Path()) -> Any:
    assert one.image is not None
    return image_of(value, one, one.image, PixelSettings(values=values, resize=resize), folder)


def test_pixels_are_the_files_own() -> None:
    """A grey image of the right size arrives as it is, with its channel first."""
    pixels = [[0, 1, 2, 3], [252, 253, 254, 255]]
    assert _read(_png(pixels), GREY).tolist() == [pixels]


def test_bytes_a_path_and_a_mapping_are_one_image(tmp_path: Path) -> None:
    """Paths count from the folder of the file that names them."""
    content = _png([[1, 2, 3, 4], [5, 6, 7, 8]])
    (tmp_path / "a.png").write_bytes(content)
    wanted = _read(content, GREY).tolist()
    assert _read("a.png", GREY, folder=tmp_path).tolist() == wanted
    assert _read({"bytes": content, "path": "elsewhere.png"}, GREY).tolist() == wanted
    assert _read({"bytes": None, "path": "a.png"}, GREY, folder=tmp_path).tolist() == wanted


@pytest.mark.parametrize(
    ("values", "wanted"), [("0..255", 51.0), ("0..1", 0.2), ("0.1/0.5", 0.2), ("0,0.1,0.2/1,1,2", 0.2)]
)
def test_values_are_scaled_as_told(values: str, wanted: float) -> None:
    """Pixel 51 of a colour image, channels last: in 0..255, in 0..1, and standardised."""
    found = _read(_png(np.full((2, 4, 3), 51)), COLOUR, values)
    assert found.dtype == np.float32
    assert found[0, 0, 0] == pytest.approx(wanted)


def test_a_mean_of_pixels_up_to_255_is_refused() -> None:
    """As in training: taken off pixels from 0 to 1 it would leave nearly the same for every image."""
    with pytest.raises(BadJob, match="are applied to pixels from 0 to 1, and are not of these"):
        parse_pixels("123.7,116.3,103.5/0.2,0.2,0.2", COLOUR)
    with pytest.raises(BadJob, match="are applied to pixels from 0 to 1, and are not of these"):
        parse_pixels("0/255", COLOUR)


def test_each_channel_has_its_own_mean() -> None:
    """Three means and deviations are applied along the channel dimension."""
    found = _read(_png(np.full((2, 4, 3), 51)), COLOUR, "0,0.1,0.2/1,1,2")
    assert found[1, 2].tolist() == pytest.approx([0.2, 0.1, 0.0])


def test_a_model_of_floats_needs_to_be_told_the_values() -> None:
    """Nothing in a signature says whether pixels go to 1 or to 255."""
    with pytest.raises(BadJob, match="does not tell what values pixels have"):
        parse_pixels("", COLOUR)
    assert parse_pixels("", GREY).divisor == 1


@pytest.mark.parametrize(
    ("datatype", "text"), [("UINT8", "0..1"), ("UINT8", "0.5/0.5"), ("INT64", "0..1"), ("INT8", "0..255")]
)
def test_scaled_pixels_are_not_cut_to_integers(datatype: Any, text: str) -> None:
    """Pixel 51 of 0..1 is 0.2, which as an integer is 0; and -128..127 does not hold 200: refused before any row."""
    with pytest.raises(BadJob, match=rf"{datatype}.*cannot hold the pixels of --pixels {text}"):
        parse_pixels(text, replace(GREY, datatype=datatype))


def test_integers_that_hold_bytes_take_them() -> None:
    """0..255 says what UINT8 takes anyway, and a longer integer has each pixel as it is."""
    pixels = [[0, 1, 2, 3], [252, 253, 254, 255]]
    for datatype in ("UINT8", "INT64"):
        assert _read(_png(pixels), replace(GREY, datatype=datatype), "0..255").tolist() == [pixels]


@pytest.mark.parametrize("text", ["0..2", "a/b", "0.5", "0.1,0.2/1", "0/0", "1,2,3,4/1", "nan/1", "0/inf", "0/-1"])
def test_what_is_not_understood_is_refused(text: str) -> None:
    """A range that does not exist, one side alone, a deviation of 0 or less, NaN, infinities, too many channels."""
    with pytest.raises(BadJob, match="--pixels"):
        parse_pixels(text, COLOUR)


def test_another_size_is_bad_unless_told_what_to_do() -> None:
    """An image of 8 × 2 pixels for 4 × 2: refused, squeezed, or its middle."""
    wide = _png([[0, 0, 80, 80, 120, 120, 200, 200]] * 2)
    with pytest.raises(ValueError, match="has 8 × 2 pixels, wanted 4 × 2"):
        _read(wide, GREY)
    stretched, cropped = _read(wide, GREY, resize="stretch"), _read(wide, GREY, resize="crop")
    assert stretched.shape == cropped.shape == (1, 2, 4)
    assert stretched[0, 0].tolist()[0] < 50
    assert stretched[0, 0].tolist()[3] > 150
    assert cropped[0, 0].min() >= 50
    padded = _read(wide, GREY, resize="pad")
    assert padded.shape == (1, 2, 4)
    assert (padded[0, 0].tolist() == [0] * 4) != (padded[0, 1].tolist() == [0] * 4)  # one row of it, one of black


def test_a_size_that_varies_is_the_images_own() -> None:
    """A model of any size gets the image as large as it is."""
    any_size = Input("image", "UINT8", (3, "height", "width"), 0)
    assert _read(_png(np.zeros((4, 5, 3))), any_size).shape == (3, 4, 5)


def test_colours_become_grey_where_there_is_one_channel() -> None:
    """Channels are converted; transparency is left out."""
    image = Image.new("RGBA", (4, 2), (255, 255, 255, 0))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    assert (_read(buffer.getvalue(), GREY) == 255).all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"no image", "cannot be decoded as an image: it is no image: it begins with 6e 6f"),
        (_png(np.zeros((2, 4)))[:-30], "cannot be decoded as an image"),
        (_png(np.zeros((2, 4), np.uint8))[:8], "cannot be decoded as an image"),
        ("absent.png", r"cannot be read: absent\.png: No such file"),
    ],
    ids=["no", "cut", "head", "absent"],
)
def test_what_cannot_be_decoded_is_bad(value: Any, words: str) -> None:
    """Reported in words that are the same every time."""
    with pytest.raises(ValueError, match=words) as caught:
        _read(value, GREY)
    assert "0x" not in str(caught.value)


def test_an_image_of_16_bits_is_refused_as_in_training() -> None:
    """Cutting its values at 255 would leave white where the picture is."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 4), 40_000, np.uint16)).save(buffer, "PNG")
    with pytest.raises(ValueError, match="more than 8 bits a channel"):
        _read(buffer.getvalue(), GREY)


@pytest.mark.parametrize(("value", "kind"), [([1, 2], "list"), (7, "int"), ({"bytes": [1]}, "list")])
def test_what_is_neither_bytes_nor_a_path_is_bad(value: Any, kind: str) -> None:
    """A line of JSON may hold anything; its row is bad, and the others go on."""
    with pytest.raises(ValueError, match=f"is a {kind}, wanted an image"):
        _read(value, GREY)


def test_no_image_is_null() -> None:
    """An empty cell is a bad row."""
    for value in (None, "", b"", {"bytes": None, "path": None}):
        with pytest.raises(ValueError, match="is null"):
            _read(value, GREY)


@pytest.mark.parametrize(
    ("shape", "is_image"),
    [((1, 8, 8), True), ((8, 8, 3), True), ((8, 8), True), ((3, 8, 3), False), ((4, 8, 8), False), ((64,), False)],
)
def test_which_shapes_images_fit(shape: tuple[int, ...], is_image: bool) -> None:
    """One or three channels, first or last; where both could be meant, neither is."""
    assert (Input("x", "UINT8", shape, None).image is not None) == is_image
