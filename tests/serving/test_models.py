"""The service over a repository: what it counts, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.artifacts.dtypes import Arrays
from stoker.engines import Engine
from stoker.serving.metrics import Metrics
from stoker.serving.refusals import BadRequest, DeadlinePassed, NotFound, QueueFull
from stoker.serving.repository.model import ServedVersion
from stoker.serving.repository.repository import Repository, RepositoryOptions, RepositoryService
from stoker.serving.service import InferenceRequest, RequestedOutput
from stoker.testing import FakeClock
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs


class Answering:
    """Stands in for the batcher of a version: takes a time, then answers, or raises what the test sets."""

    is_broken = False
    problem = ""
    queue_rows = 0

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.takes_s = 0.01
        self.error: BaseException | None = None
        self.asked: list[dict[str, Any]] = []

    async def ask(self, inputs: Arrays, **how: Any) -> Arrays:
        self.asked.append(how)
        self.clock.advance(self.takes_s)
        if self.error is not None:
            raise self.error
        return {"y": inputs["x"][:, :3], "z": inputs["x"][:, 3:]}

    async def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to give back."""

    def join(self, _within_s: float) -> tuple[Engine, ...]:
        """No engine is at a batch."""
        return ()


Story = Callable[[RepositoryService, Answering, Metrics], Awaitable[None]]


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    """Run a story of a service of `digits` whose batcher is `Answering`."""
    tiny_artifact(tmp_path, name="digits")

    async def main(story: Story) -> None:
        clock, metrics = FakeClock(), Metrics()
        repository = Repository(RepositoryOptions(places=(tmp_path,)), metrics, clock=clock)
        models = RepositoryService(repository, metrics, clock)
        await repository.open()
        served: ServedVersion = repository.model("digits").find("")
        real, served.batcher = served.batcher, Answering(clock)
        try:
            await story(models, served.batcher, metrics)
        finally:
            real.close()
            await repository.close()

    return lambda story: asyncio.run(main(story))


def request(**changes: Any) -> InferenceRequest:
    """One that fits."""
    return InferenceRequest(**{"model": "digits", "inputs": tiny_inputs(), **changes})


def count(metrics: Metrics, name: str, **labels: str) -> float:
    """A sample of the metrics; 0 where there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_what_is_asked_reaches_the_batcher(tell) -> None:
    """Priority, caller, bytes, and a point on the clock that leaves a tenth of the time for the way back."""

    async def story(models: RepositoryService, batcher: Answering, _metrics: Metrics) -> None:
        batcher.clock.advance(100)
        await models.infer(request(deadline_s=0.5, priority=1, caller="alice", num_bytes=32))
        assert batcher.asked == [{"deadline": 100.45, "priority": 1, "caller": "alice", "num_bytes": 32}]

    tell(story)


def test_the_answer_has_what_was_wanted_in_its_order(tell) -> None:
    """All outputs, or those that were named; the version that answered, and the request's id."""

    async def story(models: RepositoryService, _batcher: Answering, _metrics: Metrics) -> None:
        response = await models.infer(request(id="a-1"))
        assert (response.model, response.version, response.id) == ("digits", "1", "a-1")
        assert list(response.outputs) == ["y", "z"]
        named = await models.infer(request(outputs=(RequestedOutput(name="y"),)))
        assert list(named.outputs) == ["y"]

    tell(story)


def test_answers_and_refusals_are_counted_apart(tell) -> None:
    """By outcome in seconds, by reason among those rejected, and in the protocol's statistics."""

    async def story(models: RepositoryService, batcher: Answering, metrics: Metrics) -> None:
        await models.infer(request())
        batcher.error = QueueFull("full")
        with pytest.raises(QueueFull):
            await models.infer(request())
        with pytest.raises(BadRequest):
            await models.infer(request(inputs={}))
        batcher.error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            await models.infer(request())
        place = {"model": "digits", "version": "1"}
        for outcome in ("ok", "queue_full", "bad_request", "cancelled"):
            assert count(metrics, "stoker_total_seconds_count", **place, outcome=outcome) == 1
        assert count(metrics, "stoker_rejected_total", model="digits", reason="queue_full") == 1
        assert count(metrics, "stoker_rejected_total", model="digits", reason="cancelled") == 0
        (told,) = models.statistics("digits")
        stats = told["inference_stats"]
        assert (stats["success"], stats["fail"]["count"]) == ({"count": 1, "ns": 10_000_000}, 3)

    tell(story)


def test_deadlines_that_were_missed_are_counted(tell) -> None:
    """An answer after its deadline counts as one that was refused for it does."""

    async def story(models: RepositoryService, batcher: Answering, metrics: Metrics) -> None:
        await models.infer(request(deadline_s=0.02))
        assert count(metrics, "stoker_deadline_miss_total", model="digits") == 0
        await models.infer(request(deadline_s=0.005))
        batcher.error = DeadlinePassed("late")
        with pytest.raises(DeadlinePassed):
            await models.infer(request(deadline_s=0.02))
        assert count(metrics, "stoker_deadline_miss_total", model="digits") == 2

    tell(story)


def test_names_that_are_unknown_make_no_series(tell) -> None:
    """Requests for a thousand models that are not there add one series, not a thousand."""

    async def story(models: RepositoryService, _batcher: Answering, metrics: Metrics) -> None:
        for number in range(20):
            with pytest.raises(NotFound):
                await models.infer(request(model=f"nobody-{number}"))
        assert count(metrics, "stoker_rejected_total", model="", reason="not_found") == 20
        assert b"nobody" not in metrics.document()[0]

    tell(story)


def test_ready_once_all_was_tried_and_until_it_stops(tell) -> None:
    """Not before, and not during the shutdown, though what still comes in is answered."""

    async def story(models: RepositoryService, _batcher: Answering, _metrics: Metrics) -> None:
        assert not models.is_ready()
        models.is_open = True
        assert models.is_ready()
        assert models.is_model_ready("digits", "1")
        assert not models.is_model_ready("digits", "2")
        assert not models.is_model_ready("digits", "one")
        models.is_stopping = True
        assert not models.is_ready()
        assert not models.is_model_ready("digits")
        assert (await models.infer(request())).version == "1"

    tell(story)
