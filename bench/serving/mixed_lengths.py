"""Requests of 8 to 128 tokens to a transformer: batches chosen by measured time, against batches of all that waits.

    python -m bench.serving.mixed_lengths models/minilm [--rounds 5] [--seconds 8]

`models/minilm` is an exported model with inputs `input_ids` and `attention_mask` (all-MiniLM-L6-v2 here). Clients send
one text each, of a length drawn anew for every request, and wait for the answer; all in one process. The other side is
the same batcher, engine and threads, but each batch is all that waits (up to 32 rows) padded to its longest text, first
come first served, as batchers without an eye for lengths make them. Sides take turns. Recorded for 16 and 64 clients:
answers a second, median and 99th percentile of waits, CPU time an answer, rows a batch, the share of padding; medians
over rounds, and two ratios with their ranges: of answers a second, and of CPU time an answer, in which neighbours on
the machine show less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import numpy as np
import uvloop

from stoker.artifacts import Artifact, read
from stoker.engines import Engine, load
from stoker.records import ServiceSettings
from stoker.serving.batching import queue, scheduler
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.queue import Lane, LatencyTable, RequestPart
from stoker.serving.batching.scheduler import Executed

SHORTEST, LONGEST = 8, 128
CLIENTS = (16, 64)
Figures = dict[str, float]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    artifact = read(arguments.model)
    (engine,) = load(artifact, instances=1, threads=1)
    result = {
        "what": "requests of 8 to 128 tokens: batches by measured time (chosen) and of all that waits (everything)",
        "command": f"python -m bench.serving.mixed_lengths MODEL --rounds {arguments.rounds} "
        f"--seconds {arguments.seconds:g}",
        "model": f"{artifact.manifest.name}, {artifact.manifest.engine} {artifact.manifest.precision}, 1 thread",
        "date": datetime.now(UTC).date().isoformat(),
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores in the last minute",
        "machine": f"{artifact.manifest.proved_on}, {platform.machine()}, Python {platform.python_version()}",
        "libraries": artifact.manifest.libraries,
        **{
            f"{clients} clients": _compared(artifact, engine, clients, arguments.rounds, arguments.seconds)
            for clients in CLIENTS
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    results.joinpath(f"mixed_lengths_{result['date']}.json").write_text(text + "\n")


def _compared(artifact: Artifact, engine: Engine, clients: int, rounds: int, seconds: float) -> dict[str, object]:
    """Both sides in turns."""
    sides: dict[str, list[Figures]] = {"chosen": [], "everything": []}
    for number in range(rounds):
        sides["chosen"].append(uvloop.run(_load(artifact, engine, clients, seconds, number)))
        with _everything_at_once():
            sides["everything"].append(uvloop.run(_load(artifact, engine, clients, seconds, number)))
    pairs = list(zip(*sides.values(), strict=True))
    faster = sorted(one["answers_a_second"] / other["answers_a_second"] for one, other in pairs)
    cheaper = sorted(other["cpu_s_an_answer"] / one["cpu_s_an_answer"] for one, other in pairs)
    return {
        **{
            side: {key: round(statistics.median(one[key] for one in figures), 4) for key in figures[0]}
            for side, figures in sides.items()
        },
        "times_the_answers": {"median": statistics.median(faster), "min": faster[0], "max": faster[-1]},
        "times_the_answers_for_the_same_cpu_time": {
            "median": statistics.median(cheaper),
            "min": cheaper[0],
            "max": cheaper[-1],
        },
    }


@contextmanager
def _everything_at_once() -> Iterator[None]:
    """A batcher that does not look at lengths."""

    def everything(lane: Lane, _head: RequestPart, _table: LatencyTable, max_rows: int) -> scheduler.BatchComposition:
        (shelf,) = lane.values()
        return scheduler.BatchComposition(max_rows, (shelf,), 0.0, 0.0)

    one_shelf = mock.patch.object(queue, "round_up", return_value=LONGEST)
    with one_shelf, mock.patch.object(scheduler, "choose", everything):
        yield


async def _load(artifact: Artifact, engine: Engine, clients: int, seconds: float, seed: int) -> Figures:
    """What so many clients get in so many seconds, after a quarter of it to warm up."""
    seen: list[Executed] = []
    waits: list[float] = []
    draw = np.random.default_rng(seed)
    batcher = Batcher([engine], artifact.manifest, ServiceSettings(), observe=seen.append)
    await batcher.warm(artifact.golden(), budget_s=4.0)
    cpu_from, answered = time.process_time(), 0
    counted_from = time.monotonic() + seconds / 4
    until = counted_from + seconds

    async def client() -> None:
        nonlocal answered
        while (asked := time.monotonic()) < until:
            length = int(draw.integers(SHORTEST, LONGEST + 1))
            ids = draw.integers(1000, 20_000, (1, length))
            await batcher.ask({"input_ids": ids, "attention_mask": np.ones_like(ids)})
            answered += 1
            if counted_from <= time.monotonic():
                waits.append(time.monotonic() - asked)

    await asyncio.gather(*(client() for _ in range(clients)))
    await batcher.drain()
    batcher.close()
    waits.sort()
    useful, padding = sum(one.elements for one in seen), sum(one.padding for one in seen)
    return {
        "answers_a_second": len(waits) / (time.monotonic() - counted_from),
        "cpu_s_an_answer": (time.process_time() - cpu_from) / answered,
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[int(0.99 * len(waits))],
        "rows_a_batch": sum(one.rows for one in seen) / len(seen),
        "padding_share": padding / (useful + padding),
    }


if __name__ == "__main__":
    main()
