from __future__ import annotations

import pytest

from stoker.serving.problems import BadRequest
from stoker.serving.service import Request, Wanted
from stoker.serving.wire import Form, check_form
from tests.serving.fakes import echo_manifest

HALF = echo_manifest("half", "FP16")
ALL = Request(model="half", inputs={})


def test_half_precision_goes_in_binary_alone() -> None:
    """JSON cannot carry it, which is said before anything is computed, with the way out."""
    with pytest.raises(BadRequest, match="binary_data_output"):
        check_form(Form(), ALL, HALF)
    with pytest.raises(BadRequest, match="FP16"):
        check_form(
            Form(binary=True, outputs={"y": False}), Request(model="half", inputs={}, outputs=(Wanted(name="y"),)), HALF
        )


def test_what_json_carries_passes() -> None:
    """Binary data, classes (which are strings), outputs that nobody wants, and other datatypes."""
    classes = Request(model="half", inputs={}, outputs=(Wanted(name="y", classification=1),))
    other = Request(model="half", inputs={}, outputs=(Wanted(name="z"),))
    check_form(Form(binary=True), ALL, HALF)
    check_form(Form(), classes, HALF)
    check_form(Form(), other, HALF)
    check_form(Form(), ALL, echo_manifest("single", "FP32"))
