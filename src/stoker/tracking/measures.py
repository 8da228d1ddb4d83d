"""Which numbers of an event trackers are sent, and what they are called there. Decides; sends nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from stoker.records import Event
from stoker.records.codec import JSON
from stoker.tracking.base import Point

_PROGRESS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_s": "train/samples_per_s",
    "resident_bytes": "train/resident_bytes",
    "epoch": "train/epoch",
}
"""Fields of a progress event, and what trackers call them."""


def point_of(event: Event) -> Point | None:
    """What a tracker is sent of an event; None where it has no numbers. Values that are no number (NaN) stay as such.

    >>> point_of(Event(kind="evaluated", at=1.0, fields={"split": "valid", "samples": 64, "metrics": {"loss": 0.5}}))
    Point(samples=64, at=1.0, values={'valid/loss': 0.5})
    """
    values = dict(_values(event))
    samples = event.fields.get("samples")
    if not values or not isinstance(samples, int):
        return None
    return Point(samples=samples, at=event.at, values=values)


def _values(event: Event) -> Iterator[tuple[str, float]]:
    fields = event.fields
    if event.kind == "progress":
        for field, name in _PROGRESS.items():
            yield from _number(name, fields.get(field))
        rates = fields.get("lrs")
        for place, rate in enumerate(rates if isinstance(rates, list) and len(rates) > 1 else ()):
            yield from _number(f"train/lr/group{place}", rate)
    elif event.kind == "evaluated":
        metrics = fields.get("metrics")
        for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
            yield from _number(f"{fields.get('split', 'valid')}/{name}", value)
    elif event.kind == "finished":
        metrics = fields.get("metrics")
        for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
            yield from _number(f"final/{name}", value)


def _number(name: str, value: JSON) -> Iterator[tuple[str, float]]:
    """The value under its name, if it is a number; JSON has words for those that are not finite."""
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    if isinstance(value, str) and value in words:
        yield name, words[value]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
