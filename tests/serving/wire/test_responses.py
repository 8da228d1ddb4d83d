from __future__ import annotations

import numpy as np
import orjson

from stoker.serving.http.bodies import OutputForm, encode
from stoker.serving.protocol import from_raw, strings
from stoker.serving.service import InferenceResponse

SCORES = np.array([[0.1, 0.7]], np.float32)
RESPONSE = InferenceResponse(model="m", version="3", id="r", outputs={"y": SCORES, "w": strings([b"ab"])})


def test_json_is_flat_and_exact() -> None:
    """Shortest figures that are the same FP32, the model and version that answered, the request's id."""
    body, json_bytes = encode(RESPONSE, OutputForm())
    assert json_bytes is None
    assert orjson.loads(body) == {
        "model_name": "m",
        "model_version": "3",
        "id": "r",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.1, 0.7]},
            {"name": "w", "datatype": "BYTES", "shape": [1], "data": ["ab"]},
        ],
    }


def test_no_id_was_asked_with_none_is_answered() -> None:
    """`id` is there only where the request had one."""
    body, _ = encode(InferenceResponse(model="m", version="1", id="", outputs={}), OutputForm())
    assert "id" not in orjson.loads(body)


def test_forms_mix() -> None:
    """What is wanted in binary is behind the JSON, with its size; the rest is in it."""
    body, json_bytes = encode(RESPONSE, OutputForm(binary=False, outputs={"y": True}))
    assert json_bytes is not None
    first, second = orjson.loads(body[:json_bytes])["outputs"]
    assert first["parameters"] == {"binary_data_size": 8}
    assert "data" not in first
    assert second["data"] == ["ab"]
    assert from_raw(body[json_bytes:], "FP32", (1, 2), "output").tolist() == SCORES.tolist()


def test_a_transposed_output_is_answered_row_by_row() -> None:
    """Engines may give arrays of any layout; both forms hold the same values."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    response = InferenceResponse(model="m", version="1", id="", outputs={"y": array})
    text, _ = encode(response, OutputForm())
    binary, json_bytes = encode(response, OutputForm(binary=True))
    assert orjson.loads(text)["outputs"][0]["data"] == [0, 3, 1, 4, 2, 5]
    assert np.frombuffer(binary[json_bytes:], np.float32).tolist() == [0, 3, 1, 4, 2, 5]
