"""Batches that fail, in part or as a whole."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadValue, Engine
from stoker.errors import ServiceError
from stoker.serving.batching.queue import RequestPart, SampleShape
from stoker.serving.batching.workers import MOST_RUNS, Assembler, Attempt, attempts
from stoker.testing.fakes import FakeClock
from tests.serving.batching.models import FIXED, FixedEngine


def _parts(values: list[float]) -> list[RequestPart]:
    shape = SampleShape((), (), (), 1)
    return [
        RequestPart(value, 0, {"x": np.full((1, 4), value, np.float32)}, 1, 1, shape, "", 0.0, math.inf, 0.0)
        for value in values
    ]


def _run(values: list[float], engine: Engine | None = None, *, allow_nan: bool = True) -> list[Attempt]:
    assembler = Assembler(FIXED, (), allow_nan=allow_nan)
    return list(attempts(engine or FixedEngine(), assembler, _parts(values), (), "idle", FakeClock()))


def test_a_batch_that_succeeds_is_run_once() -> None:
    """One attempt, final, with an answer for each part."""
    (attempt,) = _run([1.0, 2.0, 3.0])
    assert attempt.is_final
    assert attempt.error is None
    assert [answer["y"].tolist() for answer in attempt.answers or []] == [[[2, 2]], [[4, 4]], [[6, 6]]]


def test_one_request_at_fault_fails_alone() -> None:
    """The other 31 are answered, after 11 runs in all."""
    found = _run([*map(float, range(17)), math.nan, *map(float, range(14))])
    failed = [attempt for attempt in found if attempt.is_final and attempt.error is not None]
    assert [len(attempt.parts) for attempt in failed] == [1]
    assert math.isnan(failed[0].parts[0].owner)
    assert sum(len(attempt.parts) for attempt in found if attempt.answers is not None) == 31
    assert len(found) == 11
    assert {attempt.reason for attempt in found[1:]} == {"bisect"}


def test_an_engine_that_fails_on_everything_is_not_asked_for_ever() -> None:
    """Bisection is bounded: what is left then fails together."""
    found = _run([math.nan] * 64)
    assert len(found) <= MOST_RUNS
    assert sum(len(attempt.parts) for attempt in found if attempt.is_final) == 64


@pytest.mark.parametrize("bad", [1, 4, 16, 63, 64])
def test_numbers_that_are_not_taken_fail_alone_however_many(bad: int) -> None:
    """The others are computed in one run; each bad request has an error of its own."""
    engine = FixedEngine()
    values = [math.nan if number < bad else float(number) for number in range(64)]
    random.Random(0).shuffle(values)
    final = [attempt for attempt in _run(values, engine, allow_nan=False) if attempt.is_final]
    assert engine.rows == ([64 - bad] if bad < 64 else [])
    failed = [attempt for attempt in final if attempt.error is not None]
    assert [math.isnan(part.owner) for attempt in failed for part in attempt.parts] == [True] * bad
    assert all(len(attempt.parts) == 1 and isinstance(attempt.error, BadValue) for attempt in failed)
    assert sum(len(attempt.parts) for attempt in final) == 64


def test_numbers_that_an_engine_does_not_take_fail_alone_however_many() -> None:
    """It refuses the batch without computing it, so that bisection has no bound."""

    class Narrow(FixedEngine):
        def run(self, inputs: Arrays) -> Arrays:
            if inputs["x"].max() > 100:
                raise BadValue("too large")
            return super().run(inputs)

    found = _run([1000.0 if number % 4 == 0 else 1.0 for number in range(64)], Narrow())
    failed = [part.owner for attempt in found if attempt.is_final and attempt.error for part in attempt.parts]
    assert failed == [1000.0] * 16


@pytest.mark.parametrize("error", [ServiceError("gone"), RuntimeError("bad graph"), MemoryError()])
def test_whatever_an_engine_raises_is_an_answer(error: Exception) -> None:
    """Libraries raise what they like; those that wait must get the error."""

    class Raising:
        def run(self, inputs: Arrays) -> Arrays:
            raise error

        def close(self) -> None: ...

    (attempt,) = _run([1.0], Raising())
    assert attempt.error is error


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan]), min_size=1, max_size=40))
def test_every_part_ends_in_one_final_attempt(values: list[float]) -> None:
    """Answered or failed, never both, never twice; and who has an answer has the right one."""
    engine = FixedEngine()
    final = [attempt for attempt in _run(values, engine) if attempt.is_final]
    ended = [part.owner for attempt in final for part in attempt.parts]
    assert sorted(map(str, ended)) == sorted(map(str, values))
    for attempt in final:
        for part, answer in zip(attempt.parts, attempt.answers or [], strict=bool(attempt.answers)):
            assert answer["y"].tolist() == [[2 * part.owner] * 2]
    assert len(engine.rows) <= MOST_RUNS
