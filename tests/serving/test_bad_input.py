"""Bad input to the whole server: the right status, a sentence that helps, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.serving.server import Running
from stoker.testing.models import tiny_artifact
from tests.serving.asking import ask, infer, metric, question, running, tensor


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys, of a model of numbers and one of tokens."""
    folder = tmp_path_factory.mktemp("plain")
    tiny_artifact(folder, name="digits")
    tiny_artifact(folder, name="words", kind="tokens")
    with running(folder, max_body_bytes=64 * 1024) as up:
        yield up


_IDS = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}
_MASK = {"name": "attention_mask", "shape": [1, 2], "datatype": "INT64", "data": [1, 1]}


@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("digits", b"{not json", 400, "JSON"),
        ("digits", b"[1, 2]", 400, ""),
        ("digits", {"inputs": []}, 400, "inputs"),
        ("digits", tensor(name="z"), 400, "unknown 'z'"),
        ("digits", tensor(shape=[1, 7], data=[0] * 7), 400, "[batch, 8]"),
        ("digits", tensor(shape=[1, 8, 1]), 400, "[batch, 8]"),
        ("digits", tensor(shape=[0, 8], data=[]), 400, "'batch'"),
        ("digits", tensor(shape=[-1, 8]), 400, "-1"),
        ("digits", tensor(shape=[2**40, 2**40]), 400, "elements"),
        ("digits", tensor(datatype="INT64", data=[1] * 8), 400, "FP32"),
        ("digits", tensor(datatype="FP31"), 400, "FP31"),
        ("digits", tensor(data=[0.5] * 7), 400, "7"),
        ("digits", tensor(data=["a"] * 8), 400, "string"),
        ("digits", question() | {"outputs": [{"name": "nothing"}]}, 400, "Known: y"),
        ("digits", question(rows=3000), 413, "KiB"),
        ("words", {"inputs": [_IDS, _MASK]}, 400, "'tokens'"),
        ("words", {"inputs": [_IDS | {"shape": [1, 65], "data": [1] * 65}, _MASK]}, 400, "equal"),
        ("nobody", question(), 404, "no model 'nobody'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(plain: Running, model: str, body: Any, status: int, words: str) -> None:
    """What does not fit has the right status and says what is wrong; the next request is answered."""
    found, answer = infer(plain, model, body)
    assert (found, set(answer)) == (status, {"error"})
    assert words in answer["error"]
    assert infer(plain)[0] == 200


@pytest.mark.parametrize("json_bytes", ["3", "100000", "-1", "many"])
def test_lying_binary_sizes_are_refused(plain: Running, json_bytes: str) -> None:
    """A header that says another length than the JSON has is a bad request."""
    body = json.dumps(tensor(data=None, parameters={"binary_data_size": 32})).encode() + bytes(32)
    url = f"{plain.started.http}/v2/models/digits/infer"
    status, answer = ask(url, body, Inference_Header_Content_Length=json_bytes)
    assert (status, set(answer)) == (400, {"error"})


def test_unknown_versions_and_pages_are_not_found(plain: Running) -> None:
    """The sentence names what there is."""
    status, answer = infer(plain, version="7")
    assert status == 404
    assert "served: 1" in answer["error"]
    assert ask(f"{plain.started.http}/v2/nothing")[0] == 404
    assert ask(f"{plain.started.http}/v2/repository/index", {})[0] == 404
    assert ask(f"{plain.started.http}/metrics")[0] == 404


def test_refusals_are_counted(plain: Running) -> None:
    """Each refusal is in the metrics under its model and its reason."""
    before = metric(plain, 'stoker_rejected_total{model="digits",reason="bad_request"}')
    infer(plain, body=tensor(name="z"))
    assert metric(plain, 'stoker_rejected_total{model="digits",reason="bad_request"}') == before + 1


def test_a_deadline_that_cannot_be_met_is_refused(plain: Running) -> None:
    """A microsecond is too short for any model: the client hears when it may come again, or that it was late."""
    status, answer = infer(plain, body=question() | {"parameters": {"timeout": 1}})
    assert status in {503, 504}
    assert "error" in answer
    misses = metric(plain, 'stoker_deadline_miss_total{model="digits"}')
    assert misses >= 1
