"""The time of starts, and the FLOPs and accuracy that are printed with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.train.cases import CASES, quick
from bench.train.equal_accuracy import compared, in_fp32, share_of_rate, under_plan
from bench.train.flops import flops_per_sample
from bench.train.gpu_cases import GPU_CASES
from bench.train.material import prepare, read
from bench.train.startup import is_met, summary
from stoker.records import Plan


def _starts(*seconds: float, others: float = 0.0, **notes: float) -> list[dict[str, Any]]:
    return [{"first_update_s": one, "others": others, "notes": notes} for one in seconds]


def test_a_start_is_compared_with_lightnings_of_the_same_repeat() -> None:
    """The machine may have been slower in the second repeat, for both."""
    cold = _starts(9.0, 9.0, took_s=4.0, forecast_s=100.0)
    found = summary({"lightning": _starts(3.0, 5.0), "stoker_warm": _starts(3.5, 5.5), "stoker_cold": cold}, 0.06)
    assert found["after_lightning_s"]["stoker_warm"]["median"] == pytest.approx(0.5)
    assert found["planning_share"]["median"] == pytest.approx(0.04)
    assert is_met(found)


def test_a_disturbed_start_is_no_figure() -> None:
    """Where no start counts, nothing is met."""
    cold = _starts(9.0, took_s=4.0, forecast_s=100.0)
    starts = {"lightning": _starts(3.0, others=0.5), "stoker_warm": _starts(3.5), "stoker_cold": cold}
    found = summary(starts, 0.06)
    assert found["after_lightning_s"]["stoker_warm"] is None
    assert not is_met(found)


def test_planning_too_long_is_missed() -> None:
    """5 % of the forecast run is the bar, whatever the start."""
    cold = _starts(9.0, took_s=6.0, forecast_s=100.0)
    starts = {"lightning": _starts(3.0), "stoker_warm": _starts(3.5), "stoker_cold": cold}
    assert not is_met(summary(starts, 0.06))


def test_what_was_learned_is_compared_seed_by_seed() -> None:
    """Means, their difference, and the spread of the seeds of fp32."""
    runs = {"fp32": [{"loss": 2.0}, {"loss": 3.0}], "stoker": [{"loss": 2.1}, {"loss": 3.1}]}
    found = compared(runs, "loss")
    assert found["difference"] == pytest.approx(0.1)
    assert found["deviation_of_seeds"] == pytest.approx(0.5**0.5)


def test_both_sides_are_trained_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, batches and rates: under a plan in fp32 Stoker's side learns what the plain loop learns."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path / "runs"))
    case, updates = quick(CASES["gpt"]), 8
    prepare(case, tmp_path)
    material = read(case, tmp_path)
    plain = in_fp32(material, updates).state_dict()
    plan = Plan(device="cpu", micro_batch=case.batch, threads=1)
    for name, learned in under_plan(material, plan, updates, seed=0).state_dict().items():
        torch.testing.assert_close(learned, plain[name], rtol=1e-4, atol=1e-6)


def test_the_rate_rises_and_falls_to_nothing() -> None:
    """From a tenth over the first twentieth, then straight down."""
    assert [share_of_rate(at) for at in (0.0, 0.05, 0.525, 1.0)] == pytest.approx([0.1, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(("name", "gflop"), [("resnet50", 24.3), ("gpt2", 875.2), ("cnn", 1.644)])
def test_flops_are_those_of_the_models_own_arithmetic(name: str, gflop: float) -> None:
    """ResNet-50: three times 8.2 GFLOP less the first layer's; GPT-2: 855 MFLOP a token."""
    assert flops_per_sample(GPU_CASES[name]) / 1e9 == pytest.approx(gflop, rel=0.005)
