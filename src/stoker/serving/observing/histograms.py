"""Histograms that cost a request little: counts by bucket and a sum, which a page of metrics reads.

`prometheus_client` has histograms of its own, whose observation takes a lock twice and walks the buckets: two
microseconds, two or three times a request. These belong to one thread, the event loop's, which also writes the page.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """What was observed under one set of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket, those beyond the last bound at the end."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in the first bucket whose bound is not below it."""
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """Tallies by their labels.

    Args:
        name: of the series.
        what: is observed, in a sentence.
        labels: their names.
        bounds: upper ends of the buckets, rising; beyond them is one more.
        registry: whose page has it.
    """

    def __init__(
        self, name: str, what: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what, self._labels, self._bounds = name, what, tuple(labels), tuple(bounds)
        self._ends = [*map(floatToGoString, self._bounds), "+Inf"]
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, **values: str) -> Tally:
        """The tally of these labels, made if it is not there: look it up once, not for each observation."""
        place = tuple(values[label] for label in self._labels)
        if place not in self._tallies:
            self._tallies[place] = Tally(self._bounds)
        return self._tallies[place]

    def remove(self, **values: str) -> None:
        """Forget every tally that has these labels, whatever its others are."""
        wanted = values.items()
        self._tallies = {
            place: tally
            for place, tally in self._tallies.items()
            if not wanted <= dict(zip(self._labels, place, strict=True)).items()
        }

    def describe(self) -> Iterable[Metric]:
        """Name and type, without which a registry would ask for all of it."""
        return [HistogramMetricFamily(self._name, self._what, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        """All tallies as they are now."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        for place, tally in self._tallies.items():
            buckets = list(zip(self._ends, map(float, accumulate(tally.counts)), strict=True))
            family.add_metric(place, buckets, tally.total)
        return [family]
