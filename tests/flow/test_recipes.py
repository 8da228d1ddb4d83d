"""A job that names a recipe is planned, recorded and trained as the job it stands for."""

from __future__ import annotations

import pytest
import torch

import stoker
from stoker.planning.resolved_job import resolve_job


def _images(**settings) -> stoker.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand((64, 1, 28, 28), generator=generator), torch.randint(0, 10, (64,), generator=generator))
    return stoker.Job(
        model=lambda: stoker.zoo.ResNet9(width=2),
        data=data,
        loss="cross_entropy",
        batch=32,
        until=stoker.epochs(1),
        recipe="fast",
        **settings,
    )


def test_what_the_recipe_sets_is_in_the_jobs_identity() -> None:
    """Optimiser, schedule and augmentation are recorded as if they had been written out."""
    prepared = resolve_job(_images())
    assert isinstance(prepared.job.optimizer, stoker.Muon)
    assert prepared.job.augment
    assert prepared.spec.settings["optimizer"]["type"] == "Muon"


def test_it_trains(tmp_path, monkeypatch) -> None:
    """From `recipe="fast"` alone to a finished run."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path))
    run = stoker.train(_images(), on="cpu", sink=lambda _: None)
    assert run.status == "finished"


def test_a_recipe_that_does_not_fit_says_why() -> None:
    """A fast recipe is for images."""
    data = (torch.rand(64, 8), torch.randint(0, 3, (64,)))
    job = stoker.Job(
        model=lambda: torch.nn.Linear(8, 3),
        data=data,
        loss="cross_entropy",
        batch=32,
        until=stoker.epochs(1),
        recipe="fast",
    )
    with pytest.raises(stoker.BadJob, match="is for images"):
        resolve_job(job)
