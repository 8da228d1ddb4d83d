"""Trials in processes of their own: what one of them breaks stays there, and its memory goes when it ends.

A child asks after each evaluation whether to go on, and waits for the answer, so that what is pruned does not depend
on who is faster. It ends with this process, however that ends: its run is saved first, and can be continued.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from stoker.errors import BadJob, RunFailed, StokerError, first_line
from stoker.tuning.messages import Ending, Judge, Reading, Request, RunTrial, Slot

OUTPUT = "output.txt"
"""What a trial prints, beside its run's directory: `trials/0007.output.txt`."""

_SAVING_S = 120.0
"""How long a trial that is asked to stop may take to save its state [s]."""

_LONGEST_WAIT_S = 3600.0
"""Of one look at the children [s]: the system's own waiting takes no more than 24 days."""


class Conducting(Protocol):
    """What a runner of trials asks; see `Conductor`."""

    @property
    def seconds_left(self) -> float | None:
        """Until everything stops [s]."""

    @property
    def is_over(self) -> bool:
        """Whether everything stops now."""

    def next_request(self) -> Request | None:
        """The next trial."""

    def on_place(self, number: int, on: str) -> None:
        """A trial runs there."""

    def judge(self, number: int, reading: Reading) -> bool:
        """Whether a trial shall stop."""

    def ended(self, number: int, ending: Ending) -> None:
        """A trial ended."""


def run_here(conductor: Conducting, run_trial: RunTrial, slot: Slot) -> None:
    """Run a study's trials in this process, one after another.

    Raises:
        KeyboardInterrupt: a trial was stopped by a signal; its run is saved.
    """
    while (request := conductor.next_request()) is not None:
        verdicts: list[bool] = []

        def judge(reading: Reading, number: int = request.number, verdicts: list[bool] = verdicts) -> bool:
            verdicts.append(conductor.judge(number, reading))
            return verdicts[-1]

        conductor.on_place(request.number, request.on or slot.on)
        ending = run_trial(request, slot, judge)
        conductor.ended(request.number, ending)
        if ending.kind == "stopped" and not any(verdicts):
            raise KeyboardInterrupt


@dataclass
class _Child:
    """A process with a trial in it."""

    request: Request
    slot: Slot
    process: BaseProcess
    pipe: connection.Connection
    kills: int
    """Processes that the system had killed for memory when this one began."""


class Processes:
    """Runs a study's trials, each in a process of its own, as many at once as there are slots.

    Args:
        run_trial: a function, or an object to call, that can be pickled: the process imports it anew.
        slots: places for trials.
        now: seconds of a clock that only goes forwards.
    """

    def __init__(
        self, run_trial: RunTrial, slots: Sequence[Slot], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._payload, self._now = _pickled(run_trial), now
        self._free, self._children = list(slots), dict[int, _Child]()

    def run(self, conductor: Conducting) -> None:
        """Run trials until there are none, or the conductor says that it is over; then none is left running."""
        try:
            while self._begin(conductor) or self._children:
                self._wait(conductor)
                if conductor.is_over:
                    self._stop(conductor)
        finally:
            self._stop(None)

    def _begin(self, conductor: Conducting) -> bool:
        """Fill the free slots; whether anything began."""
        began = False
        while self._free and (request := conductor.next_request()) is not None:
            slot = self._slot_for(request)
            conductor.on_place(request.number, slot.on)
            output = request.directory.with_name(f"{request.directory.name}.{OUTPUT}")
            process, pipe = _started(self._payload, (request, slot), slot, output)
            self._children[request.number] = _Child(request, slot, process, pipe, _kills_for_memory())
            began = True
        return began

    def _slot_for(self, request: Request) -> Slot:
        """A free slot; where the trial began, if that is one."""
        found = next((slot for slot in self._free if slot.on == request.on), self._free[0])
        self._free.remove(found)
        return found

    def _wait(self, conductor: Conducting) -> None:
        by_pipe = {id(child.pipe): child for child in self._children.values()}
        left_s = conductor.seconds_left
        timeout_s = None if left_s is None else min(left_s, _LONGEST_WAIT_S)
        ready = connection.wait([child.pipe for child in self._children.values()], timeout=timeout_s)
        for pipe in ready:
            self._hear(by_pipe[id(pipe)], conductor)

    def _hear(self, child: _Child, conductor: Conducting) -> None:
        """One message of a child: an evaluation, which it waits on, or how it ended."""
        said, number = _received(child.pipe), child.request.number
        if isinstance(said, Reading):
            is_stopping = conductor.judge(number, said)
            _answer(child.pipe, is_stopping)
            return
        ending = said if isinstance(said, Ending) else _failure(said, child)
        self._forget(child)
        conductor.ended(number, ending)

    def _forget(self, child: _Child) -> None:
        del self._children[child.request.number]
        self._free.append(child.slot)
        child.pipe.close()
        child.process.join()
        child.process.close()

    def _stop(self, conductor: Conducting | None) -> None:
        """Ask what runs to save and stop, and wait for it; endings are told to the conductor, if one is given."""
        for child in self._children.values():
            child.process.terminate()
        deadline = self._now() + _SAVING_S
        for child in list(self._children.values()):
            while child.request.number in self._children:
                if not child.pipe.poll(max(0.0, deadline - self._now())):
                    child.process.kill()
                said = _received(child.pipe)
                if isinstance(said, Reading):
                    _answer(child.pipe, is_stopping=True)
                    continue
                self._forget(child)
                if conductor is not None and isinstance(said, Ending):
                    conductor.ended(child.request.number, said)


def in_a_process(function: Callable[..., Any], arguments: tuple[Any, ...], slot: Slot) -> Any:
    """What `function(*arguments)` gives in a process of its own, which has the CPUs of `slot`.

    Raises:
        StokerError: what it raised, in the same words.
        RunFailed: it raised something else, or its process ended.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-tune-") as folder:
        output = Path(folder) / OUTPUT
        process, pipe = _started(_pickled(function), arguments, slot, output, is_judged=False)
        try:
            said = _received(pipe)
        except BaseException:
            process.terminate()
            raise
        finally:
            pipe.close()
            process.join()
        if isinstance(said, StokerError):
            raise said
        if isinstance(said, _Raised):
            raise RunFailed(f"looking at the job ended with {said.words}")
        if said is None:
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(f"looking at the job ended with exit code {process.exitcode}: {' '.join(last)}")
        return said


@dataclass(frozen=True)
class _Raised:
    """An exception that is no StokerError, in words."""

    words: str


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise BadJob(
            f"{function} cannot be given to another process: {first_line(problem)}",
            remedy="Define it at the top of a module, or put the job into a file with a function `job`.",
        ) from problem


def _started(
    payload: bytes, arguments: tuple[Any, ...], slot: Slot, output: Path, *, is_judged: bool = True
) -> tuple[BaseProcess, connection.Connection]:
    output.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_child, args=(payload, arguments, slot.cpus, there, output, is_judged), name="stoker-trial"
    )
    process.start()
    there.close()
    return process, here


def _received(pipe: connection.Connection) -> Any:
    """What a child says next; None if it is gone."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def _answer(pipe: connection.Connection, is_stopping: bool) -> None:  # noqa: FBT001 - the answer itself
    try:
        pipe.send(is_stopping)
    except (BrokenPipeError, ConnectionResetError):
        return  # it is gone, which is heard next


def _failure(said: Any, child: _Child) -> Ending:
    """The ending of a trial that did not tell one."""
    if isinstance(said, StokerError):
        return Ending(kind="failed", words=said.message)
    if isinstance(said, _Raised):
        return Ending(kind="failed", words=said.words)
    child.process.join()
    code = child.process.exitcode or 0
    if code == -signal.SIGKILL and _kills_for_memory() > child.kills:
        return Ending(kind="out of memory", words="the system was short of memory and killed its process")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Ending(kind="failed", words=f"its process {how}")


def _kills_for_memory() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not tell.

    Source: Linux kernel, mm/vmstat.c: `oom_kill` counts those of control groups too.
    """
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _child(
    payload: bytes,
    arguments: tuple[Any, ...],
    cpus: tuple[int, ...] | None,
    pipe: connection.Connection,
    output: Path,
    is_judged: bool,  # noqa: FBT001 - arguments of a process are positional
) -> None:
    """The process of a trial: settle on its CPUs before anything counts them, run, say how it ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _print_into(output)
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    try:
        function = pickle.loads(payload)  # noqa: S301 - from the parent, which made it
        said = function(*arguments, _asking(pipe)) if is_judged else function(*arguments)
    except StokerError as error:
        said = _plain(error)
    except Exception as error:  # noqa: BLE001 - what a trial breaks is told, and the study goes on
        traceback.print_exc()
        said = _Raised(f"{type(error).__name__}: {first_line(error)}")
    pipe.send(said)


def _asking(pipe: connection.Connection) -> Judge:
    def judge(reading: Reading) -> bool:
        try:
            pipe.send(reading)
            return bool(pipe.recv())
        except (EOFError, OSError):  # whoever asked for the trial is gone
            return True

    return judge


def _plain(error: StokerError) -> StokerError:
    """The same in a form that surely travels: subclasses may take other arguments than they keep."""
    kind = next(one for one in type(error).__mro__ if one.__module__ == "stoker.errors")
    found: StokerError = kind(error.message, remedy=error.remedy)
    return found


def _print_into(path: Path) -> None:
    """Send what this process prints to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
