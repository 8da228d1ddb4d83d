"""Updates of plans, measured in a process of their own.

    python -m bench.forecast.measuring < REQUEST > ANSWER

The request is a `Request` as JSON, the answer a line with a `Measured` for each round and plan, written once it is
known. Plans of a request are measured one after the other in each round, in a newly drawn order, each on a new model,
after `warm_up` updates. Batches come as in a run, by the plan's loader: with `memory` they are gathered in the process,
and on a GPU copied there one batch ahead. On a GPU the time between CUDA events is taken, on a CPU the clock's; what
one plan leaves of a GPU's memory is given back before the next. Kernels are listed after all else, since the profiler
slows down what follows it.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.forecast.energy import EnergyCounter
from bench.forecast.jobs import Size, make_job
from stoker.devices.malloc import apply_malloc
from stoker.errors import StokerError
from stoker.jobs import Job
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import Datasets, datasets_of
from stoker.profiling.ceilings import computing_threads
from stoker.profiling.plan_trial import PeakMemory
from stoker.records import Coupling, Malloc, Plan, Position, dumps, from_json, loads, to_json
from stoker.stepping.step import Step
from stoker.stepping.step_failures import ran_out_of_memory

ROOT = Path(__file__).parents[2]
"""Where modules of `bench` are found."""

_ENERGY_S = 3.0
"""How long updates go on while energy is counted [s]: the counter moves every 20 to 100 ms."""

_MOST_KERNELS, _LONGEST_NAME = 60, 160
"""Kernels that are listed of an update, and characters of their names."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    `caps_bytes` is the most that PyTorch may have of a GPU, for each plan, or empty; `with_energy` takes three more
    seconds for each plan, and `with_kernels` a few, on a GPU.
    """

    schema: ClassVar[int] = 1
    job: str
    size: Size
    plans: tuple[Plan, ...]
    coupling: Coupling
    rounds: int = 1
    updates: int = 3
    warm_up: int = 2
    seed: int = 0
    with_energy: bool = False
    with_kernels: bool = False
    caps_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel or copy of a GPU in one update: `count` of them take `seconds` together [s]."""

    schema: ClassVar[int] = 1
    name: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One plan in one round: seconds of single updates, and what else was asked for.

    `peak_bytes` is memory as a Forecast counts it: allocated on a GPU, resident on a CPU. `reserved_bytes` and
    `energy_j` (of one update) are a GPU's, as are `kernels`, the slowest first; `error` says why there is nothing.
    """

    schema: ClassVar[int] = 1
    plan: int
    round: int
    update_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    energy_j: float | None = None
    kernels: tuple[Kernel, ...] = ()
    is_out_of_memory: bool = False
    error: str | None = None


@dataclass
class Subject:
    """A job ready to be stepped."""

    job: Job
    data: Datasets
    coupling: Coupling

    def batches(self, step: Step) -> Generator[Batch, None, None]:
        """The batches of a run from its beginning, without an end, as the step's plan has them loaded."""
        pipeline, extent = step.pipeline(self.data.train, augmented=True), self.data.extent(self.job)
        return BatchSource(self.data.train, pipeline, extent, self.job.seed, step.plan).batches(Position(), sys.maxsize)


class MeasuringFailed(RuntimeError):
    """A process ended early, or was ended; `measured` is what it had answered before."""

    def __init__(self, message: str, measured: list[Measured], *, is_late: bool) -> None:
        super().__init__(message)
        self.measured, self.is_late = measured, is_late


def ask(request: Request, timeout_s: float = 1200.0) -> list[Measured]:
    """Measure in a new process.

    Raises:
        MeasuringFailed: the process ended early, or took longer than `timeout_s`; what it wrote last is in the message.
    """
    command, is_late = [sys.executable, "-m", "bench.forecast.measuring"], False
    # Files rather than pipes: a compiler's workers may keep a pipe open for longer than the process lives.
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as log,
    ):
        asked.write(dumps(request))
        asked.seek(0)
        with subprocess.Popen(command, stdin=asked, stdout=out, stderr=log, cwd=ROOT) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                is_late = True
                process.kill()
                code = process.wait()
        for file in (out, log):
            file.seek(0)
        # A killed process may leave half a line.
        whole = [line for line in out.read().split("\n")[:-1] if line.startswith('{"')]
        measured, said = [from_json(json.loads(line), Measured) for line in whole], log.read()[-2000:]
    if code == 0:
        return measured
    how = f"took longer than {timeout_s:.0f} s" if is_late else f"ended with {code}: {said}"
    raise MeasuringFailed(f"measuring {request.job} {how}", measured, is_late=is_late)


def measure(request: Request) -> list[Measured]:
    """Measure in this process; `malloc` must be one for all plans."""
    return list(each_measured(request))


def each_measured(request: Request) -> Iterator[Measured]:
    """As `measure`, each once it is known, and with `with_kernels` once more."""
    job = make_job(request.size, request.job)
    subject = Subject(job, datasets_of(job), request.coupling)
    chance = random.Random(request.seed)
    _set_malloc({plan.malloc for plan in request.plans})
    everything, latest = range(len(request.plans)), dict[int, Measured]()
    for turn in range(request.rounds):
        for at in chance.sample(everything, len(everything)):
            if request.plans[at].device != "cpu":
                _give_back_device_memory()
            if request.caps_bytes:
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, request.caps_bytes[at] / total), 0)
            latest[at] = _measured(subject, request, at, turn)
            yield latest[at]
    for at, measured in latest.items():
        if request.with_kernels and measured.error is None and request.plans[at].device != "cpu":
            _give_back_device_memory()
            yield dataclasses.replace(measured, kernels=_kernels(subject, request, at))


def _give_back_device_memory() -> None:
    """Leave a GPU as a new process finds it, but for its context: models, cached blocks, workspaces of cuBLAS."""
    gc.collect()  # models with checkpointed blocks refer to themselves
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - PyTorch has no public name for it
        torch.cuda.empty_cache()


def _measured(subject: Subject, request: Request, at: int, turn: int) -> Measured:
    plan = request.plans[at]
    try:
        with computing_threads(plan.threads):
            return _of_a_step(subject, request, at, turn)
    except StokerError as problem:
        return Measured(plan=at, round=turn, error=str(problem))
    except Exception as problem:
        if not ran_out_of_memory(problem):
            raise
        return Measured(plan=at, round=turn, error=str(problem).splitlines()[0], is_out_of_memory=True)


def _of_a_step(subject: Subject, request: Request, at: int, turn: int) -> Measured:
    step, numbers = Step(subject.job, request.plans[at], subject.coupling), itertools.count()
    with closing(subject.batches(step)) as batches:

        def update() -> None:
            step.update(next(batches), next(numbers), 0.5)

        for _ in range(request.warm_up):
            update()
        on_gpu = step.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(step.device)
        with PeakMemory(request.plans[at].device) as peak:
            times = _gpu_times(update, request.updates) if on_gpu else _host_times(update, request.updates)
        measured = Measured(plan=at, round=turn, update_s=tuple(times), peak_bytes=peak.num_bytes)
        if not on_gpu:
            return measured
        reserved = torch.cuda.max_memory_reserved(step.device)
        energy_j = _energy(update, times) if request.with_energy else None
        return dataclasses.replace(measured, reserved_bytes=reserved, energy_j=energy_j)


def _host_times(update: Callable[[], None], count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        update()
        times.append(time.perf_counter() - started)
    return times


def _gpu_times(update: Callable[[], None], count: int) -> list[float]:
    """Seconds from the end of one update to that of the next, on the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        update()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _kernels(subject: Subject, request: Request, at: int) -> tuple[Kernel, ...]:
    """The kernels of one update, and of the copies around it."""
    step = Step(subject.job, request.plans[at], subject.coupling)
    with closing(subject.batches(step)) as batches:
        for number in range(request.warm_up):
            step.update(next(batches), number, 0.5)
        torch.cuda.synchronize(step.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            step.update(next(batches), request.warm_up, 0.5)
            torch.cuda.synchronize(step.device)
    found = [
        Kernel(name=row.key[:_LONGEST_NAME], seconds=row.self_device_time_total / 1e6, count=row.count)
        for row in watched.key_averages()
        if row.device_type == DeviceType.CUDA and row.self_device_time_total > 0
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds)[:_MOST_KERNELS])


def _energy(update: Callable[[], None], times: list[float]) -> float | None:
    """Joules of one update, the device's idle power included; None where the device does not count."""
    counter = EnergyCounter.of_gpu(0)
    if counter is None:
        return None
    count = max(3, round(_ENERGY_S / sorted(times)[len(times) // 2]))
    torch.cuda.synchronize()
    before = counter.joules()
    for _ in range(count):
        update()
    torch.cuda.synchronize()
    return (counter.joules() - before) / count


def _set_malloc(settings: set[Malloc]) -> None:
    """Memory from the system as the plans say, for the rest of the process."""
    if len(settings) != 1:
        raise ValueError(f"one process has one malloc, not {sorted(settings)}")
    if problem := apply_malloc(settings.pop()):
        raise RuntimeError(problem)


if __name__ == "__main__":
    for answer in each_measured(loads(sys.stdin.read(), Request)):
        print(json.dumps(to_json(answer)), flush=True)
