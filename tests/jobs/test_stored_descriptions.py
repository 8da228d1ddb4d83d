"""Jobs are described on disk as by commit 17027c5 (2026-11-23): its runs are found again, whatever the spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.jobs.job_description import describe_settings
from stoker.loading.lengths import padded
from stoker.planning.resolved_job import resolve_job

WRITTEN = json.loads(Path(__file__).with_name("descriptions_17027c5.json").read_text(encoding="utf-8"))
"""The JSON text of each job's description, and the digests of four specs."""

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"batch": stoker.auto(base=16, most=64)},
    "auto as a word": {"batch": "auto"},
    "tokens": {"batch": stoker.tokens(40)},
    "padded tokens": {"batch": stoker.tokens(40, padded=True, length_of=[4] * 8)},
    "tokens in rows": {"batch": stoker.tokens(40), "sampling": stoker.lengths.packed(8)},
    "decay": {"average": 0.99},
    "ema": {"average": stoker.EMA(0.5)},
    "swa": {"average": stoker.SWA(start=0.5)},
    "smoothed": {"loss": stoker.Objective("cross_entropy", label_smoothing=0.1)},
    "penalty": {"loss": stoker.Objective("mse", penalty=stoker.l2(0.01))},
    "whole batch": {"loss": stoker.Objective("mse", scope="batch"), "coupling_group": 2},
    "entries": {"fields": stoker.Fields(inputs=[0], target=1)},
    "one entry": {"fields": stoker.Fields(inputs=0)},
    "collate": {"fields": stoker.Fields(collate=padded(-1))},
    "evaluation": {
        "evaluation": stoker.Evaluation(every=stoker.updates(3), select="last", keep_every=stoker.epochs(2)),
    },
    "selected": {"evaluation": stoker.Evaluation(select="loss"), "valid": stoker.holdout(0.25)},
    "mixup": {"mix": stoker.transforms.Mixup(0.3), "augment": [stoker.transforms.RandomShift(1)]},
    "one of one": {"mix": [stoker.transforms.Mixup(0.3)]},
    "one of two": {"mix": (stoker.transforms.Mixup(), stoker.transforms.CutMix(p=0.5))},
    "balanced": {"sampling": stoker.sampling.balanced(num_samples=4)},
    "bucketed": {"sampling": stoker.lengths.bucketed(window=3)},
    "most": {
        "step": print,
        "stop": [stoker.Target("loss", 0.1)],
        "valid": stoker.holdout(0.25),
        "freeze": ["weight"],
        "seed": 3,
        "on_non_finite": "roll_back",
        "metrics": ["mse"],
        "schedule": stoker.schedules.one_cycle(),
    },
    "sync": {"sync": stoker.LocalSGD(every=stoker.samples(80)), "clip_norm": 1.0},
}
"""Settings by name."""


def job_of(**changes: Any) -> stoker.Job:
    """A linear model of eight samples."""
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "data": (torch.zeros(8, 4), torch.zeros(8, 1)),
        "loss": "mse",
        "batch": 4,
        "optimizer": stoker.SGD(lr=0.1),
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_described_as_by_earlier_versions(name: str) -> None:
    """Every key, its place and its value: the settings in `spec.json` are equal to the byte."""
    assert json.dumps(describe_settings(job_of(**JOBS[name]))) == WRITTEN["settings"][name]


@pytest.mark.parametrize("name", ["plain", "tokens", "tokens in rows", "most"])
def test_a_resolved_job_has_the_digest_of_earlier_versions(name: str) -> None:
    """Runs are found by the digest of the whole spec."""
    torch.manual_seed(0)
    spec = resolve_job(job_of(**JOBS[name], name="a job")).spec
    assert spec.digest() == WRITTEN["digests"][name]
