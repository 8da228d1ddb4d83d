from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.artifacts.dtypes import dtype_of
from stoker.serving.grpc.inference_pb2 import ModelInferRequest
from stoker.serving.grpc.messages import MOST_FIELDS, SMALL_BYTES, TYPED_TIMES, decode, encode, typed_memory
from stoker.serving.protocol import from_raw, strings
from stoker.serving.refusals import BadRequest, Refusal, TooLarge, Unsupported
from stoker.serving.service import InferenceResponse, RequestedOutput


def asked(*tensors: dict[str, Any], raw: list[bytes] | None = None, **fields: Any) -> Any:
    """A request; each tensor is `x`, FP32 [2], unless it says otherwise."""
    made = ModelInferRequest(model_name="m", raw_input_contents=raw or [], **fields)
    for one in tensors:
        made.inputs.add(**({"name": "x", "datatype": "FP32", "shape": [2]} | one))
    return made


def test_everything_a_request_says_is_in_it() -> None:
    """Model, version, id, parameters of every type, deadline, priority, what is wanted."""
    made = asked({}, raw=[np.array([1, 2], np.float32).tobytes()], model_version="3", id="r-1")
    made.parameters["timeout"].int64_param = 2_000_000
    made.parameters["priority"].uint64_param = 1
    made.parameters["mine"].string_param = "x"
    made.parameters["half"].double_param = 0.5
    made.parameters["yes"].bool_param = True
    made.parameters["unset"].SetInParent()
    made.outputs.add(name="y").parameters["classification"].int64_param = 3
    made.outputs.add(name="z")
    request = decode(made, caller="ann")
    assert (request.model, request.version, request.id, request.caller) == ("m", "3", "r-1", "ann")
    assert (request.deadline_s, request.priority) == (2.0, 1)
    assert dict(request.parameters) == {
        "timeout": 2_000_000,
        "priority": 1,
        "mine": "x",
        "half": 0.5,
        "yes": True,
    }
    assert request.outputs == (RequestedOutput(name="y", classification=3), RequestedOutput(name="z"))
    assert (request.inputs["x"].tolist(), request.num_bytes) == ([1, 2], 8)


@pytest.mark.parametrize(("time_left_s", "deadline_s"), [(None, 2.0), (1.5, 1.5), (9.0, 2.0), (-0.1, 0.0)])
def test_the_sooner_deadline_counts(time_left_s: float | None, deadline_s: float) -> None:
    """The parameter's and gRPC's own; one that has passed is now."""
    made = asked({}, raw=[bytes(8)])
    made.parameters["timeout"].int64_param = 2_000_000
    assert decode(made, time_left_s=time_left_s).deadline_s == deadline_s


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-1, 1]),
        ("INT32", "int_contents", [-1, 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.5]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"ab", b""]),
    ],
)
def test_typed_contents_of_every_datatype(datatype: Any, field: str, values: list[Any]) -> None:
    """Each from the field that the protocol gives it."""
    array = decode(asked({"datatype": datatype, "contents": {field: values}})).inputs["x"]
    assert array.dtype == dtype_of(datatype)
    assert array.tolist() == values


BAD = {
    "raw contents of too few": asked({}, {"name": "y"}, raw=[bytes(8)]),
    "raw contents of too many": asked({}, raw=[bytes(8), bytes(8)]),
    "raw bytes that lie": asked({}, raw=[bytes(7)]),
    "both kinds of contents": asked({"contents": {"fp32_contents": [1, 2]}}, raw=[bytes(8)]),
    "too few values": asked({"contents": {"fp32_contents": [1]}}),
    "no values": asked({}),
    "values in another field": asked({"contents": {"fp64_contents": [1, 2]}}),
    "values in a second field": asked({"contents": {"fp32_contents": [1, 2], "fp64_contents": [1, 2]}}),
    "a value too large": asked({"datatype": "INT8", "contents": {"int_contents": [128, 0]}}),
    "half precision that is typed": asked({"datatype": "FP16", "contents": {"fp32_contents": [1, 2]}}),
    "an unknown datatype": asked({"datatype": "FP8"}, raw=[bytes(2)]),
    "a negative size": asked({"shape": [-1]}, raw=[bytes(4)]),
    "a shape that overflows": asked({"shape": [2**62, 2**62]}, raw=[bytes(4)]),
    "the same input twice": asked({}, {}, raw=[bytes(8), bytes(8)]),
    "the same output twice": asked({}, raw=[bytes(8)], outputs=[{"name": "y"}, {"name": "y"}]),
}


@pytest.mark.parametrize("made", BAD.values(), ids=BAD)
def test_what_is_malformed_is_refused(made: Any) -> None:
    """Each with a sentence, none with another exception."""
    with pytest.raises(BadRequest, match=r"\w+ \w+"):
        decode(made)


def test_shared_memory_is_not_had() -> None:
    """Neither for inputs nor for outputs."""
    made = asked({}, raw=[bytes(8)])
    made.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="shared memory"):
        decode(made)


@given(st.binary(max_size=300))
def test_any_message_is_a_request_or_a_refusal(content: bytes) -> None:
    """Whatever bytes protobuf takes for a message."""
    made = ModelInferRequest()
    try:
        made.MergeFromString(content)
    except Exception:  # noqa: BLE001 - protobuf's own errors, which gRPC answers before we see the message
        return
    try:
        decode(made)
    except Refusal as error:
        assert str(error)  # noqa: PT017 - a refusal is one of the two ways it may end


def test_answers_are_raw() -> None:
    """Every output with its datatype and shape, strings too; also where it is not row-major."""
    outputs = {"y": np.arange(6, dtype=np.float16).reshape(2, 3).T, "w": strings([b"a"])}
    answer = encode(InferenceResponse(model="m", version="3", id="r", outputs=outputs))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "r")
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
        ("y", "FP16", [3, 2]),
        ("w", "BYTES", [1]),
    ]
    first, second = answer.raw_output_contents
    np.testing.assert_array_equal(from_raw(first, "FP16", (3, 2), "y"), outputs["y"])
    assert second == b"\1\0\0\0a"


def test_typed_contents_count_as_what_is_made_of_them() -> None:
    """What is small, and raw contents, take no more than their bytes."""
    values = np.ones(SMALL_BYTES, np.int64)
    typed = {"datatype": "INT64", "shape": [len(values)], "contents": {"int64_contents": values}}
    assert typed_memory(asked(typed | {"contents": {"int64_contents": values[:100]}}).SerializeToString()) == 0
    raw = asked({"shape": [len(values)]}, raw=[values.tobytes()], id="x" * 1000)
    assert typed_memory(raw.SerializeToString()) == 0
    large = asked(typed).SerializeToString()
    assert typed_memory(large) == TYPED_TIMES * len(large)
    assert (decode(asked(typed)).inputs["x"] == values).all()


_FILL = bytes([0x3A, 0x80, 0x80, 0x04]) + bytes(SMALL_BYTES)  # raw contents that make a message large


@pytest.mark.parametrize("begin", [b"", b"\x7b\x08\x01\x7c", b"\x7d1234", b"\x7912345678", b"\xaa\x80\x00\x00"])
@pytest.mark.parametrize(
    ("one", "in_tensor"),
    [(b"\x2a\x00", 0), (b"\x32\x00", 0), (b"\x3a\x00", 0), (b"\x22\x00", 0), (b"\x18\x01", 0x2A), (b"\x22\x00", 0x32)],
    ids=["inputs", "outputs", "raw contents", "parameters", "dimensions", "parameters of an output"],
)
def test_a_message_of_many_small_fields_is_refused(begin: bytes, one: bytes, in_tensor: int) -> None:
    """Before it is parsed, wherever they are: behind groups, numbers of fixed size, and tags of more bytes too."""
    for number in (MOST_FIELDS - 10, MOST_FIELDS + 1):
        fields = one * number
        if in_tensor:
            fields = bytes([in_tensor, 0x80 | len(fields) & 0x7F, len(fields) >> 7]) + fields
        message = begin + fields + _FILL
        assert ModelInferRequest.FromString(message).ByteSize()
        if number < MOST_FIELDS:
            assert typed_memory(message) == 0
        else:
            with pytest.raises(TooLarge, match="more than 1,000 fields"):
                typed_memory(message)


@given(st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"\x2a\x00", b"\xff" * 12, _FILL]))))
def test_whatever_the_bytes_are_their_memory_is_known_or_refused(pieces: list[bytes]) -> None:
    """What is no message is left to the parser."""
    raw = b"".join(pieces) + bytes(SMALL_BYTES)
    with contextlib.suppress(TooLarge):
        assert 0 <= typed_memory(raw) <= TYPED_TIMES * len(raw)
