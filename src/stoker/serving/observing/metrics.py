"""Metrics in the format that Prometheus reads; a registry of their own, so that two services share a process.

`outcome` is `ok` or the reason of the refusal. Children are made once a version, not looked up for each request:
what a request costs here is two to three observations of a seventh of a microsecond each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from stoker.serving.batching.executed import Executed
from stoker.serving.observing.histograms import Histogram, Tally

SECONDS = tuple(0.0001 * 2**power for power in range(18))
"""Upper ends of the histograms' buckets: 0.1 ms to 13 s, each twice the one before."""
ROWS = tuple(float(2**power) for power in range(11))
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
MOST_RETIRED = 8
"""Versions of a model that no longer serve and still have their series."""
OK = "ok"


class Live(Collector):
    """What is read when somebody looks: `served` gives (model, version, its facts, rows in its queue, ready)."""

    def __init__(self, served: Callable[[], Iterable[tuple[dict[str, str], int, bool]]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        """The gauges of every version that serves."""
        labels = ("model", "version")
        info = GaugeMetricFamily(
            "stoker_model_info", "A version that serves.", labels=(*labels, "digest", "engine", "precision")
        )
        rows = GaugeMetricFamily("stoker_queue_rows", "Samples that wait.", labels=labels)
        ready = GaugeMetricFamily("stoker_model_ready", "Whether it would answer now.", labels=labels)
        for facts, waiting, is_ready in self._served():
            place = (facts["model"], facts["version"])
            info.add_metric((*place, facts["digest"], facts["engine"], facts["precision"]), 1)
            rows.add_metric(place, waiting)
            ready.add_metric(place, is_ready)
        return info, rows, ready


class Reading(Collector):
    """A gauge, or with `is_total` a counter, whose value is asked for when somebody looks."""

    def __init__(self, name: str, what: str, read: Callable[[], float], *, is_total: bool) -> None:
        self._name, self._what, self._read, self._is_total = name, what, read, is_total

    def collect(self) -> Iterable[Metric]:
        """Its value now."""
        family = CounterMetricFamily if self._is_total else GaugeMetricFamily
        return [family(self._name, self._what, value=self._read())]


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
        """Count a request that ended, `seconds` after it came in."""
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
        """One that used them is gone."""
        self.users -= 1
        if not self.users:
            self._metrics.retire(**self._place)


class Metrics:
    """All series of a service. `document` is what `/metrics` answers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ("model", "version")

        def histogram(name: str, what: str, buckets: tuple[float, ...], *more: str) -> Histogram:
            return Histogram(f"stoker_{name}", what, (*labels, *more), buckets, registry)

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
        self.load_seconds = Histogram(
            "stoker_model_load_seconds", "Reading, checking and warming a version.", ("model",),
            tuple(0.01 * 4**power for power in range(9)), registry,
        )  # fmt: skip
        ProcessCollector(registry=registry)
        self._versions: dict[tuple[str, str], VersionMetrics] = {}
        self._retired: OrderedDict[tuple[str, str], None] = OrderedDict()

    def watch(self, served: Callable[[], Iterable[tuple[dict[str, str], int, bool]]]) -> None:
        """Read what `served` tells whenever somebody looks; see `Live`."""
        self.registry.register(Live(served))

    def read(self, name: str, what: str, value: Callable[[], float], *, is_total: bool = False) -> None:
        """A series without labels, whose value is asked for whenever somebody looks."""
        self.registry.register(Reading(f"stoker_{name}", what, value, is_total=is_total))

    def version(self, model: str, version: str) -> VersionMetrics:
        """The children of a version, until its `release`; a version that is loaded again goes on where it was."""
        place = (model, version)
        self._retired.pop(place, None)
        if place not in self._versions:
            self._versions[place] = VersionMetrics(self, model, version)
        self._versions[place].users += 1
        return self._versions[place]

    def retire(self, model: str, version: str) -> None:
        """Nobody uses these any more: they stay to be read, until `MOST_RETIRED` others of their model follow."""
        self._retired[model, version] = None
        old = [place for place in self._retired if place[0] == model][:-MOST_RETIRED]
        for place in old:
            del self._retired[place], self._versions[place]
            self._remove(*place)

    def load(self, model: str, seconds: float, *, passed: bool) -> None:
        """Count an attempt to bring a version up."""
        self.loads.labels(model=model, outcome=OK if passed else "failed").inc()
        self.load_seconds.labels(model=model).observe(seconds)

    def document(self) -> tuple[bytes, str]:
        """All series as text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _remove(self, model: str, version: str) -> None:
        for histogram in (
            self.queue_seconds, self.compute_seconds, self.total_seconds, self.batch_rows, self.padding_waste,
        ):  # fmt: skip
            histogram.remove(model=model, version=version)
        self.batch_cuts.remove_by_labels({"model": model, "version": version})
