"""Several processes write one checkpoint, each its share, and any others resume it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE
from stoker.store import CheckpointStore
from stoker.testing.ranks import on_ranks
from stoker.training.checkpoints import model_weights
from tests.training.legs import leg

LAYOUTS = {
    "replicated": ("momentum", Layout(replicas=2)),
    "sharded": ("momentum", Layout(shards=2)),
    "divided": ("gpt", Layout(tensor=2)),
    "experts": ("experts", Layout(experts=2)),
    "context": ("momentum", Layout(context=2)),
    "stages of tied weights": ("tied", Layout(stages=2)),
}
"""Jobs and the layouts they are resumed in; each over two processes."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("replicated", marks=pytest.mark.slow),
        "sharded",
        "divided",
        "experts",
        pytest.param("context", marks=pytest.mark.slow),  # holds its weights as shards do
        "stages of tied weights",
    ],
)
def test_one_process_and_two_resume_each_others_checkpoints(tmp_path: Path, name: str) -> None:
    """One, two, one: losses, weights and averages are those of a run never stopped, from the middle of an epoch on."""
    job, layout = LAYOUTS[name]
    plan, alone = Plan(device="cpu", micro_batch=16, layout=layout), Plan(device="cpu", micro_batch=16)
    whole = leg(ALONE, tmp_path / "whole", job, alone, torch.float64, 8)
    legs = [leg(ALONE, tmp_path / "run", job, alone, torch.float64, 3)]
    legs.append(on_ranks(layout, leg, tmp_path / "run", job, plan, torch.float64, 5)[0])
    found = CheckpointStore(tmp_path / "run").newest()
    assert found is not None
    assert found[1].layout == layout
    for key, weight in model_weights(*found).items():
        torch.testing.assert_close(weight, legs[-1].weights[key], rtol=0, atol=0)
    parts = [(found[0] / f"model.{rank}-of-2.safetensors").stat().st_size for rank in (0, 1)]
    if layout.stages == 1:  # those have other parts of the model each
        assert max(parts) < 1.1 * min(parts)
    legs.append(leg(ALONE, tmp_path / "run", job, alone, torch.float64, 8))
    losses = [loss for one in legs for loss in one.losses]
    assert max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, whole.losses, strict=True)) < 1e-9
    for key, weight in whole.weights.items():
        torch.testing.assert_close(legs[-1].weights[key], weight, rtol=0, atol=1e-9)
        torch.testing.assert_close(legs[-1].averages[key], whole.averages[key], rtol=0, atol=1e-9)
