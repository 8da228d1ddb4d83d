"""A candidate under examination: made, loaded, asked, timed.

Which of several models is faster here, and by how much at least.

What: interleaved rounds. In each round every contestant runs once, in an order that turns from round to round, so that
whatever else the machine does meets all of them alike. Within a round the times of two are divided; the median of these
ratios is the speed-up, and the bootstrap of rounds gives its bounds.
Use when: the difference is what matters. A latency told alone is a median on the machine as it was.
Costs: rounds × the sum of all latencies.
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
    """What a search is asked for.

    `max_drop` is in the user's words, such as `0.5%`; `seconds` is for the whole search. `threads` are what an engine
    computes with, as the service would give it; `most_rows` is the largest batch that the service makes.
    """

    max_drop: str = "0.5%"
    batch_sizes: tuple[int, ...] = (1, 32)
    most_rows: int = ServiceSettings.max_batch_rows
    threads: int = 1
    seconds: float = 180.0
    confidence: float = 0.95

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes [rows] at which a candidate has to answer as it answers each row alone."""
        return served_sizes(max(self.most_rows, *self.batch_sizes))


@dataclass
class Contender:
    """What is known of a candidate so far; `trial` is the record of it."""

    trial: CompressionTrial
    manifest: Manifest
    made: BuiltGraph
    engine: Engine
    scores: Scores
    pace: float = 1.0
    """How much faster than the model given."""
    is_likely: bool = True
    """Whether the rows of acceptance will likely show that it keeps within what is allowed."""

    def note(self, *gates: Gate, **changes: Any) -> None:
        """Write down more of what was found."""
        self.trial = dataclasses.replace(self.trial, gates=(*self.trial.gates, *gates), **changes)


@dataclass(frozen=True)
class Examination:
    """Where contenders are examined: the rows, the metric, the model given and the clock."""

    source: Artifact
    material: EvaluationData
    metric: Metric
    terms: CompressionTerms
    clock: Callable[[], float]

    def load(self, candidate: CompressionCandidate, made: BuiltGraph) -> tuple[Manifest, Engine]:
        """A candidate's graph, loaded as a service would.

        Raises:
            BadArtifact: the engine refuses it.
        """
        manifest = dataclasses.replace(
            self.source.manifest, engine=candidate.engine, precision=candidate.precision, graph=made.graph.name
        )
        return manifest, self.engine_of(manifest, made.graph)

    def engine_of(self, manifest: Manifest, graph: Path) -> Engine:
        """An engine with the threads of the search's terms."""
        wanted = Graph(
            path=graph, precision=manifest.precision, inputs=manifest.inputs, outputs=manifest.outputs,
            threads=self.terms.threads,
        )  # fmt: skip
        return load_graph(manifest.engine, wanted)[0]

    def with_targets(self, rows: EvaluationRows, original: Arrays) -> EvaluationRows:
        """The rows to score by: where agreement is the metric, the original's answers are the targets."""
        return dataclasses.replace(rows, targets=original) if self.metric.is_agreement else rows

    def scores(self, found: Arrays, rows: EvaluationRows) -> Scores:
        """The metric's scores of answers for rows."""
        return self.metric.scores(found, rows.targets, len(rows))

    def answers(self, engine: Engine, rows: EvaluationRows) -> Arrays:
        """An engine's answers for rows, in batches of the largest size asked for."""
        return answers(engine, rows, self.source.manifest, batch=max(self.terms.batch_sizes))

    def golden_excess(self, engine: Engine, tolerance: Tolerance) -> float:
        """How far its own golden answers move in the batches that are served, as a share of the tolerance."""
        asked = self.source.golden().inputs
        return Golden(asked, engine.run(asked)).excess_in_batches(engine.run, tolerance, self.terms.served_sizes)

    def solo(self, engine: Engine) -> tuple[InterleavedTimes, ...]:
        """The fewest rounds of one engine at each batch size, by the name `own`."""
        requests = map(self.request, self.terms.batch_sizes)
        return tuple(
            time_interleaved({"own": partial(engine.run, request)}, self.clock, seconds=0.0) for request in requests
        )

    def races(self, one: Engine, rival: Engine, *, seconds: float) -> tuple[InterleavedTimes, ...]:
        """Rounds of two engines at each batch size, by the names `own` and `rival`, for about so long in all."""
        share = seconds / len(self.terms.batch_sizes)
        return tuple(
            time_interleaved(
                {"own": partial(one.run, request), "rival": partial(rival.run, request)}, self.clock, seconds=share
            )
            for request in map(self.request, self.terms.batch_sizes)
        )

    def request(self, rows: int) -> Arrays:
        """Inputs of so many rows of the selection, again from the first where there are fewer, cut to their longest."""
        chosen = self.material.selection.take(np.arange(rows) % len(self.material.selection))
        longest = int(row_lengths(chosen, self.source.manifest).max())
        return cut_to(chosen.inputs, self.source.manifest, longest)


def gain_of(races: tuple[InterleavedTimes, ...], confidence: float) -> Interval:
    """How much faster `own` was than `rival`."""
    return speed_up(races, "own", "rival", confidence=confidence)


def latencies(races: tuple[InterleavedTimes, ...], sizes: tuple[int, ...]) -> dict[str, float]:
    """Median seconds of `own` by rows of a batch."""
    return {str(size): one.latency("own") for size, one in zip(sizes, races, strict=True)}


def interleaved_latencies(
    rival: dict[str, float], races: tuple[InterleavedTimes, ...], sizes: tuple[int, ...]
) -> dict[str, float]:
    """Seconds by rows of a batch, from the rival's and the rounds of both: so latencies and speed-ups agree.

    Medians of rounds at different moments do not: a machine that others use is slower at one of them.
    """
    return {
        str(size): rival[str(size)] / one.ratio("own", "rival")
        for size, one in zip(sizes, races, strict=True)
        if str(size) in rival
    }


def is_finite_like(found: Arrays, reference: Arrays) -> bool:
    """Whether answers are finite wherever the reference's are, and of the same shapes."""
    return all(
        name in found
        and found[name].shape == right.shape
        and not bool((~np.isfinite(_numbers(found[name])) & np.isfinite(_numbers(right))).any())
        for name, right in reference.items()
    )


def likeness(found: Arrays, reference: Arrays) -> float:
    """The cosine between answers and the reference's, all elements in one vector; the least over outputs.

    What the reference fills in, such as -1e9 for classes that are masked, does not count: it would be all there is.
    """
    return min((_cosine(_numbers(found[name]), _numbers(right)) for name, right in reference.items()), default=1.0)


def _cosine(a: Any, b: Any) -> float:
    counts = ~is_filled_in(np.abs(b))
    a, b = a[counts], b[counts]
    norm = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    cosine = float(np.vdot(a, b)) / norm if norm > 0 else float(np.array_equal(a, b))
    return cosine if math.isfinite(cosine) else 0.0


def _numbers(array: Any) -> Any:
    return array.astype(np.float64)


RESAMPLES = 2000
FEWEST_ROUNDS, MOST_ROUNDS = 6, 101
LEAST_RUN_S = 0.002
"""A timed run takes at least so long: shorter calls are repeated within it, against the clock's own noise."""

_SLOW_S = 0.1

Times = dict[str, tuple[float, ...]]
"""Seconds a call in each round, by contestant; equally many of each."""


@dataclass(frozen=True)
class InterleavedTimes:
    """Rounds of several contestants."""

    seconds: Times

    def latency(self, name: str) -> float:
        """The median time of a call [s]."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, against: str) -> tuple[float, ...]:
        """How much faster than `against` each round was; above 1 is faster."""
        pairs = zip(self.seconds[against], self.seconds[name], strict=True)
        return tuple(other / own for other, own in pairs)

    def ratio(self, name: str, against: str) -> float:
        """How much faster than `against` in the median round: what `speed_up` is made of."""
        return float(np.exp(np.median(np.log(self.ratios(name, against)))))


def time_interleaved(
    contestants: Mapping[str, Callable[[], object]], clock: Callable[[], float], *, seconds: float
) -> InterleavedTimes:
    """Let every contestant run in each round, for about `seconds` in all, within the fewest and most rounds.

    Each has run once before, untimed.
    """
    repeats = {name: _repeats(call, clock) for name, call in contestants.items()}
    found: dict[str, list[float]] = {name: [] for name in contestants}
    order, started = list(contestants), clock()
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and clock() - started > seconds:
            break
        for name in order:
            found[name].append(_timed(contestants[name], repeats[name], clock))
        order.append(order.pop(0))
    return InterleavedTimes({name: tuple(times) for name, times in found.items()})


def speed_up(
    races: Sequence[InterleavedTimes], name: str, against: str, *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """How much faster `name` is than `against`: the geometric mean over races of the median ratio, with bounds.

    Races are of batch sizes, say; each bound holds with `confidence` on its own.
    """
    logs = [np.log(race.ratios(name, against)) for race in races]
    generator = np.random.default_rng(seed)
    resampled = np.zeros(RESAMPLES)
    for one in logs:
        draws = generator.integers(0, len(one), size=(RESAMPLES, len(one)))
        resampled += np.median(one[draws], axis=1)
    value = float(np.exp(np.mean(np.log([one.ratio(name, against) for one in races]))))
    low, high = np.exp(np.quantile(resampled / len(logs), [1 - confidence, confidence]))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    """Calls of one timed run. The first call may still set things up: a quick one is timed once more."""
    once = _timed(call, 1, clock)
    if once < _SLOW_S:
        once = _timed(call, 1, clock)
    return max(1, min(100, round(LEAST_RUN_S / once)))


def _timed(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(repeats):
        call()
    return max(clock() - started, 1e-9) / repeats
