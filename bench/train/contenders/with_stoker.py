"""Stoker as a user has it: `stoker.train` on a job from its file, which plans, then trains as planned.

What it times are updates of its own loop: its telemetry, which counts them, is told to wait between slices, and its
clock to stand still meanwhile. No checkpoint is written, as by nobody here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import stoker
from bench.train.contenders.plan_file import PLAN_FILE
from bench.train.material import Material
from bench.train.pacing import Pacer
from stoker import records
from stoker.jobs.job_file import load_job
from stoker.training import session
from stoker.training.telemetry import Telemetry

_NEVER_S = 1e7
"""Seconds between checkpoints that no run lasts."""


def run(material: Material, pacer: Pacer) -> None:
    """Train until stopped.

    Raises:
        RuntimeError: the run ended by itself: the case has too few epochs.
    """
    paced_telemetry(pacer)
    choosing = [True]
    pacer.is_choosing = lambda: choosing[0]

    def note(event: records.Event) -> None:
        if event.kind == "settled" or (event.kind == "planned" and event.fields.get("is_settled") is not False):
            choosing[0] = False
        if event.kind == "planned":
            pacer.notes |= {key: event.fields[key] for key in ("plan", "took_s", "explanation")}
            pacer.notes["forecast_s"] = event.fields["forecast"]["total_s"]["value"]
        elif event.kind not in ("progress", "started"):
            pacer.notes.setdefault("events", []).append({"kind": event.kind, **event.fields})

    every = stoker.seconds(_NEVER_S)
    job, entry = load_job(Path(__file__).with_name("stoker_job.py"), {"folder": str(material.folder)})
    plan = os.environ.get(PLAN_FILE)
    stoker.train(job, plan=plan, new=True, checkpoint_every=every, entry=entry, sink=note)
    raise RuntimeError(f"{material.case.name} ended before it was stopped; give the case more epochs")


def paced_telemetry(pacer: Pacer) -> None:
    """Let every run of this process be paced from now on."""
    rested_s = 0.0

    class Paced(Telemetry):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings, clock=lambda: time.perf_counter() - rested_s)

        def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
            nonlocal rested_s
            is_due = super().updated(loss, num_samples)
            rested_s += pacer.updated(num_samples, loss.item)
            return is_due

        def updated_together(self, losses: Sequence[float], num_samples: int) -> None:
            nonlocal rested_s
            super().updated_together(losses, num_samples)
            rested_s += pacer.updated(len(losses) * num_samples, lambda: losses[-1])

    session.Telemetry = Paced  # type: ignore[misc]
