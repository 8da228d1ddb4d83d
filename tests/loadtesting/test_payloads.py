from __future__ import annotations

import json

import numpy as np
import pytest

from stoker.errors import BadJob
from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.inference_requests import http_request, infer_payload

HERE = Address("127.0.0.1", 8000, "/pre")


def test_a_request_is_what_the_protocol_says() -> None:
    """JSON first, its length in the header, then each tensor little-endian in the order of the inputs."""
    x, words = np.arange(6, dtype=">f4").reshape(2, 3), np.array([b"a", "é"], dtype=object)
    payload = infer_payload(HERE, "my model", {"x": x, "w": words}, version="3", headers={"Authorization": "Bearer k"})
    head, _, body = payload.request.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /pre/v2/models/my%20model/versions/3/infer HTTP/1.1"
    assert "Authorization: Bearer k" in lines
    fields = dict(line.split(": ", 1) for line in lines[1:])
    length = int(fields["Inference-Header-Content-Length"])
    assert int(fields["Content-Length"]) == len(body)
    document = json.loads(body[:length])
    assert [(one["name"], one["shape"], one["datatype"]) for one in document["inputs"]] == [
        ("x", [2, 3], "FP32"),
        ("w", [2], "BYTES"),
    ]
    tail = body[length:]
    sizes = [one["parameters"]["binary_data_size"] for one in document["inputs"]]
    assert sum(sizes) == len(tail)
    assert (np.frombuffer(tail[: sizes[0]], "<f4") == np.arange(6)).all()
    assert tail[sizes[0] :] == b"\x01\0\0\0a" + b"\x02\0\0\0\xc3\xa9"
    assert payload.rows == 2


def test_headers_cannot_smuggle_a_second_request() -> None:
    """A line break in a header is refused."""
    with pytest.raises(BadJob, match="line break"):
        http_request(HERE, "GET", "/v2", headers={"X": "a\r\nY: b"})


def test_elements_without_a_name_are_refused() -> None:
    """Complex numbers have no datatype; the text names the input."""
    with pytest.raises(BadJob, match="'z'"):
        infer_payload(HERE, "m", {"z": np.ones(2, dtype=np.complex64)})
