"""A job that learns from a source of any kind, and a process that begins such runs and is killed within them.

    python -m tests.flow.data_kinds ROOT KIND:WORKERS …

makes, for each case, a run in ROOT/KIND-WORKERS/killed under the files in ROOT/KIND, and kills it after a checkpoint.
Each run has a process of its own, forked after a first run here: loading what training needs takes longer than that.
(With a GPU in sight PyTorch could not be forked then; so there is none.)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from torch import nn

import stoker
from stoker.data.files.source import IndexedSource
from stoker.records import Event, Plan
from tests.data.files.making import COUNT, SOURCES

EPOCHS = 2


def plan_with(num_workers: int) -> Plan:
    """A checkpoint after every update."""
    loader = "workers" if num_workers else "inline"
    return Plan(device="cpu", micro_batch=5, loader=loader, num_workers=num_workers, checkpoint_every_s=0.001)


def job_of(source: IndexedSource) -> stoker.Job:
    """A small classifier with dropout; images are moved at random; a ragged last batch."""
    images = source[0]["image"] if isinstance(source[0], dict) else source[0][0]
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(images.numel(), 3)),
        data=source,
        valid=stoker.holdout(0.1),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.05, momentum=0.9),
        batch=10,
        until=stoker.epochs(EPOCHS),
        augment=[stoker.transforms.RandomShift(1)] if images.dim() == 3 else [],
    )


def source_of(kind: str, root: Path) -> IndexedSource:
    """The source of a kind, its files made once."""
    folder = root / kind
    folder.mkdir(parents=True, exist_ok=True)
    return SOURCES[kind](folder, COUNT)


def killed_run(kind: str, num_workers: int, root: Path) -> None:
    """Train, in a process of its own, until it kills itself in the second epoch, a checkpoint behind it."""
    job = job_of(source_of(kind, root))
    pid = os.fork()
    if pid == 0:
        checkpointed = []

        def kill_late(event: Event) -> None:
            checkpointed.extend([event] if event.kind == "checkpointed" else [])
            if event.kind == "progress" and int(str(event.fields["samples"])) >= 50 and checkpointed:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            stoker.train(
                job, run_dir=root / f"{kind}-{num_workers}" / "killed", plan=plan_with(num_workers), sink=kill_late
            )
        finally:
            os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(f"{kind} with {num_workers} workers was not killed: it ended with {status}")


if __name__ == "__main__":
    stoker.train(
        job_of(source_of("csv", Path(sys.argv[1]))),
        run_dir=Path(sys.argv[1]) / "first",
        plan=plan_with(0),
        sink=lambda _event: None,
    )
    for case in sys.argv[2:]:
        name, _, workers = case.partition(":")
        killed_run(name, int(workers), Path(sys.argv[1]))
