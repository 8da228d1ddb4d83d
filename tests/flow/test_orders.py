"""Streams, and samples chosen or put together otherwise than one by one: killed, resumed, planned."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import stoker
from stoker.records import Plan, dumps
from tests.flow.builders import Heard, Stopping, assert_equal_weights
from tests.flow.command import Running, stoker_here
from tests.loading.streams import Counted, Stateful
from tests.loading.test_bucketing import Words

ORDERS = Path(__file__).parent / "jobs" / "orders.py"
PLAN = Plan(device="cpu", micro_batch=17, optimizer_implementation="fused", loader="inline", checkpoint_every_s=0.03)
EPOCHS = 12
BY_WORKER = Plan(
    device="cpu",
    micro_batch=6,
    optimizer_implementation="fused",
    loader="workers",
    num_workers=1,
    checkpoint_every_s=0.03,
)


def plan_file(plan: Plan) -> Path:
    """A file with the plan."""
    path = Path("plan.json")
    path.write_text(dumps(plan))
    return path


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("stream", PLAN),
        pytest.param("shuffled-seekable", BY_WORKER, marks=pytest.mark.slow),
        pytest.param("balanced", BY_WORKER, marks=pytest.mark.slow),
        pytest.param("packed", PLAN, marks=pytest.mark.slow),
        ("tokens", BY_WORKER),
    ],
)
def test_killed_a_run_ends_at_the_same_bits(kind: str, plan: Plan) -> None:
    """SIGKILL in the middle; the same command goes on, and the weights are those of a run never stopped."""
    if kind == "packed":
        plan = Plan(**{**vars(plan), "micro_batch": 4})
    arguments: list[str | Path] = [
        "train",
        ORDERS,
        "--set",
        f"kind={kind}",
        "--set",
        f"epochs={EPOCHS}",
        "--plan",
        plan_file(plan),
    ]
    with ExitStack() as left_behind:
        running = left_behind.enter_context(Running(*arguments, "--run-dir", "killed"))
        running.until("checkpointed", 2)
        running.kill()
    outcome = stoker_here(*arguments, "--run-dir", "killed", "--json")
    assert outcome.code == 0, outcome.err
    resumed = outcome.of("resumed")[0]["samples"]
    assert 0 < resumed < 110 * EPOCHS
    assert stoker_here(*arguments, "--run-dir", "whole", "--json").code == 0
    assert_equal_weights(stoker.load("killed"), stoker.load("whole"))
    assert stoker.load("killed").metrics == stoker.load("whole").metrics


def job_of(data: object, **changes: object) -> stoker.Job:
    """A regression on a stream of (i, i²)."""
    settings = {
        "model": lambda: torch.nn.Linear(2, 1),
        "data": data,
        "loss": lambda output, _: output.square().mean(1),
        "optimizer": stoker.SGD(lr=1e-6),
        "batch": 5,
        "until": stoker.epochs(4),
        "valid": Stateful(6),
    }
    return stoker.Job(**(settings | changes))


def test_a_stream_with_a_state_is_not_read_again_on_resume() -> None:
    """What was read is counted: the second half of the run reads the second half of the stream."""
    heard = Stopping(46)
    first = stoker.train(job_of(Stateful(23)), plan=Plan(device="cpu", micro_batch=5), sink=heard, run_dir="run")
    assert first.status == "unfinished"
    stopped_at = heard.of("stopped")[0]["samples"]
    again, sink = Stateful(23), Heard()
    run = stoker.train(job_of(again), plan=Plan(device="cpu", micro_batch=5), sink=sink, run_dir="run")
    assert run.status == "finished"
    assert sink.of("started")[0]["data"]["class"] == "seekable"
    assert "its own state is kept" in sink.of("started")[0]["data"]["guarantee"]
    assert sink.of("resumed")[0]["samples"] == stopped_at
    # Beside the rest of the run, only the first few: for the fingerprint, and one for the shapes in it.
    assert again.reads <= 4 * 23 - stopped_at + 17
    straight = stoker.train(
        job_of(Stateful(23)), plan=Plan(device="cpu", micro_batch=5), sink=Heard(), run_dir="straight"
    )
    assert_equal_weights(run, straight)


class Tokens(torch.nn.Module):
    """The mean of a sample, scaled; keeps how many tokens it was given at once in evaluations."""

    evaluated: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One number for each sample [B]."""
        if not self.training:
            self.evaluated.append(inputs.numel())
        return self.scale * inputs.mean(1)


def test_an_evaluation_has_no_more_tokens_than_an_update() -> None:
    """Batches of short samples have many of them; held-out samples are of all lengths, and come as they are."""
    Tokens.evaluated.clear()
    lengths = [2] * 60 + [40] * 10
    job = stoker.Job(
        model=Tokens,
        data=Words(lengths),
        valid=Words(lengths[::-1]),
        test=Words(lengths[::7]),
        loss="mse",
        batch=stoker.tokens(120, padded=True),
        sampling=stoker.lengths.bucketed(window=2),
        fields=stoker.Fields(collate=stoker.lengths.padded(0)),
        optimizer=stoker.SGD(lr=1e-6),
        until=stoker.epochs(1),
    )
    stoker.train(job, plan="safe", sink=Heard(), run_dir="run")
    assert 40 <= max(Tokens.evaluated) <= 120
    short = Tokens.evaluated.count(3 * 2)
    assert short > len(Tokens.evaluated) / 2  # not padded by as many samples as the largest batch has


def test_a_stream_is_planned_on_its_first_samples_and_read_by_one_worker_at_most() -> None:
    """Planning reads a few at a time, and no plan has two readers; a plan that has is refused."""
    data = Counted(10**9)

    class Two(Counted):
        def __iter__(self):
            for x, y in super().__iter__():
                yield torch.cat([x, x]), y

    data = Two(10**9)
    job = job_of(data, until=stoker.samples(200), valid=None)
    decision = stoker.plan(job)
    assert decision.chosen.forecast.total_samples == 200
    assert {one.plan.num_workers for one in decision.candidates} <= {0, 1}
    assert data.reads < 60_000
    with pytest.raises(stoker.BadJob, match="the data are a stream, which one reader reads"):
        stoker.train(job, plan=Plan(device="cpu", micro_batch=5, loader="workers", num_workers=2), sink=Heard())


def test_a_stream_that_ends_early_leaves_a_run_that_can_go_on() -> None:
    """What was learned until then is kept; the error says after how many samples."""
    job = job_of(stoker.data.stream(Stateful(12), length=23))
    with pytest.raises(stoker.BadJob, match="ended after 12 samples of epoch 1; 23 were to be read"):
        stoker.train(job, plan=Plan(device="cpu", micro_batch=5), sink=Heard(), run_dir="run")
