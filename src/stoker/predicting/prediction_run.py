"""The run of a job: computes the missing parts and writes them.

One thread reads ahead, and each engine computes parts in a thread of its own. A part's content does not depend on the
engine or the time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from stoker.artifacts.dtypes import Arrays
from stoker.data.reading.table_readers import BadTable
from stoker.engines import Engine
from stoker.errors import RunFailed, first_line
from stoker.predicting.batched_inference import ComputeCounts, PredictionModel, answer
from stoker.predicting.input_conversion import fill
from stoker.predicting.job_identity import stamp_of
from stoker.predicting.prediction_output import JOB_KEY, PART_KEY, OutputDirectory, encode, job_digest, table_of
from stoker.predicting.prediction_request import MostBad
from stoker.predicting.row_source import RowReader, RowSource, SourceRows
from stoker.records.codec import JSON
from stoker.records.prediction import BadRow, PredictionEvent, PredictionEventKind, PredictionJob, PredictionSummary

PredictionSink = Callable[[PredictionEvent], None]


@dataclass(frozen=True)
class FinishedPart:
    """A part on the disk."""

    part: int
    num_bad: int
    work: ComputeCounts
    compute_s: float


@dataclass
class PredictionRun:
    """A job with its model, sources, engines and output directory.

    `stamps` are of the sources before they were compared with the job's. Clocks: `now` [s since 1970], `clock` [s],
    monotonic.
    """

    job: PredictionJob
    model: PredictionModel
    sources: Sequence[RowSource]
    stamps: Sequence[str]
    schema: pa.Schema
    engines: Sequence[Engine]
    out: OutputDirectory
    most_bad: MostBad
    sink: PredictionSink
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.perf_counter
    ahead: int = 1

    def run(self) -> PredictionSummary:
        """Compute and write the missing parts, and send events.

        Raises:
            RunFailed: a file is damaged or has changed, the disk is full, or too many rows are bad. Finished parts are
                kept.
        """
        self.out.tidy()
        done = self.out.done_parts(self.job)
        self._job_digest = job_digest(self.job)
        self._event(
            "started",
            out=str(self.out.path),
            rows=self.job.num_rows,
            parts=len(self.job.parts),
            done_parts=len(done),
            batch_rows=self.job.batch_rows,
            part_rows=self.job.part_rows,
            threads=self.job.threads,
            instances=len(self.engines),
        )
        state = _State(self.job, done, self.out.num_bad(done), self.clock())
        self._check_bad(state, done)
        todo = sorted(set(range(len(self.job.parts))) - set(done))
        counter, reading = Counter(), _Reading(self.job, self.sources, self.stamps, self._columns())
        line = PartPipeline(
            reading.read, lambda part, rows, engine: self._part(part, rows, engine, counter), self.engines, self.ahead
        )
        with closing(reading), closing(line.results(todo, counter)) as results:
            for result in results:
                if result is not None:
                    state.add(result)
                    done.append(result.part)
                    self._check_bad(state, done)
                self._event("progress", **state.progress(counter.rows, self.clock()))
        self.out.merge_bad_rows(len(self.job.parts))
        summary = state.summary(self.clock(), str(self.out.path))
        self.out.finish(summary)
        self._event("finished", **{name: value for name, value in asdict(summary).items() if name != "schema"})
        return summary

    def _part(self, number: int, rows: SourceRows, engine: Engine, counter: Counter) -> FinishedPart:
        """Compute a part and write it."""
        job = self.job
        filled = fill(rows, self.model.inputs, job.columns, job.pixels, allow_nan=job.allow_nan)
        timed = _Timed(engine, self.clock)
        answers = answer(filled, rows.num_rows, self.model, timed.run, counter.add)
        table = table_of(rows, answers, self.model.manifest, self.schema, job.keep)
        bad = [
            BadRow(source=source, row=row, column=column, reason=reason)
            for index, (column, reason) in sorted(answers.bad.items())
            for source, row in (rows.origin(index),)
        ]
        content = encode(table, {JOB_KEY: self._job_digest, PART_KEY: str(number)})
        self.out.write_part(number, content, bad)
        return FinishedPart(number, len(bad), answers.work, timed.seconds)

    def _columns(self) -> list[str]:
        return list(dict.fromkeys([*(name for names in self.job.columns.values() for name in names), *self.job.keep]))

    def _check_bad(self, state: _State, done: Sequence[int]) -> None:
        if state.num_bad <= self.most_bad.rows_of(self.job.num_rows):
            return
        reasons = "; ".join(f"{count} × {reason}" for reason, count in self.out.common_reasons(done))
        raise RunFailed(
            f"{state.num_bad} of {state.rows_done:,} rows are bad, --max-bad {self.most_bad} allows "
            f"{self.most_bad.rows_of(self.job.num_rows)} of {self.job.num_rows:,}: {reasons}",
            remedy=f"They are listed in {self.out.path / 'bad'}. Continue with a larger --max-bad, "
            "or mend the files and start over with --new.",
        )

    def _event(self, kind: PredictionEventKind, **fields: JSON) -> None:
        self.sink(PredictionEvent(kind=kind, at=self.now(), fields=fields))


class _Timed:
    """An engine, and its compute time [s]."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self.seconds = 0.0

    def run(self, inputs: Arrays) -> Arrays:
        start = self._clock()
        try:
            return self._engine.run(inputs)
        finally:
            self.seconds += self._clock() - start


class _State:
    """Counts of a job while it runs."""

    def __init__(self, job: PredictionJob, done: Sequence[int], num_bad: int, start: float) -> None:
        self._job = job
        self._start = start
        self._rows_before = sum(job.parts[number].num_rows for number in done)
        self._rows_now = 0
        self._work = ComputeCounts()
        self._compute_s = 0.0
        self.parts_done = len(done)
        self.num_bad = num_bad

    @property
    def rows_done(self) -> int:
        """Number of rows of finished parts, including bad ones [rows]."""
        return self._rows_before + self._rows_now

    def add(self, done: FinishedPart) -> None:
        self.parts_done += 1
        self.num_bad += done.num_bad
        self._rows_now += self._job.parts[done.part].num_rows
        self._compute_s += done.compute_s
        for name, value in asdict(done.work).items():
            setattr(self._work, name, getattr(self._work, name) + value)

    def progress(self, computed: int, now: float) -> dict[str, JSON]:
        """The progress; `computed` includes rows of unfinished parts."""
        rows = min(self._job.num_rows, self._rows_before + max(computed, self._rows_now))
        rate = (rows - self._rows_before) / max(1e-9, now - self._start)
        return {
            "rows": rows,
            "bad_rows": self.num_bad,
            "total_rows": self._job.num_rows,
            "parts": self.parts_done,
            "total_parts": len(self._job.parts),
            "rows_per_s": rate,
            "eta_s": (self._job.num_rows - rows) / rate if rate else None,
        }

    def summary(self, now: float, out: str) -> PredictionSummary:
        wall_s = now - self._start
        return PredictionSummary(
            rows=self.rows_done - self.num_bad,
            bad_rows=self.num_bad,
            parts=self.parts_done,
            computed_rows=self._rows_now,
            wall_s=wall_s,
            rows_per_s=self._rows_now / max(1e-9, wall_s),
            compute_seconds=self._compute_s,
            padding_waste_ratio=self._work.num_padding / max(1, self._work.num_elements),
            out=out,
        )


class _Reading:
    """Reads parts in one thread, with one source open at a time."""

    def __init__(
        self, job: PredictionJob, sources: Sequence[RowSource], stamps: Sequence[str], columns: Sequence[str]
    ) -> None:
        self._job = job
        self._sources = sources
        self._columns = columns
        self._stamps = stamps
        self._open: tuple[int, RowReader] | None = None

    def read(self, part: int) -> SourceRows:
        place = self._job.parts[part]
        rows = self._reader(place.source).read(place)
        source, num_rows = self._sources[place.source], self._job.sources[place.source].num_rows
        is_at_an_end = place.first_row == 0 or place.first_row + place.num_rows == num_rows
        if not is_at_an_end and len(source.files()) > 1:  # for a million images, too slow to check for each part
            return rows
        try:
            is_unchanged = stamp_of(source) == self._stamps[place.source]
        except OSError:
            is_unchanged = False
        if not is_unchanged:
            raise RunFailed(
                f"{source.path} has changed while it was read",
                remedy="Put back what it was: the same command then continues. Or start over with --new.",
            )
        return rows

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _reader(self, number: int) -> RowReader:
        if self._open is None or self._open[0] != number:
            self.close()
            try:
                self._open = (number, self._sources[number].open(self._columns))
            except (OSError, BadTable) as error:
                path = self._sources[number].path
                raise RunFailed(
                    f"{path} can no longer be read: {first_line(error.__cause__ or error)}",
                    remedy="Put back what it was: the same command then continues.",
                ) from error
        return self._open[1]


EngineT = TypeVar("EngineT")
ResultT = TypeVar("ResultT")

LOOK_AT_S = 0.5
"""Longest time between two results for the caller, so that it can report progress [s]."""


class Stopped(Exception):
    """Raised in worker threads after another part failed, or the user stopped the run."""


class Counter:
    """Number of computed rows, counted by several threads; raises Stopped after `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.rows = 0

    def add(self, rows: int) -> None:
        """Count the rows of a batch."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.rows += rows

    def stop(self) -> None:
        """End every thread after its batch."""
        self._stop.set()


@dataclass(frozen=True)
class PartPipeline(Generic[EngineT, ResultT]):
    """`read` runs in one thread, in the order of the parts; `compute` in one thread for each engine.

    At most `ahead` parts are read beyond those being computed.
    """

    read: Callable[[int], SourceRows]
    compute: Callable[[int, SourceRows, EngineT], ResultT]
    engines: Sequence[EngineT]
    ahead: int = 1

    def results(self, parts: Sequence[int], counter: Counter) -> Generator[ResultT | None, None, None]:
        """The result of `compute` for each part, as they finish; None after half a second without one.

        The first error of any thread ends the work, and is raised here after every thread has ended.
        """
        waiting, running = deque(parts), set[Future[ResultT]]()
        free: queue.SimpleQueue[EngineT] = queue.SimpleQueue()
        for engine in self.engines:
            free.put(engine)
        with _pools(len(self.engines), counter) as (reader, workers):
            while waiting or running:
                while waiting and len(running) < len(self.engines) + self.ahead:
                    part = waiting.popleft()
                    running.add(workers.submit(self._work, part, reader.submit(self.read, part), free))
                done, running = wait(running, timeout=LOOK_AT_S, return_when=FIRST_COMPLETED)
                if not done:
                    yield None
                for result in done:
                    yield result.result()

    def _work(self, part: int, rows: Future[SourceRows], free: queue.SimpleQueue[EngineT]) -> ResultT:
        engine = free.get()
        try:
            return self.compute(part, rows.result(), engine)
        finally:
            free.put(engine)


@contextmanager
def _pools(workers: int, counter: Counter) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """Threads for reading and for computing, which end with the block."""
    reading = ThreadPoolExecutor(1, "stoker-read")
    computing = ThreadPoolExecutor(workers, "stoker-predict")
    try:
        yield reading, computing
    except BaseException:
        counter.stop()
        raise
    finally:
        for pool in (reading, computing):
            pool.shutdown(wait=True, cancel_futures=True)
