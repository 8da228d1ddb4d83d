from __future__ import annotations

import json

import pytest

from stoker.errors import ServiceError
from stoker.loadtesting.inference_requests import input_specs
from stoker.records import TensorSpec
from tests.loadtesting.servers import Handler, served


def saying(document: object, status: str = "200 OK") -> Handler:
    """A server that always answers with this document."""
    body = json.dumps(document).encode()

    async def answer(_: bytes) -> bytes:
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    return answer


def test_inputs_are_read_from_a_models_metadata() -> None:
    """The first dimension that varies is the batch, others are named by their place."""
    said = {
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        ]
    }
    with served(saying(said)) as address:
        assert input_specs(address, "m") == (
            TensorSpec(name="ids", datatype="INT64", shape=("batch", "dim1")),
            TensorSpec(name="x", datatype="FP32", shape=("batch", 3)),
        )


def test_a_model_whose_tensors_do_not_all_begin_with_a_varying_dimension_has_no_batch() -> None:
    """A state or a rate with the samples: what varies first is a dimension like any other."""
    said = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}, {"name": "k", "datatype": "FP32", "shape": []}]
    }
    with served(saying(said)) as address:
        assert [spec.shape for spec in input_specs(address, "m")] == [("dim0", 4), ()]


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ({"error": "no such model"}, "404 Not Found", "404.*no such model"),
        ({"outputs": []}, "200 OK", "cannot be used"),
        ({"inputs": [{"name": "x", "datatype": "COMPLEX", "shape": [1]}]}, "200 OK", "cannot be used"),
        ([1, 2], "200 OK", "cannot be used"),
    ],
)
def test_what_is_no_metadata_is_told(said: object, status: str, words: str) -> None:
    """With what the server said."""
    with served(saying(said, status)) as address, pytest.raises(ServiceError, match=words):
        input_specs(address, "m")
