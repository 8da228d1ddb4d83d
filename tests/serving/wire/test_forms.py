from __future__ import annotations

import pytest

from stoker.serving.http.bodies import OutputForm, check_output_form
from stoker.serving.refusals import BadRequest
from stoker.serving.service import InferenceRequest, RequestedOutput
from tests.serving.fakes import echo_manifest

HALF = echo_manifest("half", "FP16")
ALL = InferenceRequest(model="half", inputs={})


def test_half_precision_goes_in_binary_alone() -> None:
    """JSON cannot carry it, which is said before anything is computed, with the way out."""
    with pytest.raises(BadRequest, match="binary_data_output"):
        check_output_form(OutputForm(), ALL, HALF)
    with pytest.raises(BadRequest, match="FP16"):
        check_output_form(
            OutputForm(binary=True, outputs={"y": False}),
            InferenceRequest(model="half", inputs={}, outputs=(RequestedOutput(name="y"),)),
            HALF,
        )


def test_what_json_carries_passes() -> None:
    """Binary data, classes (which are strings), outputs that are not requested, and other datatypes."""
    classes = InferenceRequest(model="half", inputs={}, outputs=(RequestedOutput(name="y", classification=1),))
    other = InferenceRequest(model="half", inputs={}, outputs=(RequestedOutput(name="z"),))
    check_output_form(OutputForm(binary=True), ALL, HALF)
    check_output_form(OutputForm(), classes, HALF)
    check_output_form(OutputForm(), other, HALF)
    check_output_form(OutputForm(), ALL, echo_manifest("single", "FP32"))
