"""What every test runs under: one thread, no network, a cache of its own, examples that repeat.

All of it is set through the environment before anything of Stoker or torch is imported, so that the processes which
tests start (the command line, loader workers, a run to be killed) live under the same rules.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

TESTS = Path(__file__).parent

# One thread: sums are added in the same order everywhere, and the processes of pytest-xdist do not fight for cores.
for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[threads] = "1"

# As on a machine without a network: downloads go to a proxy on a port where nothing listens and are refused at once.
for proxy in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
    os.environ[proxy] = "http://127.0.0.1:9"
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1"

# All temporary files are below one directory that goes with the session, those of killed processes too. Its name has
# the number of the session's process, so that the next session removes what a killed one left. pytest's own stay.
if "PYTEST_XDIST_WORKER" not in os.environ:
    system = tempfile.gettempdir()
    for left in Path(system).glob("stoker-tests-*-*") if Path("/proc/self").exists() else ():
        number = left.name.split("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", system)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"stoker-tests-{os.getpid()}-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# Nothing is read from, or left in, the user's cache and settings; plain output of one width whatever the terminal.
os.environ["STOKER_CACHE"] = tempfile.mkdtemp(prefix="cache-")
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="config-")
os.environ.pop("STOKER_DATA", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.update(NO_COLOR="1", COLUMNS="120", LINES="40")

# What was compiled is kept, whatever the caller's shell says: every process that a test starts imports all of Stoker,
# and every process of pytest-xdist would rewrite the assertions of every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ctrl-C as at a terminal: what a script starts in the background inherits an ignored SIGINT, and every child with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("STOKER_SIMULATED_GPU"):  # `make test-simulated-gpu`: what is marked `gpu` runs on simulated ones
    from stoker.testing.simulated_gpu import simulate_gpus

    simulate_gpus(int(os.environ["STOKER_SIMULATED_GPU"]))

import pytest  # noqa: E402 - the environment comes first
from _pytest.doctest import DoctestModule  # noqa: E402 - likewise
from hypothesis import settings  # noqa: E402 - likewise

# Examples are derived from the test itself: a change that fails here fails everywhere, and again. They are the same in
# every run, so that more of them than show a law by its corners would only take time.
settings.register_profile("stoker", derandomize=True, deadline=None, database=None, print_blob=True, max_examples=40)
settings.load_profile("stoker")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in docstrings of the package alone: in those of thousands of tests there are none."""
    return [one for one in (yield) if not (isinstance(one, DoctestModule) and TESTS in one.path.parents)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none; torch is asked only if such a test was collected."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for garbage: before each trial of a plan there is one."""
    _leave_out_what_was_imported()


def pytest_runtest_setup() -> None:
    """Skip what begins after STOKER_TESTS_UNTIL, seconds since 1970, so that a slow machine ends in time."""
    until = os.environ.get("STOKER_TESTS_UNTIL")
    if until and time.time() > float(until):
        pytest.skip("the time for tests was over (STOKER_TESTS_UNTIL)")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Likewise what a test was the first to import."""
    if len(sys.modules) > _FROZEN_MODULES[-1] + 50:
        _leave_out_what_was_imported()


_FROZEN_MODULES: list[int] = []


def _leave_out_what_was_imported() -> None:
    gc.collect()
    gc.freeze()
    _FROZEN_MODULES.append(len(sys.modules))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test; runs are made in `runs` below it, and its cache is its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STOKER_RUNS", raising=False)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return tmp_path
