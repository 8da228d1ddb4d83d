"""`stoker serve` as a process: what it prints, how it ends, and what signals do."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker import flow
from stoker.cli.services import announce, example
from stoker.errors import ServiceError
from stoker.flow.serving import require_libraries
from stoker.testing.models import tiny_artifact
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

    With a delay they do where more rows were under way lately than are now; where that was forgotten meanwhile, it is
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
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def test_a_grace_that_was_too_short_is_an_error(tmp_path: Path) -> None:
    """The exit code is 4, and the number of unanswered requests is told."""
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
        (["models", "--http-port", "-1", "--grpc-port", "-1"], 2, "a server needs a door"),
        (["models", "--admin-host", "::"], 2, "--admin-keys"),
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
            ["bash", "-c", f"{line} -s --noproxy '*'"], capture_output=True, text=True, check=True, timeout=20
        )
        assert json.loads(answer.stdout)["model_name"] == "digits"


def test_serving_starts_without_torch(tmp_path: Path) -> None:
    """A server of exported models has no use for it: neither its memory nor its seconds."""
    tiny_artifact(tmp_path, name="digits")
    script = (
        "import os, signal, sys, threading\n"
        "from stoker import flow\n"
        "def up(started):\n"
        "    print('torch' in sys.modules)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"flow.serve({str(tmp_path)!r}, announce=up, http_port=0, grpc_port=0, admin_port=None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout == "False\n"


def test_a_library_that_is_missing_is_named() -> None:
    """With the extra that brings it."""
    with pytest.raises(ServiceError, match="serving needs no_such_library") as caught:
        require_libraries(("json", "no_such_library"))
    assert caught.value.remedy == "pip install 'stoker[serve]'"
    assert flow.serve is not None
