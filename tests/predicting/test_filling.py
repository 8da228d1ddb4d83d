"""From rows to inputs."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker.predicting.column_mapping import Input
from stoker.predicting.input_conversion import Filled, fill
from stoker.predicting.row_source import SourceRows
from stoker.records.prediction import PixelSettings

MATRIX = Input("x", "FP32", (2, 2), None)


def _filled(values: list[Any], one: Input = MATRIX, pixels: str = "") -> Filled:
    rows = SourceRows("in.csv", 0, len(values), {"x": values})
    return fill(rows, [one], {"x": ("x",)}, PixelSettings(values=pixels), allow_nan=False)


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.array([[1, 2], [3, 4]], np.uint8)).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize("values", [["oops", "[[1, 2], [3, 4]]"], [None, "", "[1, 2, 3, 4]", [[1, 2], [3, 4]]]])
def test_a_bad_value_at_the_beginning_does_not_make_the_others_bad(values: list[Any]) -> None:
    """Arrays that are written out are arrays, wherever a part begins: none is taken for the path of an image."""
    found = _filled(values)
    good = [row for row in range(len(values)) if row not in found.bad]
    assert good == [row for row, value in enumerate(values) if value not in ("oops", None, "")]
    assert all(found.inputs["x"][row].tolist() == [[1, 2], [3, 4]] for row in good)


def test_images_and_arrays_may_share_a_column() -> None:
    """Each value is what it is."""
    found = _filled([_png(), [[1, 2], [3, 4]]], pixels="0..255")
    assert not found.bad
    assert found.inputs["x"][0].tolist() == found.inputs["x"][1].tolist()


def test_text_for_a_model_of_text_is_no_path() -> None:
    """However many dimensions it has."""
    found = _filled([["a", "b"]], Input("x", "BYTES", (1, 2), None))
    assert found.inputs["x"][0].tolist() == [[b"a", b"b"]]
