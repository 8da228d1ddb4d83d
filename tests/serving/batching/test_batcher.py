"""The batcher with its threads, at moments that gates decide."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from stoker.artifacts import Golden
from stoker.artifacts.dtypes import Arrays
from stoker.errors import ServiceError
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.scheduler import Executed
from stoker.serving.refusals import DeadlinePassed, Failed, QueueFull, Unavailable
from tests.serving.batching.gated import LONGEST_S, Gated, row, run, waiting
from tests.serving.batching.models import IMAGES, POISON, TOKENS, FixedEngine, TokenEngine, token_inputs


def test_an_idle_engine_answers_at_once() -> None:
    """A request alone is a batch."""
    engine = FixedEngine()
    answer = run(lambda batcher: batcher.ask(row(3.0, rows=2)), engine)
    assert answer["y"].tolist() == [[6, 6], [6, 6]]
    assert engine.rows == [2]


def test_batches_form_while_the_engine_is_busy_and_are_told_of() -> None:
    """Five that came in the meantime go together, each gets its own answer, and records say so."""
    engine, seen = Gated(), []

    async def test(batcher: Batcher) -> list[Arrays]:
        tasks = await waiting(batcher, engine, [row(value) for value in range(6)])
        assert (batcher.queue_rows, batcher.queue_bytes) == (5, 5 * 16)
        engine.open()
        answers = await asyncio.gather(*tasks)
        await batcher.drain()
        return answers

    answers = run(test, engine, observe=seen.append)
    assert [answer["y"][0, 0] for answer in answers] == [0, 2, 4, 6, 8, 10]
    assert engine.rows == [1, 5]
    first, second = seen
    assert isinstance(second, Executed)
    assert (second.rows, second.requests, second.reason, second.padding) == (5, 5, "idle", 0)
    assert second.succeeded
    assert (first.requests, len(second.queue_s)) == (1, 5)
    assert all(waited > 0 for waited in second.queue_s)


def test_engines_work_at_the_same_time() -> None:
    """With two instances, a second request is in compute while the first still is."""
    engines = Gated(), Gated()
    engines[1].begun = engines[0].begun

    async def test(batcher: Batcher) -> None:
        (first,) = await waiting(batcher, engines[0], [row()])
        (second,) = await waiting(batcher, engines[0], [row()])
        assert batcher.queue_rows == 0
        for engine in engines:
            engine.open()
        await asyncio.gather(first, second)

    run(test, *engines)
    assert [engine.rows for engine in engines] == [[1], [1]]


def test_a_cancelled_request_leaves_the_queue() -> None:
    """It is not computed; the others are."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        first, second, third = await waiting(batcher, engine, [row(1.0), row(2.0), row(3.0, rows=4)])
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        assert batcher.queue_rows == 1
        engine.open()
        assert (await second)["y"].tolist() == [[4, 4]]
        await first

    run(test, engine)
    assert engine.rows == [1, 1]


def test_a_request_cancelled_in_compute_disturbs_nobody() -> None:
    """Its answer is dropped, the next request is answered."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        (first,) = await waiting(batcher, engine, [row()])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.open()
        assert (await batcher.ask(row(5.0)))["y"].tolist() == [[10, 10]]
        await batcher.drain()

    run(test, engine)


def test_a_deadline_that_passes_in_the_queue_is_told_then() -> None:
    """Not only when the engine, busy with something long, comes to it."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        (first,) = await waiting(batcher, engine, [row()])
        with pytest.raises(DeadlinePassed, match=r"ms after the request came, passed while it waited"):
            await batcher.ask(row(), deadline=batcher._clock() + 0.01)
        assert not first.done()
        assert batcher.queue_rows == 0
        engine.open()
        await first

    run(test, engine)
    assert engine.rows == [1]


def test_a_full_queue_refuses_and_forgets() -> None:
    """Who was refused left no trace in it."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        tasks = await waiting(batcher, engine, [row(), row(rows=3)])
        with pytest.raises(QueueFull):
            await batcher.ask(row())
        assert batcher.queue_rows == 3
        engine.open()
        await asyncio.gather(*tasks)

    run(test, engine, max_queue_rows=3)


def test_one_bad_request_fails_alone() -> None:
    """The others of its batch are answered."""
    engine = Gated()

    async def test(batcher: Batcher) -> list[Any]:
        tasks = await waiting(batcher, engine, [row(), row(2.0), row(np.nan), row(4.0)])
        engine.open()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, bad, fourth = run(test, engine)
    assert (first["y"][0, 0], second["y"][0, 0], fourth["y"][0, 0]) == (2, 4, 8)
    assert isinstance(bad, Failed)
    assert "not a number" in str(bad)


def test_a_request_of_more_rows_than_a_batch_is_split_and_joined() -> None:
    """In batches of at most their rows, and an answer in the order of its rows."""
    engine = FixedEngine()
    inputs = {"x": np.arange(40, dtype=np.float32).reshape(10, 4)}
    answer = run(lambda batcher: batcher.ask(inputs), engine, max_batch_rows=4)
    assert answer["y"].tolist() == (inputs["x"][:, :2] * 2).tolist()
    assert engine.rows == [4, 4, 2]


def test_a_split_request_with_a_bad_row_fails_once_and_leaves_nothing() -> None:
    """Its other parts are not computed in vain."""
    engine = Gated()
    inputs = row(rows=12)
    inputs["x"][0] = np.nan

    async def test(batcher: Batcher) -> None:
        (task,) = await waiting(batcher, engine, [inputs])
        engine.allowed.release()
        with pytest.raises(Failed):
            await task
        assert batcher.queue_rows <= 4
        engine.open()
        await batcher.drain()
        assert batcher.queue_rows == 0

    run(test, engine, max_batch_rows=4)


def test_draining_answers_what_was_accepted_and_accepts_no_more() -> None:
    """The last request is answered before `drain` returns; the next gets the error that the model is not there."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        tasks = await waiting(batcher, engine, [row(1.0), row(2.0)])
        drain = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await batcher.ask(row())
        assert not drain.done()
        engine.open()
        await drain
        assert [(await task)["y"][0, 0] for task in tasks] == [2, 4]

    run(test, engine)


def test_closing_refuses_what_still_waits() -> None:
    """No request waits for ever."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        first, second = await waiting(batcher, engine, [row(), row()])
        batcher.close()
        assert batcher.join(0.0) == ()  # it is at its batch, and nobody may close it yet
        with pytest.raises(Unavailable, match="before this request was computed"):
            await second
        with pytest.raises(Unavailable):
            await first
        engine.open()
        assert await asyncio.to_thread(batcher.join, LONGEST_S) == (engine,)

    run(test, engine)
    assert engine.rows == [1]


def test_a_request_of_several_batches_takes_every_idle_engine() -> None:
    """Its parts are computed at the same time, where there are instances for them."""
    engines = Gated(), Gated()
    engines[1].begun = engines[0].begun

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.ask(row(rows=2)))
        await asyncio.sleep(0)
        await engines[0].is_busy()
        for engine in engines:
            engine.allowed.release()
        await first
        asked = asyncio.create_task(batcher.ask(row(rows=8)))
        await asyncio.sleep(0)
        await engines[0].is_busy()
        await engines[0].is_busy()
        assert batcher.queue_rows == 0
        for engine in engines:
            engine.open()
        assert (await asked)["y"].shape == (8, 2)

    run(test, *engines, max_batch_rows=4)


def test_with_a_delay_requests_wait_for_each_other() -> None:
    """After three at once, an idle engine takes two that came after one another as one batch."""
    engine, seen = FixedEngine(), []

    async def test(batcher: Batcher) -> None:
        await batcher.ask(row(rows=3))
        await asyncio.gather(batcher.ask(row(1.0)), batcher.ask(row(2.0)))
        await batcher.drain()

    run(test, engine, observe=seen.append, max_delay_s=0.05)
    assert engine.rows == [3, 2]
    assert [executed.reason for executed in seen] == ["idle", "delay"]


def test_a_batch_of_several_lengths_is_padded_and_cut_back() -> None:
    """Each gets states for its own tokens, and the record says how much was padding."""
    engine, seen = TokenEngine(), []

    async def test(batcher: Batcher) -> list[Arrays]:
        await batcher.ask(token_inputs(3, 2))
        answers = await asyncio.gather(*(batcher.ask(token_inputs(1, length)) for length in (2, 7, 7)))
        await batcher.drain()
        return answers

    answers = run(test, engine, model=TOKENS, observe=seen.append, max_delay_s=0.05, buckets=(8,))
    assert [answer["states"].shape for answer in answers] == [(1, 2, 2), (1, 7, 2), (1, 7, 2)]
    _, executed = seen
    assert (executed.sizes, executed.elements, executed.padding) == ((8,), 16, 8)


def test_images_of_other_sizes_never_share_a_batch() -> None:
    """Nothing says what they could be padded with; each is computed with its own kind."""

    class Sums:
        def __init__(self) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def run(self, inputs: Arrays) -> Arrays:
            self.shapes.append(inputs["image"].shape)
            return {"sum": inputs["image"].sum(axis=(1, 2))}

        def close(self) -> None: ...

    async def test(batcher: Batcher) -> list[Arrays]:
        images = [np.ones((1, *size), np.float32) for size in ((2, 3), (3, 2), (2, 3), (3, 2))]
        return await asyncio.gather(*(batcher.ask({"image": image}) for image in images))

    engine = Sums()
    answers = run(test, engine, model=IMAGES, max_delay_s=0.05)
    assert [answer["sum"].tolist() for answer in answers] == [[6.0]] * 4
    assert sorted(engine.shapes) == [(2, 2, 3), (2, 3, 2)]


def test_warming_up_fails_with_what_the_engine_says() -> None:
    """An engine that cannot compute its golden inputs never serves."""
    with pytest.raises(ServiceError, match="vocabulary"):
        run(lambda batcher: batcher.warm(Golden(token_inputs(1, 4, first=POISON), {})), TokenEngine(), model=TOKENS)


def test_what_was_answered_leaves_memory_without_the_collector() -> None:
    """A request's inputs go with its answer: bodies are large, and reference cycles wait for a collection."""

    async def ask(batcher: Batcher) -> list[bool]:
        kept = []
        for rows in (1, 3, 9):  # the last ones are computed in parts
            inputs = row(rows=rows)
            kept.append(weakref.ref(inputs["x"]))
            await batcher.ask(inputs)
            del inputs
        await batcher.ask(row())  # the worker looks at its last batch until there is another
        await asyncio.sleep(0)
        return [one() is None for one in kept]

    gc.disable()
    try:
        assert run(ask, FixedEngine(), max_batch_rows=4) == [True, True, True]
    finally:
        gc.enable()
