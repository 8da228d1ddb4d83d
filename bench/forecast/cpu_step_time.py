"""Time of an update on the CPU here, forecast from the micro-benchmark and then measured.

    python -m bench.forecast.cpu_step_time [--rounds 5] [--budget 25] [--cpu-time] [--only NAME ...]

First the micro-benchmark, at every number of threads that the cases use; then all forecasts, from traces; then the
measurements: Stoker's own step on random samples, the cases taking turns in rounds, each case's median over rounds of
the median of its updates. Printed, and written to bench/results/, with the share of the CPU that others used.

`--cpu-time` counts the CPU time of the thread that computes, with one thread for every case: on a machine that others
use at the same time, their work then counts less.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.forecast.cpu_models import CASES, Case
from stoker.devices import attached_devices, load_between, sample_cpu
from stoker.devices.malloc import apply_malloc
from stoker.loading import BatchSource, datasets_of
from stoker.planning.time import operation_times
from stoker.planning.time.update import UpdateTime, counted, update_time
from stoker.profiling import trace_update
from stoker.profiling.micro_benchmark import measure_operations
from stoker.records import Coupling, Hardware, Malloc, Plan, Position, Trace, TraceSettings
from stoker.stepping import Step

BARS = {"median": 0.08, "p95": 0.20, "coverage": (0.70, 0.90)}
MALLOC: Malloc = "retained"
"""How memory is had while cases are measured: as plans for a CPU have it."""
_WARM_UPDATES, _SLICE_S, _MOST_UPDATES = 2, 0.6, 30


@dataclass
class Ready:
    """A case with its forecast, and the times measured so far [s]."""

    case: Case
    forecast: UpdateTime
    measured: list[float]


def coupling_of(case: Case) -> Coupling:
    """Batch norm over the whole batch where there is any; nothing else in these models couples samples."""
    with torch.device("meta"):
        names = {type(module).__name__ for module in case.model().modules()}
    if any("BatchNorm" in name for name in names):
        return Coupling(kind="batch_norm", group=case.batch, causes=("BatchNorm",), evidence="known")
    return Coupling(kind="separable", group=None, causes=(), evidence="known")


def traced(case: Case) -> Trace:
    """The trace of one of the case's updates."""
    job = case.job()
    micro_batch = case.micro_batch or case.batch
    settings = TraceSettings(
        target="cpu",
        capability="",
        micro_batch=micro_batch,
        parts=1 if micro_batch == case.batch else 2,
        precision=case.precision,
        memory_format=case.memory_format,
        optimizer_implementation="fused",
    )
    return trace_update(job, datasets_of(job), coupling_of(case), settings)


def forecasts(
    cases: Sequence[Case], budget_s: float, clock: Callable[[], float]
) -> tuple[list[Ready], dict[str, float]]:
    """Forecasts of all cases, and how long each micro-benchmark took [s]."""
    device = next(device for device in attached_devices() if device.kind == "cpu")
    ready, took = [], {}
    models = {}
    for threads in sorted({case.threads for case in cases}):
        benchmark = measure_operations(device, threads=threads, budget_s=budget_s, clock=clock)
        took[f"{threads} threads"] = benchmark.took_s
        hardware = Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, benchmark=benchmark)
        models[threads] = (hardware, operation_times(hardware))
        print(f"micro-benchmark: {len(benchmark.timings)} operations at {threads} threads, {benchmark.took_s:.0f} s")
    for case in cases:
        hardware, times = models[case.threads]
        micro_batches = math.ceil(case.batch / (case.micro_batch or case.batch))
        forecast = update_time(
            counted(traced(case), micro_batches), times, hardware, precision=case.precision, malloc=MALLOC
        )
        ready.append(Ready(case, forecast, []))
        print(f"forecast: {case.name}, {forecast.step_s.value * 1e3:.1f} ms", flush=True)
        gc.collect()
    if problem := apply_malloc(MALLOC):
        raise SystemExit(problem)
    return ready, took


def measure(case: Case, clock: Callable[[], float]) -> float:
    """Median time of an update [s], over a slice of time, of a model made anew."""
    job = case.job()
    plan = Plan(
        device="cpu",
        malloc=MALLOC,
        micro_batch=case.micro_batch or case.batch,
        threads=case.threads,
        precision=case.precision,
        memory_format=case.memory_format,
        optimizer_implementation="fused",
    )
    torch.set_num_threads(case.threads)
    step = Step(job, plan, coupling_of(case))
    data = datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    batches = list(source.batches(Position(), 2))
    update: Callable[[int], object] = lambda number: step.update(batches[number % 2], number, 0.0)  # noqa: E731 - a name for a call
    for number in range(_WARM_UPDATES):
        update(number)
    readings: list[float] = []
    began = clock()
    while len(readings) < _MOST_UPDATES and (clock() - began < _SLICE_S or len(readings) < 3):
        started = clock()
        update(len(readings))
        readings.append(clock() - started)
    return statistics.median(readings)


def summary(ready: Sequence[Ready]) -> dict[str, Any]:
    """Errors of all cases, and how many intervals hold what was measured."""
    rows = []
    for one in ready:
        measured, step = statistics.median(one.measured), one.forecast.step_s
        rows.append({
            "case": one.case.name, "threads": one.case.threads, "precision": one.case.precision,
            "forecast_ms": step.value * 1e3, "low_ms": step.low * 1e3, "high_ms": step.high * 1e3,
            "measured_ms": measured * 1e3, "spread": max(one.measured) / min(one.measured) - 1,
            "error": step.value / measured - 1, "is_within": step.low <= measured <= step.high,
        })  # fmt: skip
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "median_error": statistics.median(errors),
        "p95_error": errors[math.ceil(0.95 * len(errors)) - 1],
        "mean_signed_error": statistics.fmean(row["error"] for row in rows),
        "coverage": statistics.fmean(row["is_within"] for row in rows),
        "bars": BARS,
        "cases": rows,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    for row in result["cases"]:
        print(
            f"{row['case']:26s} {row['threads']} thr  forecast {row['forecast_ms']:7.1f} ms "
            f"[{row['low_ms']:.1f}, {row['high_ms']:.1f}]  measured {row['measured_ms']:7.1f} ms  "
            f"{row['error']:+6.1%}{'' if row['is_within'] else '  outside'}  (rounds differ by {row['spread']:.0%})"
        )
    print(
        f"median error {result['median_error']:.1%}, p95 {result['p95_error']:.1%}, "
        f"mean signed {result['mean_signed_error']:+.1%}, intervals hold {result['coverage']:.0%}"
    )


def main() -> None:
    """Forecast, measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=25.0, help="of each micro-benchmark [s]")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, with one thread for every case")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        cases = [replace(case, threads=1) for case in cases]
    began, before = time.perf_counter(), sample_cpu()
    ready, took = forecasts(cases, arguments.budget, clock)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
        for one in ready:
            one.measured.append(measure(one.case, clock))
            gc.collect()
    after = sample_cpu()
    load = None if before is None or after is None else load_between(before, after)
    result = {
        "what": "time of an update on this CPU: forecast from the micro-benchmark, then measured",
        "command": f"python -m bench.forecast.cpu_step_time --rounds {arguments.rounds} --budget {arguments.budget:g}"
        + (" --cpu-time" if arguments.cpu_time else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        "used_by_others": None if load is None else load.others,
        "stolen": None if load is None else load.stolen,
        "micro_benchmark_s": took,
        "took_s": time.perf_counter() - began,
        **summary(ready),
    }
    show(result)
    if not arguments.dry:
        path = (
            Path(__file__).parents[1]
            / "results"
            / f"cpu_step_time{'_of_thread' if arguments.cpu_time else ''}_{result['date']}.json"
        )
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
