from __future__ import annotations

import threading
from contextlib import closing

import pytest

from stoker.predicting.prediction_run import Counter, PartPipeline, Stopped
from stoker.predicting.row_source import SourceRows


def _rows(part: int) -> SourceRows:
    return SourceRows("in", part, 1, {})


def test_every_part_is_computed_once_by_some_engine() -> None:
    """Each part's rows reach one engine, and no engine computes two at a time."""
    busy: set[str] = set()
    lock = threading.Lock()

    def compute(part: int, rows: SourceRows, engine: str) -> tuple[int, int]:
        with lock:
            assert engine not in busy
            busy.add(engine)
        with lock:
            busy.discard(engine)
        return part, rows.first_row

    line = PartPipeline(_rows, compute, ("a", "b", "c"))
    assert sorted(found for found in line.results(range(50), Counter()) if found) == [(n, n) for n in range(50)]


def test_reading_goes_in_order_and_not_far_ahead() -> None:
    """One thread reads; what is read and not computed is bounded, so memory is."""
    read: list[int] = []
    ahead: list[int] = []

    def reading(part: int) -> SourceRows:
        read.append(part)
        return _rows(part)

    def compute(part: int, rows: SourceRows, engine: int) -> int:
        ahead.append(len(read) - part)
        return part

    list(PartPipeline(reading, compute, (1,), ahead=2).results(range(20), Counter()))
    assert read == list(range(20))
    assert max(ahead) <= 3


@pytest.mark.parametrize("where", ["read", "compute"])
def test_the_first_error_ends_the_work(where: str) -> None:
    """It reaches the caller after every thread has ended; what was not begun is not."""
    begun: list[int] = []
    before = threading.enumerate()

    def read(part: int) -> SourceRows:
        if where == "read" and part == 3:
            raise OSError("cut off")
        return _rows(part)

    def compute(part: int, rows: SourceRows, engine: int) -> int:
        begun.append(part)
        if where == "compute" and part == 3:
            raise OSError("cut off")
        return part

    with pytest.raises(OSError, match="cut off"):
        list(PartPipeline(read, compute, (1, 2)).results(range(1000), Counter()))
    assert len(begun) < 500  # of 1,000; how soon depends on when threads run
    assert not [one for one in threading.enumerate() if one.name.startswith("stoker-") and one not in before]


def test_a_caller_that_stops_stops_the_threads() -> None:
    """Ctrl-C in the middle of a part: the batch is ended, the part is not."""
    counter, started = Counter(), threading.Event()
    ended: list[type[BaseException]] = []

    def compute(part: int, rows: SourceRows, engine: int) -> int:
        if part == 0:
            return part
        started.set()
        try:
            while True:
                counter.add(1)
        except Stopped as stopped:
            ended.append(type(stopped))
            raise

    with closing(PartPipeline(_rows, compute, (1,)).results(range(3), counter)) as results:
        assert next(results) == 0
        assert started.wait(60)
    assert ended == [Stopped]


def test_a_caller_hears_while_a_part_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """None comes when no part is done for a while, so that progress can be reported."""
    monkeypatch.setattr("stoker.predicting.prediction_run.LOOK_AT_S", 0.001)
    may_end = threading.Event()

    def compute(part: int, rows: SourceRows, engine: int) -> int:
        assert may_end.wait(60)
        return part

    with closing(PartPipeline(_rows, compute, (1,)).results([7], Counter())) as results:
        assert next(results) is None
        may_end.set()
        assert next(found for found in results if found is not None) == 7
