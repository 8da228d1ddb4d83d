"""Real processes that are stopped and killed: the same command goes on, to the same bits."""

from __future__ import annotations

import dataclasses
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

import stoker
from stoker.records import Plan, dumps
from tests.flow.builders import assert_equal_weights
from tests.flow.command import CNN, Running, job_file, plan_file, stoker_here, stoker_process

PLAN = Plan(
    device="cpu",
    micro_batch=40,
    memory_format="channels_last",
    loader="workers",
    num_workers=2,
    optimizer_implementation="fused",
    checkpoint_every_s=0.05,
)


def pinned(plan: Plan = PLAN) -> Path:
    """A file with the plan."""
    path = Path("plan.json")
    path.write_text(dumps(plan))
    return path


def trained_at_once(*arguments: str | Path) -> stoker.Run:
    """The same job, never stopped."""
    outcome = stoker_here("train", *arguments, "--run-dir", "whole", "--json")
    assert outcome.code == 0
    return stoker.load("whole")


def test_killed_again_and_again_a_run_ends_at_the_same_bits() -> None:
    """SIGKILL after the first update, within a checkpoint, and later: the weights are those of a run never stopped."""
    arguments: list[str | Path] = ["train", CNN, "--set", "epochs=8", "--plan", pinned(), "--run-dir", "killed"]
    checkpoints = Path("killed/checkpoints")
    positions = []
    with ExitStack() as left_behind:  # what a killed trainer leaves behind does not hold its run
        for kind, count in (("progress", 1), ("checkpointed", 2), ("evaluated", 1)):
            running = left_behind.enter_context(Running(*arguments))
            positions.append(running.until(kind, count)["samples"])
            while count == 2 and running.process.poll() is None and not any(checkpoints.glob(".writing-*")):
                pass
            running.kill()
        outcome = stoker_here(*arguments, "--json")
    assert outcome.code == 0
    assert 0 < outcome.of("resumed")[0]["samples"] < 8 * 270
    assert positions[0] == 40
    whole = trained_at_once(*arguments[1:6])
    killed = stoker.load("killed")
    assert_equal_weights(killed, whole)
    assert killed.metrics == whole.metrics


def test_killed_between_the_last_update_and_the_end_a_run_is_finished_by_the_same_command() -> None:
    """Nothing is trained again, and the test set is evaluated by the process that logs it."""
    inline = dataclasses.replace(PLAN, loader="inline", num_workers=0)
    arguments: list[str | Path] = ["train", CNN, "--set", "epochs=2", "--plan", pinned(inline), "--run-dir", "killed"]
    with Running(*arguments, KILL_IN_TEST_IF="killed/checkpoints") as running:
        first = running.end()
    assert first.code == -signal.SIGKILL
    assert first.of("evaluated")[-1]["split"] == "valid"
    assert stoker.load("killed").status == "unfinished"
    outcome = stoker_here(*arguments, "--json")
    assert outcome.code == 0
    assert outcome.of("resumed")[0]["samples"] == 540
    assert outcome.of("progress") == []
    assert [event["split"] for event in outcome.of("evaluated")] == ["test"]
    assert_equal_weights(stoker.load("killed"), trained_at_once(*arguments[1:6]))


def test_killed_while_planning_a_run_leaves_nothing() -> None:
    """No directory, no lock, nothing to clear away."""
    outcome = stoker_process("train", CNN, KILL_IN_PLANNING="yes")
    assert outcome.code == -signal.SIGKILL
    assert not Path("runs").exists()


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_the_same_command() -> None:
    """SIGTERM, then Ctrl-C: exit code 130 with its state at the last update; then the bits of a run never stopped."""
    path = job_file(name="long.py")
    arguments: list[str | Path] = ["train", path, "--set", "epochs=150", "--plan", plan_file(), "--run-dir", "stopped"]
    begins = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with Running(*arguments) as running:
            assert running.until("started")["samples"] == begins
            running.until("evaluated")
            outcome = running.end(number)
        assert (outcome.code, outcome.err) == (130, "")
        stopped = outcome.of("stopped")[0]
        assert stopped["reason"] == number.name
        assert outcome.of("checkpointed")[-1]["samples"] == stopped["samples"] < 150 * 80
        run = stoker.load("stopped")
        begins = run.record.samples
        assert (run.status, begins) == ("unfinished", stopped["samples"])
    again = stoker_here(*arguments, "--json")
    assert again.code == 0
    assert "stopped is unfinished" in again.of("warned")[0]["message"]
    assert again.of("resumed")[0]["samples"] == begins
    assert_equal_weights(stoker.load("stopped"), trained_at_once(*arguments[1:6]))


def test_a_second_process_in_the_same_run_is_refused_while_the_first_trains() -> None:
    """Who holds it is named; the first is not disturbed."""
    arguments: list[str | Path] = ["train", job_file(), "--set", "epochs=4000", "--plan", plan_file()]
    with Running(*arguments) as first:
        first.until("evaluated")
        second = stoker_here(*arguments)
        assert second.code == 2
        assert f"is in use by process {first.process.pid} on " in second.err
        assert "--new" in second.err
        assert first.end(signal.SIGTERM).code == 130


def test_training_goes_on_when_nobody_reads_its_output_any_more() -> None:
    """As with `| head -1`: the run is finished, with exit code 0 and no complaint."""
    with Running("train", job_file(), "--set", "epochs=8", "--plan", plan_file()) as running:
        assert running.until("planned")
        running.process.stdout.close()
        assert running.process.wait() == 0
    assert running.errors.read_text() == ""
    assert stoker.load("latest").status == "finished"


COUNTER = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(6, 2), 0
    def forward(self, x):
        global PASSES
        self.passes += self.training
        PASSES += self.training
        if self.passes > 40 and not Path("once").exists() and any(Path("killed/checkpoints").glob("[0-9]*")):
            Path("once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x) * (1.0 if self.passes < 150 else 1.5) * (1.0 if PASSES < 155 else 1.5)
settings.update(model=Counting, until=stoker.updates(200),
                evaluation=stoker.Evaluation(select="last", every=stoker.updates(100)))
"""


COUNTED = """\
import os
import signal
from pathlib import Path

PASSES = 0
"""


@pytest.mark.slow
def test_a_count_in_the_model_survives_a_kill() -> None:
    """Plain numbers that every pass moves, in the model and around it: after a kill the same bits as without."""
    arguments: list[str | Path] = [
        "train",
        job_file(COUNTER, head=COUNTED),
        "--plan",
        plan_file(),
        "--run-dir",
        "killed",
    ]
    assert stoker_process(*arguments).code == -signal.SIGKILL
    outcome = stoker_here(*arguments, "--json")
    assert outcome.code == 0
    assert 0 < outcome.of("resumed")[0]["updates"] < 150
    assert_equal_weights(stoker.load("killed"), trained_at_once(*arguments[1:4]))
