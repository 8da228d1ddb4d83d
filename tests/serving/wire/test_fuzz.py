"""Whatever comes, the outcome is a request or a refusal, and memory stays in proportion to what came."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serving import fuzz_wire
from stoker.serving.http.bodies import decode
from stoker.serving.protocol import fit
from stoker.serving.refusals import Refusal
from stoker.serving.service import InferenceRequest

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["image", "FP32", "BYTES", "BOOL", "INT8", "FP16", ""])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "inputs",
                    "outputs",
                    "name",
                    "shape",
                    "datatype",
                    "data",
                    "parameters",
                    "binary_data_size",
                    "timeout",
                    "id",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
tensors = st.fixed_dictionaries(
    {
        "name": st.just("image"),
        "datatype": st.sampled_from(["FP32", "INT8", "BYTES", "BOOL"]) | values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | values,
    },
    optional={"data": values, "parameters": values},
)
documents = values | st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=3)}, optional={"outputs": values, "parameters": values, "id": values}
)


def _request_or_none(body: bytes, json_bytes: int | None) -> InferenceRequest | None:
    """What is decoded and fits; None where it was refused. Anything else is raised."""
    try:
        request, _ = decode(body, json_bytes=json_bytes, model="digits")
        fit(request, fuzz_wire.MODEL)
    except Refusal as refused:
        assert str(refused)  # noqa: PT017 - a refusal is one of the two ways it may end
        return None
    return request


@given(documents, st.binary(max_size=40), st.none() | st.integers(0, 200))
def test_any_json_is_a_request_or_a_refusal(document: Any, tail: bytes, json_bytes: int | None) -> None:
    """Values of any kind anywhere, with any bytes behind them and a length that need not be true."""
    _request_or_none(orjson.dumps(document) + tail, json_bytes)


@given(st.binary(max_size=200), st.none() | st.integers(0, 300))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes, json_bytes: int | None) -> None:
    """Noise is no JSON, and said so."""
    assert _request_or_none(body, json_bytes) is None


@pytest.mark.parametrize("parser", [fuzz_wire.one_body, fuzz_wire.one_compressed, fuzz_wire.one_message])
def test_good_inputs_that_were_damaged_are_requests_or_refusals(parser: Any) -> None:
    """The benchmark's fuzzer, for a moment: both outcomes come up, and no third."""
    ended = {fuzz_wire.outcome(parser, random.Random(f"tests-{number}")) for number in range(400)}
    assert {"request", "bad_request"} <= ended


HOSTILE = {
    "deep": b"[" * 200_000,
    "deep inputs": b'{"inputs":' + b"[" * 200_000,
    "many inputs": b'{"inputs":[' + b",".join([b'{"name":"x"}'] * 20_000) + b"]}",
    "many empty lists": b'{"inputs":[{"name":"x","shape":[70000],"datatype":"FP32","data":['
    + b"[]," * 69_999
    + b"[]]}]}",
    "a giant shape": b'{"inputs":[{"name":"x","shape":[1099511627776],"datatype":"BYTES","data":[]}]}',
    "giant strings": b'{"inputs":[{"name":"x","shape":[1],"datatype":"' + b"x" * 200_000 + b'","data":[]}]}',
    "a giant number": b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP64","data":[' + b"9" * 200_000 + b"]}]}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_memory_stays_in_proportion(body: bytes) -> None:
    """What is made of a body is at most fifty times as large, however it was written."""
    tracemalloc.start()
    try:
        assert _request_or_none(body, None) is None
        assert tracemalloc.get_traced_memory()[1] < 50 * len(body) + 1_000_000
    finally:
        tracemalloc.stop()


def test_a_refusal_does_not_repeat_all_that_was_sent() -> None:
    """Of a long name a part goes into the message, and the message's end is kept."""
    body = orjson.dumps({"inputs": [{"name": "x" * 100_000, "shape": [1], "datatype": "y" * 100_000, "data": [1]}]})
    with pytest.raises(Refusal) as caught:
        decode(body, json_bytes=None, model="m")
    assert len(str(caught.value)) < 700
    assert str(caught.value).endswith("UINT8")
