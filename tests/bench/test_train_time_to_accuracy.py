from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from bench.train import time_to_accuracy as bench
from bench.train import time_to_accuracy_prototype as prototype
from stoker.loading.datasets import datasets_of
from stoker.recipes import MirrorAveraged
from stoker.records import Event
from stoker.stepping.model import build_model


def run_of(accuracy: float, seconds: float) -> dict[str, Any]:
    """What one run gives."""
    return {"accuracy": accuracy, "train_wall_s": seconds, "train_cpu_s": 2 * seconds, "process_s": seconds + 20}


RUNS = {
    "by hand/0": run_of(0.93, 100.0),
    "stoker/0": run_of(0.932, 70.0),
    "by hand/1": run_of(0.931, 100.0),
    "stoker/1": run_of(0.929, 80.0),
    "stoker/2": run_of(0.5, 1.0),
}


def test_the_summary_is_of_seeds_that_both_ran() -> None:
    """Means by recipe, ratios by seed, and a verdict on both accuracy and time."""
    found = bench.summary(RUNS, [0, 1, 2], "93")
    assert found["seeds"] == [0, 1]
    assert found["stoker"]["accuracy"] == pytest.approx(0.9305)
    assert found["ratio_train_wall_s"] == {"mean": pytest.approx(0.75), "low": 0.7, "high": 0.8}
    assert found["passes"]
    assert not bench.summary(RUNS, [0, 1], "94")["passes"]
    assert not bench.summary(RUNS | {"stoker/0": run_of(0.94, 95.0)}, [0, 1], "93")["passes"]


def test_what_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted benchmark asks for what is missing, one run at a time, and keeps each as it comes."""
    asked: list[tuple[str, int]] = []

    def ask(recipe: str, target: str, seed: int, threads: int, *, is_validation: bool) -> dict[str, Any]:
        asked.append((recipe, seed))
        if (recipe, seed) == ("stoker", 1) and len(asked) < 5:
            raise KeyboardInterrupt
        return run_of(0.94, 80.0 if recipe == "stoker" else 100.0)

    monkeypatch.setattr(bench, "ask", ask)
    command = ["--target", "93", "--seeds", "0,1", "--threads", "1", "--out", str(tmp_path / "found.json")]
    with pytest.raises(KeyboardInterrupt):
        bench.main(command)
    assert asked == [("stoker", 0), ("by hand", 0), ("by hand", 1), ("stoker", 1)]
    assert bench.main(command) == 0
    assert asked[4:] == [("stoker", 1)]
    assert json.loads((tmp_path / "found.json").read_text())["summary"]["passes"]


def test_the_job_is_the_fast_recipe_evaluated_both_ways(fashion_places: None) -> None:
    """All training images, none held out; the test set is Stoker's to look at once."""
    job = bench.fast_job("93", seed=3)
    assert isinstance(job.optimizer, stoker.Muon)
    assert (job.until, job.seed, job.valid, job.recipe) == (stoker.epochs(3), 3, None, "fast")
    assert isinstance(build_model(job), MirrorAveraged)


def test_validation_looks_at_training_images_alone() -> None:
    """Both recipes train on the same nine tenths and are measured on the rest; the test images are not read."""
    train, _ = stoker.data.fashion_mnist()
    if not train.is_here():
        pytest.skip("Fashion-MNIST is not on this machine")
    chosen, aside = bench.images(is_validation=True)
    job = bench.fast_job("93", 0, is_validation=True)
    data = datasets_of(job)
    assert data.test is None
    assert len(chosen[0]) == len(data.train) == 54_000
    assert torch.equal(aside[1], data.valid.fetch(np.arange(6_000), 0)[1])


@pytest.fixture
def fashion_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fashion-MNIST's shape without its files."""
    images = torch.randint(0, 255, (40, 1, 28, 28), dtype=torch.uint8).float()
    parts = [(images, torch.arange(40) % 10)] * 2
    monkeypatch.setattr(stoker.data, "fashion_mnist", lambda: parts)


def test_training_is_timed_from_its_start_to_its_last_update() -> None:
    """Neither planning before nor the test after counts."""
    watch = bench.Stopwatch()
    for kind, fields in (("planned", {"plan": {"threads": 2}}), ("started", {}), ("progress", {}), ("evaluated", {})):
        watch(Event(kind=kind, at=0.0, fields=fields))
    assert watch.plan == {"threads": 2}
    timed = watch.wall_s
    assert timed > 0
    watch(Event(kind="finished", at=0.0, fields={}))
    assert watch.wall_s == timed


def test_the_loop_by_hand_moves_filters_orthogonally() -> None:
    """Its Muon and Stoker's take the same step from the same gradient."""
    weights = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    mine, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    mine.grad = theirs.grad = weights.sin()
    prototype.Muon([mine], lr=0.1).step()
    stoker.stepping.muon.MuonOptimizer(
        [{"params": [theirs]}], None, lr=0.1, momentum=prototype.MOMENTUM, steps=3, adjust="none", normalize=True
    ).step()
    torch.testing.assert_close(mine, theirs)
    assert prototype.rate(0.0) == pytest.approx(0.2)
    assert prototype.rate(0.15) == pytest.approx(1.0)
    assert prototype.rate(1.0) == 0.02


def test_the_loop_by_hand_augments_within_a_pixel() -> None:
    """Every image is one of its eighteen shifted or mirrored selves."""
    images = torch.randint(1, 250, (30, 1, 28, 28), dtype=torch.uint8)
    for before, after in zip(images, prototype._augmented(images), strict=True):
        selves = [
            torch.nn.functional.pad(way, (1, 1, 1, 1))[:, top : top + 28, left : left + 28]
            for way in (before, before.flip(-1))
            for top in range(3)
            for left in range(3)
        ]
        assert any(torch.equal(after, each) for each in selves)


@pytest.mark.slow
def test_the_loop_by_hand_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From images to an accuracy and its times, in three updates."""
    monkeypatch.setattr(prototype, "apply_malloc", lambda _setting: None)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (500, 1, 28, 28), dtype=torch.uint8, generator=random)
    labels = torch.randint(0, 10, (500,), generator=random)
    found = prototype.train("93", 0, torch.get_num_threads(), (images, labels), (images[:20], labels[:20]))
    assert 0 <= found["accuracy"] <= 1
    assert found["train_wall_s"] > 0
    assert found["train_cpu_s"] > 0
