"""Programs in processes of their own that are forked from one which has imported PyTorch and Stoker.

Most of what a short run costs is the start of Python: seconds of imports, in each of the many processes that tests
kill, interrupt or run side by side. Here a nursery imports once, and forks for every program asked of it. What it forks
is a process like any other, with its own number, signals, environment, working directory and output, and it ends as
Python ends; only its imports are shared. The workers that such a program starts are forked from it in the same way.
Tests of the start itself, of what depends on the environment before Python runs, or on what is imported when, start an
interpreter instead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
LONGEST_S = 300.0
"""How long a program may run on after it was last spoken to [s], before it is killed."""
_IMPORTED = (
    "stoker.cli.main",
    "stoker.training.train",
    "stoker.training.elastic.worker_pool",
    "stoker.reporting.run_page",
    "stoker.stepping.layouts.sharded",
    "torch.distributed.tensor.debug",
    "stoker.layouts.stages",
    "stoker.planning.model.cpu_times",
    "numpy.ma",
    "numpy.ctypeslib",
    "encodings.idna",
    "torch._dynamo",
)
"""What a run imports from its command to its report."""
_IMPORTED_IF_INSTALLED = ("pydantic.type_adapter", "stoker.pool.control_plane", "uvicorn")
"""What Typer imports when it reads a command's options, and a control plane that is killed and started again."""
_MOST_BYTES = 2**17  # of an order, most of which is the environment
_MOST_FILES = 8  # with an order


class Forked:
    """`python -m MODULE ARGUMENTS` in a session of its own, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stderr: IO[Any] | None,
        env: dict[str, str],
        forks_workers: bool = True,
        leaves_memory: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it here, in the present working directory; a module's name, or the path of a script.

        With `leaves_memory`, whose objects are not torn down at its end: that takes half a second.
        """
        order = {
            "module": module,
            "arguments": list(arguments),
            "env": env,
            "cwd": str(Path.cwd()),
            "forks_workers": forks_workers,
            "leaves_memory": leaves_memory,
            "kept": list(pass_fds),
        }
        reading, writing = os.pipe()
        self._end, theirs = socket.socketpair()
        errors = writing if stderr is None else stderr.fileno()
        socket.send_fds(_nursery(), [json.dumps(order).encode()], [writing, errors, theirs.fileno(), *pass_fds])
        os.close(writing)
        theirs.close()
        self.stdout = os.fdopen(reading, encoding="utf-8")
        self.returncode: int | None = None
        self.pid = int.from_bytes(self._end.recv(8), "little", signed=True)

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        with contextlib.suppress(BlockingIOError):
            self._hear(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; the exit code, or minus the signal that ended it."""
        with self._limited():
            self._hear()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end in between, as with subprocess
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> str:
        """Standard output to its end; the process has ended afterwards."""
        with self._limited():
            out = self.stdout.read()
        self.stdout.close()
        self.wait()
        return out

    def _hear(self, flags: int = 0) -> None:
        """Take the nursery's message about its end."""
        if self.returncode is None:
            told = self._end.recv(8, flags)
            assert told, f"the nursery was lost, and with it how process {self.pid} ended"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(told, "little", signed=True))
            self._end.close()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(LONGEST_S, os.kill, (self.pid, signal.SIGKILL))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def forked_by_nursery(command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **_: Any) -> Forked:
    """As `subprocess.Popen` of a worker, with its output and its errors in one pipe, but forked from the nursery."""
    program, *arguments = [word for word in command[1:] if word != "-m"]
    return Forked(program, arguments, stderr=None, env=env, leaves_memory=True, pass_fds=pass_fds)


class ForkedWorker(subprocess.Popen):  # type: ignore[type-arg]
    """`python -m MODULE ARGUMENTS` as a fork of this process, which is one of the nursery's and has computed little."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(asked)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _become_worker(asked: dict[str, Any]) -> NoReturn:
    """What an interpreter would do with a command: signals and files like new, and an end with a code."""
    words = [word for word in asked["args"][1:] if word != "-m"]
    atexit._clear()
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        for number, source in enumerate((asked["p2cread"], asked["c2pwrite"], asked["errwrite"])):
            os.dup2(source, number)
        kept = sorted(asked["pass_fds"])
        for first, last in itertools.pairwise([2, *kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, last)
        for number in kept:
            os.set_inheritable(number, True)
        os.environ.clear()
        os.environ.update(asked["env"])
        _run_program(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter would
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@functools.cache
def _nursery() -> socket.socket:
    """Where orders go; the nursery ends when this process does, and the other end of its socket is closed."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(mine.close)  # before it is waited for
    return mine


@dataclass(frozen=True)
class _Order:
    """What is to be run, and where its output goes (file descriptors)."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str
    forks_workers: bool
    leaves_memory: bool
    kept: list[int]
    files: list[int]

    def run(self) -> None:
        """Become the program."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in a script's background
        aside = [fcntl.fcntl(own, fcntl.F_DUPFD, 500) for own in self.files]  # so that none is in another's place
        for own in self.files:
            os.close(own)
        for number, own in zip((1, 2, *self.kept), aside, strict=True):
            os.dup2(own, number)
            os.close(own)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        if self.forks_workers:
            pool = sys.modules["stoker.training.elastic.worker_pool"]
            pool.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker})
        sys.path[0] = self.cwd
        code = 0
        try:
            _run_program([self.module, *self.arguments])
        except SystemExit as end:
            if not self.leaves_memory or not isinstance(end.code, int | None):
                raise
            code = end.code or 0
        if self.leaves_memory:
            _leave(code)


def _leave(code: int) -> NoReturn:
    """End as Python does, but for its memory; by itself where a file cannot be flushed, which it complains of."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        raise SystemExit(code) from None
    os._exit(code)


def _run_program(words: list[str]) -> None:
    """Run a module, or a script, with its arguments."""
    sys.argv = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _next_order(orders: socket.socket) -> _Order | None:
    """In a child of the nursery: what it is to run. In the nursery itself: None, once its parent is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, _MOST_FILES)
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return None
        if os.fork() == 0:
            orders.close()
            out, errors, end, *kept = descriptors
            if _is_program(end):
                return _Order(**json.loads(message), files=[out, errors, *kept])
        for descriptor in descriptors:
            os.close(descriptor)


def _is_program(end: int) -> bool:
    """Fork once more: True in the program to be; its parent reports its number and how it ended, and exits."""
    pid = os.fork()
    if pid == 0:
        os.close(end)
        return True
    os.closerange(0, end)
    os.write(end, pid.to_bytes(8, "little", signed=True))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(end, status.to_bytes(8, "little", signed=True))
    os._exit(0)


def _serve(orders: socket.socket) -> None:
    """Import what every run needs, then fork for each order."""
    for module in _IMPORTED:
        importlib.import_module(module)
    for module in _IMPORTED_IF_INSTALLED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    pages = sys.modules["stoker.reporting.pages"]._environment()
    for template in pages.list_templates():  # each process would compile those of its report
        pages.get_template(template)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    order = _next_order(orders)
    if order is not None:
        order.run()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
