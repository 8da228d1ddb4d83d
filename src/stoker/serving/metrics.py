"""Metrics of a service in Prometheus' format (`Metrics`), and the protocol's statistics of a version (`Counters`).

Each service has its own registry, so that two can share a process. `outcome` is `ok` or the reason of a refusal.
Children are made once per version, not looked up per request. `Histogram` replaces `prometheus_client`'s, whose
observation locks twice and walks the buckets: 2 µs, two or three times per request, against 0.15 µs here. It belongs
to one thread, the event loop's, which also writes the page.
"""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stoker.records.codec import JSON
from stoker.serving.batching.scheduler import Executed

SECONDS = tuple(0.0001 * 2**power for power in range(18))
"""Upper bounds of the histograms' buckets [s]: 0.1 ms to 13 s, each twice the previous."""
ROWS = tuple(float(2**power) for power in range(11))
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
MOST_RETIRED = 8
"""Number of versions per model that keep their series after they stop serving."""
OK = "ok"


Served = Callable[[], Iterable[tuple[dict[str, str], int, bool]]]
"""Each version that serves: its labels, the rows in its queue, and whether it would answer now."""


class SampledCollector(Collector):
    """Series that are read when the page is."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The current values."""
        return self._read()


def served_series(served: Served) -> Iterable[Metric]:
    """The gauges of every version that serves."""
    labels = ("model", "version")
    info = GaugeMetricFamily(
        "stoker_model_info", "A version that serves.", labels=(*labels, "digest", "engine", "precision")
    )
    rows = GaugeMetricFamily("stoker_queue_rows", "Samples that wait.", labels=labels)
    ready = GaugeMetricFamily("stoker_model_ready", "Whether it would answer now.", labels=labels)
    for facts, waiting, is_ready in served():
        place = (facts["model"], facts["version"])
        info.add_metric((*place, facts["digest"], facts["engine"], facts["precision"]), 1)
        rows.add_metric(place, waiting)
        ready.add_metric(place, is_ready)
    return info, rows, ready


class VersionMetrics:
    """The children of one version, shared by all that are loaded of it at a time."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self.users = 0
        self._place = {"model": model, "version": version}
        self._metrics = metrics
        self._queue = metrics.queue_seconds.labels(**self._place)
        self._rows = metrics.batch_rows.labels(**self._place)
        self._waste = metrics.padding_waste.labels(**self._place)
        self._compute: dict[bool, Tally] = {}
        self._totals: dict[str, Tally] = {}
        self._cuts: dict[str, Counter] = {}

    def request(self, outcome: str, seconds: float) -> None:
        """Count a finished request, which took `seconds`."""
        child = self._totals.get(outcome)
        if child is None:
            child = self._totals[outcome] = self._metrics.total_seconds.labels(**self._place, outcome=outcome)
        child.observe(seconds)

    def batch(self, batch: Executed) -> None:
        """Count a run of an engine."""
        computed = self._compute.get(batch.succeeded)
        if computed is None:
            outcome = OK if batch.succeeded else "failed"
            computed = self._compute[batch.succeeded] = self._metrics.compute_seconds.labels(
                **self._place, outcome=outcome
            )
        computed.observe(batch.input_s + batch.infer_s + batch.output_s)
        self._rows.observe(batch.rows)
        for seconds in batch.queue_s:
            self._queue.observe(seconds)
        if batch.sizes:
            self._waste.observe(batch.padding / (batch.elements + batch.padding))
        child = self._cuts.get(batch.reason)
        if child is None:
            child = self._cuts[batch.reason] = self._metrics.batch_cuts.labels(**self._place, reason=batch.reason)
        child.inc()

    def release(self) -> None:
        """Drop one user of these metrics."""
        self.users -= 1
        if not self.users:
            self._metrics.retire(**self._place)


class Metrics:
    """All series of a service. `document` is what `/metrics` answers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ("model", "version")
        self._of_versions: list[Histogram] = []

        def histogram(name: str, what: str, buckets: tuple[float, ...], *more: str) -> Histogram:
            self._of_versions.append(Histogram(f"stoker_{name}", what, (*labels, *more), buckets, registry))
            return self._of_versions[-1]

        self.queue_seconds = histogram("queue_seconds", "How long a request waited for its batch.", SECONDS)
        self.compute_seconds = histogram("compute_seconds", "How long a batch took.", SECONDS, "outcome")
        self.total_seconds = histogram("total_seconds", "From a request's arrival to its end.", SECONDS, "outcome")
        self.batch_rows = histogram("batch_rows", "Samples in a batch.", ROWS)
        self.padding_waste = histogram("padding_waste_ratio", "Padding's share of a batch's positions.", SHARES)
        self.batch_cuts = Counter(
            "stoker_batch_cut_reason", "Batches, by why they ended.", (*labels, "reason"), registry=registry
        )
        self.rejected = Counter(
            "stoker_rejected", "Requests that were not answered, by why.", ("model", "reason"), registry=registry
        )
        self.deadline_misses = Counter(
            "stoker_deadline_miss", "Requests that were late, or would have been.", ("model",), registry=registry
        )
        self.loads = Counter(
            "stoker_model_loads", "Versions brought up, or refused.", ("model", "outcome"), registry=registry
        )
        bounds = tuple(0.01 * 4**power for power in range(9))
        what = "Reading, checking and warming a version."
        self.load_seconds = Histogram("stoker_model_load_seconds", what, ("model",), bounds, registry)
        ProcessCollector(registry=registry)
        self._versions: dict[tuple[str, str], VersionMetrics] = {}
        self._retired: OrderedDict[tuple[str, str], None] = OrderedDict()

    def watch(self, served: Served) -> None:
        """Read the versions that serve with each page."""
        self.registry.register(SampledCollector(lambda: served_series(served)))

    def read(self, name: str, what: str, value: Callable[[], float], *, is_total: bool = False) -> None:
        """Add a gauge, or with `is_total` a counter, without labels, whose value is read with each page."""
        family = CounterMetricFamily if is_total else GaugeMetricFamily
        self.registry.register(SampledCollector(lambda: [family(f"stoker_{name}", what, value=value())]))

    def version(self, model: str, version: str) -> VersionMetrics:
        """The children of a version, until its `release`; a version that is loaded again continues its series."""
        place = (model, version)
        self._retired.pop(place, None)
        if place not in self._versions:
            self._versions[place] = VersionMetrics(self, model, version)
        self._versions[place].users += 1
        return self._versions[place]

    def retire(self, model: str, version: str) -> None:
        """Keep an unused version's series until `MOST_RETIRED` others of its model have retired."""
        self._retired[model, version] = None
        old = [place for place in self._retired if place[0] == model][:-MOST_RETIRED]
        for place in old:
            del self._retired[place], self._versions[place]
            labels = dict(zip(("model", "version"), place, strict=True))
            for histogram in self._of_versions:
                histogram.remove(**labels)
            self.batch_cuts.remove_by_labels(labels)

    def load(self, model: str, seconds: float, *, passed: bool) -> None:
        """Count an attempt to bring a version up."""
        self.loads.labels(model=model, outcome=OK if passed else "failed").inc()
        self.load_seconds.labels(model=model).observe(seconds)

    def document(self) -> tuple[bytes, str]:
        """All series as text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class Tally:
    """Observations under one set of labels: counts by bucket, and a sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket; the last is beyond all bounds."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """Tallies by their labels.

    Args:
        name: of the series.
        what: its description.
        labels: names of the labels.
        bounds: upper bounds of the buckets, ascending; one more bucket is beyond them.
        registry: the registry of the page.
    """

    def __init__(
        self, name: str, what: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what, self._labels, self._bounds = name, what, tuple(labels), tuple(bounds)
        self._ends = [*map(floatToGoString, self._bounds), "+Inf"]
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, **values: str) -> Tally:
        """The tally of these labels, made if absent; look it up once, not for each observation."""
        place = tuple(values[label] for label in self._labels)
        if place not in self._tallies:
            self._tallies[place] = Tally(self._bounds)
        return self._tallies[place]

    def remove(self, **values: str) -> None:
        """Remove every tally with these labels, whatever its other labels are."""
        self._tallies = {
            place: tally
            for place, tally in self._tallies.items()
            if not values.items() <= dict(zip(self._labels, place, strict=True)).items()
        }

    def describe(self) -> Iterable[Metric]:
        """Name and type; without it a registry collects everything."""
        return [HistogramMetricFamily(self._name, self._what, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        """The current tallies."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        for place, tally in self._tallies.items():
            buckets = list(zip(self._ends, map(float, accumulate(tally.counts)), strict=True))
            family.add_metric(place, buckets, tally.total)
        return [family]


@dataclass(slots=True)
class _Sum:
    """A count, and the total seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` occurrences that took `seconds` together."""
        self.count += count
        self.seconds += seconds

    def document(self) -> dict[str, int]:
        """The protocol's form, in nanoseconds."""
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


@dataclass(slots=True)
class _Compute:
    """The three parts of a batch."""

    input: _Sum = field(default_factory=_Sum)
    infer: _Sum = field(default_factory=_Sum)
    output: _Sum = field(default_factory=_Sum)

    def add(self, batch: Executed, count: int) -> None:
        """Count a batch's times `count` times."""
        self.input.add(count * batch.input_s, count)
        self.infer.add(count * batch.infer_s, count)
        self.output.add(count * batch.output_s, count)

    def document(self) -> dict[str, JSON]:
        """The protocol's form."""
        return {f"compute_{part}": getattr(self, part).document() for part in ("input", "infer", "output")}


class Counters:
    """Statistics of one version since it was loaded, for the protocol. It belongs to the event loop.

    A request counts the whole times of the batch that answered it, as in Triton: clients divide by the number of
    requests.
    """

    def __init__(self, name: str, version: str, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._version = version
        self._wall_clock = wall_clock
        self._last_s = 0.0
        self._rows = 0
        self._success, self._fail, self._queue = _Sum(), _Sum(), _Sum()
        self._requests = _Compute()
        self._batches: dict[int, _Compute] = {}

    def add_request(self, seconds: float, *, succeeded: bool) -> None:
        """Count a finished request, which took `seconds`."""
        if succeeded:
            self._last_s = self._wall_clock()
        (self._success if succeeded else self._fail).add(seconds)

    def add_batch(self, batch: Executed) -> None:
        """Count a run of an engine that gave answers; a failed run shows in the requests that failed."""
        if not batch.succeeded:
            return
        self._rows += batch.rows
        self._queue.add(sum(batch.queue_s), len(batch.queue_s))
        self._requests.add(batch, batch.requests)
        self._batches.setdefault(batch.rows, _Compute()).add(batch, 1)

    def document(self) -> JSON:
        """The current counts, in the statistics extension's form."""
        batches = sorted(self._batches.items())
        none = _Sum().document()
        return {
            "name": self._name,
            "version": self._version,
            "last_inference": round(self._last_s * 1000),
            "inference_count": self._rows,
            "execution_count": sum(compute.infer.count for _, compute in batches),
            "inference_stats": {
                "success": self._success.document(),
                "fail": self._fail.document(),
                "queue": self._queue.document(),
                **self._requests.document(),
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [{"batch_size": rows, **compute.document()} for rows, compute in batches],
        }
