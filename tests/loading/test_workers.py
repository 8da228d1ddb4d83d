from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import BadJob, RunFailed
from stoker.jobs import Holdout
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.samples import hold_out
from stoker.loading.workers import WorkerDeath, WorkerWatch
from stoker.records import Position
from tests.loading.data import Deadly, Failing, Growing, Noisy, Squares, contents, source_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are tested where they are forked")

interrupts_anything = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""An error raised out of a signal handler may leave a socket of the loader open: collected within the test, unheard."""


def all_equal(one: list[Any], other: list[Any]) -> bool:
    """Whether two streams of dict batches are the same, bit for bit."""
    return all(
        list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def test_workers_change_nothing() -> None:
    """Items drawn from Python's, NumPy's and torch's generators are those fetched inline, from any position on."""
    samples = as_samples(Noisy(23), what="data", seed=5)
    inline = contents(source_of(samples, 4), 0, 14)
    source = source_of(samples, 4, "workers")
    assert all_equal(contents(source, 0, 14), inline)
    assert all_equal(contents(source, 8, 14), inline[8:])
    assert [len(batch["label"]) for batch in inline[:6]] == [4, 4, 4, 4, 4, 3]


def test_workers_fetch_a_part_of_the_data_as_it_is() -> None:
    """The training data without a holdout."""
    part, _ = hold_out(as_samples(Noisy(20), what="data"), Holdout(0.3))
    assert all_equal(contents(source_of(part, 5, "workers"), 0, 4), contents(source_of(part, 5), 0, 4))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (Failing(10), r"^sample 7 of Failing raised OSError: the disk said: BadSample: no$"),
        (Growing(10), r"^samples \d and \d differ in shape: \[3, \d\] and \[3, \d\]; make them equal[^\n]*$"),
    ],
)
def test_a_workers_error_is_told_in_plain_words(data: Any, problem: str) -> None:
    """Index and reason, as if it had happened here: no traceback of another process."""
    samples = as_samples(data, what="data")
    with pytest.raises(BadJob, match=problem):
        contents(source_of(samples, 5, "workers"), 0, 2)


def test_shapes_are_named_by_the_index_of_the_data() -> None:
    """Not by the place in the batch: sample 5 is the long one, wherever it came."""
    with pytest.raises(BadJob, match=r"^samples (5 and \d|\d and 5) differ in shape"):
        contents(source_of(as_samples(Growing(10), what="data"), 10, "workers"), 0, 1)


@interrupts_anything
def test_samples_that_kill_their_worker_twice_fail_the_run() -> None:
    """Promptly, by their indices, with what to do, and as an error that a run records."""
    source = source_of(as_samples(Deadly(10), what="data"), 2, "workers")
    told: list[WorkerDeath] = []
    source.watch.tell = told.append
    with pytest.raises(RunFailed, match=r"died twice while it fetched samples (9, \d|\d, 9) \(epoch 1\)") as caught:
        contents(source, 0, 5)
    assert "fewer num_workers" in (caught.value.remedy or "")
    assert len(told) == 1
    assert multiprocessing.active_children() == []
    gc.collect()


@interrupts_anything
def test_workers_that_die_are_replaced_and_every_batch_is_as_it_was() -> None:
    """While the trainer computes, which is not interrupted; draws of the items included."""
    samples = as_samples(Noisy(100), what="data")
    source, told = source_of(samples, 4, "workers"), list[WorkerDeath]()
    source.watch.tell = told.append
    found = []
    for number, batch in enumerate(source.batches(Position(), 50)):
        found.append(batch.cut(0, batch.size))
        if number in (3, 30):
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
    assert all_equal(found, contents(source_of(samples, 4), 0, 50))
    assert len(told) == 2
    assert all("worker" in death.why for death in told)
    gc.collect()


@interrupts_anything
def test_a_worker_that_hangs_is_replaced_once_somebody_ends_it() -> None:
    """It stands still while the trainer waits for it; from another thread all are killed, and the wait ends."""
    samples = as_samples(Noisy(60), what="data")
    source, told = source_of(samples, 4, "workers"), list[WorkerDeath]()
    source.watch.tell = told.append
    batches = source.batches(Position(), 15)
    found = [next(batches)]
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGSTOP)

    def end_it() -> None:
        while not source.watch.is_waiting:
            threading.Event().wait(0.01)
        source.watch.kill("no batch came for 60 s")

    thread = threading.Thread(target=end_it)
    thread.start()
    found += list(batches)
    thread.join()
    inline = contents(source_of(samples, 4), 0, 15)
    assert all_equal([batch.cut(0, batch.size) for batch in found], inline)
    assert [death.why for death in told] == ["no batch came for 60 s"]
    gc.collect()


def test_workers_say_where_they_are() -> None:
    """Their stacks, on request, while they wait for something to do."""
    source = source_of(as_samples(Squares(40), what="data"), 4, "workers")
    batches = source.batches(Position(), 10)
    next(batches)
    assert "worker.py" in source.watch.stacks()
    batches.close()
    assert source.watch.stacks() == ""


def test_no_process_and_no_handler_is_left_behind() -> None:
    """Neither when the batches are through, nor when training stops early."""
    samples = as_samples(Squares(40), what="data")
    contents(source_of(samples, 4, "workers"), 0, 2)
    before = signal.getsignal(signal.SIGCHLD)
    batches = source_of(samples, 4, "workers").batches(Position(), 10)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGCHLD) == before


def test_an_error_that_is_kept_keeps_no_process() -> None:
    """Its traceback holds on to the loader, but the workers are gone, and without a wait."""
    with pytest.raises(BadJob) as kept:
        contents(source_of(as_samples(Failing(10), what="data"), 5, "workers"), 0, 2)
    assert kept.value
    assert multiprocessing.active_children() == []


def test_signals_for_the_whole_run_are_left_to_the_trainer() -> None:
    """Ctrl-C and SIGTERM, sent to every process of it, do not end the workers before the trainer has saved."""
    samples = as_samples(Noisy(30), what="data")
    batches = source_of(samples, 3, "workers").batches(Position(), 10)
    found = [next(batches), next(batches)]  # one from each: both have begun
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT):
            subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
    found += list(batches)
    assert all_equal([batch.cut(0, 3) for batch in found], contents(source_of(samples, 3), 0, 10))


def test_workers_can_be_used_beside_the_main_thread() -> None:
    """A program may train in a thread of its own, which cannot hear signals."""
    found: list[Any] = []
    source = source_of(as_samples(Noisy(12), what="data"), 4, "workers")
    thread = threading.Thread(target=lambda: found.extend(contents(source, 0, 3)))
    thread.start()
    thread.join(60)
    assert all_equal(found, contents(source_of(as_samples(Noisy(12), what="data"), 4), 0, 3))


ABANDONED = """
import torch
from stoker.loading.dataset_adapters import as_samples
from stoker.records import Position
from tests.loading.data import Squares, source_of
batches = source_of(as_samples(Squares(100), what="data"), 2, "workers").batches(Position(), 50)
next(batches)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_ends_amid_batches_ends(tmp_path: Path) -> None:
    """Workers that ignore SIGTERM do not keep it, even if the batches were not closed; nothing temporary is left."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert left_in(tmp_path) == []


LATE = """
import sys
from torch.utils.data._utils import worker
from stoker.loading.worker_watchdog import watch_trainer
for trainer in sys.argv[1:]:
    watch_trainer(int(trainer))
    print(worker.ManagerWatchdog().is_alive())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch watches in another way")
def test_a_worker_that_is_set_up_after_its_trainer_was_killed_ends() -> None:
    """PyTorch would watch the parent of that moment, which is another by then, and the worker would never end."""
    command = [sys.executable, "-c", LATE, str(os.getpid()), str(os.getppid())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["True", "False"]


def left_in(folder: Path) -> list[str]:
    """What is there, but for PyTorch's cache of compiled code, which is kept."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_"))


KILLED = f"{ABANDONED}\nimport time\ntime.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_killed_leaves_nothing_temporary(tmp_path: Path, number: signal.Signals) -> None:
    """Its workers, once they notice, remove what was theirs; nor do workers that were killed themselves leave any."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as trainer:
        assert trainer.stdout.readline() == "done\n"
        assert [name.startswith("stk-") for name in left_in(tmp_path)] == [True]
        trainer.send_signal(number)
        trainer.stdout.read()  # until the last of them has ended, who all write to it
    deadline = time.monotonic() + 60
    while left_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_in(tmp_path) == []


def test_workers_that_are_killed_leave_nothing_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a socket on the disk, in a directory that goes with the loader."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    batches = source_of(as_samples(Squares(40), what="data"), 4, "workers").batches(Position(), 10)
    next(batches)
    for worker in multiprocessing.active_children():
        worker.kill()
    batches.close()
    assert left_in(tmp_path) == []


def test_a_long_path_of_temporary_files_holds_up_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket has room for 107 bytes: beyond that workers could not hand over their batches."""
    place = tmp_path / ("long" * 30)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    samples = as_samples(Noisy(12), what="data")
    assert all_equal(contents(source_of(samples, 4, "workers"), 0, 3), contents(source_of(samples, 4), 0, 3))


def close_everything_then_die() -> None:
    """As a killed process does in the kernel: its files are closed before its parent can reap it."""
    os.closerange(3, 256)
    time.sleep(0.5)
    os._exit(9)


def test_a_broken_connection_is_a_death_even_while_the_worker_is_still_dying() -> None:
    """Between the closing of its files and its end a process counts as alive; a busy machine makes that long."""
    worker = multiprocessing.get_context("fork").Process(target=close_everything_then_die)
    worker.start()
    watch = WorkerWatch()
    watch.begin([worker])
    why = watch.describe(ConnectionResetError(104, "Connection reset by peer"))
    assert why is not None
    assert "a loader worker" in why
