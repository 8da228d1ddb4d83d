"""Bad input to the whole server: the right status, a sentence that helps, and the server goes on."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from bench.serving.background_server import BackgroundServer
from stoker.artifacts import Golden, publish
from stoker.records import ArtifactSource, EngineName, FileDigest, Manifest, TensorSpec, Tolerance, dumps
from stoker.serving.grpc import inference_pb2
from stoker.testing.tiny_models import tiny_artifact
from tests.serving.asking import ask, infer, metric, question, running, tensor


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
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
def test_bad_input_is_refused_in_a_sentence(
    plain: BackgroundServer, model: str, body: Any, status: int, words: str
) -> None:
    """What does not fit has the right status and says what is wrong; the next request is answered."""
    found, answer = infer(plain, model, body)
    assert (found, set(answer)) == (status, {"error"})
    assert words in answer["error"]
    assert infer(plain)[0] == 200


@pytest.mark.parametrize("json_bytes", ["3", "100000", "-1", "many"])
def test_lying_binary_sizes_are_refused(plain: BackgroundServer, json_bytes: str) -> None:
    """A header that says another length than the JSON has is a bad request."""
    body = json.dumps(tensor(data=None, parameters={"binary_data_size": 32})).encode() + bytes(32)
    url = f"{plain.started.http}/v2/models/digits/infer"
    status, answer = ask(url, body, Inference_Header_Content_Length=json_bytes)
    assert (status, set(answer)) == (400, {"error"})


def test_unknown_versions_and_pages_are_not_found(plain: BackgroundServer) -> None:
    """The sentence names what there is."""
    status, answer = infer(plain, version="7")
    assert status == 404
    assert "served: 1" in answer["error"]
    assert ask(f"{plain.started.http}/v2/nothing")[0] == 404
    assert ask(f"{plain.started.http}/v2/repository/index", {})[0] == 404
    assert ask(f"{plain.started.http}/metrics")[0] == 404


def test_refusals_are_counted(plain: BackgroundServer) -> None:
    """Each refusal is in the metrics under its model and its reason."""
    before = metric(plain, 'stoker_rejected_total{model="digits",reason="bad_request"}')
    infer(plain, body=tensor(name="z"))
    assert metric(plain, 'stoker_rejected_total{model="digits",reason="bad_request"}') == before + 1


def test_a_deadline_that_cannot_be_met_is_refused(plain: BackgroundServer) -> None:
    """A microsecond is too short for any model: the client hears when it may come again, or that it was late."""
    status, answer = infer(plain, body=question() | {"parameters": {"timeout": 1}})
    assert status in {503, 504}
    assert "error" in answer
    misses = metric(plain, 'stoker_deadline_miss_total{model="digits"}')
    assert misses >= 1


def binary(values: Any, name: str = "x", datatype: str = "FP32") -> tuple[bytes, dict[str, str]]:
    """A request with one tensor as binary data, and its header."""
    raw = values if isinstance(values, bytes) else values.tobytes()
    shape = [1, 1] if isinstance(values, bytes) else list(values.shape)
    described = {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [described]}).encode()
    return text + raw, {"Inference_Header_Content_Length": str(len(text))}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_in_binary_as_in_json(plain: BackgroundServer, value: float) -> None:
    """One number among many; JSON has no way to write it."""
    url = f"{plain.started.http}/v2/models/digits/infer"
    for rows in (1, 1000):
        values = np.full((rows, 8), 0.5, np.float32)
        values[-1, 3] = value
        body, header = binary(values)
        status, answer = ask(url, body, **header)
        assert (status, "has NaN or infinities" in answer["error"]) == (400, True)
    body, header = binary(np.full((1, 8), 3e38, np.float32))  # whose squares are infinite, and no matter
    assert ask(url, body, **header)[0] == 200
    message = inference_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[values[-1:].tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 8])
    with pytest.raises(grpc.RpcError) as refused:
        call(plain, message)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("rows", [1, 600])
def test_a_setting_lets_it_through(rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For models to which NaN means that a value is missing; of others an engine may make a number of it."""
    tiny_artifact(tmp_path, name="digits")
    body, header = binary(np.full((rows, 8), np.nan, np.float32))
    with running(tmp_path, overrides=("allow_nan=true",)) as up:
        assert ask(f"{up.started.http}/v2/models/digits/infer", body, **header)[0] == 200
    assert "no example that digits was exported with has NaN" in caplog.text


def test_requests_that_are_refused_before_the_model_is_asked_are_counted(tmp_path: Path) -> None:
    """Malformed ones, and those of models that do not exist, whose names are no labels."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        assert ask(f"{up.started.http}/v2/models/digits/infer", b"{")[0] == 400
        for name in ("no", "none"):
            assert ask(f"{up.started.http}/v2/models/{name}/infer", b"{}")[0] == 404
            with pytest.raises(grpc.RpcError):
                call(up, inference_pb2.ModelInferRequest(model_name=name))
        message = inference_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[b"123"])
        message.inputs.add(name="x", datatype="FP32", shape=[1, 8])
        with pytest.raises(grpc.RpcError):
            call(up, message)
        assert metric(up, 'stoker_rejected_total{model="digits",reason="bad_request"}') == 2
        assert metric(up, 'stoker_rejected_total{model="",reason="not_found"}') == 4


def call(up: BackgroundServer, message: Any) -> Any:
    """Ask over gRPC."""
    assert up.started.grpc is not None
    with grpc.insecure_channel(up.started.grpc) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelInferResponse.FromString,
        )
        return method(message, timeout=60)


def test_strings_that_are_not_utf8_are_the_clients_fault(tmp_path: Path) -> None:
    """Over HTTP and over gRPC, raw and typed; the string and the byte are named."""
    strings_artifact(tmp_path)
    with running(tmp_path) as up:
        raw = struct.pack("<I", 3) + b"a\xffb"
        body, header = binary(raw, datatype="BYTES")
        status, answer = ask(f"{up.started.http}/v2/models/words/infer", body, **header)
        assert (status, "string 0 of input 'x' is not UTF-8: invalid start byte at byte 1" in answer["error"]) == (
            400,
            True,
        )
        whole, header = binary(struct.pack("<I", 5) + "grün".encode(), datatype="BYTES")
        assert ask(f"{up.started.http}/v2/models/words/infer", whole, **header)[0] == 200
        for typed in (False, True):
            message = inference_pb2.ModelInferRequest(model_name="words")
            described = message.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
            if typed:
                described.contents.bytes_contents.append(b"\xff")
            else:
                message.raw_input_contents.append(raw)
            with pytest.raises(grpc.RpcError) as refused:
                call(up, message)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def strings_artifact(root: Path) -> None:
    """A model that gives its strings back."""

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "g",
            [value("x", TensorProto.STRING, ["batch", 1])],
            [value("y", TensorProto.STRING, ["batch", 1])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        (directory / "model.onnx").write_bytes(model.SerializeToString())
        asked = {"x": np.array([[b"a"], [b"b"]], object)}
        save_file(Golden(asked, {"y": asked["x"]}).as_tensors(), directory / "golden.safetensors")
        spec = TensorSpec(name="x", datatype="BYTES", shape=("batch", 1))
        return Manifest(
            name="words",
            engine="onnxruntime",
            precision="fp32",
            graph="model.onnx",
            golden="golden.safetensors",
            inputs=(spec,),
            outputs=(replace(spec, name="y"),),
            tolerance=Tolerance(absolute=0.0, relative=0.0),
            proved_on="a test",
            source=ArtifactSource(kind="onnx", name="t", digest="0" * 64),
            made_at="2026-11-22T00:00:00+00:00",
            files=digests(),
        )

    publish(root / "words", write)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_shapes_that_do_not_fit_inside_the_graph_are_the_clients_fault(engine: EngineName, tmp_path: Path) -> None:
    """A state of another batch than the inputs': the manifest has no word of it, the engine refuses, 400."""
    artifact = tiny_artifact(tmp_path, name="words", kind="tokens", engine=engine)
    names = {"input_ids": "ids", "attention_mask": "mask"}
    inputs = tuple(replace(spec, shape=("batch", names[spec.name])) for spec in artifact.manifest.inputs)
    document = dumps(replace(artifact.manifest, inputs=inputs, dims=()))
    (artifact.path / "manifest.json").write_text(document)
    with running(tmp_path) as up:
        for _ in range(4):
            status, answer = infer(up, "words", {"inputs": [_IDS, _MASK]})
            assert (status, "could not compute this request" in answer["error"]) == (400, True)
        mask = _MASK | {"shape": [1, 3], "data": [1, 1, 1]}
        assert infer(up, "words", {"inputs": [_IDS, mask]})[0] == 200


def test_an_encoding_that_is_not_known_is_an_unsupported_media_type(plain: BackgroundServer) -> None:
    """415 as RFC 9110 has it, with those that are."""
    status, answer = ask(f"{plain.started.http}/v2/models/digits/infer", b"x", Content_Encoding="br")
    assert (status, "gzip and deflate are" in answer["error"]) == (415, True)


@pytest.mark.parametrize("path", ["models/{}", "models/digits/versions/{}", "models/digits/versions/{}/ready", "{}"])
def test_long_names_are_not_found_and_not_repeated(plain: BackgroundServer, path: str) -> None:
    """Five thousand digits are no version, and no traceback either."""
    for name in ("1" * 5000, "x" * 5000):
        status, answer = ask(f"{plain.started.http}/v2/{path.format(name)}")
        if path.endswith("/ready"):
            assert (status, answer["ready"]) == (503, False)
        else:
            assert status == 404
            assert "… (50" in answer["error"]
            assert len(answer["error"]) < 250


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / SMTP/1.1\r\n\r\n", "HTTP/"),
        (b"NOTHING / HTTP/1.1\r\n\r\n", "method"),
        (b"GET / HTTP/1.1\r\nna me: x\r\n\r\n", "header"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "Content-Length"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk"),
    ],
)
def test_what_is_not_http_is_told_which_part(plain: BackgroundServer, sent: bytes, says: str) -> None:
    """The parser's own reason, in a JSON error."""
    assert plain.started.http is not None
    host, port = plain.started.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert says in json.loads(body)["error"]


def test_without_a_key_no_model_is_named(tmp_path: Path) -> None:
    """Questions about health need none, and tell of the model that was asked for alone."""
    tiny_artifact(tmp_path / "models", name="secret-project")
    keys = tmp_path / "keys"
    keys.write_text("me:abcdefghijklmnopqrst\n")
    with running(tmp_path / "models", api_keys=keys) as up:
        status, answer = ask(f"{up.started.http}/v2/models/zzz/ready")
        assert (status, answer) == (404, {"error": "there is no model 'zzz'"})
        assert ask(f"{up.started.http}/v2/models/secret-project/versions/{'1' * 5000}/ready")[0] == 503


def test_a_page_of_another_site_unloads_nothing(tmp_path: Path) -> None:
    """Neither by its origin, nor under a name that it lets point here; a program still can."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        url = f"{up.started.admin}/v2/repository/models/digits/unload"
        for headers in (
            {"Origin": "https://evil.example", "Content_Type": "text/plain", "Host": "rebound.evil.example"},
            {"Origin": "https://evil.example"},
            {"Host": "rebound.evil.example"},
        ):
            assert ask(url, b"", **headers)[0] == 403
        assert ask(f"{up.started.admin}/metrics", Host="rebound.evil.example")[0] == 403
        assert infer(up)[0] == 200
        assert ask(url, b"")[0] == 200
