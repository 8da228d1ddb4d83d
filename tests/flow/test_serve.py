"""`stoker serve` as a process: what it prints, how it ends, and what signals do."""

from __future__ import annotations

import concurrent.futures
import fcntl
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker import api
from stoker.artifacts import read_settings
from stoker.cli.serve import announce, announce_changes, example
from stoker.errors import BadArtifact, BadJob, ServiceError
from stoker.records import TensorSpec
from stoker.serving.serve import Rollback, require_libraries
from stoker.serving.server import ServerOptions
from stoker.testing.tiny_models import tiny_artifact
from tests.flow.command import command, stoker_here
from tests.serving.asking import ask, fetch, question, running
from tests.serving.waiting import until_on_threads

FREE = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")


class Serving:
    """A server in a process of its own, and its document."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            command("serve", *arguments, *FREE, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started = self._document()

    def _document(self) -> dict[str, Any]:
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line == "}\n":
                return dict(json.loads("".join(lines)))
        raise AssertionError(f"it ended before it was up: {self.process.communicate()}")

    def end(self, *numbers: signal.Signals) -> tuple[int, str]:
        """Exit code and standard error after these signals."""
        for number in numbers:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Serving]:
    """A server that does not outlive the test."""
    one = Serving(*arguments)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def infer(started: dict[str, Any]) -> tuple[int, Any]:
    """Ask the tiny model."""
    return ask(f"{started['http']}/v2/models/digits/infer", question())


def waiting_rows(started: dict[str, Any]) -> float:
    """Rows in the queue."""
    lines = fetch(f"{started['admin']}/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("stoker_queue_rows{"))


Asked = list[concurrent.futures.Future[tuple[int, Any]]]


def waiting(started: dict[str, Any], pool: concurrent.futures.Executor, count: int) -> Asked:
    """So many requests that wait for their batch.

    With a delay they do where more rows were under way recently than are now; where that was forgotten since, it is
    tried again.
    """
    asked: Asked = []
    while not asked:
        ask(f"{started['http']}/v2/models/digits/infer", question(rows=8))
        asked = _waiting_or_none(started, [pool.submit(infer, started) for _ in range(count)])
    return asked


def _waiting_or_none(started: dict[str, Any], asked: Asked) -> Asked:
    """These requests once all of them wait; none where they were answered."""
    until_on_threads(lambda: waiting_rows(started) == len(asked) or any(one.done() for one in asked))
    if not any(one.done() for one in asked):
        return asked
    concurrent.futures.wait(asked)
    return []


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop_and_answers_what_it_accepted(tmp_path: Path) -> None:
    """SIGTERM while requests wait: they are answered, the exit code is 0, and nothing is on standard error."""
    tiny_artifact(tmp_path, name="digits")
    with serving(tmp_path, "--set", "max_delay_s=0.5") as one, concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert [model["name"] for model in one.started["models"]] == ["digits"]
        asked = waiting(one.started, pool, 3)
        assert one.end(signal.SIGTERM) == (0, "")
        assert [future.result()[0] for future in asked] == [200] * 3


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """With a request that waits for a minute, the first signal waits too; the second does not."""
    tiny_artifact(tmp_path, name="digits")
    with serving(tmp_path, "--set", "max_delay_s=60") as one, concurrent.futures.ThreadPoolExecutor(1) as pool:
        (asked,) = waiting(one.started, pool, 1)
        one.process.send_signal(signal.SIGINT)
        until_on_threads(lambda: not _accepts(one.started["http"]))
        assert one.process.poll() is None
        assert one.end(signal.SIGINT)[0] == 128 + signal.SIGINT
        assert asked.exception() is not None


def _accepts(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except OSError:
        return False
    return True


def test_a_grace_that_was_too_short_is_an_error(tmp_path: Path) -> None:
    """The exit code is 4, and the number of unanswered requests is reported."""
    tiny_artifact(tmp_path, name="digits")
    with (
        serving(tmp_path, "--set", "max_delay_s=60", "--grace", "0.1") as one,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        (asked,) = waiting(one.started, pool, 1)
        code, errors = one.end(signal.SIGTERM)
        assert code == 4
        assert "1 requests were still unanswered after 0.1 s" in errors
        assert asked.result()[0] == 503


def test_sighup_reads_keys_again_and_reopens_the_log(tmp_path: Path) -> None:
    """A key that is added is known, a log that was renamed goes on in a new file, a new version is seen."""
    tiny_artifact(tmp_path / "models", name="digits")
    keys, log = tmp_path / "keys", tmp_path / "access.jsonl"
    keys.write_text("alice:alice-has-a-long-key\n")
    with serving(tmp_path / "models", "--api-keys", keys, "--access-log", log) as one:
        url = f"{one.started['http']}/v2"
        assert ask(url, X_API_Key="bob-has-another-long-key")[0] == 401
        log.rename(tmp_path / "old.jsonl")
        keys.write_text("bob:bob-has-another-long-key\n")
        one.process.send_signal(signal.SIGHUP)
        until_on_threads(lambda: ask(url, X_API_Key="bob-has-another-long-key")[0] == 200)
        assert ask(url, X_API_Key="alice-has-a-long-key")[0] == 401
        assert one.end(signal.SIGTERM)[0] == 0
    assert (tmp_path / "old.jsonl").read_text().count("\n") >= 1
    assert '"caller": "bob"' in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "nowhere is not a directory"),
        (["empty"], 2, "there is no exported model in empty"),
        (["models", "--set", "digits.rows=3"], 2, "there is no setting 'rows'"),
        (["models", "--api-keys", "nowhere"], 2, "cannot be read"),
        (["models", "--http-port", "-1", "--grpc-port", "-1"], 2, "a server needs a port"),
        (["models", "--admin-host", "::"], 2, "--admin-keys"),
        (["models", "--dry-run"], 2, "--dry-run is for a cluster"),
        (["models", "--scale", "3"], 2, "--scale is for a cluster"),
        (["broken"], 4, "1 of 1 models cannot be served"),
    ],
)
def test_what_it_cannot_start_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, says: str
) -> None:
    """An exit code and a sentence."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    tiny_artifact("models", name="digits")
    tiny_artifact("broken", name="digits").graph_path.write_bytes(b"no graph")
    outcome = stoker_here("serve", *arguments, *(word for word in FREE if "--http-port" not in arguments))
    assert (outcome.code, says in outcome.err) == (code, True), outcome.err


def test_options_that_a_service_on_a_cluster_does_not_have_are_refused(tmp_path: Path) -> None:
    """Keys above all: without this its callers would need none."""
    outcome = stoker_here("serve", tmp_path, "--on", "k8s:team", "--set", "max_batch_rows=8", "--api-keys", "keys")
    assert outcome.code == 2
    assert "--api-keys is for a server on this machine, and has no effect on k8s:team" in outcome.err


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    """The address, the reason and the option."""
    tiny_artifact(tmp_path, name="digits")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = stoker_here("serve", tmp_path, *FREE, "--http-port", port)
    assert outcome.code == 4
    assert f"cannot listen at 127.0.0.1:{port} for http: Address already in use" in outcome.err


def test_the_start_page_shows_doors_models_and_a_line_to_ask_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed leads to an answer when it is typed; a model that is not served is there with its reason."""
    tiny_artifact(tmp_path, name="digits")
    tiny_artifact(tmp_path, name="broken").graph_path.write_bytes(b"no graph")
    with running(tmp_path, overrides=("instances=2", "threads=3")) as up:
        announce(up.started, as_json=False)
        page = capsys.readouterr().out
        for part in (up.started.http, up.started.grpc, up.started.admin, "2 × 3", "onnxruntime", "broken", "SHA-256"):
            assert str(part) in page
        line = example(up.started.models[0], up.started)
        assert line in page.replace("\n", "")
        answer = subprocess.run(
            ["bash", "-c", f"{line} -s --noproxy '*'"], capture_output=True, text=True, check=True, timeout=60
        )
        assert json.loads(answer.stdout)["model_name"] == "digits"


def test_the_line_to_ask_with_is_no_padding() -> None:
    """A mask of zeros says that there is nothing to look at, and the answer would be NaN."""
    inputs = tuple(
        TensorSpec(name=name, datatype="INT64", shape=("batch", "tokens"), pad=0) for name in ("ids", "mask")
    )
    model = SimpleNamespace(name="words", inputs=(*inputs, TensorSpec(name="age", datatype="FP32", shape=("batch",))))
    line = example(model, SimpleNamespace(http="http://here", has_keys=False, has_tls=False))  # type: ignore[arg-type]
    asked = json.loads(line.split("'")[1])["inputs"]
    assert [(one["name"], one["data"]) for one in asked] == [("ids", [1]), ("mask", [1]), ("age", [0])]


def test_serving_starts_without_torch(tmp_path: Path) -> None:
    """A server of exported models has no use for it: neither its memory nor its seconds."""
    tiny_artifact(tmp_path, name="digits")
    script = (
        "import os, signal, sys, threading\n"
        "from stoker import api\n"
        "def up(started):\n"
        "    print('torch' in sys.modules)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"api.serve({str(tmp_path)!r}, announce=up, http_port=0, grpc_port=0, admin_port=None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout == "False\n"


def script_of(folder: Path, body: str, **options: Any) -> list[str]:
    """A command that runs lines before it serves a folder at free ports."""
    given = {"http_port": 0, "grpc_port": None, "admin_port": None, **options}
    text = (
        "import os, signal, sys, threading\nfrom pathlib import Path\nfrom stoker import engines, api\n"
        f"{body}\n"
        f"api.serve({str(folder)!r}, announce=up, **{given!r})\n"
    )
    return [sys.executable, "-c", text]


def test_sighup_at_any_moment_of_the_start_is_followed_later(tmp_path: Path) -> None:
    """Before libraries are loaded, and while models are: the default of the signal would end the process."""
    tiny_artifact(tmp_path, name="digits")
    body = (
        "from stoker.serving import serve as serving\n"
        "from stoker.serving.server import Server\n"
        "def hup(act):\n"
        "    def acting(*given, **named):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        return act(*given, **named)\n"
        "    return acting\n"
        "serving.require_libraries = hup(serving.require_libraries)\n"
        "engines.load = hup(engines.load)\n"
        "async def reload(self):\n"
        "    print('reloaded', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "Server.reload = reload\n"
        "def up(started): print('up', flush=True)"
    )
    done = subprocess.run(script_of(tmp_path, body), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "up\nreloaded\n"), done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "engines.load = hang\ndef up(started): pass",
        "from stoker.serving.repository import repository\ndef up(started): repository.snapshot = hang",
    ],
    ids=["a load at the start", "a later look at the directories"],
)
def test_it_ends_though_a_disk_stalls_or_a_library_hangs(tmp_path: Path, body: str) -> None:
    """SIGTERM while a call never returns: no thread is waited for, and the exit code is 0."""
    tiny_artifact(tmp_path, name="digits")
    hang = "def hang(*given, **named):\n    os.kill(os.getpid(), signal.SIGTERM)\n    threading.Event().wait()\n"
    command = script_of(tmp_path, hang + body, watch_s=0.01, grace_s=0.1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_signals(tmp_path: Path) -> None:
    """Standard error is a full pipe, for the access log and for news of models; the server ends all the same."""
    tiny_artifact(tmp_path, name="digits")
    body = (
        "from stoker.cli.serve import announce_changes\n"
        "from stoker.serving import access_log\n"
        "access_log.MOST_WAITING = 20\n"
        "changes = announce_changes()\n"
        "changes.__enter__()\n"
        "def up(started): print(started.http, started.admin, flush=True)"
    )
    command = script_of(tmp_path, body, access_log="-", admin_port=0, grace_s=2.0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
            http, admin = process.stdout.readline().split()
            host, port = http.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                for _ in range(10):  # fewer at once than may wait on one connection
                    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
                    answers = b""
                    while answers.count(b"HTTP/1.1 200") < 20:
                        received = connection.recv(65536)
                        assert received, answers
                        answers += received
            for _ in range(3):
                process.send_signal(signal.SIGHUP)
                assert ask(f"{http}/v2/health/ready")[0] == 200
            for _ in range(5):  # each of them a line, which waits as well
                assert ask(f"{admin}/v2/repository/models/nobody/load", {})[0] == 404
            dropped = [
                line for line in fetch(f"{admin}/metrics")[1].decode().splitlines() if "log_dropped_total " in line
            ]
            assert float(dropped[-1].split()[1]) > 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_bad_key_file_does_not_stop_the_certificate_from_being_read(tmp_path: Path) -> None:
    """Each part of a reload is done whatever becomes of the others, and what failed is reported."""
    tiny_artifact(tmp_path / "models", name="digits")
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-has-a-long-key\n")
    with running(tmp_path / "models", api_keys=keys) as up:
        read: list[str] = []

        class Certificate:
            def read(self) -> None:
                read.append("certificate")

        up.server._tls = Certificate()  # type: ignore[assignment]
        keys.write_text("alice:short\n")
        tiny_artifact(tmp_path / "models", name="digits", seed=1)
        for _ in range(2):
            with pytest.raises(BadJob, match="at least 16"):
                up.do(up.server.reload())
        assert read == ["certificate"] * 2
        assert ask(f"{up.started.http}/v2/models/digits", X_API_Key="alice-has-a-long-key")[1]["versions"] == ["2"]


def test_the_default_grace_leaves_time_to_close_before_kubernetes_kills() -> None:
    """30 s after SIGTERM; the command line and Python agree."""
    from stoker.cli import serve

    assert ServerOptions(places=()).grace_s == inspect.signature(serve.serve).parameters["grace"].default < 30


def test_names_from_disk_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A directory may be named anything: its escapes are shown, not sent, on the page, in the log and in errors."""
    name = "\x1b]0;owned\x07\x1b[2Jdigits"
    tiny_artifact(tmp_path, name="digits")
    (tmp_path / "digits").rename(tmp_path / name)
    with announce_changes(), running(tmp_path) as up:
        announce(up.started, as_json=False)
        tiny_artifact(tmp_path, name=name, seed=1)
        for _ in range(2):
            up.do(up.server.repository.look_around())
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert r"\x1b]0;owned\x07" in out
    assert r"\x1b[2Jdigits: version 2 passed" in err
    outcome = stoker_here("rollback", tmp_path / name, "--to", "7")
    assert (outcome.code, "\x1b" in outcome.err, "has no version 7" in outcome.err) == (2, False, True)


def test_rolling_back_serves_an_older_version_and_the_newest_again(tmp_path: Path) -> None:
    """One command, which a running server takes up; other settings stay."""
    for seed in range(3):
        tiny_artifact(tmp_path, name="digits", seed=seed)
    model = tmp_path / "digits"
    (model / "service.json").write_text('{"max_batch_rows": 8}')
    with running(tmp_path) as up:

        def serving_now() -> list[str]:
            for _ in range(2):
                up.do(up.server.repository.look_around())
            return list(ask(f"{up.started.http}/v2/models/digits")[1]["versions"])

        outcome = stoker_here("rollback", model)
        assert (outcome.code, outcome.out) == (
            0,
            "digits: version 2 serves from now on, instead of the newest version\n",
        )
        assert serving_now() == ["2"]
        assert api.rollback(model) == Rollback(model="digits", before=2, now=1)
        assert serving_now() == ["1"]
        with pytest.raises(BadJob, match="no version older than 1"):
            api.rollback(model)
        assert api.rollback(model, to=3).now == 3
        assert serving_now() == ["3"]
        assert json.loads(stoker_here("rollback", model, "--newest", "--json").out)["now"] is None
        tiny_artifact(tmp_path, name="digits", seed=4)
        assert serving_now() == ["4"]
    assert read_settings(model).max_batch_rows == 8


def test_rolling_back_to_what_cannot_be_served_changes_nothing(tmp_path: Path) -> None:
    """No such version, one that is damaged, a directory that is no model, and options that contradict each other."""
    for seed in range(2):
        tiny_artifact(tmp_path, name="digits", seed=seed)
    model = tmp_path / "digits"
    (model / "1" / "model.onnx").write_bytes(b"damaged")
    for place, to, newest, kind, says in (
        (model, 7, False, BadArtifact, "has no version 7"),
        (model, None, False, BadArtifact, "is not what was exported"),
        (tmp_path, None, False, BadArtifact, "is no model"),
        (model, 1, True, BadJob, "contradict"),
    ):
        with pytest.raises(kind, match=says):
            api.rollback(place, to=to, newest=newest)
    assert not (model / "service.json").exists()


def test_a_library_that_is_missing_is_named() -> None:
    """With the extra that brings it."""
    with pytest.raises(ServiceError, match="serving needs no_such_library") as caught:
        require_libraries(("json", "no_such_library"))
    assert caught.value.remedy == "pip install 'stoker[serve]'"
    assert api.serve is not None
