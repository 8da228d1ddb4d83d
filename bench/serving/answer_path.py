"""What an answer costs the event loop with everything in caches: from a request's bytes to those of its answer.

    python -m bench.serving.answer_path [--rounds 600]

A server with a model of one small layer, on OpenVINO, is asked in its own event loop by 16 connections at a time, whose
sockets only count: parsing, the protocol, the queue, a batch, the answer's bytes, counting; no system calls of a
network. Images have 3 x 32 x 32 FP32 in binary. What is told is the CPU time of the loop's thread for an answer, the
least and the median over rounds: the least is hardly touched by other work on the machine, so that two versions of the
source can be compared on a busy one. `cpu_per_answer` compares it with an engine that takes the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from uvicorn.server import ServerState

from bench.serving.background_server import BackgroundServer
from bench.serving.mlp import mlp_artifact
from bench.train.results import document, save
from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.inference_requests import infer_payload
from stoker.serving.http.connection import uvicorn_config
from stoker.serving.server import ServerOptions
from stoker.serving.service import ServerContext

RESULTS = Path(__file__).resolve().parents[1] / "results"
CONNECTIONS, FEATURES, CLASSES = 16, 3 * 32 * 32, 10
_WARM_ROUNDS = 20


class Answers:
    """Wakes whoever waits for so many answers: polling would cost more the longer an engine takes."""

    def __init__(self) -> None:
        self._missing = 0
        self._all = asyncio.Event()

    def expect(self, number: int) -> asyncio.Event:
        """Set once so many have come."""
        self._missing = number
        self._all.clear()
        return self._all

    def count(self) -> None:
        """One has come."""
        self._missing -= 1
        if not self._missing:
            self._all.set()


class Nowhere(asyncio.Transport):
    """A socket that takes everything and counts answers."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def is_closing(self) -> bool:
        """Never."""
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def writelines(self, list_of_data: object) -> None:
        """Take an answer."""
        self._answers.count()

    def resume_reading(self) -> None:
        """Nothing is read."""

    def close(self) -> None:
        """Nothing is open."""


async def rounds_us(edge: ServerContext, request: bytes, rounds: int) -> list[float]:
    """CPU time of the running loop's thread for an answer [µs], in each of so many rounds."""
    config, state = uvicorn_config(edge), ServerState()
    config.load()
    answers = Answers()
    sockets = [Nowhere(answers) for _ in range(CONNECTIONS)]
    connections = [config.http_protocol_class(config=config, server_state=state, app_state={}) for _ in sockets]
    for connection, end in zip(connections, sockets, strict=True):
        connection.connection_made(end)
    found = []
    for _ in range(_WARM_ROUNDS + rounds):
        before = time.thread_time()
        all_answered = answers.expect(CONNECTIONS)
        for connection in connections:
            connection.data_received(request)
        await all_answered.wait()
        found.append((time.thread_time() - before) / CONNECTIONS * 1e6)
    for connection in connections:
        connection.connection_lost(None)
    return found[_WARM_ROUNDS:]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=600)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        artifact = mlp_artifact(Path(temporary) / "small", (FEATURES, CLASSES), engine="openvino")
        image = np.random.default_rng(0).standard_normal((1, FEATURES), np.float32)
        request = infer_payload(Address("127.0.0.1", 80), "small", {"x": image}).request
        places = (artifact.path.parent,)
        with BackgroundServer(ServerOptions(places=places, http_port=0, grpc_port=None, admin_port=None)) as running:
            found = running.do(rounds_us(ServerContext(service=running.server.models), request, rounds))
    versions = {name: version(name) for name in ("stoker", "openvino", "uvicorn", "uvloop")}
    content = document(__doc__.splitlines()[0], f"python -m bench.serving.answer_path --rounds {rounds}", versions)
    content["load_average"] = os.getloadavg()
    content |= {
        "loop_us": {"least": round(min(found), 1), "median": round(statistics.median(found), 1)},
        "connections": CONNECTIONS,
    }
    print(content["loop_us"])
    save(RESULTS / f"answer_path_{datetime.now(UTC).date().isoformat()}.json", content)


if __name__ == "__main__":
    main()
