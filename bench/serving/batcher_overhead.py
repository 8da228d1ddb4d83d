"""What the batcher adds to a request: seconds beyond the engine's own, at 1, 16 and 64 clients.

    python -m bench.serving.batcher_overhead [--rounds 7] [--requests 2000]

The engine is a fixed amount of work that holds no GIL (a digest over so many bytes: about 1 ms, and for a batch 0.9 ms
and 0.1 ms a row). Clients send one row each and wait for the answer, in the same process and on the same event loop
(uvloop). In turns: the engine called in a bare loop; a thread that is handed each request over a lock and answers over
the loop, which is the least that leaves the loop free; the batcher. Last, 64 clients that compute in Python for 60 µs
before and after each request, as decoding does, with the interpreter's switch interval at its default and at half a
millisecond. Recorded: medians over rounds of the wall and CPU time of a request, and how many rows a batch had;
`beyond_bare_cpu_us` is the CPU time of a request at one client beyond that of the bare loop, in which neighbours on the
machine show less.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import uvloop

from stoker.artifacts import Golden
from stoker.artifacts.dtypes import Arrays
from stoker.records import ArtifactSource, Manifest, ServiceSettings, TensorSpec, Tolerance
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.scheduler import Executed

BASE_S, ROW_S = 0.9e-3, 0.1e-3
CLIENTS = (1, 16, 64)
PYTHON_S = 60e-6
SWITCH_INTERVALS_S = (5e-3, 5e-4)


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
    beyond = sorted(one["batcher_1_cpu_us"] - one["bare_cpu_us"] for one in rounds)
    result = {
        "what": "what the batcher adds to a request, microseconds",
        "command": f"python -m bench.serving.batcher_overhead --rounds {arguments.rounds} "
        f"--requests {arguments.requests}",
        "date": datetime.now(UTC).date().isoformat(),
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores in the last minute",
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"uvloop {uvloop.__version__}, numpy {np.__version__}",
        **{key: round(value, 2) for key, value in medians.items()},
        "beyond_bare_cpu_us": {"median": beyond[len(beyond) // 2], "min": beyond[0], "max": beyond[-1]},
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    results.joinpath(f"batcher_overhead_{result['date']}.json").write_text(text + "\n")


async def _round(engine: Busy, requests: int) -> dict[str, float]:
    """One look at each side, in turns."""
    row = {"x": np.ones((1, 8), np.float32)}
    took = {
        **await _timed("bare", requests, 1, _bare(engine, row)),
        **await _hop(engine, row, requests),
    }
    for clients in CLIENTS:
        counts = Counts()
        batcher = Batcher([engine], _manifest(), ServiceSettings(), observe=counts.add)
        await batcher.warm(Golden(row, {}))

        async def ask(batcher: Batcher = batcher) -> object:
            return await batcher.ask(row)

        await _timed("", requests // 10 + clients, clients, ask)
        counts.clear()
        took |= await _timed(f"batcher_{clients}", requests, clients, ask)
        took[f"rows_a_batch_{clients}"] = counts.rows / counts.batches
        await batcher.drain()
        batcher.close()
    default = sys.getswitchinterval()
    for interval_s in SWITCH_INTERVALS_S:
        sys.setswitchinterval(interval_s)
        took |= await _busy_loop(engine, row, requests, f"busy_loop_{interval_s * 1e3:g}_ms")
    sys.setswitchinterval(default)
    return took


async def _busy_loop(engine: Busy, row: Arrays, requests: int, name: str) -> dict[str, float]:
    """The same, with 64 clients on a loop that computes in Python for each."""
    batcher = Batcher([engine], _manifest(), ServiceSettings())
    await batcher.warm(Golden(row, {}))

    async def ask() -> object:
        _compute()
        answer = await batcher.ask(row)
        _compute()
        return answer

    took = await _timed(name, requests, CLIENTS[-1], ask)
    await batcher.drain()
    batcher.close()
    return took


def _compute() -> None:
    """Hold the interpreter for a while."""
    until = time.thread_time() + PYTHON_S
    while time.thread_time() < until:
        pass


@dataclass
class Counts:
    """What the engine was asked to do."""

    rows: int = 0
    batches: int = 0

    def add(self, executed: Executed) -> None:
        """Take in a batch."""
        self.rows += executed.rows
        self.batches += 1

    def clear(self) -> None:
        """Begin again."""
        self.rows, self.batches = 0, 0


def _bare(engine: Busy, row: Arrays) -> Callable[[], Awaitable[object]]:
    async def ask() -> object:
        return engine.run(row)

    return ask


async def _hop(engine: Busy, row: Arrays, requests: int) -> dict[str, float]:
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

    took = await _timed("hop", requests, 1, ask)
    box.append(None)
    bell.release()
    return took


async def _timed(name: str, requests: int, clients: int, ask: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Microseconds of wall and CPU time a request, with so many clients that each wait for their answer."""

    async def client() -> None:
        for _ in range(requests // clients):
            await ask()

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(clients)))
    asked = requests // clients * clients
    return {
        f"{name}_us": (time.perf_counter() - started) / asked * 1e6,
        f"{name}_cpu_us": (time.process_time() - cpu) / asked * 1e6,
    }


def _speed() -> float:
    """Bytes a second that are digested here."""
    data = bytes(4_000_000)
    times = []
    for _ in range(20):
        started = time.thread_time()
        hashlib.sha256(data).digest()
        times.append(time.thread_time() - started)
    return len(data) / statistics.median(times)


def _manifest() -> Manifest:
    return Manifest(
        name="busy",
        engine="onnxruntime",
        precision="fp32",
        graph="",
        golden="",
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 8)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 3)),),
        tolerance=Tolerance(absolute=0.0, relative=0.0),
        proved_on="",
        made_at="",
        files=(),
        source=ArtifactSource(kind="onnx", name="", digest=""),
    )


if __name__ == "__main__":
    main()
