"""A real Ray cluster on this machine, of one node, then two; needs an environment with Ray, `STOKER_RAY` names it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.launching import ray
from stoker.launching.launcher import Request, Submission
from stoker.launching.ray import LAUNCHER
from stoker.records import ENDED
from stoker.testing.launcher_conformance import LiveLauncherConformance
from tests.launching import test_ray as fakes
from tests.launching.test_ray import submission

RAY = Path(os.environ.get("STOKER_RAY", "build/ray")) / "bin" / "ray"
pytestmark = [
    pytest.mark.places,
    pytest.mark.skipif(not RAY.exists(), reason="no Ray in build/ray: `make build/ray`"),
]


class Cluster:
    """A head node with two CPUs, and a second node of this machine once it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.word, self.port = f"127.0.0.1:{_free_port()}", _free_port()
        self._ray(
            "start",
            "--head",
            "--port",
            str(self.port),
            "--dashboard-host",
            "127.0.0.1",
            "--dashboard-port",
            self.word.rpartition(":")[2],
            "--num-cpus",
            "2",
            "--disable-usage-stats",
            "--temp-dir",
            str(folder),
        )

    def has_two_nodes(self) -> None:
        """Start a second node of two CPUs on this machine, if there is none, and wait until it is there."""
        target = LAUNCHER.parse(f"{self.word}/2x1xcpu")
        if not LAUNCHER.probe(target, {}).missing:
            return
        # In one folder each node's agent would unpack a job's files where the other has them.
        folder, port = str(self.folder / "2"), str(_free_port())
        own = ["--temp-dir", folder, "--dashboard-agent-listen-port", port, "--num-cpus", "2"]
        self._ray("start", f"--address=127.0.0.1:{self.port}", *own, "--disable-usage-stats")
        until = time.monotonic() + 60
        while LAUNCHER.probe(target, {}).missing:
            assert time.monotonic() < until
            time.sleep(0.5)

    def _ray(self, *words: str) -> None:
        path = f"{RAY.absolute().parent}{os.pathsep}{os.environ['PATH']}"  # jobs have `python` from there
        program, environment = [str(RAY.absolute()), *words], {**os.environ, "PATH": path}
        subprocess.run(program, env=environment, check=True, capture_output=True, timeout=180)

    def stop(self) -> None:
        """End the processes of this cluster alone."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.folder).encode() in path.read_bytes():
                    os.kill(int(path.parent.name), 9)
            except OSError:
                continue


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One cluster for all tests here; its sockets need a short path."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    made = Cluster(folder)
    yield made
    made.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class TestRealRay(LiveLauncherConformance):
    launcher = LAUNCHER

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """The cluster."""
        yield submission(self.cluster, folder, run=f"live-{folder.name}")  # type: ignore[arg-type]

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[Any]:
        """States at short intervals."""
        yield from fakes.TestLive().until(handle, *phases)


def test_a_finished_run_comes_home(cluster: Cluster, tmp_path: Path) -> None:
    """Trained to its end at the node; its directory is as it was there."""
    run = submission(cluster, tmp_path, run="whole", arguments=("--set", "epochs=20", "--threads", "1"))  # type: ignore[arg-type]
    handle = LAUNCHER.start(run, lambda text: None)
    *_, last = fakes.TestLive().until(handle, *ENDED)
    assert (last.phase, last.exit_code) == ("finished", 0), last
    LAUNCHER.fetch(handle, tmp_path / "home")
    there = tmp_path / "root/runs/whole"
    for name in ("run.json", "model.safetensors", "events.jsonl"):
        assert (tmp_path / "home" / name).read_bytes() == (there / name).read_bytes()


def test_a_cluster_without_gpus_says_so(cluster: Cluster) -> None:
    """The real answers have the fields that the probe reads."""
    probe = LAUNCHER.probe(LAUNCHER.parse(f"{cluster.word}/4xa100"), {})
    assert "0 GPUs" in "".join(probe.facts.values())
    assert probe.missing
    assert not LAUNCHER.probe(LAUNCHER.parse(f"{cluster.word}/cpu"), {}).missing


def test_two_nodes_are_one_run(cluster: Cluster, tmp_path: Path) -> None:
    """A rank on each, by a placement group; the run comes home, and a third node is asked for in vain."""
    target = LAUNCHER.parse(f"{cluster.word}/2x1xcpu")
    cluster.has_two_nodes()
    assert LAUNCHER.offers(Request(target=target))[0].num_nodes == 2
    arguments = ("--set", "epochs=20", "--threads", "1")
    run = submission(cluster, tmp_path, run="two", arguments=arguments, target=target)  # type: ignore[arg-type]
    handle = LAUNCHER.start(run, lambda text: None)
    *_, last = fakes.TestLive().until(handle, *ENDED)
    assert (last.phase, last.exit_code) == ("finished", 0), ray._log(handle).decode()[-3000:]
    there = tmp_path / "root/runs/two"
    assert {path.name for path in (there / "launch").glob("host-*.json")} == {"host-0.json", "host-1.json"}
    LAUNCHER.fetch(handle, tmp_path / "home")
    assert json.loads((tmp_path / "home/run.json").read_text())["status"] == "finished"
    plan = json.loads((tmp_path / "home/plan.json").read_text())["candidates"][0]["plan"]
    assert plan["layout"]["replicas"] * plan["layout"]["shards"] == 2
    assert LAUNCHER.probe(LAUNCHER.parse(f"{cluster.word}/3x1xcpu"), {}).missing


def test_ranks_save_and_leave_when_their_driver_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Ray ends the actors, and not what they have started: that sees it, and the same command goes on."""
    cluster.has_two_nodes()
    target = LAUNCHER.parse(f"{cluster.word}/2x1xcpu")
    arguments = ("--set", "epochs=3000", "--threads", "1")
    run = submission(cluster, tmp_path, run="orphans", arguments=arguments, target=target)  # type: ignore[arg-type]
    handle = LAUNCHER.start(run, lambda text: None)
    there = tmp_path / "root/runs/orphans"
    _until(lambda: '"progress"' in _text(there / "events.jsonl"))
    os.kill(_processes(b"stoker.launching.ray_nodes", tmp_path)[0], signal.SIGKILL)
    _until(lambda: not _processes(b"--run-dir", there))
    assert json.loads(_text(there / "events.jsonl").splitlines()[-1])["kind"] == "stopped", "the ranks have saved"
    _until(lambda: LAUNCHER.state(handle).phase == "lost")
    assert list((tmp_path / "root/sent").iterdir()), "ranks may still have read from it"
    again = LAUNCHER.start(run, lambda text: None)
    _until(lambda: '"resumed"' in _text(there / "events.jsonl"))
    LAUNCHER.stop(again)
    *_, last = fakes.TestLive().until(again, *ENDED)
    assert last.phase == "stopped", last
    _until(lambda: not list((tmp_path / "root/sent").iterdir()))


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.3)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _processes(word: bytes, folder: Path) -> list[int]:
    """Numbers of the processes whose command has a word, and names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if word in words and any(str(folder).encode() in one for one in words):
                found.append(int(path.parent.name))
    return found
