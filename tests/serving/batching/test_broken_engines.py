"""Engines that die or hang: who waits for them hears of it, and the others go on."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from stoker.artifacts import Golden
from stoker.artifacts.dtypes import Arrays
from stoker.errors import ServiceError
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.workers import HangLimits
from stoker.serving.refusals import Failed, Unavailable
from tests.serving.batching.gated import LONGEST_S, Gated, row, run, waiting
from tests.serving.batching.models import FixedEngine

IMPATIENT = HangLimits(least_s=0.3, times=1.0, every_s=0.01)


def test_an_engine_that_dies_is_told_from_bad_requests() -> None:
    """Bad requests alone do not break it; once it fails on its golden inputs, no request waits for it."""

    class Mortal(FixedEngine):
        is_dead = False

        def run(self, inputs: Arrays) -> Arrays:
            if self.is_dead:
                raise ServiceError("the library beneath has crashed")
            return super().run(inputs)

    engine = Mortal()

    async def test(batcher: Batcher) -> None:
        await batcher.warm(Golden(row(), {}))
        for _ in range(5):
            with pytest.raises(Failed):
                await batcher.ask(row(np.nan))
        assert not batcher.is_broken
        engine.is_dead = True
        failures = 0
        while not batcher.is_broken:
            failures += 1
            with pytest.raises(Failed, match="crashed"):
                await batcher.ask(row())
        assert failures <= 3
        with pytest.raises(Unavailable, match="engine has died"):
            await batcher.ask(row())
        await batcher.drain()

    run(test, engine)


def test_an_engine_that_hangs_is_told_and_the_others_go_on() -> None:
    """Who waits for it hears why, the next request is answered by the other, and what it gives later goes nowhere."""
    engines, told = (Gated(), Gated()), []
    engines[1].begun = engines[0].begun

    async def test(batcher: Batcher) -> None:
        (first,) = await waiting(batcher, engines[0], [row()])
        (other,) = await waiting(batcher, engines[0], [row()])
        engines[1].open()
        (answered,), (hanging,) = await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
        assert answered.result()["y"].shape == (1, 2)
        with pytest.raises(Failed, match=r"did not answer this request: it has been at one run for .* and hangs"):
            await hanging
        assert batcher.is_broken
        assert "hangs" in batcher.problem
        for value in range(5):
            assert (await batcher.ask(row(value)))["y"][0, 0] == 2 * value
        assert batcher._scheduler._busy_until.count(math.inf) == 1
        assert batcher.join(0.0) == ()
        await batcher.drain()

    run(test, *engines, patience=IMPATIENT, on_broken=lambda: told.append("broken"))
    assert told == ["broken"]


def test_where_every_engine_hangs_nobody_waits_for_ever() -> None:
    """What waits is refused, what comes is refused at once, and draining and closing do not wait either."""
    engine = Gated()

    async def test(batcher: Batcher) -> None:
        tasks = await waiting(batcher, engine, [row(), row(), row(rows=3)])
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in outcomes] == [Failed] * 3
        with pytest.raises(Unavailable, match="has died: it has been at one run for"):
            await batcher.ask(row())
        await batcher.drain()
        batcher.close()
        assert batcher.join(LONGEST_S) == ()

    run(test, engine, patience=IMPATIENT)


def test_an_engine_hangs_though_whoever_asked_has_gone() -> None:
    """The request was cancelled; that nothing comes back is noticed all the same."""
    engine, told = Gated(), asyncio.Event()

    async def test(batcher: Batcher) -> None:
        (first,) = await waiting(batcher, engine, [row()])
        first.cancel()
        await told.wait()
        assert batcher.is_broken

    run(test, engine, patience=IMPATIENT, on_broken=told.set)
