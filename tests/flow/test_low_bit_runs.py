"""Runs whose optimiser states have few bits: killed, resumed, verified, and refused where a job does not allow them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

import stoker
from stoker.records import Plan, dumps
from tests.flow.builders import assert_equal_weights
from tests.flow.command import Running, job_file, stoker_here

WIDE = """settings["optimizer"] = stoker.AdamW(lr=1e-2)
settings["numerics"] = ["bf16-states", "8bit-states"]
settings["model"] = lambda: nn.Sequential(
    nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2)
)"""


def pinned(states: str) -> Path:
    """A file with a plan of such states."""
    path = Path("plan.json")
    path.write_text(dumps(Plan(device="cpu", micro_batch=16, optimizer_states=states, checkpoint_every_s=0.05)))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("states", [pytest.param("bf16", marks=pytest.mark.slow), "8bit"])
def test_killed_twice_a_run_ends_at_the_same_bits(states: str) -> None:
    """SIGKILL after the first update and after a checkpoint: the weights are those of a run never stopped."""
    arguments: list[str | Path] = ["train", job_file(WIDE), "--set", "epochs=15", "--plan", pinned(states)]
    with ExitStack() as left_behind:
        for kind, count in (("progress", 1), ("checkpointed", 2)):
            running = left_behind.enter_context(Running(*arguments, "--run-dir", "killed"))
            running.until(kind, count)
            running.kill()
        outcome = stoker_here(*arguments, "--run-dir", "killed", "--json")
    assert outcome.code == 0
    assert 0 < outcome.of("resumed")[0]["samples"] < 15 * 80
    assert stoker_here(*arguments, "--run-dir", "whole", "--json").code == 0
    assert_equal_weights(stoker.load("killed"), stoker.load("whole"))


def test_verify_holds_and_tells_what_the_states_change() -> None:
    """Plans of the same states are the same mathematics; against full ones it is the same law."""
    outcome = stoker_here("verify", job_file(WIDE), "--json")
    assert outcome.code == 0
    verdicts = {one["question"]: one for one in json.loads(outcome.out)["verdicts"]}
    assert "differ by" in verdicts["Are 8-bit optimiser states close enough to full ones?"]["answer"]
    assert verdicts["Is training the same under every legal plan?"]["passed"]
    assert "8-bit optimiser states, which the job allows, round more" in verdicts["Which level holds?"]["answer"]


def test_a_plan_of_few_bits_is_refused_for_a_job_that_does_not_allow_it() -> None:
    """Exit code 2, with what would allow it."""
    outcome = stoker_here("train", job_file(), "--plan", pinned("8bit"), "--run-dir", "run")
    assert outcome.code == 2
    assert 'numerics=["8bit-states"]' in outcome.err
