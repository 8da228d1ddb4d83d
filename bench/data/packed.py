"""A packed dataset of any size against the same shape in memory: samples a second while a CNN is trained, and memory.

    python -m bench.data.packed --folder DIR [--gib 20] [--side 64] [--batch 32] [--updates 8] [--rounds 9]

Images of random bytes are generated and packed into DIR (killed, it goes on where it was), and some of them compared
with what was generated. Then a ResNet-9 is trained on samples from all over the packed set, while the process's
resident memory is read after every update; then in turns on the packed set and on a part of it that lies in memory, by
the same step, shifted, flipped and standardised on the way. Last, batches are fetched alone. Printed and written to
bench/results/: the ratio of the two rates by wall clock and by the process's CPU time (median over rounds, with its
spread), the peak of resident memory, and what packing took. Whether the system's cache holds the files is not forced;
how much of them it could hold is stated. `--keep` leaves the packed files there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stoker
from stoker.devices.cpu import attached_cpu
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import datasets_of
from stoker.loading.transforms import Normalize, RandomFlip, RandomShift
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Generated:
    """Image i is a stretch of 16 MiB of random bytes, from a place that i chooses; label i % 10."""

    name = "generated"

    def __init__(self, size: int, side: int) -> None:
        self.size, self.shape = size, (3, side, side)
        self._row = 3 * side * side
        self._bytes = np.random.default_rng(0).integers(0, 256, 2**24, dtype=np.uint8)

    def __len__(self) -> int:
        """Number of images."""
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The image, uint8 [3, side, side], and its label."""
        start = index * 2_654_435_761 % (len(self._bytes) - self._row)
        return self._bytes[start : start + self._row].reshape(self.shape), index % 10


class Run:
    """Updates of a ResNet-9 on the samples of `data`."""

    def __init__(self, data: Any, batch: int) -> None:
        self.batch = batch
        job = stoker.Job(
            model=lambda: stoker.zoo.ResNet9(width=16, in_channels=3),
            data=data,
            loss="cross_entropy",
            optimizer=stoker.SGD(lr=1e-3),
            batch=batch,
            until=stoker.epochs(1000),
            augment=[RandomShift(4), RandomFlip(), Normalize(0.5, 0.25)],
        )
        sets, plan = datasets_of(job), Plan(device="cpu", micro_batch=batch, loader="inline", num_workers=0)
        self.step = Step(job, plan, Coupling(kind="batch_norm", group=batch, causes=("BatchNorm2d",), evidence="known"))
        source = BatchSource(sets.train, self.step.pipeline(sets.train, augmented=True), sets.extent(job), 0, plan)
        self._batches: Iterator[Batch] = source.batches(Position(), sets.extent(job).updates_per_epoch * 1000)
        self._done = 0

    def updates(self, count: int) -> None:
        """Make updates."""
        for _ in range(count):
            self.step.update(next(self._batches), self._done, 0.1)
            self._done += 1

    def rates(self, count: int) -> tuple[float, float]:
        """Samples a second over so many updates, by the wall clock and by CPU time."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.updates(count)
        return tuple(count * self.batch / spent for spent in (time.perf_counter() - wall, time.process_time() - cpu))


def resident_bytes() -> int:
    """What this process holds of memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def watched(run: Run, updates: int) -> dict[str, float]:
    """Resident memory before and while updates are made [MiB]."""
    run.updates(2)
    before, seen = resident_bytes(), [0]
    for _ in range(updates):
        run.updates(1)
        seen.append(resident_bytes())
    return {"before": before / 2**20, "peak": max(seen) / 2**20, "updates": updates, "samples": updates * run.batch}


def fetched_per_s(data: Any, batch: int, batches: int) -> float:
    """Samples a second fetched alone, by CPU time."""
    samples = datasets_of(
        stoker.Job(
            model=torch.nn.Identity,
            data=data,
            loss="mse",
            optimizer=stoker.SGD(lr=1.0),
            batch=batch,
            until=stoker.epochs(1),
        )
    ).train
    order = samples.order(1).indices(0, 0, min(len(samples), batch * batches))
    started = time.process_time()
    for at in range(0, len(order) - batch + 1, batch):
        samples.fetch(order[at : at + batch], 0)
    return (len(order) // batch) * batch / (time.process_time() - started)


def compared(found: list[tuple[tuple[float, float], tuple[float, float]]], clock: int) -> dict[str, float]:
    """The ratio of rates, packed over memory, by one of the clocks: median and spread over rounds."""
    ratios = sorted(packed[clock] / memory[clock] for packed, memory in found)
    return {
        "packed_samples_per_s": statistics.median(packed[clock] for packed, _ in found),
        "memory_samples_per_s": statistics.median(memory[clock] for _, memory in found),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--watched", type=int, default=100)
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Pack, measure, print and write the result."""
    arguments = parsed()
    torch.set_num_threads(1)
    generated = Generated(int(arguments.gib * 2**30) // (3 * arguments.side**2), arguments.side)
    load = os.getloadavg()[0]
    started = time.perf_counter(), time.process_time()
    packed = stoker.data.packed(generated, arguments.folder)
    num_bytes = packed.num_bytes
    packing = {"wall_s": time.perf_counter() - started[0], "cpu_s": time.process_time() - started[1]}
    chosen = np.random.default_rng(1).integers(0, len(packed), 500)
    images, labels = packed.rows(chosen)
    for image, label, index in zip(images, labels, chosen.tolist(), strict=True):
        assert np.array_equal(image.numpy(), generated[index][0])
        assert int(label) == index % 10
    memory = watched(from_packed := Run(packed, arguments.batch), arguments.watched)
    few = np.arange(min(len(packed), 2**28 // (3 * arguments.side**2)))
    at_hand = packed.rows(few)
    from_memory = Run(at_hand, arguments.batch)
    from_memory.updates(2)
    rounds = [
        (from_packed.rates(arguments.updates), from_memory.rates(arguments.updates)) for _ in range(arguments.rounds)
    ]
    result = {
        "what": "a packed dataset against the same shape in memory, a ResNet-9 (width 16) trained on both in turns",
        "command": f"python -m bench.data.packed --folder DIR --gib {arguments.gib:g} --side {arguments.side} "
        f"--batch {arguments.batch} --updates {arguments.updates} --rounds {arguments.rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, {os.sysconf('SC_PHYS_PAGES') * _PAGE / 2**30:.1f} GiB, torch "
        f"{torch.__version__}, 1 thread",
        "load": {"before": load, "after": os.getloadavg()[0]},
        "samples": len(packed),
        "image": list(generated.shape),
        "packed_gib": num_bytes / 2**30,
        "packing_in_this_process": packing,
        "compared_samples": len(chosen),
        "resident_mib": memory,
        "by_wall_clock": compared(rounds, 0),
        "by_cpu_time": compared(rounds, 1),
        "fetched_alone_samples_per_cpu_s": {
            name: fetched_per_s(data, arguments.batch, 200) for name, data in (("packed", packed), ("memory", at_hand))
        },
        "peak_resident_mib_with_the_part_in_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    (results / f"packed_{result['date']}.json").write_text(text + "\n", encoding="utf-8")
    if not arguments.keep:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
