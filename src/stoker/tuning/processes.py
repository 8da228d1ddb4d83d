"""Trials in processes of their own: what is exchanged with them, how many run at once, and how they run.

A failure stays in the trial's process, and its memory is freed when it ends. A child asks after each evaluation whether
to go on, and waits for the answer, so that what is pruned does not depend on timing. It ends with this process, however
that ends: its run is saved first, and can be continued.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stoker.errors import BadJob, RunFailed, StokerError
from stoker.records import Device
from stoker.records.codec import JSON
from stoker.store.child_process import ChildProcess, Raised, require_picklable
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.tuning.conductor import Conductor

TrialResultKind = Literal["finished", "stopped", "out of memory", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """A trial to be run: its number, its settings, its directory; `on` is where it began, if it goes on.

    `parent` is the directory of the run whose state it begins with; `reported_samples` are those of the last evaluation
    that the study knows of.
    """

    number: int
    parameters: dict[str, JSON]
    directory: Path
    on: str | None = None
    parent: Path | None = None
    reported_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class TrialSlot:
    """A place for one trial at a time: a device, a share of its memory [bytes], the CPUs it may use (None: all)."""

    on: str = "here"
    memory_bytes: float | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TrialReading:
    """An evaluation within a trial: metrics on held-out data by their bare names, at `samples` of `total_samples`."""

    samples: int
    total_samples: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial ended.

    `metrics` are those of the weights it kept, by their bare names; `stopped` means that it was asked to, and could go
    on. `words` says what went wrong.
    """

    kind: TrialResultKind
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    wall_s: float = 0.0
    peak_bytes: int = 0
    words: str = ""


Judge = Callable[[TrialReading], bool]
"""Looks at an evaluation; whether the trial shall stop."""

RunTrial = Callable[[TrialRequest, TrialSlot, Judge], TrialResult]
"""Runs a trial from where it is, in this process; where the judge says so, it stops and returns."""


_USABLE = 0.9
"""The share of memory that trials may have together; the rest is the system's, and what forecasts are off by."""

_CONTEXT_BYTES = 600 * 2**20
"""Memory of a GPU that a process takes before it has a tensor: its context and its kernels; a judgement."""


@dataclass(frozen=True)
class TrialPacking:
    """Places for trials, and why there are so many."""

    slots: tuple[TrialSlot, ...]
    why: str


def by_cores(device: Device, cpus: Sequence[int], asked: int | None) -> int:
    """How many trials can each have a core [trials]; for a GPU, which they share anyhow, as many as are asked for.

    Raises:
        BadJob: `asked` is no positive number.
    """
    if asked is not None and asked < 1:
        raise BadJob(f"--parallel {asked}: wanted auto, or a number of trials from 1 on")
    if device.kind != "cpu":
        return asked or len(cpus)
    return max(1, min(device.cores, len(cpus), asked or device.cores))


def packed(devices: Sequence[Device], cpus: Sequence[int], peak_bytes: float | None, asked: int | None) -> TrialPacking:
    """Places for trials.

    Args:
        devices: of one kind, those that trials may run on: one CPU, or GPUs.
        cpus: numbers of the logical CPUs that may be used.
        peak_bytes: the most that one trial is forecast to need; None where it is not known.
        asked: how many at once, at most; None for as many as fit.
    """
    first = devices[0]
    if asked == 1:
        return TrialPacking((TrialSlot(on=first.torch_name),), "one trial at a time, as asked")
    if first.kind == "cpu":
        return _on_cpu(first, cpus, peak_bytes, asked)
    return _on_gpus(devices, peak_bytes, asked)


def _on_cpu(device: Device, cpus: Sequence[int], peak_bytes: float | None, asked: int | None) -> TrialPacking:
    cores = by_cores(device, cpus, asked)
    fitting = _fitting(device.memory_bytes, peak_bytes, 0)
    count = max(1, min(cores, fitting))
    parts = [tuple(sorted(cpus)[index::count]) for index in range(count)]
    share = device.memory_bytes * _USABLE / count if device.memory_bytes and count > 1 else None
    slots = tuple(TrialSlot(on="cpu", memory_bytes=share, cpus=part if count > 1 else None) for part in parts)
    limit = f"{asked} asked for" if asked is not None else f"{device.cores} cores"
    return TrialPacking(slots, _reason(count, limit, device, peak_bytes, is_memory_short=fitting < cores))


def _on_gpus(devices: Sequence[Device], peak_bytes: float | None, asked: int | None) -> TrialPacking:
    """As many as fit into the memory of each, dealt out so that all GPUs have work before one has two."""
    most = asked if asked is not None else math.inf
    each = [
        _fitting(device.memory_bytes, peak_bytes, _CONTEXT_BYTES) if peak_bytes and device.memory_bytes else 1
        for device in devices
    ]
    places = [
        device
        for round_ in range(max(1, *each))
        for device, count in zip(devices, (max(1, one) for one in each), strict=True)
        if round_ < count
    ]
    chosen = places[: int(min(len(places), most))]
    trials = Counter(device.torch_name for device in chosen)
    slots = []
    for device in chosen:  # trials on one GPU share its memory; one alone may have all of it
        count = trials[device.torch_name]
        share = device.memory_bytes * _USABLE / count - _CONTEXT_BYTES if count > 1 else None
        slots.append(TrialSlot(on=device.torch_name, memory_bytes=share))
    limit = f"{asked} asked for" if asked is not None else f"{len(devices)} GPUs"
    is_short = sum(max(1, count) for count in each) <= len(slots)
    return TrialPacking(tuple(slots), _reason(len(slots), limit, devices[0], peak_bytes, is_memory_short=is_short))


def _fitting(memory_bytes: int, peak_bytes: float | None, context_bytes: int) -> int:
    if not memory_bytes or not peak_bytes:
        return 10**6  # nothing is known against it
    return int(_USABLE * memory_bytes / (peak_bytes + context_bytes))


def _reason(count: int, limit: str, device: Device, peak_bytes: float | None, *, is_memory_short: bool) -> str:
    trials = "1 trial at a time" if count == 1 else f"{count} trials at once"
    if peak_bytes is None:
        return f"{trials}: {limit}; the memory they need is unknown"
    need = f"each is forecast to need at most {format_bytes(peak_bytes)} of {format_bytes(device.memory_bytes)}"
    return f"{trials}: {need}" if is_memory_short else f"{trials}: {limit}; {need}"


OUTPUT = "output.txt"
"""The output of a trial, next to its run's directory: `trials/0007.output.txt`."""

_SAVING_S = 120.0
"""How long a trial that is asked to stop may take to save its state [s]."""

_ENDING_S = 30.0
"""How long a process may live on after its result [s], as one does whose threads do not end; then it is killed."""

_LONGEST_WAIT_S = 3600.0
"""Longest wait for the children at a time [s]; the system's limit is 24 days."""


def run_here(conductor: Conductor, run_trial: RunTrial, slot: TrialSlot) -> None:
    """Run a study's trials in this process, one after another.

    Raises:
        KeyboardInterrupt: a trial was stopped by a signal; its run is saved.
    """
    while (request := conductor.next_request()) is not None:
        verdicts: list[bool] = []

        def judge(reading: TrialReading, number: int = request.number, verdicts: list[bool] = verdicts) -> bool:
            verdicts.append(conductor.judge(number, reading))
            return verdicts[-1]

        conductor.on_place(request.number, request.on or slot.on)
        ending = run_trial(request, slot, judge)
        conductor.ended(request.number, ending)
        if ending.kind == "stopped" and not any(verdicts):
            raise KeyboardInterrupt


@dataclass
class _Running:
    """A trial in a process of its own."""

    request: TrialRequest
    slot: TrialSlot
    process: ChildProcess


class Processes:
    """Runs a study's trials, each in a process of its own, as many at once as there are slots.

    Args:
        run_trial: a function, or an object to call, that can be pickled: the process imports it again.
        slots: places for trials.
    """

    def __init__(self, run_trial: RunTrial, slots: Sequence[TrialSlot]) -> None:
        require_picklable(run_trial)
        self._run_trial = run_trial
        self._free, self._children = list(slots), dict[int, _Running]()

    def run(self, conductor: Conductor) -> None:
        """Run trials until there are none, or the conductor says that it is over; then none is left running."""
        try:
            while self._begin(conductor) or self._children:
                self._wait(conductor)
                if conductor.is_over:
                    self._stop(conductor)
        finally:
            self._stop(None)

    def _begin(self, conductor: Conductor) -> bool:
        """Fill the free slots; whether anything began."""
        began = False
        while self._free and (request := conductor.next_request()) is not None:
            slot = next((slot for slot in self._free if slot.on == request.on), self._free[0])  # where it began
            self._free.remove(slot)
            conductor.on_place(request.number, slot.on)
            output = request.directory.with_name(f"{request.directory.name}.{OUTPUT}")
            output.parent.mkdir(parents=True, exist_ok=True)
            process = ChildProcess(
                _trial, self._run_trial, request, slot, name="stoker-trial", talks=True, cpus=slot.cpus, output=output
            )
            self._children[request.number] = _Running(request, slot, process)
            began = True
        return began

    def _wait(self, conductor: Conductor) -> None:
        by_pipe = {id(child.process.pipe): child for child in self._children.values()}
        left_s = conductor.seconds_left
        timeout_s = None if left_s is None else min(left_s, _LONGEST_WAIT_S)
        ready = connection.wait([child.process.pipe for child in self._children.values()], timeout=timeout_s)
        for pipe in ready:
            child = by_pipe[id(pipe)]
            message, number = child.process.receive(), child.request.number
            if isinstance(message, TrialReading):  # an evaluation: the child waits for the answer
                child.process.answer(conductor.judge(number, message))
                continue
            ending = message if isinstance(message, TrialResult) else _failure(message, child.process)
            conductor.ended(number, ending)
            self._forget(child)

    def _forget(self, child: _Running) -> None:
        del self._children[child.request.number]
        self._free.append(child.slot)
        child.process.close(_ENDING_S)

    def _stop(self, conductor: Conductor | None) -> None:
        """Ask what runs to save and stop, and wait for it; endings go to the conductor, if one is given."""
        for child in self._children.values():
            child.process.stop()
        deadline = time.monotonic() + _SAVING_S
        for child in list(self._children.values()):
            while child.request.number in self._children:
                if not child.process.pipe.poll(max(0.0, deadline - time.monotonic())):
                    child.process.kill()
                said = child.process.receive()
                if isinstance(said, TrialReading):
                    child.process.answer(value=True)
                    continue
                if conductor is not None and isinstance(said, TrialResult):
                    conductor.ended(child.request.number, said)
                self._forget(child)


def in_a_process(function: Callable[..., Any], arguments: tuple[Any, ...], slot: TrialSlot) -> Any:
    """The result of `function(*arguments)` in a process of its own, which has the CPUs of `slot`.

    Raises:
        StokerError: what it raised, in the same words.
        RunFailed: it raised something else, or its process ended.
    """
    require_picklable(function)
    with tempfile.TemporaryDirectory(prefix="stoker-tune-") as folder:
        output = Path(folder) / OUTPUT
        process = ChildProcess(function, *arguments, name="stoker-trial", cpus=slot.cpus, output=output)
        try:
            result = process.receive()
            how = process.ending()[1] if result is None else ""
        except BaseException:
            process.stop()
            raise
        finally:
            process.close(_ENDING_S)
        if isinstance(result, StokerError):
            raise result
        if isinstance(result, Raised):
            raise RunFailed(f"looking at the job ended with {result.words}")
        if result is None:
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(f"the process that looked at the job {how}: {' '.join(last)}")
        return result


def _failure(message: Any, process: ChildProcess) -> TrialResult:
    """The ending of a trial that sent none."""
    if isinstance(message, StokerError | Raised):
        return TrialResult(kind="failed", words=message.message if isinstance(message, StokerError) else message.words)
    is_for_memory, how = process.ending()
    if is_for_memory:
        return TrialResult(kind="out of memory", words="the system was short of memory and killed its process")
    return TrialResult(kind="failed", words=f"its process {how}")


def _trial(run_trial: RunTrial, request: TrialRequest, slot: TrialSlot, pipe: connection.Connection) -> TrialResult:
    """A trial in its process, which sends each evaluation and waits for the answer."""

    def judge(reading: TrialReading) -> bool:
        try:
            pipe.send(reading)
            return bool(pipe.recv())
        except (EOFError, OSError):  # the process that asked for the trial is gone
            return True

    return run_trial(request, slot, judge)
