"""Batches fetched ahead by worker processes, which another thread can watch and end (`WorkerWatch`).

What: PyTorch's DataLoader runs the processes and transfers tensors. Its items are whole batches by (epoch, indices), so
that nothing depends on which worker fetches one: if one dies, all are replaced, and pending batches are fetched again,
bit for bit. Use when: fetching an item takes Python time. Costs: a process each, on Linux a fork that shares the memory
of the samples.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import IO

import torch

from stoker.activity import doing
from stoker.errors import RunFailed
from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import BadSample, Samples
from stoker.loading.worker_watchdog import watch_trainer
from stoker.store.child_process import exit_in_words

_MOST_SOCKET_BYTES, _SHORT = 107, "/tmp"  # noqa: S108 - mkdtemp makes a new directory in it
"""Longest path of a socket on Linux [bytes] (unix(7)), and a directory for use when `$TMPDIR` is too long."""

EpochIndices = tuple[int, Indices]
"""An epoch and the sample indices [B] of a batch in it."""


class WorkerDied(Exception):
    """A worker died before it had fetched its batch."""


def by_workers(
    samples: Samples,
    places: Iterator[EpochIndices],
    num_workers: int,
    prefetch_batches: int,
    *,
    is_pinned: bool,
    watch: WorkerWatch | None = None,
) -> Generator[tuple[EpochIndices, Content], None, None]:
    """The batches at `places`, in their order, each with its place.

    After a death, pending batches are fetched by one worker, one at a time, to identify a batch that kills it again.

    Args:
        samples: the samples; on Linux workers see them as they were when the first batch is requested.
        places: epoch and indices of each batch.
        num_workers: number of processes.
        prefetch_batches: number of batches fetched ahead by each of them.
        is_pinned: whether batches are put into page-locked memory, for copying to a GPU.
        watch: receives deaths; other threads may inspect and end the workers through it.

    Raises:
        BadJob: a sample cannot be fetched or collated.
        RunFailed: a worker died twice over the same batch.
    """
    watch = watch or WorkerWatch()
    suspects: deque[EpochIndices] = deque()
    while True:
        pending: deque[EpochIndices] = deque()
        try:
            if suspects:
                again = _fetched(samples, iter(tuple(suspects)), deque(), 1, 1, is_pinned=is_pinned, watch=watch)
                with contextlib.closing(again):
                    for fetched in again:
                        suspects.popleft()
                        yield fetched
            yield from _fetched(
                samples, places, pending, num_workers, prefetch_batches, is_pinned=is_pinned, watch=watch
            )
        except WorkerDied as death:
            why = str(death)
        else:
            return
        if suspects:
            epoch, indices = suspects[0]
            raise RunFailed(
                f"a loader worker died twice while it fetched samples {named(indices)} (epoch {epoch + 1}): {why}",
                remedy="Look at what fetching these samples does. If it is memory that they lack: give a plan with "
                "fewer num_workers. The same command continues from the last checkpoint.",
            )
        suspects = pending
        watch.tell(WorkerDeath(why, len(suspects)))


def _fetched(
    samples: Samples,
    places: Iterator[EpochIndices],
    pending: deque[EpochIndices],
    num_workers: int,
    prefetch_batches: int,
    *,
    is_pinned: bool,
    watch: WorkerWatch,
) -> Generator[tuple[EpochIndices, Content], None, None]:
    """The batches at `places` by workers started here; `pending` are the requested ones not given back yet.

    Raises:
        WorkerDied: one did.
    """

    def requested() -> Iterator[EpochIndices]:
        for place in places:
            pending.append(place)
            yield place

    # The directory's path must be short enough for sockets in it; beyond that a worker's batches never arrive.
    is_long = len(os.fsencode(tempfile.gettempdir())) > _MOST_SOCKET_BYTES - len("/stk-12345678/listener-12345678")
    folder = tempfile.mkdtemp(prefix="stk-", dir=_SHORT if is_long and os.access(_SHORT, os.W_OK) else None)
    is_over = multiprocessing.RawValue("b", 0)
    loader = torch.utils.data.DataLoader(
        _Batches(samples),
        sampler=requested(),
        batch_size=None,
        collate_fn=_as_is,
        num_workers=num_workers,
        prefetch_factor=prefetch_batches,
        worker_init_fn=partial(_begin_worker, is_over, os.getpid(), watch.stacks_file(), folder),
        pin_memory=is_pinned,
        # The user's classes need not be importable in a fresh process, and data in memory are not copied.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    with _running(loader, is_over, watch, folder) as batches, _deaths_noted(watch):
        while True:
            try:
                content = _next(batches, watch)
            except StopIteration:
                return
            except BadSample as problem:  # without the traceback that the loader puts before its text
                text = str(problem).rsplit(f"{BadSample.__module__}.{BadSample.__qualname__}: ", 1)[-1]
                raise BadSample(text.strip()) from problem
            yield pending.popleft(), content


def _next(batches: Iterator[Content], watch: WorkerWatch) -> Content:
    """The next batch; raises WorkerDied if a worker died since the last one, or dies during the wait."""
    if watch.death is not None:
        raise WorkerDied(watch.death)
    watch.is_waiting = True
    try:
        with doing("waiting for a batch from the loader's workers"):
            return next(batches)
    except (StopIteration, BadSample, WorkerDied):
        raise
    except Exception as error:  # of many types: data sent by a dead worker cannot be opened any more
        if (why := watch.describe(error)) is None:
            raise
        raise WorkerDied(why) from error
    finally:
        watch.is_waiting = False


@contextlib.contextmanager
def _running(
    loader: torch.utils.data.DataLoader[Content], is_over: ctypes.c_byte, watch: WorkerWatch, folder: str
) -> Iterator[Iterator[Content]]:
    """The loader's batches; its workers end with the block, even if an exception keeps the iterator alive.

    So does `folder`, which holds their temporary files.
    """
    others = multiprocessing.active_children()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), _temporary_files_in(folder):
        batches = iter(loader)  # forks while another thread runs
    workers = [process for process in multiprocessing.active_children() if process not in others]

    def kill() -> None:
        # At exit, Python sends SIGTERM to the rest and waits; workers react to that too late or not at all.
        if hasattr(signal, "SIGCHLD") and _is_main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(kill)
    watch.begin(workers)
    try:
        yield batches
    except WorkerDied:
        with _deaths_noted(watch):
            for worker in workers:  # a hanging one would not react to the loader
                worker.kill()
                worker.join()
        raise
    finally:
        watch.end()
        is_over.value = 1
        with contextlib.suppress(RuntimeError):  # a death that no longer matters
            # The private work of the iterator's destructor; without it, the destructor or the exit does it.
            getattr(batches, "_shutdown_workers", lambda: None)()
        if not any(worker.is_alive() for worker in workers):
            atexit.unregister(kill)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Processes started within the block keep multiprocessing's temporary files in `folder`.

    Each worker has a socket there, for passing tensors. By default it makes a directory `pymp-*` for it, which a killed
    worker leaves behind.
    """
    config = getattr(multiprocessing.current_process(), "_config", {})  # private: without it, they use the default
    before = config.get("tempdir")
    config["tempdir"] = folder
    try:
        yield
    finally:
        config["tempdir"] = before


def _remove_as_orphan(folder: str, trainer: int) -> None:
    """Remove the workers' directory from within a worker, if the trainer was killed."""
    if os.getppid() != trainer:
        shutil.rmtree(folder, ignore_errors=True)


class _Batches(torch.utils.data.Dataset[Content]):
    """Whole batches as items, for workers."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, place: EpochIndices) -> Content:
        """The batch of these samples."""
        epoch, indices = place
        return self._samples.fetch(indices, epoch)


def _as_is(content: Content) -> Content:
    return content


@contextlib.contextmanager
def _deaths_noted(watch: WorkerWatch) -> Iterator[None]:
    """Record a worker's death, and raise it only while waiting for a batch.

    By default the loader's handler of SIGCHLD raises wherever the main thread is, such as in the middle of an update.
    """
    loader_handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(loader_handler) or not _is_main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        try:
            loader_handler(number, frame)
        except RuntimeError as error:
            if (why := watch.describe(error)) is None:
                raise
            watch.death = why
            if watch.is_waiting:
                raise WorkerDied(why) from error

    signal.signal(signal.SIGCHLD, note)
    try:
        yield
    finally:
        if _is_main_thread():  # else a garbage collector closes the generator
            signal.signal(signal.SIGCHLD, loader_handler)


def _begin_worker(is_over: ctypes.c_byte, trainer: int, stacks: int | None, folder: str, _worker: int) -> None:
    """Set up a worker: it ignores signals until the trainer is done.

    Ctrl-C and service managers signal every process of a run, and the trainer saves and ends its workers itself.
    """
    watch_trainer(trainer)
    multiprocessing.util.Finalize(None, _remove_as_orphan, (folder, trainer), exitpriority=-200)
    torch.set_num_threads(1)
    if stacks is not None:  # on SIGUSR1 the stacks of all threads are written there
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    def exit_if_over(_number: int, _frame: FrameType | None) -> None:
        if is_over.value:
            os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler, since programs started by a user's data set would inherit SIG_IGN.
        signal.signal(number, exit_if_over)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_DYING_S = 2.0
"""Longest wait for the death of a worker whose connection broke [s]."""

_WRITING_S = 0.5
"""Time for workers to write their stacks [s]."""

_SHOWN = 8


@dataclass(frozen=True)
class WorkerDeath:
    """A worker died or was killed because of `why`, and all were replaced; `asked` batches are fetched again."""

    why: str
    asked: int


class WorkerWatch:
    """The workers of one source of batches.

    Attributes:
        is_waiting: whether the training process waits for a batch from them now.
        tell: called in the training process after workers were replaced.
        death: how a worker died that is not replaced yet; None if none did.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.tell: Callable[[WorkerDeath], None] = lambda _death: None
        self.death: str | None = None
        self._workers: Sequence[BaseProcess] = ()
        self._killed_for: str | None = None
        self._stacks: IO[bytes] | None = None

    def begin(self, workers: Sequence[BaseProcess]) -> None:
        """Set the workers that fetch from now on."""
        self._workers, self.death, self._killed_for = workers, None, None

    def end(self) -> None:
        """Forget the workers, which have ended."""
        self._workers, self.is_waiting = (), False
        stacks, self._stacks = self._stacks, None
        if stacks is not None:
            stacks.close()

    def stacks_file(self) -> int | None:
        """The descriptor to which new workers write their stacks on a signal; None where they are not forked."""
        if sys.platform != "linux":
            return None
        if self._stacks is None:
            self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as workers may write to it
        return self._stacks.fileno()

    def stacks(self) -> str:
        """Python tracebacks of the workers, without any that are stopped or hang within a C call."""
        if self._stacks is None:
            return ""
        try:
            begin = os.fstat(self._stacks.fileno()).st_size
            for worker in self._alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGUSR1)
            time.sleep(_WRITING_S)
            return os.pread(self._stacks.fileno(), 1 << 20, begin).decode(errors="replace")
        except (OSError, ValueError):  # they ended during the wait, and the file is closed
            return ""

    def kill(self, why: str) -> int:
        """Number of workers killed because of `why` [workers]: all; they are replaced as if they had died."""
        self._killed_for = why
        alive = self._alive()
        for worker in alive:
            worker.kill()
        return len(alive)

    def describe(self, error: BaseException) -> str | None:
        """How a worker died, if that caused `error`; None where all are well."""
        if self._killed_for is not None:
            return self._killed_for
        if isinstance(error, OSError | EOFError):
            # Its end of a connection closes a moment before its sentinel, and that a moment before it can be reaped.
            ended = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], _DYING_S)
            for worker in self._workers:
                if worker.sentinel in ended:
                    worker.join(_DYING_S)
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if "DataLoader worker" in str(error):
            return str(error).splitlines()[0].strip()
        return f"a loader worker {exit_in_words(dead[0].exitcode)}" if dead else None

    def _alive(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if worker.pid is not None and worker.is_alive()]


def named(indices: Indices) -> str:
    """The first few sample indices, for people: `3, 9, 12 and 61 more`."""
    first = ", ".join(str(int(index)) for index in indices[:_SHOWN])
    return f"{first} and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else first
