"""Where the CPU time of an answer goes: the engine's threads, the event loop, the thread that feeds the engine.

    python -m bench.serving.cpu_per_answer [--seconds 8]

The race's CNN, asked for one image at a time by 16 and 64 callers, with one instance of one thread and batches of up to
16 and 32; against the engine in a bare loop at the same batch. The rows that a batch had are shown. CPU time of
threads, as the kernel counts it: other work on the machine weighs less there than in rates, though it cools caches. The
callers' own time is not in it, and on two cores they take what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.serving.race import running as race
from bench.serving.race.contenders import Pythons, Setting, contenders
from bench.serving.race.workloads import WORKLOADS, make
from bench.train.results import document, save
from stoker.artifacts import Artifact
from stoker.artifacts.dtypes import Arrays
from stoker.engines import load
from stoker.loadtesting.http_connection import Address, ask
from stoker.loadtesting.inference_requests import http_request
from stoker.loadtesting.measurement import with_callers

RESULTS = Path(__file__).resolve().parents[1] / "results"
CALLERS, BATCHES = (16, 64), (16, 32)


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU time of each thread of a process so far [s]; the event loop's has the process's own number."""
    tasks = Path(f"/proc/{pid}/task")
    return {int(one.name): int((one / "schedstat").read_text().split()[0]) / 1e9 for one in tasks.iterdir()}


def bare_ms(artifact: Artifact, samples: list[Arrays], batch: int, seconds: float) -> float:
    """CPU time of an answer of the engine alone [ms]."""
    (engine,) = load(artifact, threads=1)
    inputs = {name: np.stack([sample[name] for sample in samples[:batch]]) for name in samples[0]}
    engine.run(inputs)
    began, until, answers = time.process_time(), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        engine.run(inputs)
        answers += batch
    took_s = time.process_time() - began
    engine.close()
    return 1e3 * took_s / answers


def rows_and_batches(address: Address, model: str) -> tuple[int, int]:
    """How many rows were answered so far, and in how many batches, as the server's statistics tell."""
    answer = ask(address, http_request(address, "GET", f"/v2/models/{model}/stats", b"", {}))
    (stats,) = json.loads(answer.body)["model_stats"]
    return stats["inference_count"], stats["execution_count"]


def served_ms(asked: race.Asked, batch: int, seconds: float, work: Path) -> list[dict[str, Any]]:
    """CPU time of an answer of the server, by its busiest threads [ms]."""
    started: list[int] = []
    popen = subprocess.Popen

    def noting(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    told, name = [], asked.artifact.path.parent.name
    with (
        mock.patch.object(race.subprocess, "Popen", noting),
        race.running(contenders(32)["stoker"], Pythons(), asked, Setting(1, 1, batch, 0.0), work) as target,
    ):
        with_callers(target, 4, 0.5)
        for callers in CALLERS:
            before, counted = thread_cpu_s(started[0]), rows_and_batches(target.address, name)
            found = with_callers(target, callers, seconds)
            spent = {tid: s - before.get(tid, 0.0) for tid, s in thread_cpu_s(started[0]).items()}
            rows, batches = rows_and_batches(target.address, name)
            loop = spent.pop(started[0])
            others = sorted((1e3 * s / found.answered for s in spent.values()), reverse=True)
            told.append(
                {
                    "callers": callers,
                    "answered": found.answered,
                    "loop_ms": 1e3 * loop / found.answered,
                    "others_ms": [round(one, 4) for one in others[:4]],
                    "all_ms": 1e3 * loop / found.answered + sum(others),
                    "rows_a_batch": round((rows - counted[0]) / (batches - counted[1]), 1),
                }
            )
    return told


def main() -> None:
    """Measure both, and write where the time went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    seconds = parser.parse_args().seconds
    workload = WORKLOADS[0]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        artifact, samples = make(workload.model, work / "models"), workload.samples()
        (engine,) = load(artifact, threads=1)
        output = artifact.manifest.outputs[0].name
        expected = [engine.run({name: array[None] for name, array in one.items()})[output][0] for one in samples]
        engine.close()
        asked = race.Asked(artifact, samples, expected)
        versions = {name: version(name) for name in ("stoker", "openvino", "uvicorn", "uvloop")}
        content = document(
            __doc__.splitlines()[0], f"python -m bench.serving.cpu_per_answer --seconds {seconds:g}", versions
        )
        content["load_average"] = os.getloadavg()
        content["batches"] = {
            str(batch): {
                "engine_alone_ms": bare_ms(artifact, samples, batch, seconds),
                "server": served_ms(asked, batch, seconds, work),
            }
            for batch in BATCHES
        }
    print(content["batches"])
    save(RESULTS / f"serving_cpu_per_answer_{datetime.now(UTC).date().isoformat()}.json", content)


if __name__ == "__main__":
    main()
