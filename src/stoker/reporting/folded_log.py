"""A run's events, folded as they come: columns of progress, evaluations, what was logged, and what happened.

What lies beyond a position to which the run went back is dropped (`reporting.history.Rewinds`). Progress is kept twice:
as columns for charts, and in at most `2 * _MOST_SEGMENTS` events that stand for their neighbours with the same sums, so
that a report made of them shows the same times and rates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from stoker.records import Event
from stoker.records.codec import JSON
from stoker.records.progress import MOST
from stoker.reporting.history import Rewinds, as_number, evaluation_metrics
from stoker.reporting.summary import NOT_TRAINING

COLUMNS = (
    "samples",
    "updates",
    "at",
    "wall_s",
    "loss",
    "lr",
    "grad_norm",
    "samples_per_s",
    "resident_bytes",
    "allocated_bytes",
    "data_s",
    "split_s",
)
"""Columns of progress: `data_s` is the time waited for data, `split_s` all of the time that the event covers."""
_SAMPLES, _RATE = COLUMNS.index("samples"), COLUMNS.index("samples_per_s")

_MOST_SEGMENTS = 256
_FIRST_KEPT, _LAST_KEPT = 400, 2000
_MOST_NAMES, _MOST_MEDIA, _MOST_GROUPS = 200, 2000, 32

Points = list[tuple[float, float]]
"""(samples, value) pairs in order."""


class Table:
    """Rows of floats that grow at the end: positions ascend, and rows beyond a position can be dropped."""

    def __init__(self, width: int) -> None:
        self._rows = np.empty((256, width))
        self.length = 0

    @property
    def rows(self) -> np.ndarray:
        """All rows [n, width]."""
        return self._rows[: self.length]

    def extend(self, rows: np.ndarray) -> None:
        """Add rows."""
        needed = self.length + len(rows)
        if needed > len(self._rows):
            grown = np.empty((max(needed, 2 * len(self._rows)), self._rows.shape[1]))
            grown[: self.length] = self.rows
            self._rows = grown
        self._rows[self.length : needed] = rows
        self.length = needed

    def drop_beyond(self, position: float) -> np.ndarray:
        """Remove the rows whose first column is above `position`; a copy of them."""
        kept = int(np.searchsorted(self.rows[:, 0], position, side="right"))
        dropped: np.ndarray = self.rows[kept:].copy()
        self.length = kept
        return dropped


@dataclass
class _Segment:
    """Several progress events in a row: the last one's fields, and sums over all of them."""

    event: Mapping[str, JSON]
    at: float
    count: int = 1
    split_s: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    busy_s: float = 0.0

    def absorb(self, later: _Segment) -> None:
        """Stand for `later` too."""
        self.event, self.at, self.count = later.event, later.at, self.count + later.count
        for phase, seconds in later.split_s.items():
            self.split_s[phase] = self.split_s.get(phase, 0.0) + seconds
        self.samples += later.samples
        self.busy_s += later.busy_s

    def as_event(self) -> Event:
        """One progress event with the sums: its rate is the mean over the time trained."""
        rate = self.samples / self.busy_s if self.busy_s else 0.0
        known = {name: value for name, value in self.event.items() if not isinstance(value, dict | list)}
        return Event(
            kind="progress", at=self.at, fields={**known, "split_s": dict(self.split_s), "samples_per_s": rate}
        )


@dataclass(frozen=True)
class Kept:
    """An event that is no progress, and the offset [bytes] after its line."""

    offset: int
    event: Event


@dataclass(frozen=True)
class Medium:
    """A picture or a text that the run logged: its name, position [samples], and file or content."""

    name: str
    samples: float
    at: float
    content: str


class FoldedLog:
    """A run's events, folded.

    Attributes:
        progress: a row of `COLUMNS` for each progress event.
        rates: for each group of parameters (samples, learning rate), where the groups differ.
        evaluations: by (split, metric) its points.
        best: (samples, metrics) of the evaluations that were the best so far.
        scalars: by name the points of `stoker.log`.
        superseded_s: training time of what was done again after a resume [s].
    """

    def __init__(self) -> None:
        self.num_checkpoints = 0
        self.progress = Table(len(COLUMNS))
        self.rates: list[Table] = []
        self.evaluations: dict[tuple[str, str], Points] = {}
        self.best: list[tuple[float, dict[str, float]]] = []
        self.scalars: dict[str, Table] = {}
        self.images: list[Medium] = []
        self.texts: list[Medium] = []
        self.superseded_s = 0.0
        self._rewinds = Rewinds()
        self._first: list[Kept] = []
        self._last: deque[Kept] = deque(maxlen=_LAST_KEPT)
        self._history: list[_Segment | Kept] = []
        self._per_segment = 1
        self._num_segments = 0

    @property
    def kept(self) -> list[Kept]:
        """The events that are no progress, in order; of very many the middle ones are left out."""
        return [*self._first, *self._last]

    def take(self, events: Iterable[Event]) -> None:
        """Fold events in, which follow those before."""
        for event in events:
            if event.kind != "progress":
                self._take_other(Kept(0, event))
                continue
            row = row_of(event.at, event.fields)
            if 0 <= row[_SAMPLES] <= MOST:
                self._go_back(self._rewinds.position_of("progress", row[_SAMPLES]))
                self.progress.extend(np.array([row]))
                self._take_progress(event.at, event.fields, row)

    def _take_progress(self, wall_time: float, fields: Mapping[str, JSON], row: list[float]) -> None:
        """Keep what a progress event has besides its row; called for every line of a long log."""
        self._append_segment(wall_time, fields, row)
        if isinstance(rates := fields.get("lrs"), list):
            self.rates += [Table(2) for _ in range(len(self.rates), min(len(rates), _MOST_GROUPS))]
            for table, rate in zip(self.rates, rates, strict=False):
                table.extend(np.array([[row[_SAMPLES], _number(rate)]]))

    def _append_segment(self, wall_time: float, fields: Mapping[str, JSON], row: list[float]) -> None:
        """Take a progress event into the last segment, or begin another."""
        last = self._history[-1] if self._history else None
        if not isinstance(last, _Segment) or last.count >= self._per_segment:
            last = _Segment(fields, wall_time, count=0)
            self._history.append(last)
            self._num_segments += 1
        last.event, last.at = fields, wall_time
        last.count += 1
        split = fields.get("split_s")
        if isinstance(split, dict) and len(split) < 32:
            total, busy_s = last.split_s, 0.0
            for phase, seconds in split.items():
                if isinstance(seconds, float | int):
                    total[phase] = total.get(phase, 0.0) + seconds
                    if phase not in NOT_TRAINING:
                        busy_s += seconds
            last.busy_s += busy_s
            rate = row[_RATE]
            if math.isfinite(rate):
                last.samples += rate * busy_s
        if self._num_segments > 2 * _MOST_SEGMENTS:
            self._condense()

    def _condense(self) -> None:
        """Let each two neighbouring segments be one."""
        self._per_segment *= 2
        merged: list[_Segment | Kept] = []
        for item in self._history:
            last = merged[-1] if merged else None
            if (
                isinstance(item, _Segment)
                and isinstance(last, _Segment)
                and (last.count + item.count <= self._per_segment)
            ):
                last.absorb(item)
            else:
                merged.append(item)
        self._history = merged
        self._num_segments = sum(isinstance(item, _Segment) for item in merged)
        if self._num_segments > 2 * _MOST_SEGMENTS:  # so many events between them that few have neighbours
            self._num_segments = 0

    def _take_other(self, kept: Kept) -> None:
        event = kept.event
        position = as_number(event.fields.get("samples"))
        self._go_back(self._rewinds.position_of(event.kind, position))
        if event.kind == "evaluated" and position is not None:
            self._take_evaluation(event, position)
            if event.fields.get("best") is True:
                self.best.append((position, evaluation_metrics(event)))
        elif event.kind == "logged":
            self._take_logged(event)
            return
        elif event.kind == "checkpointed":
            self.num_checkpoints += 1
        if len(self._first) < _FIRST_KEPT:
            self._first.append(kept)
        else:
            self._last.append(kept)
        self._history.append(kept)
        if len(self._history) > 4 * (_FIRST_KEPT + _LAST_KEPT):  # far more evaluations than a report shows
            del self._history[_FIRST_KEPT : _FIRST_KEPT + _LAST_KEPT]

    def _go_back(self, position: float | None) -> None:
        """Drop everything beyond a position [samples] to which the run went back; nothing for None."""
        if position is None:
            return
        split_s = COLUMNS.index("split_s")
        self.superseded_s += float(np.nansum(self.progress.drop_beyond(position)[:, split_s]))
        for points in self.evaluations.values():
            while points and points[-1][0] > position:
                points.pop()
        for table in (*self.scalars.values(), *self.rates):
            table.drop_beyond(position)
        self.best = [point for point in self.best if point[0] <= position]
        self.images = [image for image in self.images if image.samples <= position]
        self.texts = [text for text in self.texts if text.samples <= position]

    def _take_evaluation(self, event: Event, position: float) -> None:
        split, metrics = str(event.fields.get("split", "valid"))[:80], event.fields.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            number, bare = as_number(value), str(name).removeprefix(f"{split}/")[:80]
            key = (split, bare)
            if (
                number is None
                or bare.endswith("]")
                or (key not in self.evaluations and len(self.evaluations) >= _MOST_NAMES)
            ):
                continue
            points = self.evaluations.setdefault(key, [])
            if points and points[-1][0] == position:
                points.pop()
            points.append((position, number))

    def _take_logged(self, event: Event) -> None:
        scalars = event.fields.get("scalars")
        for name, points in scalars.items() if isinstance(scalars, dict) else ():
            label = str(name)[:80]
            if label not in self.scalars and len(self.scalars) >= _MOST_NAMES:
                continue
            pairs = (
                [
                    (x, y)
                    for pair in points
                    if isinstance(pair, list) and len(pair) == 2
                    if (x := as_number(pair[0])) is not None
                    and (y := as_number(pair[1])) is not None
                    and math.isfinite(x)
                ]
                if isinstance(points, list)
                else []
            )
            table = self.scalars.setdefault(label, Table(2))
            if pairs:
                table.drop_beyond(np.nextafter(min(pairs)[0], -math.inf))
                table.extend(np.array(sorted(pairs, key=lambda pair: pair[0])))
        for kind, known in (("images", self.images), ("texts", self.texts)):
            entries = event.fields.get(kind)
            for entry in entries if isinstance(entries, list) else ():
                with suppress(TypeError, KeyError, ValueError):
                    content = str(entry["file" if kind == "images" else "text"])[:20_000]
                    known.append(Medium(str(entry["name"])[:80], float(entry["samples"]), event.at, content))
            del known[:-_MOST_MEDIA]

    def events(self) -> tuple[Event, ...]:
        """Events for a report, in order: progress in condensed form, `logged` left out."""
        return tuple(item.as_event() if isinstance(item, _Segment) else item.event for item in self._history)


_NUMBERS = ("loss", "lr", "grad_norm", "samples_per_s", "resident_bytes", "allocated_bytes")


def row_of(wall_time: float, fields: Mapping[str, JSON]) -> list[float]:
    """A row of `COLUMNS`; NaN for what is missing or no number."""
    split = fields.get("split_s")
    data_s = split_s = 0.0
    if isinstance(split, dict):
        for phase, seconds in split.items():
            if isinstance(seconds, float | int):
                split_s += seconds
                if phase == "data":
                    data_s = seconds
    row = [
        _number(fields.get("samples")),
        _number(fields.get("updates")),
        _number(wall_time),
        _number(fields.get("wall_s")),
    ]
    row += [_number(fields.get(name)) for name in _NUMBERS]
    return [*row, data_s, split_s]


def _number(value: JSON) -> float:
    if type(value) is float:
        return value
    number = as_number(value)
    return math.nan if number is None else number


Column = list[float | None]
"""Numbers for JSON; None where there is none."""


def downsampled(
    x: np.ndarray, columns: Mapping[str, np.ndarray], start: float, end: float, px: int
) -> dict[str, Column]:
    """The columns between two values of `x`, at most two points for each of `px` pixel columns: the least and the most.

    All columns share the positions under "x": the first and the last of each pixel column. NaN are None. One point to
    each side of the stretch is included, so that lines reach its edges.
    """
    first = max(0, int(np.searchsorted(x, start, side="left")) - 1)
    last = min(len(x), int(np.searchsorted(x, end, side="right")) + 1)
    x = x[first:last]
    if len(x) <= 2 * px:
        return {"x": x.tolist(), **{name: _listed(values[first:last]) for name, values in columns.items()}}
    edges = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], px + 1)[:-1], side="left"))
    ends = np.append(edges[1:], len(x)) - 1
    positions = np.column_stack([x[edges], x[ends]]).ravel()
    found: dict[str, Column] = {"x": positions.tolist()}
    for name, values in columns.items():
        part = values[first:last]
        low, high = np.fmin.reduceat(part, edges), np.fmax.reduceat(part, edges)
        rises = part[edges] <= part[ends]
        found[name] = _listed(np.column_stack([np.where(rises, low, high), np.where(rises, high, low)]).ravel())
    return found


def _listed(values: np.ndarray) -> Column:
    """Numbers for JSON; None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def thinned(points: Sequence[tuple[float, float]], most: int = 600) -> Points:
    """At most `most` + 2 points: the ends, and the lowest and the highest of each run of points, in order of x."""
    if len(points) <= most:
        return list(points)
    stretch = -(-len(points) // (most // 2))
    kept: Points = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*([] if kept[0] == points[0] else [points[0]]), *kept, *([] if kept[-1] == points[-1] else [points[-1]])]
