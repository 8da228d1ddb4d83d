"""examples/gan.py: two networks, two optimisers and a step of its own, from the command's verbs."""

from __future__ import annotations

import copy
import signal
from pathlib import Path

import pytest

import stoker
from stoker.jobs import load_job
from stoker.loading.datasets import datasets_of
from stoker.records import Event, Plan
from stoker.stepping.coupling import find_coupling
from stoker.stepping.step import Step
from stoker.verifying.exactness_contract import check_contract
from tests.flow.builders import Heard, assert_equal_weights

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gan.py"
PLAN = Plan(device="cpu", micro_batch=480)


class StoppingAtOnce(Heard):
    """Asks training to stop with the first progress it hears of."""

    def __call__(self, event: Event) -> None:
        """Keep the event; send the signal once."""
        super().__call__(event)
        if event.kind == "progress" and not self.of("stopped"):
            signal.raise_signal(signal.SIGTERM)


def _job() -> stoker.Job:
    job, _ = load_job(EXAMPLE, {"epochs": "2", "batch": "480"})
    return job


def test_a_stopped_gan_goes_on_to_the_bits_of_one_never_stopped() -> None:
    """Both networks, their statistics, both optimisers and the average are in its checkpoints, and its draws keyed."""
    whole = stoker.train(_job(), plan=PLAN, sink=Heard(), run_dir="whole")
    stopped = stoker.train(_job(), plan=PLAN, sink=StoppingAtOnce(), run_dir="stopped")
    assert stopped.status == "unfinished"
    heard = Heard()
    resumed = stoker.train(_job(), plan=PLAN, sink=heard, run_dir="stopped")
    assert 0 < heard.of("resumed")[0]["updates"] < 6
    assert resumed.status == whole.status == "finished"
    assert_equal_weights(resumed, whole)


@pytest.mark.slow  # steps of one's own are traced in profiling/tracing/test_step_function
def test_its_update_can_be_forecast_for_a_device_that_is_not_here() -> None:
    """The trace of a step of its own has both networks and both optimisers; nothing is computed."""
    found = stoker.profile(_job(), on="l4")
    weights = sum(p.numel() for p in _job().model().parameters())  # type: ignore[operator]
    state = [s.num_bytes for s in found.trace.storages if s.category == "optimizer state"]
    assert sum(state) == pytest.approx(2 * 4 * weights, rel=0.01)
    assert found.flops > 0
    assert found.plan is not None
    assert found.plan.micro_batch == 480


def test_verify_says_what_it_cannot_promise() -> None:
    """Resuming is examined and holds bit for bit; that plans learn the same is said to be unexamined."""
    job = _job()
    data = datasets_of(job)

    def through_checkpoint(saved: Step, fresh: Step) -> None:
        fresh.model.load_state_dict(saved.model.state_dict())
        fresh.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        assert saved.average is not None
        assert fresh.average is not None
        fresh.average.load(saved.average.weights)

    found = check_contract(
        job, data, PLAN, find_coupling(job, data.train), through_checkpoint=through_checkpoint, budget_s=1.0
    )
    verdicts = {verdict.question: verdict for verdict in found}
    assert verdicts["Is a resumed run equal to one never stopped?"].level == "bit-equal"
    assert "in one piece" in verdicts["Are samples separable?"].answer
    assert "not examined" in verdicts["Is training the same under every legal plan?"].answer
    assert all(verdict.passed for verdict in found)
    assert found[-1].level == "same law"


def test_the_page_shows_the_example() -> None:
    """The step in docs/custom-loop.md is that of examples/gan.py, word for word."""
    source = EXAMPLE.read_text(encoding="utf-8")
    own = source[source.index("def step(") : source.index("def job(")].strip()
    assert own in (EXAMPLE.parents[1] / "docs" / "custom-loop.md").read_text(encoding="utf-8")
