"""Time of an update on the CPU here, forecast and then measured.

    python -m bench.forecast.cpu_step_time [--rounds 5] [--budget 25] [--cpu-time] [--only NAME ...]

First the micro-benchmark, at every number of threads that the cases use; then traces of all cases; then the cases take
turns in rounds: one is planned, with a look at the anchors as `stoker plan` takes it, and measured at once, by Stoker's
own step on random samples, the median of its updates. A case's error is the median over rounds. Printed, and written
to bench/results/, with the share of the CPU that others used: three errors of each case, which `step_errors` tells
apart.

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
from bench.forecast.step_errors import Compared, Turn, in_words, summary
from stoker.devices import attached_devices, load_between, sample_cpu
from stoker.devices.malloc import apply_malloc
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.model.cpu_times import CpuTimes
from stoker.planning.model.shared_cpu import pace_of, speed_changes
from stoker.planning.model.update_time import UpdateWork, counted, update_time
from stoker.profiling import ceilings
from stoker.profiling.micro_benchmark import measure_operations
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Estimate, Hardware, Malloc, Pace, Plan, Position, Trace, TraceSettings
from stoker.stepping.step import Step

MALLOC: Malloc = "retained"
"""How memory is had while cases are measured: as plans for a CPU have it."""
_WARM_UPDATES, _SLICE_S, _MOST_UPDATES = 2, 0.6, 30
_TURNS_AFTER = 4
"""Of the anchors, after each case."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Look:
    """Anchors of one number of threads: their times when operations were timed, and now, turn by turn [s]."""

    then_s: dict[str, float]
    now_s: Sequence[ceilings.Turn]


@dataclass(frozen=True)
class Machine:
    """This CPU at one number of threads, measured by `clock`."""

    hardware: Hardware
    times: CpuTimes
    threads: int
    clock: Clock

    def look(self, turns: int) -> Look:
        """Look how fast it is now."""
        benchmark = self.hardware.benchmark
        then_s = benchmark.anchors_s if benchmark else {}
        return Look(then_s, ceilings.measure_anchors(threads=self.threads, turns=turns, clock=self.clock))

    def forecast(self, work: UpdateWork, precision: str, pace: Pace | None) -> Estimate:
        """What an update takes [s], at a pace; None: as when operations were timed."""
        hardware = replace(self.hardware, pace=pace)
        times = replace(self.times, slowdown=hardware.slowdown)
        return update_time(work, times, hardware, precision=precision, malloc=MALLOC).step_s


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


def calibrated(threads: Sequence[int], budget_s: float, clock: Clock) -> dict[int, Machine]:
    """Measure the CPU at each number of threads."""
    device = next(device for device in attached_devices() if device.kind == "cpu")
    found, left_s = {}, budget_s * len(threads)
    for done, number in enumerate(sorted(threads, reverse=True)):  # as `stoker doctor` does
        benchmark = measure_operations(device, threads=number, budget_s=left_s / (len(threads) - done), clock=clock)
        left_s -= benchmark.took_s
        hardware = Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, benchmark=benchmark)
        found[number] = Machine(hardware, CpuTimes.of(hardware), number, clock)
        print(f"micro-benchmark: {len(benchmark.timings)} operations at {number} threads, {benchmark.took_s:.0f} s")
    return found


def counted_work(case: Case) -> UpdateWork:
    """What one of the case's updates does."""
    return counted(traced(case), math.ceil(case.batch / (case.micro_batch or case.batch)))


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


def turn_of(case: Case, work: UpdateWork, machine: Machine) -> Turn:
    """Plan a case, and measure it at once."""
    before = machine.look(ceilings.TURNS)
    planned = machine.forecast(work, case.precision, pace_of(before.then_s, before.now_s))
    seconds = measure(case, machine.clock)
    gc.collect()
    after = machine.look(_TURNS_AFTER)
    return Turn(planned, seconds, speed_changes(before.then_s, before.now_s), speed_changes(after.then_s, after.now_s))


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
    machines = calibrated(sorted({case.threads for case in cases}), arguments.budget, clock)
    works = {case.name: counted_work(case) for case in cases}
    compared = {
        case.name: Compared(
            case.name,
            case.threads,
            case.precision,
            machines[case.threads].forecast(works[case.name], case.precision, None),
        )
        for case in cases
    }
    gc.collect()
    if problem := apply_malloc(MALLOC):
        raise SystemExit(problem)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
        for case in cases:
            compared[case.name].turns.append(turn_of(case, works[case.name], machines[case.threads]))
    after = sample_cpu()
    load = None if before is None or after is None else load_between(before, after)
    result = {
        "what": "time of an update on this CPU: forecast right before, then measured",
        "command": f"python -m bench.forecast.cpu_step_time --rounds {arguments.rounds} --budget {arguments.budget:g}"
        + (" --cpu-time" if arguments.cpu_time else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        "used_by_others": None if load is None else load.others,
        "stolen": None if load is None else load.stolen,
        "micro_benchmark_s": {
            f"{number} threads": machine.hardware.benchmark.took_s
            for number, machine in machines.items()
            if machine.hardware.benchmark
        },
        "took_s": time.perf_counter() - began,
        **summary(list(compared.values())),
    }
    print(in_words(result))
    if not arguments.dry:
        path = (
            Path(__file__).parents[1]
            / "results"
            / f"cpu_step_time_planned{'_of_thread' if arguments.cpu_time else ''}_{result['date']}.json"
        )
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
