"""Histograms compared with those of Prometheus' own library."""

from __future__ import annotations

import random

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from stoker.serving.metrics import Histogram

BOUNDS = (0.0, 0.1, 0.25, 1.0)


def test_the_page_is_the_librarys() -> None:
    """The same observations give the same text, values on a bound and beyond the last one among them."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("waited_seconds", "How long.", ("model", "outcome"), BOUNDS, ours)
    other = prometheus_client.Histogram(
        "waited_seconds", "How long.", ("model", "outcome"), registry=theirs, buckets=BOUNDS
    )
    draw = random.Random(1)
    for model in ("a", 'b"\n'):
        for value in (0.0, 0.1, 1.0, 1.5, *(draw.random() for _ in range(100))):
            for histogram in (one, other):
                histogram.labels(model=model, outcome="ok").observe(value)
    lines = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == lines


def test_tallies_are_forgotten_by_some_of_their_labels() -> None:
    """All outcomes of one model go, the other stays; one that comes again begins over."""
    registry = CollectorRegistry()
    histogram = Histogram("waited_seconds", "How long.", ("model", "outcome"), BOUNDS, registry)
    for model in ("a", "b"):
        for outcome in ("ok", "late"):
            histogram.labels(model=model, outcome=outcome).observe(0.2)
    histogram.remove(model="a")
    assert b'model="a"' not in generate_latest(registry)
    assert registry.get_sample_value("waited_seconds_count", {"model": "b", "outcome": "late"}) == 1
    histogram.labels(model="a", outcome="ok")
    assert registry.get_sample_value("waited_seconds_count", {"model": "a", "outcome": "ok"}) == 0
