"""Time of an update on the CPU here, forecast from the micro-benchmark and then measured.

    python -m bench.forecast.cpu_step_time [--rounds 5] [--budget 25] [--cpu-time] [--only NAME ...]

First the micro-benchmark, at every number of threads that the cases use; then traces of all cases; then anchors, as
`stoker plan` times them, and all forecasts; then the measurements: Stoker's own step on random samples, the cases
taking turns in rounds, each between two looks at the anchors, each case's median over rounds of the median of its
updates. Printed, and written to bench/results/, with the share of the CPU that others used: three errors of each case,
which `step_errors` tells apart.

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

import torch

from bench.forecast.cpu_models import CASES, Case
from bench.forecast.step_errors import Compared, in_words, summary
from stoker.devices import attached_devices, load_between, sample_cpu
from stoker.devices.malloc import apply_malloc
from stoker.loading import BatchSource, datasets_of
from stoker.planning.time import operation_times
from stoker.planning.time.pace import changes, pace_of
from stoker.planning.time.update import Work, counted, update_time
from stoker.profiling import trace_update
from stoker.profiling.anchors import TURNS, Turn, measure_anchors
from stoker.profiling.micro_benchmark import measure_operations
from stoker.records import Coupling, Hardware, Malloc, Plan, Position, Trace, TraceSettings
from stoker.stepping import Step

MALLOC: Malloc = "retained"
"""How memory is had while cases are measured: as plans for a CPU have it."""
_WARM_UPDATES, _SLICE_S, _MOST_UPDATES = 2, 0.6, 30
_TURNS_BESIDE = 4
"""Of the anchors, before each case and after it."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Machine:
    """This CPU, measured by `clock`, by the number of threads."""

    hardware: dict[int, Hardware]
    clock: Clock

    def look(self, threads: int, turns: int) -> tuple[dict[str, float], Sequence[Turn]]:
        """Times of anchors when operations were timed, and now."""
        benchmark = self.hardware[threads].benchmark
        then_s = benchmark.anchors_s if benchmark else {}
        return then_s, measure_anchors(threads=threads, turns=turns, clock=self.clock)


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


def calibrated(threads: Sequence[int], budget_s: float, clock: Clock) -> Machine:
    """Measure the CPU at each number of threads."""
    device = next(device for device in attached_devices() if device.kind == "cpu")
    found = {}
    for number in threads:
        benchmark = measure_operations(device, threads=number, budget_s=budget_s, clock=clock)
        found[number] = Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, benchmark=benchmark)
        print(f"micro-benchmark: {len(benchmark.timings)} operations at {number} threads, {benchmark.took_s:.0f} s")
    return Machine(found, clock)


def counted_work(case: Case) -> Work:
    """What one of the case's updates does."""
    return counted(traced(case), math.ceil(case.batch / (case.micro_batch or case.batch)))


def forecasts(cases: Sequence[Case], machine: Machine) -> list[Compared]:
    """Forecasts of all cases by the micro-benchmark alone, and at the pace of now."""
    works = [counted_work(case) for case in cases]
    gc.collect()
    paces = {threads: pace_of(*machine.look(threads, TURNS)) for threads in machine.hardware}
    planned = {threads: replace(hardware, pace=paces[threads]) for threads, hardware in machine.hardware.items()}
    both = machine.hardware, planned
    models = [{threads: operation_times(one) for threads, one in known.items()} for known in both]
    compared = []
    for case, work in zip(cases, works, strict=True):
        alone, now = (
            update_time(work, times[case.threads], known[case.threads], precision=case.precision, malloc=MALLOC).step_s
            for times, known in zip(models, both, strict=True)
        )
        compared.append(Compared(case.name, case.threads, case.precision, calibrated=alone, planned=now))
        print(f"forecast: {case.name}, {now.value * 1e3:.1f} ms", flush=True)
    return compared


def measure(case: Case, clock: Clock) -> float:
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


def measure_in_turns(case: Case, one: Compared, machine: Machine) -> None:
    """Measure a case once more, between two looks at the machine."""
    before = changes(*machine.look(case.threads, _TURNS_BESIDE))
    one.measured_s.append(measure(case, machine.clock))
    gc.collect()
    after = changes(*machine.look(case.threads, _TURNS_BESIDE))
    one.drift.append(math.exp(statistics.median([*before.values(), *after.values()])))


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
    machine = calibrated(sorted({case.threads for case in cases}), arguments.budget, clock)
    compared = forecasts(cases, machine)
    if problem := apply_malloc(MALLOC):
        raise SystemExit(problem)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
        for case, one in zip(cases, compared, strict=True):
            measure_in_turns(case, one, machine)
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
        "micro_benchmark_s": {f"{n} threads": h.benchmark.took_s for n, h in machine.hardware.items() if h.benchmark},
        "took_s": time.perf_counter() - began,
        **summary(compared),
    }
    print(in_words(result))
    if not arguments.dry:
        path = (
            Path(__file__).parents[1]
            / "results"
            / f"cpu_step_time_in_turns{'_of_thread' if arguments.cpu_time else ''}_{result['date']}.json"
        )
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
