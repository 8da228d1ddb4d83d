from __future__ import annotations

import ast
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forked

PROGRAM = """
import os, sys, time
try:
    print("here", os.getcwd(), sys.argv[1:], os.environ.get("ASKED"), os.environ.get("HOME"), flush=True)
    print("there", file=sys.stderr, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a program in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def waiting() -> Iterator[Forked]:
    """The program, running on until it is stopped."""
    with tempfile.TemporaryFile() as errors:
        process = Forked("program", ["wait"], stderr=errors, env=dict(os.environ))
        assert process.stdout.readline()
        yield process
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_program_has_what_a_process_has_of_its_own(place: Path, code: int) -> None:
    """Arguments, environment, working directory, output and exit code, as if Python had been started for it."""
    with tempfile.TemporaryFile() as errors:
        process = Forked("program", [str(code)], stderr=errors, env={"ASKED": "yes"})
        assert process.communicate() == f"here {place} ['{code}'] yes None\n"
        assert (process.wait(), process.poll(), process.returncode) == (code, code, code)
        errors.seek(0)
        assert errors.read() == b"there\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_by_a_signal(waiting: Forked, number: signal.Signals) -> None:
    """The signal is named; another one, to what has ended, is not sent to anybody."""
    assert waiting.poll() is None
    assert os.getsid(waiting.pid) == waiting.pid
    waiting.send_signal(number)
    assert waiting.wait() == -number
    waiting.kill()
    assert not Path(f"/proc/{waiting.pid}").exists()


def test_an_interrupt_is_an_exception_of_python(waiting: Forked) -> None:
    """Whatever the shell did to the nursery's signals, a program starts with Python's own."""
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait() == 7


ENDS = """
import atexit, sys, threading
def last():
    threading.main_thread().join()
    print("a thread")
atexit.register(print, "at exit")
threading.Thread(target=last).start()
print("not flushed", end=" ")
sys.exit({code})
"""


@pytest.mark.parametrize("leaves_memory", [False, True])
@pytest.mark.parametrize(("code", "ended"), [("None", 0), ("3", 3), ("'why'", 1)])
def test_a_program_comes_to_its_end(place: Path, code: str, ended: int, *, leaves_memory: bool) -> None:
    """Threads, functions for the end, and what was not flushed, whether or not its memory is torn down."""
    (place / "ends.py").write_text(ENDS.format(code=code))
    with tempfile.TemporaryFile() as errors:
        process = Forked("ends", [], stderr=errors, env=dict(os.environ), leaves_memory=leaves_memory)
        assert process.communicate() == "not flushed a thread\nat exit\n"
        errors.seek(0)
        assert (process.returncode, errors.read()) == (ended, b"why\n" if ended == 1 else b"")


UNREAD = """
import os, sys
os.read(int(sys.argv[1]), 1)
print("to nobody")
"""


@pytest.mark.parametrize("leaves_memory", [False, True])
def test_a_program_whose_output_nobody_reads_complains_as_python_does(place: Path, *, leaves_memory: bool) -> None:
    """At its end, when what it printed is flushed, unless the environment has it flushed at once."""
    (place / "unread.py").write_text(UNREAD)
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = Forked(
            "unread",
            [str(reading)],
            stderr=errors,
            env=dict(os.environ),
            leaves_memory=leaves_memory,
            pass_fds=[reading],
        )
        process.stdout.close()
        os.write(writing, b"!")
        code = process.wait()
        errors.seek(0)
        assert code != 0
        assert b"BrokenPipeError" in errors.read()
    os.close(reading)
    os.close(writing)


STARTS_A_WORKER = """
import os, sys
from stoker.training.elastic.worker_pool import subprocess
read, write = os.pipe()
worker = subprocess.Popen(
    [sys.executable, "-m", "worker", str(write)], pass_fds=(write,), env={**os.environ, "ASKED": "a worker"},
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
)
os.close(write)
words = worker.stdout.read().decode().split()
print([os.read(read, 9), words, worker.wait(), worker.poll(), "torch" in words, words[0] == str(worker.pid)])
"""

WORKER = """
import os, sys
print(os.getpid(), os.environ["ASKED"], os.path.exists("/proc/self/fd/" + sys.argv[1]), flush=True)
print(*sorted({name for name in sys.modules if name == "torch"}), file=sys.stderr, flush=True)
os.write(int(sys.argv[1]), b"by a pipe")
raise SystemExit(5)
"""


@pytest.mark.parametrize("forks_workers", [True, False])
def test_a_worker_is_a_process_like_one_of_a_fresh_interpreter(place: Path, *, forks_workers: bool) -> None:
    """Its number, environment, output, exit code and the descriptors it is given; only that it has imported PyTorch."""
    (place / "starts.py").write_text(STARTS_A_WORKER)
    (place / "worker.py").write_text(WORKER)
    with tempfile.TemporaryFile() as errors:
        process = Forked("starts", [], stderr=errors, env=dict(os.environ), forks_workers=forks_workers)
        found = ast.literal_eval(process.communicate())
        errors.seek(0)
        assert (process.wait(), errors.read()) == (0, b"")
    piped, words, code, again, has_imported, is_its_number = found
    assert (piped, words[1:4], code, again) == (b"by a pipe", ["a", "worker", "True"], 5, 5)
    assert is_its_number
    assert has_imported == forks_workers
