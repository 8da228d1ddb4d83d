"""The whole server: starting, settings, TLS, what it reports of itself, and shutting down."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import tritonclient.grpc as over_grpc

from bench.serving.background_server import BackgroundServer
from stoker import engines
from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact, BadJob, ServiceError
from stoker.testing.tiny_models import tiny_artifact
from tests.serving.asking import ask, fetch, infer, metric, question, running, tensor
from tests.serving.waiting import until_on_threads


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    return _certificate(tmp_path_factory.mktemp("tls"))


def _certificate(folder: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            str(folder / "key.pem"),
            "-out",
            str(folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


def test_tls_on_both_ports(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """HTTP and gRPC answer over TLS to clients that trust the certificate, and to no others."""
    cert, key = certificate
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path, tls_certificate=cert, tls_key=key) as up:
        assert str(up.started.http).startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        host, port = str(up.started.http).removeprefix("https://").split(":")
        secure = http.client.HTTPSConnection(host, int(port), context=trusting, timeout=60)
        with contextlib.closing(secure):
            secure.request("GET", "/v2/health/ready")
            assert secure.getresponse().status == 200
        with over_grpc.InferenceServerClient(
            str(up.started.grpc).replace("127.0.0.1", "localhost"), ssl=True, root_certificates=str(cert)
        ) as client:
            assert client.is_server_ready()
        with pytest.raises((http.client.HTTPException, OSError)):
            fetch(f"http://{host}:{port}/v2")
    with pytest.raises(BadJob, match="belong together"):
        running(tmp_path, tls_certificate=cert).__enter__()
    with pytest.raises(BadJob, match="TLS cannot be set up"):
        running(tmp_path, tls_certificate=cert, tls_key=cert).__enter__()


def _presented(up: BackgroundServer) -> str:
    """The certificate that a new connection gets."""
    parts = urlsplit(str(up.started.http))
    return ssl.get_server_certificate((str(parts.hostname), int(parts.port or 0)))


def test_a_new_certificate_is_taken_without_a_restart(tmp_path: Path) -> None:
    """New connections of both protocols get it, an open one goes on; one that cannot be used changes nothing."""
    tiny_artifact(tmp_path / "models", name="digits")
    (tmp_path / "new").mkdir()
    old, new = _certificate(tmp_path), _certificate(tmp_path / "new")
    with running(tmp_path / "models", tls_certificate=old[0], tls_key=old[1]) as up:
        first = _presented(up)
        parts = urlsplit(str(up.started.http))
        trusting = ssl.create_default_context(cafile=str(old[0]))
        with contextlib.closing(
            http.client.HTTPSConnection(str(parts.hostname), parts.port, context=trusting)
        ) as before:
            before.request("GET", "/v2/health/ready")
            before.getresponse().read()
            for fresh, stale in zip(new, old, strict=True):
                shutil.copy(fresh, stale)
            up.do(up.server.reload())
            before.request("GET", "/v2/health/ready")
            assert before.getresponse().status == 200
        assert _presented(up) == new[0].read_text() != first
        address = str(up.started.grpc).replace("127.0.0.1", "localhost")
        with over_grpc.InferenceServerClient(address, ssl=True, root_certificates=str(new[0])) as client:
            assert client.is_server_ready()
        old[1].write_text("no key")
        with pytest.raises(BadJob, match="TLS cannot be set up"):
            up.do(up.server.reload())
        assert _presented(up) == new[0].read_text()


def test_some_models_are_served_where_others_cannot(tmp_path: Path) -> None:
    """A corrupt model is not ready, the others and the server are; `is_strict` refuses to start."""
    tiny_artifact(tmp_path, name="digits")
    tiny_artifact(tmp_path, name="broken").graph_path.write_bytes(b"no graph")
    with running(tmp_path) as up:
        assert list(up.started.problems) == ["broken"]
        assert infer(up)[0] == 200
        status, answer = infer(up, "broken")
        assert (status, "SHA-256" in answer["error"]) == (503, True)
        assert ask(f"{up.started.http}/v2/models/broken/ready")[0] == 503
        assert ask(f"{up.started.http}/v2/health/ready")[0] == 200
    with pytest.raises(ServiceError, match="1 of 2 models cannot be served: broken"):
        running(tmp_path, is_strict=True).__enter__()


def test_nothing_to_serve_is_an_error(tmp_path: Path) -> None:
    """A directory without models, one that is not there, and one whose only model is corrupt."""
    with pytest.raises(BadArtifact, match="there is no exported model"):
        running(tmp_path).__enter__()
    with pytest.raises(BadArtifact, match="is not a directory"):
        running(tmp_path / "nowhere").__enter__()
    tiny_artifact(tmp_path, name="broken").graph_path.write_bytes(b"no graph")
    with pytest.raises(ServiceError, match="1 of 1 models"):
        running(tmp_path).__enter__()


def test_an_engine_that_is_not_installed_comes_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the start says what to install, and not only that the engine is missing."""
    tiny_artifact(tmp_path, name="digits")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not there
    with pytest.raises(ServiceError, match="The engine onnxruntime is not installed here") as caught:
        running(tmp_path).__enter__()
    assert caught.value.remedy == "pip install 'stoker[serve]'"
    with pytest.raises(ServiceError) as caught:
        running(tmp_path, is_strict=True).__enter__()
    assert caught.value.remedy == "pip install 'stoker[serve]'; or serve the others without --strict"


@pytest.mark.parametrize("door", ["http", "grpc", "admin"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, door: str) -> None:
    """The error has the address and the option; nothing else is left open."""
    tiny_artifact(tmp_path, name="digits")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f"cannot listen at 127.0.0.1:{port} for {door}") as caught:
            running(tmp_path, **{f"{door}_port": port}).__enter__()
    assert f"--{door}-port" in str(caught.value)


def test_the_admin_port_is_not_opened_to_everyone(tmp_path: Path) -> None:
    """Beyond this machine it needs keys."""
    with pytest.raises(BadJob, match="unload models"):
        running(tmp_path, admin_host="::").__enter__()


def test_bodies_together_have_room_for_the_largest(tmp_path: Path) -> None:
    """Or no request of that size could ever be taken."""
    tiny_artifact(tmp_path, name="digits")
    with pytest.raises(BadJob, match=r"--max-bodies 1\.0 MiB has no room for a request of --max-body, 2\.0 MiB"):
        running(tmp_path, max_body_bytes=2 * 2**20, max_bodies_bytes=2**20).__enter__()
    with running(tmp_path, max_body_bytes=100, max_bodies_bytes=100) as up:
        assert infer(up, body=b"x" * 100)[0] == 400


def test_a_line_is_logged_for_every_request(tmp_path: Path) -> None:
    """Lines of JSON with model, status, seconds and, of refusals, why."""
    tiny_artifact(tmp_path / "models", name="digits")
    log = tmp_path / "access.jsonl"
    with running(tmp_path / "models", access_log=str(log)) as up:
        infer(up)
        infer(up, body=tensor(name="z"))
    good, bad = (json.loads(line) for line in log.read_text().splitlines())
    assert (good["status"], good["model"], good["protocol"]) == (200, "digits", "http")
    assert 0 < good["seconds"] < 20
    assert (bad["status"], bad["reason"]) == (400, "bad_request")
    assert "unknown 'z'" in bad["error"]


def test_statistics_and_metrics_count_the_same(tmp_path: Path) -> None:
    """Requests, rows and batches agree between the protocol's statistics and Prometheus."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        for rows in (1, 2, 3):
            infer(up, body=question(rows=rows))
        (told,) = ask(f"{up.started.http}/v2/models/digits/stats")[1]["model_stats"]
        assert (told["inference_count"], told["execution_count"]) == (6, 3)
        assert told["inference_stats"]["success"]["count"] == 3
        assert [one["batch_size"] for one in told["batch_stats"]] == [1, 2, 3]
        place = 'model="digits",version="1"'
        assert metric(up, f"stoker_batch_rows_sum{{{place}}}") == 6
        assert metric(up, 'stoker_total_seconds_count{model="digits",outcome="ok",version="1"}') == 3
        assert metric(up, f"stoker_queue_seconds_count{{{place}}}") == 3
        assert metric(up, f"stoker_model_ready{{{place}}}") == 1


def test_settings_come_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    """`service.json` holds, `--set` outranks it, for one model or every one."""
    tiny_artifact(tmp_path, name="digits")
    tiny_artifact(tmp_path, name="words", kind="tokens")
    settings = {"record": "ServiceSettings", "schema": 1, "max_batch_rows": 4, "instances": 2, "threads": 1}
    (tmp_path / "digits" / "service.json").write_text(json.dumps(settings))
    with running(tmp_path, overrides=("digits.max_batch_rows=8", "max_queue_rows=50")) as up:
        digits, words = (one.settings for one in up.started.models)
        assert (digits.max_batch_rows, digits.instances, digits.max_queue_rows) == (8, 2, 50)
        assert (words.max_batch_rows, words.max_queue_rows) == (32, 50)
        assert ask(f"{up.started.http}/v2/models/digits/config")[1]["max_batch_size"] == 8
        rows = question(rows=51)
        assert infer(up, body=rows)[0] == 413


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this event is not set, engines answer no request; it is set until a test clears it."""
    is_open, load = threading.Event(), engines.load
    is_open.set()

    class Gated:
        def __init__(self, engine: engines.Engine) -> None:
            self._engine = engine

        def run(self, inputs: Arrays) -> Arrays:
            assert is_open.wait(60.0)
            return self._engine.run(inputs)

        def close(self) -> None:
            self._engine.close()

    monkeypatch.setattr(engines, "load", lambda *args, **how: tuple(map(Gated, load(*args, **how))))
    yield is_open
    is_open.set()


def test_what_was_accepted_is_answered_before_the_end(tmp_path: Path, gate: threading.Event) -> None:
    """Requests that wait for their batch when the shutdown begins get their answers, over HTTP and gRPC."""
    tiny_artifact(tmp_path, name="digits")
    inputs = over_grpc.InferInput("x", [1, 8], "FP32")
    inputs.set_data_from_numpy(np.zeros((1, 8), np.float32))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with running(tmp_path, overrides=("instances=1",)) as up:
            gate.clear()
            asked = [pool.submit(infer, up) for _ in range(3)]
            client = over_grpc.InferenceServerClient(str(up.started.grpc))
            asked.append(pool.submit(client.infer, "digits", [inputs]))
            batcher = up.server.repository.models["digits"].find("").batcher
            until_on_threads(lambda: len(batcher._open) == 4)
            threading.Timer(0.3, gate.set).start()
        assert [one.result()[0] for one in asked[:3]] == [200] * 3
        assert asked[3].result().as_numpy("y").shape == (1, 3)
        client.close()
    assert up.unanswered == 0


def test_a_server_ends_though_an_engine_hangs(tmp_path: Path, gate: threading.Event) -> None:
    """Once the grace is over: the request is refused as unavailable and counted, and none waits for the engine."""
    tiny_artifact(tmp_path, name="digits")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with running(tmp_path, grace_s=0.0) as up:
            gate.clear()
            asked = pool.submit(infer, up)
            batcher = up.server.repository.models["digits"].find("").batcher
            until_on_threads(lambda: len(batcher._open) == 1)
        assert asked.result()[0] == 503
        assert not gate.is_set()
    assert up.unanswered == 1
