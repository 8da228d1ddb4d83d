"""What the batcher adds to a request: seconds beyond the engine's own, at 1, 16 and 64 clients.

    python -m bench.serving.batcher_overhead [--rounds 7] [--requests 2000]

The engine is a fixed amount of work that holds no GIL (a digest over so many bytes: about 1 ms, and for a batch 0.9 ms
and 0.1 ms a row). Clients send one row each and wait for the answer, in the same process and on the same event loop
(uvloop). In turns: the engine called in a bare loop; a thread that is handed each request over a lock and answers over
the loop, which is the least that leaves the loop free; the batcher. Recorded: medians over rounds of the time of a
request at one client, and of a row's share of wall and CPU time at 16 and 64, beside what the engine alone would take
for the batches that were cut.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import platform
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import uvloop

from stoker.artifacts import Golden
from stoker.artifacts.elements import Arrays
from stoker.records import ArtifactSource, Manifest, ServiceSettings, TensorSpec, Tolerance
from stoker.serving.batching import Batcher, Executed

BASE_S, ROW_S = 0.9e-3, 0.1e-3
CLIENTS = (1, 16, 64)


class Busy:
    """An engine that computes for a fixed time, in which other threads may run Python."""

    def __init__(self, bytes_a_second: float) -> None:
        self._bytes_a_second = bytes_a_second
        self._bytes = bytes(int(bytes_a_second * (BASE_S + 64 * ROW_S)))

    def run(self, inputs: Arrays) -> Arrays:
        """Twice the first three numbers of each row, after a while."""
        x = inputs["x"]
        hashlib.sha256(memoryview(self._bytes)[: int(self._bytes_a_second * (BASE_S + len(x) * ROW_S))]).digest()
        return {"y": x[:, :3] * 2}

    def close(self) -> None:
        """Nothing to give back."""


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    engine = Busy(_speed())
    rounds = [uvloop.run(_round(engine, arguments.requests)) for _ in range(arguments.rounds)]
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    beyond = sorted(one["batcher_1_us"] - one["bare_us"] for one in rounds)
    result = {
        "what": "what the batcher adds to a request, microseconds",
        "command": f"python -m bench.serving.batcher_overhead --rounds {arguments.rounds} "
        f"--requests {arguments.requests}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"uvloop {uvloop.__version__}, numpy {np.__version__}",
        **{key: round(value, 2) for key, value in medians.items()},
        "beyond_bare_1_us": {"median": beyond[len(beyond) // 2], "min": beyond[0], "max": beyond[-1]},
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    results.joinpath(f"batcher_overhead_{result['date']}.json").write_text(text + "\n")


async def _round(engine: Busy, requests: int) -> dict[str, float]:
    """One look at each side, in turns."""
    row = {"x": np.ones((1, 8), np.float32)}
    took = {"bare_us": await _timed(requests, 1, _bare(engine, row)), "hop_us": await _hop(engine, row, requests)}
    for clients in CLIENTS:
        counts = Counts()
        batcher = Batcher([engine], _manifest(), ServiceSettings(), observe=counts.add)
        await batcher.warm(Golden(row, {}))

        async def ask(batcher: Batcher = batcher) -> object:
            return await batcher.ask(row)

        await _timed(requests // 10 + clients, clients, ask)
        counts.clear()
        cpu = time.process_time()
        took[f"batcher_{clients}_us"] = await _timed(requests, clients, ask)
        took[f"cpu_{clients}_us"] = (time.process_time() - cpu) / counts.rows * 1e6
        took[f"engine_{clients}_us"] = counts.infer_s / counts.rows * 1e6
        took[f"rows_a_batch_{clients}"] = counts.rows / counts.batches
        await batcher.drain()
        batcher.close()
    return took


@dataclass
class Counts:
    """What the engine was asked to do."""

    rows: int = 0
    batches: int = 0
    infer_s: float = 0.0

    def add(self, executed: Executed) -> None:
        """Take in a batch."""
        self.rows += executed.rows
        self.batches += 1
        self.infer_s += executed.infer_s

    def clear(self) -> None:
        """Begin again."""
        self.rows, self.batches, self.infer_s = 0, 0, 0.0


def _bare(engine: Busy, row: Arrays) -> Callable[[], Awaitable[object]]:
    async def ask() -> object:
        return engine.run(row)

    return ask


async def _hop(engine: Busy, row: Arrays, requests: int) -> float:
    """A thread that answers each request in turn, and nothing else."""
    loop = asyncio.get_running_loop()
    bell, box = threading.Lock(), []
    bell.acquire()

    def work() -> None:
        while True:
            bell.acquire()
            if (future := box.pop()) is None:
                return
            loop.call_soon_threadsafe(future.set_result, engine.run(row))

    threading.Thread(target=work, daemon=True).start()

    async def ask() -> object:
        box.append(loop.create_future())
        future = box[-1]
        bell.release()
        return await future

    took = await _timed(requests, 1, ask)
    box.append(None)
    bell.release()
    return took


async def _timed(requests: int, clients: int, ask: Callable[[], Awaitable[object]]) -> float:
    """Microseconds of wall time a request, with so many clients that each wait for their answer."""

    async def client() -> None:
        for _ in range(requests // clients):
            await ask()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return (time.perf_counter() - started) / (requests // clients * clients) * 1e6


def _speed() -> float:
    """Bytes a second that are digested here."""
    data = bytes(4_000_000)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        hashlib.sha256(data).digest()
        times.append(time.perf_counter() - started)
    return len(data) / statistics.median(times)


def _manifest() -> Manifest:
    return Manifest(
        name="busy", engine="onnxruntime", precision="fp32", graph="", golden="",
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 8)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 3)),),
        tolerance=Tolerance(absolute=0.0, relative=0.0), proved_on="", made_at="", files=(),
        source=ArtifactSource(kind="onnx", name="", digest=""),
    )  # fmt: skip


if __name__ == "__main__":
    main()
