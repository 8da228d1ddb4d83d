"""Three updates of a job in a process that is fresh, and what it took of the machine's memory; prints JSON.

python -m bench.forecast.resident_run CASE retained|default|mapped
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from bench.forecast.memory_jobs import CASES, SEPARABLE, Case
from stoker.devices.malloc import apply_malloc, resident_bytes
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Malloc, Position
from stoker.stepping.step import Step

UPDATES = 3


def measure(case: Case, malloc: Malloc) -> dict[str, float]:
    """Train in this process, which is fresh: resident bytes before, the peak, the CPU time of an update [s]."""
    torch.set_num_threads(1)
    if problem := apply_malloc(malloc):
        raise SystemExit(problem)
    job, plan = case.job(), case.plan_with(malloc)
    data = datasets_of(job)
    before = resident_bytes()
    step = Step(job, plan, SEPARABLE)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    times = []
    for update, batch in enumerate(source.batches(Position(), UPDATES)):
        started = time.process_time()
        step.update(batch, update, update / 100)
        times.append(time.process_time() - started)
    return {"before": before, "peak": _high_water_bytes(), "update_s": min(times[1:])}


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the system does not tell a process's peak memory")


if __name__ == "__main__":
    print(json.dumps(measure(next(case for case in CASES if case.name == sys.argv[1]), sys.argv[2])))  # type: ignore[arg-type]
