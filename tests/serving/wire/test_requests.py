from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest

from stoker.records import TensorSpec
from stoker.serving.http.bodies import OutputForm, decode, decode_raw
from stoker.serving.refusals import BadRequest, Unsupported
from stoker.serving.service import RequestedOutput
from tests.serving.fakes import DIGITS, TWO, manifest_of

ONES = np.ones((2, 2), np.float32)


def tensor(name: str = "x", **changes: Any) -> dict[str, Any]:
    """A small input as JSON."""
    return {"name": name, "shape": [2], "datatype": "FP32", "data": [1, 2]} | changes


def asked(document: Any, tail: bytes = b"") -> tuple[Any, OutputForm]:
    """A body decoded; with a tail the header's length is that of the JSON."""
    text = document if isinstance(document, bytes) else orjson.dumps(document)
    return decode(text + tail, json_bytes=len(text) if tail else None, model="m", version="2", caller="ann")


def binary(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    """An input that is in the tail."""
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}


def test_everything_a_request_says_is_in_it() -> None:
    """Path, id, deadline, priority, caller, parameters of one's own and what is wanted."""
    document = {
        "id": "r-1",
        "parameters": {"timeout": 250_000, "priority": 2, "mine": "x", "binary_data_output": True},
        "inputs": [tensor()],
        "outputs": [
            {"name": "y", "parameters": {"classification": 3}},
            {"name": "z", "parameters": {"binary_data": False}},
        ],
    }
    request, form = asked(document)
    assert (request.model, request.version, request.id, request.caller) == ("m", "2", "r-1", "ann")
    assert (request.deadline_s, request.priority) == (0.25, 2)
    assert request.parameters["mine"] == "x"
    assert request.outputs == (RequestedOutput(name="y", classification=3), RequestedOutput(name="z"))
    assert (form.is_binary("y"), form.is_binary("z")) == (True, False)
    assert request.inputs["x"].tolist() == [1, 2]
    assert request.num_bytes == len(orjson.dumps(document))


def test_binary_and_json_inputs_mix() -> None:
    """The tail holds those with a size, in their order, and nothing is copied out of it."""
    words = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0)
    half = np.array([1.5, -2], np.float16)
    brain = np.array([3], ml_dtypes.bfloat16)
    inputs = [binary("w", "BYTES", [2], len(words)), tensor(), binary("h", "FP16", [2], 4), binary("b", "BF16", [1], 2)]
    request, _ = asked({"inputs": inputs}, words + half.tobytes() + brain.tobytes())
    assert list(request.inputs) == ["w", "x", "h", "b"]
    assert request.inputs["w"].tolist() == [b"ab", b""]
    assert request.inputs["h"].tolist() == [1.5, -2]
    assert request.inputs["b"].dtype == brain.dtype


def test_nothing_said_is_json_and_all_outputs() -> None:
    """The protocol's defaults."""
    request, form = asked({"inputs": [tensor()]})
    assert (request.outputs, request.id, request.deadline_s, request.priority) == ((), "", None, 0)
    assert not form.is_binary("y")
    assert asked({"inputs": [tensor()], "outputs": [], "id": None, "parameters": None})[0].outputs == ()


BAD: dict[str, Any] = {
    "no JSON": b"{",
    "not UTF-8": b'{"inputs": ["\xff"]}',
    "no object": [],
    "no inputs": {},
    "empty inputs": {"inputs": []},
    "inputs of another kind": {"inputs": {"x": 1}},
    "an input of another kind": {"inputs": [1]},
    "an input without name": {"inputs": [tensor(name=None)]},
    "an input without shape": {"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]},
    "an input without datatype": {"inputs": [{"name": "x", "shape": [1], "data": [1]}]},
    "an input without data": {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"}]},
    "a negative size": {"inputs": [tensor(shape=[-1])]},
    "a shape that overflows": {"inputs": [tensor(shape=[2**62, 2**62])]},
    "the same input twice": {"inputs": [tensor(), tensor()]},
    "an id that is a number": {"inputs": [tensor()], "id": 3},
    "parameters of another kind": {"inputs": [tensor()], "parameters": [1]},
    "a parameter of another kind": {"inputs": [tensor()], "parameters": {"mine": [1]}},
    "a negative timeout": {"inputs": [tensor()], "parameters": {"timeout": -1}},
    "a timeout that is no number": {"inputs": [tensor()], "parameters": {"timeout": "1"}},
    "a priority that is a boolean": {"inputs": [tensor()], "parameters": {"priority": True}},
    "binary_data_output of another kind": {"inputs": [tensor()], "parameters": {"binary_data_output": 1}},
    "outputs of another kind": {"inputs": [tensor()], "outputs": {"y": 1}},
    "the same output twice": {"inputs": [tensor()], "outputs": [{"name": "y"}, {"name": "y"}]},
    "negative classes": {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"classification": -1}}]},
}


@pytest.mark.parametrize("document", BAD.values(), ids=BAD)
def test_what_is_malformed_is_refused(document: Any) -> None:
    """Each with a sentence, none with another exception."""
    with pytest.raises(BadRequest, match=r"\w+ \w+"):
        asked(document)


LYING: dict[str, tuple[list[dict[str, Any]], bytes]] = {
    "less than claimed": ([binary("x", "FP32", [2], 8)], bytes(7)),
    "more than claimed": ([binary("x", "FP32", [2], 8)], bytes(9)),
    "a size that is not the shape's": ([binary("x", "FP32", [2], 4)], bytes(4)),
    "a second input behind the end": ([binary("x", "FP32", [1], 4), binary("y", "FP32", [1], 4)], bytes(4)),
    "a negative size": ([binary("x", "FP32", [1], -4)], bytes(4)),
    "a giant size": ([binary("x", "FP32", [1], 2**63)], bytes(4)),
    "a size that is text": ([binary("x", "FP32", [1], "4")], bytes(4)),  # type: ignore[arg-type]
    "both forms at once": ([binary("x", "FP32", [1], 4) | {"data": [1]}], bytes(4)),
    "a tail nobody claims": ([tensor()], bytes(4)),
}


@pytest.mark.parametrize(("inputs", "tail"), LYING.values(), ids=LYING)
def test_sizes_that_lie_are_refused(inputs: list[dict[str, Any]], tail: bytes) -> None:
    """The sizes claimed must be those of the shapes, and together the whole tail."""
    with pytest.raises(BadRequest):
        asked({"inputs": inputs}, tail)


def test_the_input_that_is_too_long_is_named() -> None:
    """With where it ends and how many bytes there are."""
    inputs = [binary("x", "FP32", [1], 4), binary("y", "FP32", [1], 4)]
    with pytest.raises(BadRequest, match="input 'y' ends at byte 8 of the binary data, of which there are 4 bytes"):
        asked({"inputs": inputs}, bytes(4))


def test_a_header_longer_than_the_body_is_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(BadRequest, match="is 10, more than the 2 bytes"):
        decode(b"{}", json_bytes=10, model="m")


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [tensor(parameters={"shared_memory_region": "r"})]},
        {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
        {"inputs": [tensor()], "parameters": {"sequence_id": 7, "sequence_start": True}},
    ],
)
def test_what_the_server_has_not_is_said_so(document: Any) -> None:
    """Shared memory and sequences would be answered wrongly if they were ignored."""
    with pytest.raises(Unsupported):
        asked(document)


def test_a_sequence_of_zero_is_none() -> None:
    """Zero is the protocol's default, and some clients send defaults."""
    assert asked({"inputs": [tensor()], "parameters": {"sequence_id": 0, "sequence_start": False}})[0].inputs


def test_a_body_without_json_is_one_tensor() -> None:
    """One sample of the model's only input; everything is answered in binary."""
    body = np.ones((1, 8, 8), np.float32).tobytes()
    request, form = decode_raw(body, manifest=DIGITS, model="digits")
    assert request.inputs["image"].shape == (1, 8, 8)
    assert form.is_binary("scores")


def test_a_body_without_json_tells_one_size() -> None:
    """A dimension that varies follows from the number of bytes."""
    tokens = manifest_of("t", (TensorSpec(name="x", datatype="INT64", shape=("batch", "tokens")),), DIGITS.outputs)
    request, _ = decode_raw(np.arange(5).tobytes(), manifest=tokens, model="t")
    assert request.inputs["x"].tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(BadRequest, match="comes with 41 bytes"):
        decode_raw(bytes(41), manifest=tokens, model="t")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (TWO, "2 inputs"),
        (manifest_of("v", (TensorSpec(name="x", datatype="FP32", shape=("batch", "h", "w")),), ()), "how large"),
        (manifest_of("s", (TensorSpec(name="x", datatype="BYTES", shape=("batch", "words")),), ()), "how large"),
        (manifest_of("z", (TensorSpec(name="x", datatype="FP32", shape=("batch", 0, "w")),), ()), "comes with 4 bytes"),
    ],
)
def test_a_body_without_json_must_be_clear(manifest: Any, said: str) -> None:
    """Where bytes alone do not tell the shape, that is said."""
    with pytest.raises(BadRequest, match=said):
        decode_raw(bytes(4), manifest=manifest, model=manifest.name)


def test_the_same_json_twice_has_each_time_its_own_tensors() -> None:
    """What JSON says is remembered, never what follows it; and a body that does not fit it is refused as at first."""
    document = {"id": "again", "inputs": [binary("x", "FP32", [2, 2], 16)]}
    first, form = asked(document, ONES.tobytes())
    second, same = asked(document, (2 * ONES).tobytes())
    assert (first.id, second.id, form) == ("again", "again", same)
    np.testing.assert_array_equal(first.inputs["x"], ONES)
    np.testing.assert_array_equal(second.inputs["x"], 2 * ONES)
    for _ in range(2):
        with pytest.raises(BadRequest, match="ends at byte 16 of the binary data, of which there are 8"):
            asked(document, ONES.tobytes()[:8])
