"""The engine alone in a loop, without any server: what no server can exceed on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from bench.serving.race.samples import Arrays, Format
from stoker import engines
from stoker.artifacts import Artifact

BATCHES = (1, 2, 4, 8, 16, 32)


def rates(artifact: Artifact, samples: Sequence[Arrays], seconds: float) -> dict[str, float]:
    """Samples a second for each layout of two cores and each batch, each for about so many seconds."""
    found: dict[str, float] = {}
    for instances, threads in ((1, 2), (2, 1)):
        loaded = engines.load(artifact, instances=instances, threads=threads)
        for batch in BATCHES:
            found[f"{instances}x{threads} b{batch}"] = _rate(loaded, artifact, samples, batch, seconds)
        for engine in loaded:
            engine.close()
    return found


def _rate(
    loaded: Sequence[engines.Engine], artifact: Artifact, samples: Sequence[Arrays], batch: int, seconds: float
) -> float:
    """All engines at once, each in a thread; samples of like length share a batch, as a perfect batcher would do."""
    ordered = sorted(samples, key=lambda sample: sum(array.size for array in sample.values()))
    stacked = [
        Format(artifact.manifest.inputs).stack(ordered[start : start + batch])
        for start in range(0, len(ordered) - batch + 1, batch)
    ]
    for engine in loaded:
        for inputs in stacked:
            engine.run(inputs)
    counts = [0] * len(loaded)
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        while time.perf_counter() < until:
            for inputs in stacked:
                loaded[number].run(inputs)
            counts[number] += len(stacked) * batch

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(loaded))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def expected(artifact: Artifact, samples: Sequence[Arrays]) -> list[NDArray[Any]]:
    """The engine's answer to each sample alone."""
    (engine,) = engines.load(artifact, instances=1, threads=1)
    name = artifact.manifest.outputs[0].name
    answers = [engine.run({key: array[None] for key, array in sample.items()})[name][0].copy() for sample in samples]
    engine.close()
    return answers
