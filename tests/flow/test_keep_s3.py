"""Runs kept in S3: a server of S3's API on this machine (moto), and the real s3fs."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stoker
from stoker.records import Layout
from tests.flow.builders import assert_equal_weights
from tests.flow.command import Running, job_file, plan_file, stoker_here
from tests.flow.test_many_processes import LONG, TWO, plan_over
from tests.optional import optional

s3fs = optional("s3fs")
if importlib.util.find_spec("moto") is None:
    pytest.skip("moto, a server of S3's API, is not installed: `make test-keep`", allow_module_level=True)


class Bucket:
    """A server with one bucket; it can be paused, and keeps its objects."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/moto-api/", timeout=1).close()  # noqa: S310 - this machine
                break
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None
                assert time.monotonic() < until

    def files(self) -> list[str]:
        """All keys of the bucket."""
        fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        return [key.removeprefix("bucket/") for key in fs.find("bucket")]

    def newest(self) -> int:
        """Position of the newest whole checkpoint of the one run there [samples]."""
        return max((int(key.split("/")[3][:12]) for key in self.files() if key.endswith("/manifest.json")), default=0)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The server, which s3fs finds by its usual variables."""
    server = Bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    yield server
    server.process.kill()
    server.process.wait()


def test_killed_on_one_machine_a_run_ends_on_another_at_the_same_bits(bucket: Bucket) -> None:
    """SIGKILL while uploads are under way, three machines in turn: each goes on from what the bucket has."""
    path, plan = job_file(), plan_file()
    arguments: list[str | Path] = ["train", path, "--set", "epochs=500", "--plan", plan]
    keep = ["--keep", "s3://bucket/runs", "--checkpoint-every", "0.05"]
    begins = []
    for machine in ("a", "b"):
        with Running(*arguments, *keep, STOKER_RUNS=machine) as running:
            begins.append(running.until("started")["samples"])
            running.until("checkpointed", 2)
            while bucket.newest() <= begins[-1]:
                assert running.process.poll() is None
            os.killpg(running.process.pid, signal.SIGKILL)
    with Running(*arguments, *keep[:2], STOKER_RUNS="c") as running:
        ended = running.end()
    assert ended.code == 0, ended.err
    begins.append(ended.of("started")[0]["samples"])
    assert begins[0] == 0 < begins[1] < begins[2]
    whole = stoker_here(*arguments, "--run-dir", "whole")
    assert whole.code == 0
    name = next(path.name for path in Path("c").iterdir())
    assert_equal_weights(stoker.load(f"c/{name}"), stoker.load("whole"))
    keys = bucket.files()
    assert f"runs/{name}/model.safetensors" in keys
    checkpoints = {key.split("/")[3] for key in keys if "/checkpoints/0" in key}
    assert len(checkpoints) <= 3, "retention follows the run's own"


def test_another_layout_goes_on_from_the_bucket(bucket: Bucket) -> None:
    """Two processes on the first machine, killed while uploads are under way; one on the second, equal to rounding."""
    path = job_file(LONG)
    arguments: list[str | Path] = ["train", path, "--set", "epochs=200"]
    keep = ["--keep", "s3://bucket/runs"]
    with Running(
        *arguments, *keep, "--on", "2xhere", "--plan", plan_over(TWO), "--checkpoint-every", "0.05", STOKER_RUNS="a"
    ) as running:
        running.until("checkpointed", 2)
        while bucket.newest() == 0:
            assert running.process.poll() is None
        os.killpg(running.process.pid, signal.SIGKILL)
    with Running(*arguments, *keep, STOKER_RUNS="b") as running:
        ended = running.end()
    assert ended.code == 0, ended.err
    assert ended.of("resumed")[0]["samples"] > 0
    assert ended.of("replanned")[0]["new"]["layout"]["replicas"] == 1
    whole = stoker_here(*arguments, "--plan", plan_over(Layout()), "--run-dir", "whole")
    assert whole.code == 0
    weights = stoker.load(f"b/{next(Path('b').iterdir()).name}").weights()
    for name, tensor in stoker.load("whole").weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-3)


def test_a_bucket_that_goes_away_ends_no_run(bucket: Bucket) -> None:
    """The server is stopped in the middle and comes back: one warning, one note, and all of it is there at the end."""
    with Running(
        "train",
        job_file(),
        "--set",
        "epochs=900",
        "--plan",
        plan_file(),
        "--keep",
        "s3://bucket/runs",
        "--checkpoint-every",
        "0.05",
    ) as running:
        running.until("checkpointed", 3)
        bucket.process.send_signal(signal.SIGSTOP)
        running.until("checkpointed", 6)
        bucket.process.send_signal(signal.SIGCONT)
        ended = running.end()
    assert ended.code == 0, ended.err
    assert any(key.endswith("/model.safetensors") and "/checkpoints/" not in key for key in bucket.files())


def test_a_bucket_that_is_not_there_is_refused_at_once(bucket: Bucket) -> None:
    """And none is made."""
    done = stoker_here("train", job_file(), "--keep", "s3://no-such-bucket/runs")
    assert done.code == 2
    assert "--keep s3://no-such-bucket/runs cannot be written" in done.err
    assert not Path("runs").exists()
