"""Batch norm's counters when a run of stages is continued from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import largest_difference
from tests.training.legs import leg

STAGES = Layout(stages=2)


def plan_of(layout: Layout) -> Plan:
    """All samples of a group at once."""
    return Plan(device="cpu", micro_batch=16, layout=layout)


@pytest.mark.slow
def test_a_run_with_batch_norm_goes_on_in_stages_and_out_of_them(tmp_path: Path) -> None:
    """One process, two stages, two stages again, one process: losses, weights and running statistics are one run's."""
    losses: list[float] = []
    for number, layout in enumerate((Layout(), STAGES, STAGES, Layout()), start=1):
        arguments = (tmp_path / "parts", "cnn", plan_of(layout), torch.float64, 3 * number)
        part = leg(ALONE, *arguments) if layout.world_size == 1 else on_ranks(layout, leg, *arguments)[0]
        losses += part.losses
    whole = leg(ALONE, tmp_path / "whole", "cnn", plan_of(Layout()), torch.float64, 12)
    assert losses == pytest.approx(whole.losses, rel=1e-9)
    assert largest_difference(part.weights, whole.weights) < 1e-9
