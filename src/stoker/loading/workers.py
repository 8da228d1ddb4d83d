"""Batches fetched ahead by worker processes.

What: PyTorch's DataLoader runs the processes and carries tensors over; what it fetches is whole batches by
(epoch, indices), so that nothing depends on which worker does it: where one dies, all are replaced, and what was asked
for is fetched again, bit for bit. Use when: fetching an item takes Python time. Costs: a process each, which on Linux
is a fork and shares what the samples hold in memory.

What another thread may know of the workers that fetch batches, and do to them.
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

from stoker.errors import RunFailed
from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import BadSample, Samples

_MOST_SOCKET_BYTES, _SHORT = 107, "/tmp"  # noqa: S108 - mkdtemp makes a directory of its own in it
"""The longest path of a socket on Linux [bytes] (unix(7)), and where there is room where `$TMPDIR` has none."""

EpochIndices = tuple[int, Indices]
"""An epoch and the sample indices [B] of a batch in it."""


class WorkerDied(Exception):
    """A worker died before it had fetched what it was asked for."""


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

    After a death, batches that were asked for are fetched by one worker, one at a time: a batch that kills it again is
    then known.

    Args:
        samples: what to fetch; on Linux workers see them as they were when the first batch is asked for.
        places: which samples, batch by batch.
        num_workers: how many processes.
        prefetch_batches: how many batches each of them fetches ahead.
        is_pinned: whether batches are put into page-locked memory, for copying to a GPU.
        watch: told of deaths; it may be asked about the workers, and to end them, from another thread.

    Raises:
        BadJob: a sample cannot be fetched or collated.
        RunFailed: a worker died twice over the same batch.
    """
    watch = watch or WorkerWatch()
    suspects: deque[EpochIndices] = deque()
    while True:
        asked: deque[EpochIndices] = deque()
        try:
            if suspects:
                alone = iter(tuple(suspects))
                again = _fetched(samples, alone, deque(), 1, 1, is_pinned=is_pinned, watch=watch)
                with contextlib.closing(again):
                    for fetched in again:
                        suspects.popleft()
                        yield fetched
            yield from _fetched(samples, places, asked, num_workers, prefetch_batches, is_pinned=is_pinned, watch=watch)
        except WorkerDied as death:
            why, is_again = str(death), bool(suspects)
        else:
            return
        if is_again:
            raise _died_again(suspects[0], why)
        suspects = asked
        watch.tell(WorkerDeath(why, len(suspects)))


def _died_again(place: EpochIndices, why: str) -> RunFailed:
    epoch, indices = place
    return RunFailed(
        f"a loader worker died twice while it fetched samples {named(indices)} (epoch {epoch + 1}): {why}",
        remedy="Look at what fetching these samples does. If it is memory that they lack: give a plan with fewer "
        "num_workers. The same command continues from the last checkpoint.",
    )


def _fetched(
    samples: Samples,
    places: Iterator[EpochIndices],
    asked: deque[EpochIndices],
    num_workers: int,
    prefetch_batches: int,
    *,
    is_pinned: bool,
    watch: WorkerWatch,
) -> Generator[tuple[EpochIndices, Content], None, None]:
    """The batches at `places` by workers that are started here; `asked` are those that were not given back yet.

    Raises:
        WorkerDied: one did.
    """
    is_over, folder = multiprocessing.RawValue("b", 0), _folder_for_sockets()
    loader = torch.utils.data.DataLoader(
        _Batches(samples),
        sampler=_remembered(places, asked),
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
            except BadSample as problem:
                raise BadSample(_own_words(problem)) from problem
            yield asked.popleft(), content


def _next(batches: Iterator[Content], watch: WorkerWatch) -> Content:
    """The next batch; raises WorkerDied if a worker died since the last one, or dies meanwhile."""
    if watch.death is not None:
        raise WorkerDied(watch.death)
    watch.is_waiting = True
    try:
        return next(batches)
    except (StopIteration, BadSample, WorkerDied):
        raise
    except Exception as error:  # of many types: what a dead worker sent ahead cannot be opened any more
        if (why := watch.describe(error)) is None:
            raise
        raise WorkerDied(why) from error
    finally:
        watch.is_waiting = False


@contextlib.contextmanager
def _running(
    loader: torch.utils.data.DataLoader[Content], is_over: ctypes.c_byte, watch: WorkerWatch, folder: str
) -> Iterator[Iterator[Content]]:
    """The loader's batches; its workers end with the block, even where an exception holds on to the iterator.

    So does `folder`, where they keep what is temporary.
    """
    others = multiprocessing.active_children()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), _temporary_files_in(folder):
        batches = iter(loader)  # forks beside a thread
    workers = [process for process in multiprocessing.active_children() if process not in others]
    kill = partial(_kill, workers, folder)
    atexit.register(kill)
    watch.begin(workers)
    try:
        yield batches
    except WorkerDied:
        with _deaths_noted(watch):
            for worker in workers:  # one that hangs would not heed the loader
                worker.kill()
                worker.join()
        raise
    finally:
        watch.end()
        is_over.value = 1
        with contextlib.suppress(RuntimeError):  # a death that no longer matters
            # What the iterator's destructor does, private; without it, that is left to the destructor, and to the exit.
            getattr(batches, "_shutdown_workers", lambda: None)()
        if not any(worker.is_alive() for worker in workers):
            atexit.unregister(kill)
        shutil.rmtree(folder, ignore_errors=True)


def _folder_for_sockets() -> str:
    """A new directory whose path is short enough for sockets in it; beyond that a worker's batches never arrive."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > _MOST_SOCKET_BYTES - len("/stk-12345678/listener-12345678")
    return tempfile.mkdtemp(prefix="stk-", dir=_SHORT if is_long and os.access(_SHORT, os.W_OK) else None)


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Processes started within the block keep what multiprocessing needs on a disk in `folder`.

    Each worker has a socket there, by which it hands over tensors. By itself it makes a directory `pymp-*` for it,
    which a worker that is killed leaves behind.
    """
    config = getattr(multiprocessing.current_process(), "_config", {})  # private: without it, they make their own
    before = config.get("tempdir")
    config["tempdir"] = folder
    try:
        yield
    finally:
        config["tempdir"] = before


def _remove_as_orphan(folder: str, trainer: int) -> None:
    """Where the trainer was killed, its workers' directory is theirs to remove."""
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


def _remembered(places: Iterator[EpochIndices], asked: deque[EpochIndices]) -> Iterator[EpochIndices]:
    """The same places; each also goes to the end of `asked`."""
    for place in places:
        asked.append(place)
        yield place


def _as_is(content: Content) -> Content:
    return content


def _own_words(problem: BadSample) -> str:
    """What the problem says, without the traceback that the loader puts before it."""
    return str(problem).rsplit(f"{BadSample.__module__}.{BadSample.__qualname__}: ", 1)[-1].strip()


@contextlib.contextmanager
def _deaths_noted(watch: WorkerWatch) -> Iterator[None]:
    """The loader raises on hearing (SIGCHLD) of a worker's death, wherever the main thread is.

    Here it raises only out of waiting for a batch; elsewhere, such as in the middle of an update, it is noted.
    """
    theirs = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(theirs) or not _is_main_thread():
        yield
        return

    def ours(number: int, frame: FrameType | None) -> None:
        try:
            theirs(number, frame)
        except RuntimeError as error:
            if (why := watch.describe(error)) is None:
                raise
            watch.death = why
            if watch.is_waiting:
                raise WorkerDied(why) from error

    signal.signal(signal.SIGCHLD, ours)
    try:
        yield
    finally:
        if _is_main_thread():  # else a garbage collector closes the generator
            signal.signal(signal.SIGCHLD, theirs)


def _begin_worker(is_over: ctypes.c_byte, trainer: int, stacks: int | None, folder: str, _worker: int) -> None:
    """Ctrl-C and a service manager signal every process of a run: the trainer saves and ends its workers itself."""
    if sys.platform == "linux" and os.getppid() != trainer:  # killed meanwhile: PyTorch watches whoever adopted us
        _remove_as_orphan(folder, trainer)
        os._exit(0)
    multiprocessing.util.Finalize(None, _remove_as_orphan, (folder, trainer), exitpriority=-200)
    torch.set_num_threads(1)
    write_stacks_when_asked(stacks)

    def heed_the_trainer(_number: int, _frame: FrameType | None) -> None:
        if is_over.value:
            os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler, since programs that a user's data set starts would inherit SIG_IGN.
        signal.signal(number, heed_the_trainer)


def _kill(workers: list[BaseProcess], folder: str) -> None:
    """At exit, Python sends SIGTERM to what is left and waits for its end: workers heed that too late or not at all."""
    if hasattr(signal, "SIGCHLD") and _is_main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_DYING_S = 2.0
"""A worker whose connection broke is waited for so long, to see whether it died [s]."""

_WRITING_S = 0.5
"""A worker that is able to gets so long to write its stack [s]."""

_SHOWN = 8


@dataclass(frozen=True)
class WorkerDeath:
    """A worker died or was killed, and all were replaced; `why` says how, `asked` how many batches are fetched anew."""

    why: str
    asked: int


def _ignore(_death: WorkerDeath) -> None:
    """Tell nobody."""


class WorkerWatch:
    """The workers of one source of batches.

    Attributes:
        is_waiting: whether the training process waits for a batch from them now.
        tell: called in the training process after workers were replaced.
        death: how a worker died that nobody has replaced yet; None if none did.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.tell: Callable[[WorkerDeath], None] = _ignore
        self.death: str | None = None
        self._workers: Sequence[BaseProcess] = ()
        self._killed_for: str | None = None
        self._stacks: IO[bytes] | None = None

    def begin(self, workers: Sequence[BaseProcess]) -> None:
        """Take note of the workers that fetch from now on."""
        self._workers, self.death, self._killed_for = workers, None, None

    def end(self) -> None:
        """There are no workers now."""
        self._workers, self.is_waiting = (), False
        stacks, self._stacks = self._stacks, None
        if stacks is not None:
            stacks.close()

    def stacks_file(self) -> int | None:
        """A descriptor that workers about to be started write their stacks to when asked; None where not forked."""
        if sys.platform != "linux":
            return None
        if self._stacks is None:
            self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as workers may be asked
        return self._stacks.fileno()

    def stacks(self) -> str:
        """Where each worker is, as Python tracebacks; nothing of those that are stopped or hang within a C call."""
        if self._stacks is None:
            return ""
        try:
            begin = os.fstat(self._stacks.fileno()).st_size
            for worker in self._alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGUSR1)
            time.sleep(_WRITING_S)
            return os.pread(self._stacks.fileno(), 1 << 20, begin).decode(errors="replace")
        except (OSError, ValueError):  # they ended meanwhile, and the file is closed
            return ""

    def kill(self, why: str) -> int:
        """End all workers at once, because of `why`; they are replaced as if they had died. Returns how many."""
        self._killed_for = why
        alive = self._alive()
        for worker in alive:
            worker.kill()
        return len(alive)

    def describe(self, error: BaseException) -> str | None:
        """How a worker died, where `error` comes of that; None where all are well."""
        if self._killed_for is not None:
            return self._killed_for
        if isinstance(error, OSError | EOFError):  # its end of a connection may be gone a moment before it is
            multiprocessing.connection.wait([worker.sentinel for worker in self._workers], _DYING_S)
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if "DataLoader worker" in str(error):
            return str(error).splitlines()[0].strip()
        return f"a loader worker ended with {dead[0].exitcode}" if dead else None

    def _alive(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if worker.pid is not None and worker.is_alive()]


def write_stacks_when_asked(descriptor: int | None) -> None:
    """In a worker: on SIGUSR1 write the stacks of all threads to `descriptor`."""
    if descriptor is not None:
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)


def named(indices: Indices) -> str:
    """The first few sample indices, for people: `3, 9, 12 and 61 more`."""
    first = ", ".join(str(int(index)) for index in indices[:_SHOWN])
    return f"{first} and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else first
