"""Runs at a Ray cluster, by a fake head that runs jobs as processes; a real one is in tests/places."""

from __future__ import annotations

import copy
import dataclasses
import http.client
import itertools
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching.at_place import LIMIT_OVER
from stoker.launching.bundle import code_bundle, stoker_bundle
from stoker.launching.launcher import Request, Submission
from stoker.launching.logged_run import STATE, events_in, files_in, run_order, sent_files, state_in, write_files
from stoker.launching.ray import LAUNCHER
from stoker.records import ENDED, LaunchState
from stoker.records.codec import dumps
from stoker.testing.launcher_conformance import LauncherConformance, LiveLauncherConformance
from tests.flow.command import BLOBS
from tests.launching.fake_ray import NODES, FakeRay


class TestConformance(LauncherConformance):
    launcher = LAUNCHER
    words = {  # noqa: RUF012 - a test's table
        "head": (1, 1, ""),
        "head:8265/4": (1, 4, ""),
        "http://head:8265/4xa100": (1, 4, "a100"),
        "https://ray.example.com/cpu": (1, 1, "cpu"),
        "[::1]:8265/2": (1, 2, ""),
        "head/2x4xa100": (2, 4, "a100"),
    }
    bad_words = ("", "head:port", "head/0", "ftp://head", "head/2x", "he ad", "head/0x4xa100")
    environments = (
        {},
        {"STOKER_HOST": "1", "STOKER_HOSTS": "2", "STOKER_MASTER": "10.0.0.1", "STOKER_PORT": "4711"},
    )
    unreachable = {"url": "http://127.0.0.1:9", "job": "x-1", "directory": "~/.stoker/runs/x"}  # noqa: RUF012 - likewise
    client = ("ray",)


def submission(head: FakeRay, folder: Path, **changes: Any) -> Submission:
    """A run of 100 points that takes some seconds, by this Python and this Stoker."""
    job = folder / "job" / "blobs.py"
    job.parent.mkdir(exist_ok=True)
    job.write_text(BLOBS)
    settings: dict[str, Any] = {
        "run": "blobs-1a2b3c",
        "target": LAUNCHER.parse(f"{head.word}/cpu"),
        "code": code_bundle(job, {"blobs.py": BLOBS}, [], ()),
        "stoker": stoker_bundle(),
        "job_file": "blobs.py",
        "arguments": ("--set", "epochs=4000", "--threads", "1"),
        "environment": sys.executable,
        "owner": "me@here:/runs",
        "options": {"root": str(folder / "root")},
    }
    return Submission(**settings | changes)


class TestLive(LiveLauncherConformance):
    launcher = LAUNCHER

    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """A fake head."""
        with FakeRay(folder) as head:
            yield submission(head, folder)

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[Any]:
        """States at short intervals."""
        until = time.monotonic() + 240
        while time.monotonic() < until:
            state = LAUNCHER.state(handle)
            yield state
            if state.phase in phases:
                return
            time.sleep(0.05)
        raise AssertionError(f"none of {phases}: {state}")


@pytest.mark.slow
def test_a_run_finishes_and_is_not_sent_again(tmp_path: Path) -> None:
    """Its exit code, its log and its weights come home; a second run of the same files sends nothing."""
    with FakeRay(tmp_path) as head:
        quick = submission(head, tmp_path, arguments=("--set", "epochs=2", "--threads", "1"))
        handle = LAUNCHER.start(quick, lambda text: None)
        assert handle["sent_bytes"] > 10_000
        *_, last = TestLive().until(handle, *ENDED)
        assert (last.phase, last.exit_code) == ("finished", 0), last
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert json.loads((tmp_path / "home/run.json").read_text())["status"] == "finished"
        assert (tmp_path / "home/model.safetensors").stat().st_size > 100
        log = LAUNCHER.events(handle, 0)
        assert LAUNCHER.events(handle, 100) == log[100:]
        again = LAUNCHER.start(quick, lambda text: None)
        assert again["sent_bytes"] == 0
        assert again["job"] != handle["job"]
        assert sum(request.startswith("PUT") for request in head.requests) == 1


def test_a_job_that_waits_is_queued_and_a_cluster_that_forgot_it_has_lost_it(tmp_path: Path) -> None:
    """By Ray's own states, with its message as evidence."""
    with FakeRay(tmp_path, holds=True) as head:
        handle = LAUNCHER.start(submission(head, tmp_path), lambda text: None)
        state = LAUNCHER.state(handle)
        assert (state.phase, state.evidence) == ("queued", "status is PENDING")
        assert LAUNCHER.events(handle, 0) == b""
        head.jobs.clear()
        assert LAUNCHER.state(handle).phase == "lost"


def test_a_run_goes_on_at_the_node_where_it_was(tmp_path: Path) -> None:
    """Its directory is there; with a mirror any node will do, and of a node that is gone it is said."""
    with FakeRay(tmp_path, holds=True) as head:

        def posted(said: list[str], *arguments: str) -> dict[str, float]:
            handle = LAUNCHER.start(submission(head, tmp_path, arguments=arguments), said.append)
            job = head.jobs[handle["job"]]
            job.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(130)"])
            job.process.wait()
            return dict(job.body.get("entrypoint_resources", {}))

        assert posted([]) == {}
        assert posted([]) == {"node:192.0.2.2": 0.001}
        assert posted([], "--keep", "s3://bucket/runs") == {}
        head.nodes = copy.deepcopy(NODES)
        head.nodes["data"]["result"]["result"][0]["state"] = "DEAD"
        said: list[str] = []
        assert posted(said) == {}
        assert any("192.0.2.2, where the run has been, is gone" in text for text in said)


@pytest.mark.parametrize("answer", [(404, "no such log"), (500, "the agent is gone")])
def test_a_job_whose_log_cannot_be_read_is_as_its_status_says(tmp_path: Path, answer: tuple[int, str]) -> None:
    """One that succeeded is finished, and is not trained again; one that runs is not known."""

    class Forgetful(FakeRay):
        def respond(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
            return answer if path.endswith("/logs") else super().respond(method, path, body)

    with Forgetful(tmp_path, holds=True) as head:
        handle = LAUNCHER.start(submission(head, tmp_path), lambda text: None)
        found = []
        for code in ("input()", "raise SystemExit(3)", ""):
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            head.jobs[handle["job"]].process = process
            if code != "input()":
                process.wait()
            state = LAUNCHER.state(handle)
            found.append((state.phase, state.exit_code))
            process.communicate(b"\n")
    assert found == [("starting" if answer[0] == 404 else "unknown", None), ("failed", 3), ("finished", 0)]


def test_a_job_that_was_killed_while_it_trained_is_lost(tmp_path: Path) -> None:
    """As by the system for memory: it did begin, and the same command goes on; one that ended said so itself."""
    with FakeRay(tmp_path, holds=True) as head:
        handle = LAUNCHER.start(submission(head, tmp_path), lambda text: None)
        job = head.jobs[handle["job"]]
        said = LaunchState(phase="running", why="training")
        job.log.write_bytes(STATE + dumps(said, indent=None).encode() + b"\n")
        job.process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        job.process.wait()
        state = LAUNCHER.state(handle)
    assert (state.phase, state.why) == ("lost", "Ray lost the job's process")


def test_an_answer_that_breaks_off_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy or a head that dies in the middle of it: one sentence, and the state is not known."""

    def broken(answer: http.client.HTTPResponse) -> bytes:
        raise http.client.IncompleteRead(b"{", 100)

    with FakeRay(tmp_path, holds=True) as head:
        handle = LAUNCHER.start(submission(head, tmp_path), lambda text: None)
        monkeypatch.setattr(http.client.HTTPResponse, "read", broken)
        assert LAUNCHER.state(handle).phase == "unknown"


def test_a_run_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    """A name that collides is refused, and nothing is sent."""
    with FakeRay(tmp_path, holds=True) as head:
        LAUNCHER.start(submission(head, tmp_path), lambda text: None)
        with pytest.raises(PlaceFailed, match="another owner"):
            LAUNCHER.start(submission(head, tmp_path, owner="you@there:/runs"), lambda text: None)
        assert len(head.jobs) == 1


def test_what_ray_cannot_do_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """Secrets would be seen by everybody at the dashboard."""
    with FakeRay(tmp_path) as head:
        with pytest.raises(PlaceFailed, match="HF_TOKEN cannot be sent"):
            LAUNCHER.start(submission(head, tmp_path, secrets=("HF_TOKEN",)), lambda text: None)
        assert head.requests == []


def test_the_probe_says_which_devices_are_missing(tmp_path: Path) -> None:
    """Two cores and no GPU are enough for a CPU; four A100 are not there, and then there is no offer."""
    with FakeRay(tmp_path) as head:
        probe = LAUNCHER.probe(LAUNCHER.parse(f"{head.word}/cpu"), {})
        assert (probe.missing, probe.cores) == ((), 2)
        assert probe.facts["Ray"] == "2.60.0"
        target = LAUNCHER.parse(f"{head.word}/4xa100")
        assert "4 a100" in LAUNCHER.probe(target, {}).missing[0]
        assert LAUNCHER.offers(Request(target=target)) == ()
        nodes = copy.deepcopy(NODES)
        nodes["data"]["result"]["result"][0]["resources_total"] |= {"GPU": 4.0, "accelerator_type:A100": 1.0}
        head.nodes = nodes
        assert LAUNCHER.probe(target, {}).device == "A100"
        (offer,) = LAUNCHER.offers(Request(target=target))
        assert (offer.starts_in_s, offer.price_per_h) == (None, None)  # both unknown: no limit of cost is kept by that


def nodes_with(*resources: dict[str, float]) -> dict[str, Any]:
    """The nodes' answer with these resources, each with two CPUs."""
    nodes: dict[str, Any] = copy.deepcopy(NODES)
    (first,) = nodes["data"]["result"]["result"]
    nodes["data"]["result"]["result"] = [
        first | {"node_ip": f"192.0.2.{i}", "resources_total": {"CPU": 2.0, **more}}
        for i, more in enumerate(resources, 2)
    ]
    return nodes


def posted(folder: Path, nodes: dict[str, Any], shape: str, **options: str) -> dict[str, Any]:
    """The resources that a job asks for."""
    with FakeRay(folder, nodes=nodes, holds=True) as head:
        target = LAUNCHER.parse(f"{head.word}{shape}")
        given = submission(head, folder, target=target, options={"root": str(folder / "root"), **options})
        body = head.jobs[LAUNCHER.start(given, lambda text: None)["job"]].body
    return {name.removeprefix("entrypoint_"): asked for name, asked in body.items() if name.startswith("entrypoint_")}


@pytest.mark.parametrize(
    ("shape", "options", "asked"),
    [
        ("/4", {"cpus": "8"}, {"num_cpus": 8.0, "num_gpus": 4}),
        ("/2xa100", {"cpus": "8"}, {"num_cpus": 8.0, "num_gpus": 2}),
        ("/1", {}, {"num_gpus": 1}),
        ("", {}, {"num_gpus": 1}),
        ("/2xcpu", {}, {"num_cpus": 2.0}),
        ("/cpu", {"cpus": "2"}, {"num_cpus": 2.0}),
    ],
)
def test_a_job_asks_for_its_gpus_and_for_its_cpus(
    tmp_path: Path, shape: str, options: dict[str, str], asked: dict[str, float]
) -> None:
    """One does not replace the other, and a cluster with GPUs behind a head without gives one unless a CPU is named."""
    nodes = nodes_with({}, {"GPU": 4.0, "accelerator_type:A100": 1.0})
    found = posted(tmp_path, nodes, shape, **options)
    assert {name: number for name, number in found.items() if name.startswith("num_")} == asked


@pytest.mark.parametrize(
    ("shape", "models", "asked"),
    [
        ("/2xa100", ("A100-80G",), "A100-80G"),
        ("/8xamd-instinct-mi300x-oam", ("AMD-Instinct-MI300X-OAM",), "AMD-Instinct-MI300X-OAM"),
        ("/a100", ("A100-80G", "A100"), "A100"),
    ],
)
def test_a_job_asks_for_a_gpu_by_the_name_that_a_node_has(
    tmp_path: Path, shape: str, models: tuple[str, ...], asked: str
) -> None:
    """What the probe takes for the device is what Ray is asked for: it would wait for ever for another spelling."""
    nodes = nodes_with({}, *({"GPU": 8.0, f"accelerator_type:{model}": 1.0} for model in models))
    assert posted(tmp_path, nodes, shape)["resources"] == {f"accelerator_type:{asked}": 0.001}


def test_a_cluster_without_gpus_gives_a_cpu_but_not_several_gpus(tmp_path: Path) -> None:
    """The best device is the CPU there; `/4` is four GPUs, and would wait for ever."""
    assert posted(tmp_path, nodes_with({}), "") == {}
    with FakeRay(tmp_path) as head:
        assert "4 GPU" in LAUNCHER.probe(LAUNCHER.parse(f"{head.word}/4"), {}).missing[0]


def test_something_else_than_ray_is_named(tmp_path: Path) -> None:
    """A wrong port answers with something else, or not at all."""
    with pytest.raises(PlaceUnreachable, match="does not answer"):
        LAUNCHER.probe(LAUNCHER.parse("127.0.0.1:9"), {})


def test_marked_lines_are_found_in_what_a_platform_adds() -> None:
    """Prefixes, colours, other lines, a line that is not whole yet."""
    log = (
        b'INFO something\n(blobs, pid=12) STOKER event {"a": 1}\r\nSTOKER event {"b": 2}\nSTOKER state {broken\n'
        b'STOKER event {"c"'
    )
    assert events_in(log, 0) == b'{"a": 1}\n{"b": 2}\n'
    assert events_in(log, 9) == b'{"b": 2}\n'
    assert state_in(log) is None


def test_data_that_a_node_has_to_have_are_checked_before_the_run_starts(tmp_path: Path) -> None:
    """A path that is not there is a sentence of its own, and nothing of the run is begun."""
    there, gone = str(tmp_path), str(tmp_path / "train.parquet")
    one = TestConformance().submission("head/cpu", secrets=(), expected=(there, gone))
    for path, content in sent_files(one):
        file = tmp_path / "sent" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    with pytest.raises(PlaceFailed, match=r"has no .*/train\.parquet, which the job reads and which was not sent"):
        run_order(tmp_path / "sent", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_files_from_a_log_cannot_leave_the_directory(tmp_path: Path) -> None:
    """Names that lead elsewhere are left out, and content that is not as announced is not written."""
    log = b"".join(
        b"STOKER file " + json.dumps({"name": name, "sha256": "0" * 64, "num_bytes": 1}).encode() + b"\n"
        for name in ("run.json", "../evil", "/etc/evil", ".bashrc")
    )
    assert list(files_in(log + b'STOKER file {"name": "cut\nSTOKER file [1]\n')) == ["run.json"]
    sent = b'STOKER file {"name": "run.json"}\nSTOKER data AAAA\nSTOKER data A\nSTOKER file {\n'
    assert write_files(sent, tmp_path / "home", files_in(log)) == ["run.json"]
    assert not list(itertools.chain((tmp_path / "home").glob("*")))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        *((code, b"<html>hello\n\n") for code in (200, 404, 502, 503)),
        (404, b'{"status": 404, "error": "Not Found"}'),
        (200, b'{"kind": "Status", "status": "Failure"}'),
    ],
)
def test_what_a_proxy_answers_says_nothing_of_the_run(code: int, body: bytes) -> None:
    """Its page of login, of a route that is gone, of a dashboard that restarts: the run may be training on."""

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        handle = {"url": f"http://127.0.0.1:{server.server_address[1]}", "job": "x-1", "directory": "~/x"}
        assert LAUNCHER.state(handle).phase == "unknown"
        if code != 404:
            with pytest.raises(PlaceUnreachable, match="answer"):
                LAUNCHER.events(handle, 0)
        server.shutdown()


def test_an_address_that_is_none_is_said_in_plain_words() -> None:
    """Without what Python's library writes around it."""
    with pytest.raises(PlaceUnreachable, match=r"does not answer: \[Errno") as refused:
        LAUNCHER.probe(LAUNCHER.parse("no-such-host.invalid"), {})
    assert "urlopen" not in refused.value.message


@pytest.mark.parametrize("code", [200, 404, 500])
def test_a_body_that_breaks_off_is_no_answer_whatever_its_status(tmp_path: Path, code: int) -> None:
    """A proxy that ends within the body, of an answer or of an error, leaves the state unknown, in one sentence."""

    class Cut(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")

    with HTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        handle = {"url": f"http://127.0.0.1:{server.server_address[1]}", "job": "x-1", "directory": "~/x"}
        state = LAUNCHER.state(handle)
        with pytest.raises(PlaceUnreachable, match="does not answer"):
            LAUNCHER.events(handle, 0)
        server.shutdown()
    assert (state.phase, state.why) == ("unknown", "the cluster does not answer")


def test_a_run_of_several_nodes_is_a_driver_without_devices(tmp_path: Path) -> None:
    """It asks Ray for the devices of each node itself; a run goes on at any nodes, which see one folder."""
    gpus = copy.deepcopy(NODES)
    first = gpus["data"]["result"]["result"][0]
    first["resources_total"] |= {"GPU": 4.0, "accelerator_type:A100": 1.0}
    second = {**copy.deepcopy(first), "node_ip": "192.0.2.3", "node_id": "2"}
    with FakeRay(tmp_path, nodes=gpus, holds=True) as head:
        target = LAUNCHER.parse(f"{head.word}/2x4xa100")
        assert LAUNCHER.probe(target, {}).missing == (
            "only 1 of 1 has 4 a100 (the most GPUs on one: 4; asked for: 2 nodes): ask for fewer, or add a node",
        )
        assert LAUNCHER.offers(Request(target=target)) == ()
        gpus["data"]["result"]["result"].append(second)
        assert LAUNCHER.probe(target, {}).missing == ()
        assert LAUNCHER.offers(Request(target=target))[0].num_nodes == 2
        LAUNCHER.start(submission(head, tmp_path, target=target, options={"root": "/shared", "cpus": "8"}), print)
        (body,) = (job.body for job in head.jobs.values())
    words = shlex.split(body["entrypoint"])
    assert words[1:4] == ["python", "-m", "stoker.launching.ray_nodes"]
    assert words[4] == "2"
    assert json.loads(words[5]) == {"CPU": 8.0, "GPU": 4, "accelerator_type:A100": 0.001}
    assert words[6:] == [sys.executable, "run", "/shared"]
    assert not [name for name in body if name.startswith("entrypoint_")]


@pytest.mark.slow
def test_the_limit_is_kept_at_the_cluster_when_nobody_follows(tmp_path: Path) -> None:
    """The run saves and leaves before it, is stopped with the reason, and what was sent is not sent again for it."""
    with FakeRay(tmp_path) as head:
        long = ("--set", "epochs=100000", "--threads", "1")
        first = submission(head, tmp_path, arguments=long, most_held_s=10.0, save_s=1.0)
        handle = LAUNCHER.start(first, lambda text: None)
        *_, last = TestLive().until(handle, *ENDED)
        assert (last.phase, last.exit_code) == ("stopped", LIMIT_OVER), last
        assert "of 10.0 s, the limit: saved and left" in last.why
        again = LAUNCHER.start(dataclasses.replace(first, most_held_s=30.0), lambda text: None)
        assert again["sent_bytes"] == 0
        LAUNCHER.stop(again)
