"""Calls of `stoker.train` one after another in a process, as in a notebook: seconds from the call to the first update.

    python -m bench.start.notebook [--kind tabular] [--calls 4] [--out FILE]

Each call has another learning rate and another number of updates; `$STOKER_CACHE` is empty at first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import stoker
from bench.forecast.registration import dated
from bench.start.kinds import KINDS, WEIGHT_DECAY, prepare, read
from bench.train import results


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="tabular", choices=sorted(KINDS))
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kind, calls = KINDS[given.kind], list[dict[str, float]]()
    with tempfile.TemporaryDirectory(prefix="bench-notebook-") as name:
        folder = Path(name)
        os.environ |= {"STOKER_CACHE": str(folder / "cache"), "STOKER_RUNS": str(folder / "runs")}
        prepare(folder)
        data = read(kind, folder)
        for number in range(given.calls):
            job = stoker.Job(
                model=kind.model,
                data=data,
                loss=kind.loss,
                batch=kind.batch,
                optimizer=stoker.AdamW(lr=kind.lr / (1 + number), weight_decay=WEIGHT_DECAY),
                until=stoker.updates(200 + 10 * number),
            )
            first: list[float] = []

            def updated(_: object, moments: list[float] = first) -> None:
                moments.append(time.perf_counter())

            called, cpu_s = time.perf_counter(), time.process_time()
            stoker.train(job, new=True, sink=lambda _: None, hooks=[stoker.on("updated", updated)])
            calls.append(
                {
                    "first_update_s": first[0] - called,
                    "whole_s": time.perf_counter() - called,
                    "cpu_s": time.process_time() - cpu_s,
                }
            )
            print(" ".join(f"{key} {value:.3f}" for key, value in calls[-1].items()), flush=True)
    content = results.document("calls in one process", " ".join(["python -m bench.start.notebook", *sys.argv[1:]]), {})
    results.save(given.out or dated("notebook_calls"), {**content, "kind": kind.name, "calls": calls})
    return 0


if __name__ == "__main__":
    sys.exit(main())
