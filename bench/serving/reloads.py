"""Hot reloads under load: errors, gaps and memory of a server that takes a new version again and again.

    python -m bench.serving.reloads [--reloads 200] [--engines onnxruntime,openvino] [--callers 4]

A server in a process of its own serves an MLP of 5.3 MB; callers ask it without a pause over HTTP, each sending the
next request once the last is answered. Meanwhile a version is copied into the repository and loaded over the admin
port, old ones are removed, and so on. Recorded: requests that were not answered with 200 (the bar: none), versions that
answered, latencies against those without reloads, how long a reload took, and the server's resident memory and threads
as reloads went by.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from bench.serving.mlp import mlp_artifact
from stoker import artifacts
from stoker.devices import attached_cpu
from stoker.loadtesting.http_connection import Address, address_of, ask
from stoker.loadtesting.inference_requests import http_request, infer_payload
from stoker.loadtesting.measurement import LoadTarget, greet, with_callers
from stoker.loadtesting.server_process import served_in_child
from stoker.records import EngineName
from stoker.records.service import LoadMeasurement
from stoker.serving.server import ServerOptions, run

WIDTHS = (256, 1024, 1024, 10)
KEPT = 3
SLICE_S = 3.0


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--engines", default="onnxruntime,openvino")
    parser.add_argument("--callers", type=int, default=4)
    arguments = parser.parse_args()
    machine = attached_cpu()
    result = {
        "what": "hot reloads under load",
        "command": f"python -m bench.serving.reloads --reloads {arguments.reloads} --engines {arguments.engines} "
        f"--callers {arguments.callers}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{machine.model}, {machine.cores} cores, Python {platform.python_version()}",
        "libraries": {name: version_of(name) for name in ("onnxruntime", "openvino", "uvicorn")},
        "engines": {
            engine: _measure(engine, arguments.reloads, arguments.callers) for engine in arguments.engines.split(",")
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    results.joinpath(f"serving_reloads_{result['date']}.json").write_text(text + "\n")


def _measure(engine: EngineName, reloads: int, callers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        variants = [mlp_artifact(folder / "made" / "mlp", WIDTHS, engine=engine, seed=seed).path for seed in range(2)]
        models = folder / "models"
        shutil.copytree(variants[0], models / "mlp" / "1")
        options = ServerOptions(
            places=(models,),
            http_port=0,
            grpc_port=None,
            admin_port=0,
            watch_s=None,
            access_log=str(folder / "access.jsonl"),
        )
        with served_in_child(run, options) as (started, pid):
            target = _target(started.http, variants[0])
            greet(target)
            quiet = with_callers(target, callers, SLICE_S)
            load = _Load(target, callers)
            took, memory = _reload_all(models / "mlp", variants, reloads, address_of(started.admin), pid)
            found = load.end()
        answered_by = _versions_in(folder / "access.jsonl")
    return _told(quiet, found, took, memory, answered_by)


def _reload_all(
    model: Path, variants: list[Path], reloads: int, admin: Address, pid: int
) -> tuple[list[float], list[dict[str, int]]]:
    """Copy a version in and have it loaded, so many times: seconds of each, and the server's memory on the way."""
    took, memory = [], [_memory(pid, 0)]
    for number in range(2, reloads + 2):
        aside = model / f".{number}"
        shutil.copytree(variants[number % len(variants)], aside)
        aside.rename(model / str(number))
        began = time.perf_counter()
        answer = ask(admin, http_request(admin, "POST", "/v2/repository/models/mlp/load", b"{}"), timeout_s=60)
        took.append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(f"reload {number} failed: {answer.body!r}")
        for old in artifacts.versions(model)[:-KEPT]:
            shutil.rmtree(model / str(old))
        if (number - 1) % max(1, reloads // 20) == 0:
            memory.append(_memory(pid, number - 1))
    return took, memory


class _Load:
    """Callers on a thread, until the end."""

    def __init__(self, target: LoadTarget, callers: int) -> None:
        self._found: list[LoadMeasurement] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go, args=(target, callers))
        self._thread.start()

    def _go(self, target: LoadTarget, callers: int) -> None:
        while not self._is_over.is_set():
            self._found.append(with_callers(target, callers, SLICE_S))

    def end(self) -> list[LoadMeasurement]:
        """Stop; what was measured, a slice each."""
        self._is_over.set()
        self._thread.join()
        return self._found


def _target(url: str | None, version: Path) -> LoadTarget:
    address = address_of(str(url))
    golden = artifacts.read(version).golden()
    return LoadTarget(address, [infer_payload(address, "mlp", {"x": golden.inputs["x"][:1]})])


def _memory(pid: int, reloads: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {"reloads": reloads, "rss_mib": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"])}


def _versions_in(log: Path) -> Counter[str]:
    """Statuses of the access log's inference lines."""
    lines = (json.loads(line) for line in log.read_text().splitlines())
    return Counter(str(line["status"]) for line in lines if line["path"].endswith("/infer"))


def _told(
    quiet: LoadMeasurement,
    found: list[LoadMeasurement],
    took: list[float],
    memory: list[dict[str, int]],
    statuses: Counter[str],
) -> dict[str, Any]:
    failures = sum((Counter(one.failures) for one in found), Counter())
    settled = [one["rss_mib"] for one in memory if one["reloads"] >= len(took) // 4]
    return {
        "reloads": len(took),
        "requests": sum(one.requests for one in found),
        "failures": dict(failures),
        "statuses_in_the_access_log": dict(statuses),
        "requests_per_s": {
            "without": round(quiet.throughput, 1),
            "with_median": round(statistics.median(one.throughput for one in found), 1),
        },
        "p99_ms": {
            "without": round(1e3 * quiet.quantile(0.99).seconds, 2),
            "with_median": round(1e3 * statistics.median(one.quantile(0.99).seconds for one in found), 2),
            "with_worst": round(1e3 * max(one.quantile(0.99).seconds for one in found), 2),
        },
        "reload_s": {"median": round(statistics.median(took), 3), "max": round(max(took), 3)},
        "rss_growth_from_a_quarter_on_mib": settled[-1] - settled[0],
        "memory": memory,
    }


if __name__ == "__main__":
    main()
