"""Jobs that augment and mix packed images, from end to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.artifacts import difference
from stoker.engines import load
from tests.flow.augmented import job_in, plan_with
from tests.flow.builders import Heard, assert_equal_weights


@pytest.mark.slow  # a minute on a busy machine
def test_a_killed_run_ends_at_the_bits_of_one_never_stopped(tmp_path: Path) -> None:
    """SIGKILL in the second epoch, then the same command; by workers or not, the weights are the same bits."""
    begin = f"from tests.flow.augmented import killed_run; killed_run({str(tmp_path)!r}, 2)"
    done = subprocess.run(
        [sys.executable, "-c", begin],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    job, heard = job_in(tmp_path), Heard()
    resumed = stoker.train(job, run_dir=tmp_path / "killed", plan=plan_with(2), sink=heard)
    whole = stoker.train(job, run_dir=tmp_path / "whole", plan=plan_with(0), sink=Heard())
    assert 0 < heard.of("resumed")[0]["samples"] < 420
    assert_equal_weights(resumed, whole)


@pytest.mark.slow
def test_what_stands_for_augmentation_in_evaluation_is_part_of_the_exported_model(tmp_path: Path) -> None:
    """Crops take the middle, and standardising stays: bytes go in as they are stored."""
    t, pixels = stoker.transforms, torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    crop, spread, normalize = t.RandomCrop(6), t.Autocontrast(), t.Normalize(0.25, 0.5)
    data = pixels, torch.arange(60) % 10
    job = job_in(
        tmp_path,
        data=data,
        valid=data,
        augment=[t.RandomFlip(), crop, t.Posterize(5), t.Solarize(0.75), spread, normalize],
        mix=None,
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 10)),
    )
    run = stoker.train(job, run_dir=tmp_path / "run", plan=plan_with(0), sink=Heard())
    artifact = stoker.export(run, tmp_path / "model", job=job)
    (given,), (engine,) = artifact.manifest.inputs, load(artifact)
    assert given.datatype == "UINT8"
    with torch.no_grad():
        toned = t.Solarize(0.75).in_evaluation(t.Posterize(5).in_evaluation(crop.in_evaluation(pixels[:16])))
        wanted = run.model(job)(normalize.in_evaluation(spread.in_evaluation(toned))).numpy()
    assert difference(engine.run({given.name: pixels[:16].numpy()}), {"output": wanted}) < 1e-4
