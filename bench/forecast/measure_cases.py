"""Training steps on the GPU here, in the form of published ones: what `bench.forecast.published` then forecasts.

    python -m bench.forecast.measure_cases CASES.csv --out FOLDER [--only REGEX] [--at-once 5] [--limit-s 240]
    python -m bench.forecast.measure_cases --show bench/results/gpu_cases_….json

A line of `CASES.csv` has the columns of `bench.forecast.published` but for what is measured. Each case is a process,
of which --at-once run at a time: models are made, and compiled, concurrently, and one process at a time computes. In
`FOLDER`: `cases.csv`, with the lower quartile of 12 updates after 3 [ms] and the memory allocated at most [GiB], and
`operations.json`, with the time on the GPU of each operation of one update, by the shapes of what it read, and of each
kernel. After `--limit-s` no case begins, and those that run are ended. Exit code 3 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.forecast.published import GIB, planner_of
from bench.forecast.registration import surroundings
from stoker.devices import attached_devices, planned_devices
from stoker.jobs import load_job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.pinned_plan import plan_of
from stoker.records import Position
from stoker.stepping.step import Step

NO_DEVICE = 3
UPDATES, WARM_UP = 12, 3
_HOST_BOUND = 1.15
"""The host's time over that of all kernels from which on the host is what an update waits for."""
_RANGES = ("## Call", "Optimizer.", "ProfilerStep")
"""What the names of ranges begin with, which span kernels."""


def measured(case: dict[str, str], folder: Path, out: Path, num_compiled: int) -> dict[str, Any]:
    """Times of updates [s], peak memory [bytes], and the operations and kernels of one update, on this GPU."""
    settings = {name: str(value) for name, value in json.loads(case["set"]).items()}
    job, entry = load_job(folder / case["job"], settings)
    planner, place = planner_of(job, entry), planned_devices("cuda:0", attached_devices())[0]
    usual = {"optimizer_implementation": "fused", "loader": "device", "precision": "fp32"}
    plan = plan_of(usual | json.loads(case["plan"]), place, planner.profile("cuda"))
    step, data, numbers = Step(job, plan, planner.coupling), datasets_of(job), itertools.count()
    pipeline, extent = step.pipeline(data.train, augmented=True), data.extent(job)
    source = BatchSource(data.train, pipeline, extent, job.seed, plan)
    with contextlib.closing(source.batches(Position(), sys.maxsize)) as batches:

        def update() -> None:
            step.update(next(batches), next(numbers), 0.5)

        started = time.perf_counter()
        if plan.compile:
            update()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        first_s = time.perf_counter() - started
        if plan.compile:
            wait_for_others(_compiled(out), case["id"], num_compiled)
        with profiled():  # its first use takes seconds
            torch.zeros(1, device=step.device)
        with alone(out / "lock"):
            for _ in range(WARM_UP):
                update()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            times, host_s = timed(update)
            memory = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            with profiled() as watched:
                update()
                torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return {
        "id": case["id"],
        "plan": plan.in_words(),
        "update_s": times,
        "host_s": host_s,
        "first_update_s": first_s,
        "peak_bytes": memory[0],
        "reserved_bytes": memory[1],
        **listed(watched),
    }


def wait_for_others(folder: Path, name: str, count: int, patience_s: float = 100.0) -> None:
    """Return once so many are compiled, so that no first update of another disturbs what is measured."""
    folder.mkdir(exist_ok=True)
    (folder / name.replace("/", "-")).touch()
    ends = time.perf_counter() + patience_s
    while len(list(folder.iterdir())) < count and time.perf_counter() < ends:
        time.sleep(0.2)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold the lock under which one process at a time computes on the GPU."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def profiled() -> profile:
    """A profile of operations, with the shapes of what they read, and of kernels."""
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)


def timed(update: Any) -> tuple[list[float], float]:
    """Seconds from the end of one update to that of the next on the device, and what the host took for one [s]."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(UPDATES + 1)]
    marks[0].record()
    started = time.perf_counter()
    for mark in marks[1:]:
        update()
        mark.record()
    host_s = (time.perf_counter() - started) / UPDATES
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)], host_s


def listed(watched: profile) -> dict[str, Any]:
    """Operations by the shapes of their inputs, and kernels: seconds on the device together, and how many."""
    operations = [
        {"name": row.key, "shapes": row.input_shapes, "count": row.count, "seconds": row.self_device_time_total / 1e6}
        for row in watched.key_averages(group_by_input_shape=True)
        if row.device_type == DeviceType.CPU and row.self_device_time_total > 0
    ]
    kernels = [
        {"name": row.key[:200], "count": row.count, "seconds": row.self_device_time_total / 1e6}
        for row in watched.key_averages()
        if row.device_type == DeviceType.CUDA and row.self_device_time_total > 0 and not row.key.startswith(_RANGES)
    ]
    for rows in (operations, kernels):
        rows.sort(key=lambda row: -row["seconds"])
    return {"busy_s": sum(row["seconds"] for row in kernels), "operations": operations, "kernels": kernels}


def in_a_process(case: dict[str, str], given: argparse.Namespace, ends: float) -> dict[str, Any]:
    """As `measured`, in a process of its own; `problem` says why there is nothing."""
    if (left_s := ends - time.perf_counter()) <= 0:
        return {"id": case["id"], "problem": "no time was left"}
    command = [sys.executable, "-m", "bench.forecast.measure_cases", str(given.cases), "--out", str(given.out)]
    command += ["--one", case["id"], "--compiled-together", str(given.compiled_together)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return {"id": case["id"], "problem": "no time was left"}
    if answer.returncode:
        return {"id": case["id"], "problem": answer.stderr[-1500:]}
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and write it; 3 without a GPU, 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="folder of what is written")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print results of before, and measure nothing")
    parser.add_argument("--only", default="", help="cases whose id this expression matches")
    parser.add_argument("--at-once", type=int, default=5, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--compiled-together", type=int, default=0, help="compile so many cases, then measure them")
    parser.add_argument("--one", help="measure this case here, and print it")
    given = parser.parse_args(arguments)
    if given.show:
        for result in json.loads(given.show.read_text(encoding="utf-8"))["cases"]:
            print(f"{result['id']:<40} {result.get('problem') or _in_words(result)}")
        return 0
    if not (given.cases and given.out):
        parser.error("CASES and --out FOLDER are needed, or --show FILE")
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} finds no CUDA device here. Run this where one is.", file=sys.stderr)
        return NO_DEVICE
    with given.cases.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if given.one:
        case = next(row for row in rows if row["id"] == given.one)
        print(json.dumps(measured(case, given.cases.parent, given.out, given.compiled_together)))
        return 0
    chosen, results = [row for row in rows if re.search(given.only, row["id"])], dict[str, dict[str, Any]]()
    if not chosen:
        parser.error(f"--only {given.only!r} matches none of {', '.join(row['id'] for row in rows) or 'no cases'}")
    given.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(_compiled(given.out), ignore_errors=True)  # of an earlier run
    ends = time.perf_counter() + given.limit_s
    with ThreadPoolExecutor(given.at_once) as pool:
        for result in pool.map(lambda case: in_a_process(case, given, ends), chosen):
            results[result["id"]] = result
            print(f"{result['id']:<40} {result.get('problem') or _in_words(result)}", flush=True)
            document = {"machine": surroundings(), "cases": list(results.values())}
            (given.out / "operations.json").write_text(json.dumps(document), encoding="utf-8")
    write_cases(given.out / "cases.csv", chosen, results)
    return int(any("problem" in result for result in results.values()))


def _compiled(out: Path) -> Path:
    """The folder in which each case that is compiled leaves a mark."""
    return out / "compiled"


def step_ms_of(result: dict[str, Any]) -> float:
    """The lower quartile of the updates [ms]: what else a machine does only slows them down."""
    return 1e3 * statistics.quantiles(result["update_s"], n=4)[0]


def _in_words(result: dict[str, Any]) -> str:
    step_ms, busy_ms = step_ms_of(result), 1e3 * result["busy_s"]
    host_ms, peak_gib = 1e3 * result["host_s"], result["peak_bytes"] / GIB
    rate = products_tflops(result["operations"])
    times = f"{step_ms:8.2f} ms, busy {busy_ms:8.2f}, host {host_ms:7.2f}"
    return f"{times}, {peak_gib:6.2f} GiB, products {rate:4.0f} TFLOP/s"


def products_tflops(operations: Sequence[dict[str, Any]]) -> float:
    """Mean rate of an update's matrix products, of whatever dtypes [TFLOP/s]; 0 without any."""
    flops = seconds = 0.0
    for row in operations:
        if (first := {"aten::mm": 0, "aten::addmm": 1}.get(row["name"])) is not None:
            (rows, depth), (_, columns) = row["shapes"][first : first + 2]
            flops, seconds = flops + 2.0 * rows * depth * columns * row["count"], seconds + row["seconds"]
    return flops / seconds / 1e12 if seconds else 0.0


def write_cases(path: Path, rows: Sequence[dict[str, str]], results: dict[str, dict[str, Any]]) -> None:
    """The cases that were measured, as `bench.forecast.published` reads them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "measured_step_ms", "measured_mem_gib"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            result = results.get(row["id"], {})
            if "update_s" in result:
                is_host_bound = result["host_s"] > _HOST_BOUND * result["busy_s"]
                measured_here = {
                    "group": "bound by the host" if is_host_bound else row["group"],
                    "measured_step_ms": f"{step_ms_of(result):.3f}",
                    "measured_mem_gib": f"{result['peak_bytes'] / GIB:.3f}",
                }
                writer.writerow(row | measured_here)


if __name__ == "__main__":
    sys.exit(main())
