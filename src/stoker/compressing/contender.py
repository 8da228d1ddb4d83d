"""A contender (a candidate that was built and loaded) and its examination: answers, scores and interleaved timing.

Timing: in each round every contestant runs once, in an order that rotates from round to round, so that other load on
the machine meets all of them equally. Within a round the times of two are divided; the median of these ratios is the
speed-up, and the bootstrap over rounds gives its bounds. A latency on its own is a median on the machine as it was.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stoker.artifacts import Artifact, Golden, served_sizes
from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import is_filled_in
from stoker.compressing.candidates import BuiltGraph, CompressionCandidate
from stoker.compressing.rows import EvaluationData, EvaluationRows, answers, cut_to, row_lengths
from stoker.compressing.scores import Metric, Scores
from stoker.engines import Engine, Graph, load_graph
from stoker.records import Manifest, ServiceSettings, Tolerance
from stoker.records.compression import CompressionTrial, Gate, Interval


@dataclass(frozen=True, kw_only=True)
class CompressionTerms:
    """Terms of a search.

    `max_drop` is as the user gave it, such as `0.5%`; `seconds` is for the whole search; `threads` are an engine's, as
    in the service; `most_rows` is the largest batch [rows] of the service.
    """

    max_drop: str = "0.5%"
    batch_sizes: tuple[int, ...] = (1, 32)
    most_rows: int = ServiceSettings.max_batch_rows
    threads: int = 1
    seconds: float = 180.0
    confidence: float = 0.95

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes [rows] at which a candidate has to answer as it does for each row alone."""
        return served_sizes(max(self.most_rows, *self.batch_sizes))


@dataclass
class Contender:
    """A loaded candidate; `trial` is its record so far."""

    trial: CompressionTrial
    manifest: Manifest
    made: BuiltGraph
    engine: Engine
    scores: Scores
    pace: float = 1.0
    """Speed-up over the original [1]."""
    is_likely: bool = True
    """Whether the rows of acceptance will likely show that its drop is within the allowed one."""

    def note(self, *gates: Gate, **changes: Any) -> None:
        """Add gates and changes to the record."""
        self.trial = dataclasses.replace(self.trial, gates=(*self.trial.gates, *gates), **changes)


@dataclass(frozen=True)
class Examination:
    """The rows, metric, original model, terms and clock that contenders are examined with."""

    source: Artifact
    material: EvaluationData
    metric: Metric
    terms: CompressionTerms
    clock: Callable[[], float]

    def load(self, candidate: CompressionCandidate, made: BuiltGraph) -> tuple[Manifest, Engine]:
        """Load a candidate's graph as a service does.

        Raises:
            BadArtifact: the engine refuses it.
        """
        manifest = dataclasses.replace(
            self.source.manifest, engine=candidate.engine, precision=candidate.precision, graph=made.graph.name
        )
        return manifest, self.engine_of(manifest, made.graph)

    def engine_of(self, manifest: Manifest, graph: Path) -> Engine:
        """An engine with the threads of the search's terms."""
        loaded = Graph(
            path=graph,
            precision=manifest.precision,
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            threads=self.terms.threads,
        )
        return load_graph(manifest.engine, loaded)[0]

    def with_targets(self, rows: EvaluationRows, original: Arrays) -> EvaluationRows:
        """The rows to score by: for the metric agreement, the original's answers are the targets."""
        return dataclasses.replace(rows, targets=original) if self.metric.is_agreement else rows

    def scores(self, outputs: Arrays, rows: EvaluationRows) -> Scores:
        """The metric's scores of answers for rows."""
        return self.metric.scores(outputs, rows.targets, len(rows))

    def answers(self, engine: Engine, rows: EvaluationRows) -> Arrays:
        """An engine's answers for rows, in batches of the largest of the terms' sizes."""
        return answers(engine, rows, self.source.manifest, batch=max(self.terms.batch_sizes))

    def golden_excess(self, engine: Engine, tolerance: Tolerance) -> float:
        """Largest change of its own golden answers in the served batch sizes, relative to the tolerance [1]."""
        inputs = self.source.golden().inputs
        return Golden(inputs, engine.run(inputs)).excess_in_batches(engine.run, tolerance, self.terms.served_sizes)

    def solo(self, engine: Engine) -> tuple[InterleavedTimes, ...]:
        """The fewest rounds of one engine at each batch size, under the name `own`."""
        requests = map(self.request, self.terms.batch_sizes)
        return tuple(
            time_interleaved({"own": partial(engine.run, request)}, self.clock, seconds=0.0) for request in requests
        )

    def races(self, own: Engine, rival: Engine, *, seconds: float) -> tuple[InterleavedTimes, ...]:
        """Rounds of two engines at each batch size, under `own` and `rival`, for about `seconds` in all."""
        share = seconds / len(self.terms.batch_sizes)
        return tuple(
            time_interleaved(
                {"own": partial(own.run, request), "rival": partial(rival.run, request)}, self.clock, seconds=share
            )
            for request in map(self.request, self.terms.batch_sizes)
        )

    def request(self, rows: int) -> Arrays:
        """Inputs of this many rows of the selection, repeated if there are fewer, cut to their longest."""
        chosen = self.material.selection.take(np.arange(rows) % len(self.material.selection))
        longest = int(row_lengths(chosen, self.source.manifest).max())
        return cut_to(chosen.inputs, self.source.manifest, longest)


def latencies(races: tuple[InterleavedTimes, ...], sizes: tuple[int, ...]) -> dict[str, float]:
    """Median seconds of `own` by rows of a batch."""
    return {str(size): race.latency("own") for size, race in zip(sizes, races, strict=True)}


def interleaved_latencies(
    rival: dict[str, float], races: tuple[InterleavedTimes, ...], sizes: tuple[int, ...]
) -> dict[str, float]:
    """Seconds by rows of a batch, from the rival's latency and the rounds of both, so that they agree with speed-ups.

    Medians of rounds at different times would not agree on a machine with other load.
    """
    return {
        str(size): rival[str(size)] / race.ratio("own", "rival")
        for size, race in zip(sizes, races, strict=True)
        if str(size) in rival
    }


def is_finite_like(outputs: Arrays, reference: Arrays) -> bool:
    """Whether answers are finite wherever the reference's are, and of the same shapes."""
    return all(
        name in outputs
        and outputs[name].shape == expected.shape
        and not bool((~np.isfinite(_numbers(outputs[name])) & np.isfinite(_numbers(expected))).any())
        for name, expected in reference.items()
    )


def likeness(outputs: Arrays, reference: Arrays) -> float:
    """Cosine between answers and the reference's, all elements in one vector; the least over outputs [-1 to 1].

    Values that the reference fills in, such as -1e9 for masked classes, are left out: they would outweigh all others.
    """
    least = 1.0
    for name, expected in reference.items():
        a, b = _numbers(outputs[name]), _numbers(expected)
        counts = ~is_filled_in(np.abs(b))
        a, b = a[counts], b[counts]
        norm = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
        cosine = float(np.vdot(a, b)) / norm if norm > 0 else float(np.array_equal(a, b))
        least = min(least, cosine if math.isfinite(cosine) else 0.0)
    return least


def _numbers(array: Any) -> Any:
    return array.astype(np.float64)


RESAMPLES = 2000
FEWEST_ROUNDS, MOST_ROUNDS = 6, 101
LEAST_RUN_S = 0.002
"""Least duration of a timed run: shorter calls are repeated within it, against the noise of the clock."""

_SLOW_S = 0.1

Times = dict[str, tuple[float, ...]]
"""Seconds per call in each round, by contestant; equally many of each."""


@dataclass(frozen=True)
class InterleavedTimes:
    """Times of several contestants in the same rounds."""

    seconds: Times

    def latency(self, name: str) -> float:
        """Median time of a call [s]."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, against: str) -> tuple[float, ...]:
        """Speed-up over `against` in each round [1]; above 1 is faster."""
        pairs = zip(self.seconds[against], self.seconds[name], strict=True)
        return tuple(other / own for other, own in pairs)

    def ratio(self, name: str, against: str) -> float:
        """Speed-up over `against` in the median round [1]."""
        return float(np.exp(np.median(np.log(self.ratios(name, against)))))


def time_interleaved(
    contestants: Mapping[str, Callable[[], object]], clock: Callable[[], float], *, seconds: float
) -> InterleavedTimes:
    """Run every contestant in each round, for about `seconds` in all, within the fewest and most rounds.

    Each is expected to have run once before, untimed.
    """
    repeats = {name: _repeats(call, clock) for name, call in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, started = list(contestants), clock()
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and clock() - started > seconds:
            break
        for name in order:
            times[name].append(_timed(contestants[name], repeats[name], clock))
        order.append(order.pop(0))
    return InterleavedTimes({name: tuple(own) for name, own in times.items()})


def gain_of(races: Sequence[InterleavedTimes], confidence: float) -> Interval:
    """Speed-up [1] of `own` over `rival`: the geometric mean over races of the median ratio, with bounds.

    Races differ in batch size, for example; each bound holds with `confidence` on its own.
    """
    generator = np.random.default_rng(0)
    resampled = np.zeros(RESAMPLES)
    for race in races:
        rounds = np.log(race.ratios("own", "rival"))
        draws = generator.integers(0, len(rounds), size=(RESAMPLES, len(rounds)))
        resampled += np.median(rounds[draws], axis=1)
    value = float(np.exp(np.mean(np.log([race.ratio("own", "rival") for race in races]))))
    low, high = np.exp(np.quantile(resampled / len(races), [1 - confidence, confidence]))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    """Number of calls in a timed run. The first call may still set things up: a quick one is timed once more."""
    once = _timed(call, 1, clock)
    if once < _SLOW_S:
        once = _timed(call, 1, clock)
    return max(1, min(100, round(LEAST_RUN_S / once)))


def _timed(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(repeats):
        call()
    return max(clock() - started, 1e-9) / repeats
