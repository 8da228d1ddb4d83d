"""A job that augments and mixes packed images, and a process that begins its run and is killed within it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import nn

import stoker
from stoker.records import Event, Plan

KILLED_AT = 300
"""Samples of 420, the second epoch's among them."""


def plan_with(num_workers: int, micro_batch: int = 30) -> Plan:
    """A checkpoint after every update."""
    loader = "workers" if num_workers else "inline"
    return Plan(device="cpu", micro_batch=micro_batch, loader=loader, num_workers=num_workers, checkpoint_every_s=0.001)


def job_in(root: Path, **changed: object) -> stoker.Job:
    """A small classifier of digits, packed in `root`; a ragged last batch."""
    t, (train, test) = stoker.transforms, stoker.data.digits()
    given = {
        "model": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
        "data": stoker.data.packed(train.subset(0, 210), root / "digits", shard_bytes=4000, tell=lambda _line: None),
        "valid": test.subset(0, 50),
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "optimizer": stoker.SGD(lr=0.05, momentum=0.9),
        "batch": 30,
        "until": stoker.epochs(2),
        "augment": [t.RandomAffine(degrees=10, translate=(0.1, 0.1)), t.Sometimes(t.GaussianBlur()), t.Cutout(2)],
        "mix": [t.Mixup(0.4), t.CutMix()],
    }
    return stoker.Job(**{**given, **changed})  # type: ignore[arg-type]


def killed_run(root: str, num_workers: int) -> None:
    """Train until this process kills itself, checkpoints behind it."""

    def kill_late(event: Event) -> None:
        if event.kind == "progress" and int(str(event.fields["samples"])) >= KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    stoker.train(job_in(Path(root)), run_dir=Path(root) / "killed", plan=plan_with(num_workers), sink=kill_late)
