from __future__ import annotations

import asyncio
import gzip
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from stoker.errors import BadArtifact
from stoker.serving.http import bodies
from stoker.serving.http.application import DISCONNECTED, Application
from stoker.serving.refusals import (
    BadRequest,
    DeadlinePassed,
    DeadlineUnreachable,
    Failed,
    NotFound,
    QueueFull,
    Refusal,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from stoker.serving.service import (
    AccessEntry,
    InferenceRequest,
    InferenceResponse,
    InFlight,
    RequestLimits,
    ServerContext,
)
from tests.serving.fakes import ECHOES, FakeService, refusing, scores_of
from tests.serving.http.asking import Answered, ask

IMAGE = np.arange(64, dtype=np.float32).reshape(1, 8, 8)
ASKED = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": IMAGE}]}
INFER = "/v2/models/digits/infer"


def served(service: FakeService | None = None, **edge: Any) -> Application:
    """The application over a service."""
    return Application(ServerContext(service=service or FakeService(), **edge))


def asked(method: str, path: str, application: Application | None = None, **how: Any) -> Answered:
    """One request, from outside of a loop."""
    return asyncio.run(ask(application or served(), method, path, **how))


def test_an_inference_in_json() -> None:
    """The simplest request there is."""
    answer = asked("POST", INFER, body=ASKED)
    (output,) = answer.json["outputs"]
    assert answer.status == 200
    assert (output["name"], output["datatype"], output["shape"]) == ("scores", "FP32", [1, 10])
    np.testing.assert_array_equal(np.array(output["data"], np.float32), scores_of(IMAGE)[0])


def test_classes_have_the_names_of_the_version_that_answers() -> None:
    """A version with other classes takes over while the request's body arrives."""

    class Reloading(FakeService):
        async def infer(self, request: InferenceRequest) -> InferenceResponse:
            others = {"scores": tuple(f"class {number}" for number in range(10))}
            self.manifests["digits"] = replace(self.manifests["digits"], labels=others)
            return await super().infer(request)

    wanted = [{"name": "scores", "parameters": {"classification": 1}}]
    (output,) = asked("POST", INFER, served(Reloading()), body={**ASKED, "outputs": wanted}).json["outputs"]
    best = int(scores_of(IMAGE)[0].argmax())
    assert output["data"][0].endswith(f":{best}:class {best}")


def test_an_inference_in_binary() -> None:
    """The header gives the end of the JSON, both ways; the answer is an octet stream."""
    tensor = {"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": 256}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = asked("POST", INFER, body=text + IMAGE.tobytes(), headers=headers)
    assert answer.headers["content-type"] == "application/octet-stream"
    tail = answer.body[int(answer.headers["inference-header-content-length"]) :]
    np.testing.assert_array_equal(np.frombuffer(tail, np.float32), scores_of(IMAGE)[0])


def test_a_body_without_json() -> None:
    """`Inference-Header-Content-Length: 0`: bytes in, bytes out."""
    answer = asked("POST", INFER, body=IMAGE.tobytes(), headers={"Inference-Header-Content-Length": "0"})
    tail = answer.body[int(answer.headers["inference-header-content-length"]) :]
    np.testing.assert_array_equal(np.frombuffer(tail, np.float32), scores_of(IMAGE)[0])


@pytest.mark.parametrize("length", ["-1", "1.5", "x", "9" * 30])
def test_a_length_that_is_none_is_refused(length: str) -> None:
    """The header must be a number of bytes, and of a body as long."""
    answer = asked("POST", INFER, body=ASKED, headers={"Inference-Header-Content-Length": length})
    assert answer.status == 400
    assert "must be a number of bytes" in answer.error


def test_pages_that_tell() -> None:
    """Server, health, models, metadata, config and statistics."""
    assert asked("GET", "/v2").json["extensions"]
    assert asked("GET", "/v2/health/live").json == {"live": True}
    assert asked("GET", "/v2/health/ready").json == {"ready": True}
    assert set(asked("GET", "/v2/models").json["models"]) == {"digits", "two", *ECHOES.values()}
    assert asked("GET", "/v2/models/digits").json["inputs"][0]["shape"] == [-1, 8, 8]
    assert asked("GET", "/v2/models/digits/versions/1").json["name"] == "digits"
    assert asked("GET", "/v2/models/digits/ready").json == {"name": "digits", "ready": True}
    assert asked("GET", "/v2/models/digits/config").json["max_batch_size"] == 32
    assert asked("GET", "/v2/models/digits/stats").json["model_stats"][0]["name"] == "digits"
    assert len(asked("GET", "/v2/models/stats").json["model_stats"]) == 2 + len(ECHOES)


def test_what_is_not_ready_says_so_by_its_status() -> None:
    """Load balancers and clients look at nothing else."""
    application = served(FakeService(unloaded={"digits"}))
    assert asked("GET", "/v2/health/ready", application).status == 503
    answer = asked("GET", "/v2/models/digits/ready", application)
    assert (answer.status, answer.json["ready"]) == (503, False)
    answer = asked("POST", INFER, application, body=ASKED)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("GET", "/v2/models/digits/versions/9", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v2/models/digits/versions/9/infer", 404),
        ("GET", "/metrics", 404),
        ("POST", "/v2/repository/index", 404),
        ("GET", INFER, 405),
        ("POST", "/v2/health/live", 405),
        ("DELETE", "/v2/models/digits", 405),
        ("GET", "/v2/systemsharedmemory/status", 501),
    ],
)
def test_wrong_questions_have_their_status(method: str, path: str, status: int) -> None:
    """Always JSON with the one key `error`, which is what tritonclient reads."""
    answer = asked(method, path, body=ASKED if method == "POST" else b"")
    assert answer.status == status
    assert answer.error
    if status == 405:
        assert answer.headers["allow"] == ("POST" if path == INFER else "GET, HEAD")


@pytest.mark.parametrize(
    ("refused", "status", "retry_after"),
    [
        (BadRequest("no"), 400, None),
        (Unauthorized("no"), 401, None),
        (NotFound("no"), 404, None),
        (TooLarge("no"), 413, None),
        (QueueFull("no", retry_after_s=0.2), 429, "1"),
        (Failed("no"), 500, None),
        (Unavailable("no"), 503, None),
        (DeadlineUnreachable("no", retry_after_s=2.1), 503, "3"),
        (DeadlinePassed("no"), 504, None),
    ],
)
def test_every_refusal_has_its_status(refused: Refusal, status: int, retry_after: str | None) -> None:
    """What the service refuses with is what the client sees."""
    answer = asked("POST", INFER, served(refusing(refused)), body=ASKED)
    assert (answer.status, answer.error) == (status, "no")
    assert answer.headers.get("retry-after") == retry_after


def test_an_error_nobody_foresaw_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """The client learns that it was not its fault; the log learns what it was."""
    with caplog.at_level(logging.ERROR):
        answer = asked("POST", INFER, served(FakeService(refuse=ZeroDivisionError("secret"))), body=ASKED)
    assert answer.status == 500
    assert "secret" not in answer.error
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    """An error that a user can mend keeps its text and its remedy."""

    class Damaged(FakeService):
        async def load(self, model: str, parameters: Any = None) -> None:
            raise BadArtifact("its digest is wrong", remedy="Copy it again.")

    answer = asked("POST", "/v2/repository/models/digits/load", served(Damaged(), is_admin=True))
    assert answer.status == 422
    assert "Copy it again." in answer.error


def test_the_repository_is_for_the_admin_port() -> None:
    """Index, load and unload; the plain port has none of them."""
    service = FakeService()
    admin = served(service, is_admin=True)
    assert len(asked("POST", "/v2/repository/index", admin).json) == 2 + len(ECHOES)
    assert asked("POST", "/v2/repository/models/digits/unload", admin, body={"parameters": {}}).status == 200
    assert service.unloaded == {"digits"}
    ready = asked("POST", "/v2/repository/index", admin, body={"ready": True}).json
    assert "digits" not in {entry["name"] for entry in ready}
    policy = {"config": '{"version_policy": {"specific": {"versions": [1]}}}'}
    assert asked("POST", "/v2/repository/models/digits/load", admin, body={"parameters": policy}).json == {}
    assert (service.unloaded, service.loaded_with) == (set(), policy)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v2/repository/index", b"{", 400),
        ("/v2/repository/index", [], 400),
        ("/v2/repository/index", {"ready": 1}, 400),
        ("/v2/repository/models/digits/load", {"parameters": {"config": {}}}, 400),
        ("/v2/repository/models/nobody/load", {}, 404),
    ],
)
def test_the_repository_refuses_what_it_cannot_do(path: str, body: Any, status: int) -> None:
    """What is no JSON or of another form, and models that are not there."""
    answer = asked("POST", path, served(is_admin=True), body=body)
    assert (answer.status, bool(answer.error)) == (status, True)


def test_the_repositorys_bodies_have_the_limits_of_json() -> None:
    """A hundred thousand lists would take thirty times their length in memory, on this port as on the others."""
    body = b'{"parameters": {}, "more": [' + b"[]," * 100_000 + b"0]}"
    answer = asked("POST", "/v2/repository/models/digits/load", served(is_admin=True), body=body)
    assert (answer.status, "100,000 lists" in answer.error) == (413, True)


def test_metrics_are_those_handed_in() -> None:
    """With the content type that their format has."""
    application = served(is_admin=True, metrics=lambda: (b"up 1\n", "text/plain; version=0.0.4"))
    answer = asked("GET", "/metrics", application)
    assert (answer.body, answer.headers["content-type"]) == (b"up 1\n", "text/plain; version=0.0.4")
    assert asked("GET", "/metrics", served(is_admin=True)).status == 404


def _ann_alone(headers: Mapping[str, str]) -> str:
    if headers.get("authorization") != "Bearer 123":
        raise Unauthorized("no key, or an unknown one")
    return "ann"


def test_keys_are_asked_for_but_not_of_probes() -> None:
    """The caller's name goes along with the request; health needs no key."""
    service = FakeService()
    application = served(service, authorize=_ann_alone)
    answer = asked("POST", INFER, application, body=ASKED)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert asked("GET", "/v2/models/digits", application).status == 401
    assert asked("GET", "/v2/health/ready", application).status == 200
    assert asked("GET", "/v2/models/digits/ready", application).status == 200
    assert asked("POST", INFER, application, body=ASKED, headers={"Authorization": "Bearer 123"}).status == 200
    assert [request.caller for request in service.requests] == ["ann"]


def test_one_line_of_log_for_each_request() -> None:
    """Method, path, model, version, status, bytes, seconds, caller and id; of a refusal its reason and message."""
    lines: list[AccessEntry] = []
    ticks = iter([10.0, 10.5, 20.0, 20.25])
    application = served(log=lines.append, authorize=_ann_alone, clock=lambda: next(ticks))
    key = {"Authorization": "Bearer 123"}
    answer = asked("POST", "/v2/models/digits/versions/1/infer", application, body=ASKED | {"id": "r-1"}, headers=key)
    asked("POST", "/v2/models/digits/infer", application, body=b"{", headers=key)
    good, bad = lines
    assert good == AccessEntry(
        protocol="http",
        method="POST",
        path="/v2/models/digits/versions/1/infer",
        model="digits",
        version="1",
        status=200,
        seconds=0.5,
        id="r-1",
        caller="ann",
        bytes_in=good.bytes_in,
        bytes_out=len(answer.body),
    )
    assert good.bytes_in == len(orjson.dumps(ASKED | {"id": "r-1"}, option=orjson.OPT_SERIALIZE_NUMPY))
    assert (bad.status, bad.reason, bad.seconds, bad.bytes_in) == (400, "bad_request", 0.25, 1)
    assert bad.error.startswith("the body is no JSON")


SMALL = RequestLimits(body_bytes=1000, body_s=0.05)


@pytest.mark.parametrize(
    "how",
    [
        {"body": bytes(1001)},
        {"pieces": (bytes(600), bytes(600), b"never read")},
        {"headers": {"Content-Length": "1001"}},
        {"body": gzip.compress(bytes(100_000)), "headers": {"Content-Encoding": "gzip"}},
    ],
)
def test_bodies_over_the_limit_are_refused(how: dict[str, Any]) -> None:
    """By what is announced, while it comes, and while it is decompressed."""
    answer = asked("POST", INFER, served(limits=SMALL), **how)
    assert answer.status == 413
    assert "1000 B" in answer.error or "1000 bytes" in answer.error


@pytest.mark.parametrize("pieces", [(), (b'{"inputs"',)])
def test_a_body_that_does_not_come_is_not_waited_for(pieces: tuple[bytes, ...]) -> None:
    """A slow client has its answer and loses its connection."""
    answer = asked("POST", INFER, served(limits=SMALL), pieces=pieces)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "within 50 ms" in answer.error


def test_a_client_that_goes_away_is_noted() -> None:
    """The answer is not read; the log has it."""
    lines: list[AccessEntry] = []
    asked("POST", INFER, served(log=lines.append), pieces=(b"{",), goes_away=True)
    assert [(line.status, line.reason) for line in lines] == [(499, "cancelled")]


@pytest.mark.parametrize(("why", "status"), [(DISCONNECTED, 499), (None, 503)])
def test_a_request_that_is_cancelled_leaves_the_queue(why: str | None, status: int) -> None:
    """Since the client went away, or since the server stops; the service's wait ends at once."""

    async def cancel() -> tuple[Answered, bool]:
        service = FakeService(hold=asyncio.Event())
        asking = asyncio.create_task(ask(served(service), "POST", INFER, body=ASKED))
        await service.held.wait()
        asking.cancel(why)
        return await asking, service.cancelled.is_set()

    answer, was_cancelled = asyncio.run(cancel())
    assert (answer.status, was_cancelled) == (status, True)


def test_answers_are_compressed_for_who_asks() -> None:
    """From a kilobyte on; a smaller one is left as it is."""
    many = {"inputs": [{"name": "x", "shape": [1, 500], "datatype": "FP32", "data": [0.5] * 500}]}
    path = f"/v2/models/{ECHOES['FP32']}/infer"
    answer = asked("POST", path, body=many, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    plain = asked("POST", path, body=many, headers={"Accept-Encoding": "gzip, deflate, br"})
    assert gzip.decompress(answer.body) == plain.body
    assert "content-encoding" not in asked("POST", INFER, body=ASKED, headers={"Accept-Encoding": "gzip"}).headers


def test_a_large_answer_is_compressed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered in that time, its bytes count, and it comes whole."""
    threads, held, compress, in_flight = [], [], bodies.compress, InFlight()

    def watched(body: bytes, encoding: str) -> bytes:
        threads.append(threading.current_thread())
        held.append(in_flight.num_bytes)
        return compress(body, encoding)

    monkeypatch.setattr(bodies, "compress", watched)
    many = {"inputs": [{"name": "x", "shape": [1, 50_000], "datatype": "FP32", "data": [0.5] * 50_000}]}
    path = f"/v2/models/{ECHOES['FP32']}/infer"
    answer = asked("POST", path, served(in_flight=in_flight), body=many, headers={"Accept-Encoding": "gzip"})
    whole = gzip.decompress(answer.body)
    assert orjson.loads(whole)["outputs"][0]["data"] == [0.5] * 50_000
    assert threads != [threading.current_thread()]
    assert held[0] >= len(whole)
    assert in_flight.num_bytes == 0


def test_a_large_compressed_body_is_read_beside_the_loop() -> None:
    """What takes long to decompress goes to a thread, and comes back whole."""
    array = np.random.default_rng(0).standard_normal((1, 50_000)).astype(np.float32)
    tensor = {"name": "x", "shape": [1, 50_000], "datatype": "FP32", "parameters": {"binary_data_size": 200_000}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Encoding": "gzip"}
    body = gzip.compress(text + array.tobytes(), 1)
    answer = asked("POST", f"/v2/models/{ECHOES['FP32']}/infer", body=body, headers=headers)
    assert answer.body.endswith(array.tobytes())


def test_half_precision_in_json_is_refused_before_it_is_computed() -> None:
    """JSON cannot carry the answer; nothing was asked of the service."""
    service = FakeService()
    half = np.ones((1, 2), np.float16)
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP16", "parameters": {"binary_data_size": 4}}
    text = orjson.dumps({"inputs": [tensor]})
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = asked("POST", "/v2/models/echo-fp16/infer", served(service), body=text + half.tobytes(), headers=headers)
    assert (answer.status, service.requests) == (400, [])
    assert "binary_data_output" in answer.error


def test_other_kinds_of_scope_are_left_alone() -> None:
    """A server that offers lifespan or WebSocket events is not answered."""
    asyncio.run(served()({"type": "lifespan"}, _never, _never))


async def _never(*_arguments: Any) -> Any:
    raise AssertionError("nothing is to be received or sent")


def test_limits_are_their_own_record() -> None:
    """They can be changed one by one."""
    assert replace(RequestLimits(), body_bytes=1).body_s == RequestLimits().body_s
