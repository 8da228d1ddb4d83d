"""The batching law: every answer equals the answer alone, each request ends exactly once, accounts return to zero."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.artifacts.dtypes import Arrays
from stoker.engines import load
from stoker.records import ServiceSettings
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.scheduler import Executed
from stoker.serving.refusals import DeadlinePassed, DeadlineUnreachable, Failed, QueueFull, Refusal, TooLarge
from stoker.testing.tiny_models import tiny_artifact
from tests.serving.batching.models import POISON, TOKENS, TokenEngine, token_inputs


@dataclass(frozen=True)
class Asking:
    """A request, and what befalls it: how many turns of the loop after the one before, and before it is cancelled."""

    rows: int
    length: int
    first: int
    after: int
    priority: int
    within_s: float | None
    is_poisoned: bool
    cancelled_after: int | None

    def inputs(self) -> Arrays:
        """Its tokens; one of them cannot be computed if it is poisoned."""
        inputs = token_inputs(self.rows, self.length, first=self.first)
        if self.is_poisoned:
            inputs["input_ids"][-1, -1] = POISON
        return inputs


ASKING = st.builds(
    Asking,
    rows=st.sampled_from([1, 1, 1, 2, 3, 9, 30]),
    length=st.integers(1, 40),
    first=st.integers(1, 1000),
    after=st.integers(0, 4),
    priority=st.integers(0, 4),
    within_s=st.sampled_from([None, None, 0.0, 1e-4, 10.0]),
    is_poisoned=st.sampled_from([False] * 5 + [True]),
    cancelled_after=st.sampled_from([None, None, None, 0, 1, 3]),
)
SETTINGS = st.builds(
    ServiceSettings,
    max_batch_rows=st.sampled_from([1, 4, 8, 32]),
    max_queue_rows=st.sampled_from([10, 40, 1000]),
    max_queue_bytes=st.sampled_from([4000, 10**9]),
    max_caller_share=st.sampled_from([0.5, 1.0]),
    max_delay_s=st.sampled_from([0.0, 0.0, 1e-3]),
    buckets=st.sampled_from([(), (), (16, 48)]),
)


@settings(max_examples=150)
@given(st.lists(ASKING, min_size=1, max_size=25), SETTINGS, st.integers(1, 3))
def test_every_answer_is_that_of_the_request_alone(askings: list[Asking], chosen: ServiceSettings, number: int) -> None:
    """Random arrivals, shapes, priorities, deadlines, cancels and requests that cannot be computed."""
    outcomes, seen = asyncio.run(_play(askings, chosen, number))
    alone = TokenEngine()
    for asking, outcome in zip(askings, outcomes, strict=True):
        if isinstance(outcome, dict):
            assert not asking.is_poisoned
            _assert_same(outcome, alone.run(asking.inputs()))
        elif isinstance(outcome, asyncio.CancelledError):
            assert asking.cancelled_after is not None
        else:
            assert isinstance(outcome, (QueueFull, TooLarge, DeadlineUnreachable, DeadlinePassed, Failed)), outcome
            assert not isinstance(outcome, (DeadlineUnreachable, DeadlinePassed)) or asking.within_s is not None
    assert all(executed.rows <= chosen.max_batch_rows for executed in seen)
    if not any(asking.is_poisoned for asking in askings):
        assert not any(isinstance(outcome, Failed) for outcome in outcomes)


async def _play(
    askings: list[Asking], chosen: ServiceSettings, number: int
) -> tuple[list[Arrays | BaseException], list[Executed]]:
    """What came of each request; afterwards nothing waits, and nothing is counted."""
    seen: list[Executed] = []
    batcher = Batcher([TokenEngine() for _ in range(number)], TOKENS, chosen, observe=seen.append)
    tasks: list[asyncio.Task[Arrays]] = []
    for asking in askings:
        for _ in range(asking.after):
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(_ask(batcher, asking)))
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    await batcher.drain()
    batcher.close()
    batcher.join(60.0)
    queue = batcher._scheduler.queue
    assert (queue.rows, queue.num_bytes, queue.num_parts, len(queue.lanes)) == (0, 0, 0, 0)
    assert not queue.rows_of
    assert not batcher._open
    return outcomes, seen


async def _ask(batcher: Batcher, asking: Asking) -> Arrays:
    deadline = None if asking.within_s is None else batcher._clock() + asking.within_s
    ask = asyncio.create_task(
        batcher.ask(asking.inputs(), deadline=deadline, priority=asking.priority, caller="ab"[asking.rows % 2])
    )
    if asking.cancelled_after is not None:
        for _ in range(asking.cancelled_after):
            await asyncio.sleep(0)
        ask.cancel()
    return await ask


def _assert_same(answer: Arrays, alone: Arrays) -> None:
    assert answer.keys() == alone.keys()
    for name, array in alone.items():
        np.testing.assert_allclose(answer[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_real_engine_under_chaos_answers_each_its_own(tmp_path: Path, engine: str) -> None:
    """Many clients at once, of random lengths and tempers, against an exported model: within its tolerance."""
    artifact = tiny_artifact(tmp_path, kind="tokens", engine=engine)
    engines = load(artifact, instances=2, threads=1)
    draw = random.Random(3)

    async def client(batcher: Batcher, seed: int) -> int:
        mine, answered = random.Random(seed), 0
        for _ in range(15):
            rows, length = mine.choice([1, 1, 2, 5]), mine.randint(1, 64)
            tokens = np.array([[mine.randint(0, 15) for _ in range(length)] for _ in range(rows)], np.int64)
            inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
            try:
                deadline = batcher._clock() + mine.choice([1e-4, 5.0, 5.0])
                answer = await asyncio.wait_for(batcher.ask(inputs, deadline=deadline), mine.choice([2e-4, 5.0, 5.0]))
            except (Refusal, TimeoutError):
                continue
            asked.append((inputs, answer))
            answered += 1
        return answered

    asked: list[tuple[Arrays, Arrays]] = []

    async def main() -> int:
        batcher = Batcher(engines, artifact.manifest, ServiceSettings(max_batch_rows=8))
        await batcher.warm(artifact.golden(), budget_s=0.2)
        answered = sum(await asyncio.gather(*(client(batcher, draw.randint(0, 10**6)) for _ in range(24))))
        await batcher.drain()
        batcher.close()
        batcher.join(60.0)
        assert batcher.queue_rows == batcher.queue_bytes == 0
        return answered

    answered = asyncio.run(main())
    assert answered == len(asked) > 24
    tolerance = artifact.manifest.tolerance
    for inputs, answer in asked:
        alone = engines[0].run(inputs)
        for name, array in answer.items():
            np.testing.assert_allclose(array, alone[name], atol=tolerance.absolute, rtol=tolerance.relative)
    for one in engines:
        one.close()
