"""The documents of a run's page, live and in a report: its state, its series, its confusion matrices.

Names and texts of records are bounded here; a page shows them as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from stoker.errors import BadRun
from stoker.records import Plan, from_json
from stoker.records.codec import JSON
from stoker.records.run import ExampleSet
from stoker.reporting import history
from stoker.reporting.event_text import describe_event
from stoker.reporting.folded_log import COLUMNS, FoldedLog, Kept, Table, downsampled, thinned
from stoker.reporting.history import forecast_of, price_of
from stoker.reporting.wording import short

_MOST_EVENTS = 300
_MOST_TEXT = 400
_MOST_CLASSES = 64
_MOST_EVALUATIONS = 2000
"""Points of all metrics together."""


def event_document(kept: Kept) -> dict[str, JSON]:
    """An event as a line of a page's log, with the fields that charts take."""
    event, fields = kept.event, kept.event.fields
    document: dict[str, JSON] = {
        "kind": event.kind,
        "at": event.at,
        "offset": kept.offset,
        "samples": history.number(event, "samples"),
        "text": short(describe_event(event), _MOST_TEXT),
    }
    if event.kind == "evaluated":
        metrics = {
            short(name, 80): value
            for name, value in list(history.evaluation_metrics(event).items())[:200]
            if not name.endswith("]")
        }
        document |= {
            "split": short(fields.get("split", "valid"), 80),
            "took_s": history.finite(event, "took_s"),
            "is_best": fields.get("best") is True,
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        }
    if event.kind == "logged" and isinstance(fields.get("scalars"), Mapping):
        document["scalars"] = {
            short(name, 80): points[:2000]
            for name, points in list(fields["scalars"].items())[:200]
            if isinstance(points, list)
        }
        document["has_media"] = bool(fields.get("images") or fields.get("texts"))
    return document


def run_document(row: Mapping[str, JSON], log: FoldedLog, decision: JSON) -> dict[str, JSON]:
    """The first document of a run's page.

    Args:
        row: what is known of it at a glance: status, state, total_samples, price_per_h, and more on the live page.
        log: its events.
        decision: the stored Decision as JSON, or as much of it as `forecast_of` and `price_of` read.
    """
    kept = [kept_event for kept_event in log.kept if kept_event.event.kind != "checkpointed"]
    shown = kept
    if len(kept) > _MOST_EVENTS:  # of very many the first, the last, and what is marked in charts
        marked = [kept_event for kept_event in kept[40 : 40 - _MOST_EVENTS] if kept_event.event.kind != "evaluated"]
        shown = [*kept[:40], *marked[-_MOST_EVENTS:], *kept[40 - _MOST_EVENTS :]]
    return {
        "row": row,
        "forecast": forecast_of(decision),
        "price_per_h": price_of(decision),
        "plans": _plans(log),
        "events": [event_document(one) for one in shown],
        "num_events": len(kept),
        "num_checkpoints": log.num_checkpoints,
        "saved": next(
            (history.number(one.event, "samples") for one in reversed(log.kept) if one.event.kind == "checkpointed"),
            None,
        ),
        "superseded_s": log.superseded_s,
        "spans": _spans(log),
        "evaluations": _evaluations(log),
        "best": _best(log),
        "scalars": sorted(log.scalars),
        "images": [[image.name, image.samples, image.content] for image in log.images],
        "texts": [[text.name, text.samples, text.content] for text in log.texts],
    }


def _evaluations(log: FoldedLog, place: Callable[[float], float] = float) -> dict[str, JSON]:
    """The evaluations by split and metric, at the places of their positions; of very many points the extremes."""
    most = max(20, _MOST_EVALUATIONS // max(1, len(log.evaluations)))
    return {
        f"{split} {name}": [[place(at), y if math.isfinite(y) else None] for at, y in thinned(points, most)]
        for (split, name), points in log.evaluations.items()
    }


def _best(log: FoldedLog) -> JSON:
    """The last evaluation that was the best so far: its position and metrics; None where none said so."""
    if not log.best:
        return None
    samples, metrics = log.best[-1]
    shown = list(metrics.items())[:200]
    return {"samples": samples, "metrics": {short(name, 80): y for name, y in shown if math.isfinite(y)}}


def _plans(log: FoldedLog) -> list[dict[str, JSON]]:
    """The plans that were settled on or changed to: from which sample, in words."""
    plans: list[dict[str, JSON]] = []
    for kept in log.kept:
        event = kept.event
        plan = event.fields.get("new" if event.kind == "replanned" else "plan")
        if event.kind in ("planned", "settled", "replanned") and isinstance(plan, dict):
            with suppress(ValueError, TypeError):
                words = from_json(plan, Plan).in_words()
                plans.append(
                    {
                        "samples": history.number(event, "samples") or 0.0,
                        "plan": short(words, 300),
                        "kind": event.kind,
                        "why": short(event.fields.get("why") or "", 300),
                    }
                )
    return plans[-60:]


def _spans(log: FoldedLog) -> list[list[JSON]]:
    """By the clock what the run's processes did: (began [s since 1970], ended, what)."""
    spans: list[list[JSON]] = []
    began: float | None = None
    heard_at = 0.0
    for kept in log.kept:
        event = kept.event
        if event.kind == "planned":
            spans.append([event.at - min(86_400.0, history.finite(event, "took_s") or 0.0), event.at, "planning"])
        elif event.kind == "started":
            if began is not None:  # a process that was killed says nothing more
                spans.append([began, max(began, heard_at), "training"])
            began = event.at
        elif event.kind in ("stopped", "finished") and began is not None:
            spans.append([began, max(began, event.at), "training"])
            began = None
        elif event.kind == "evaluated":
            took_s = history.finite(event, "took_s") or 0.0
            spans.append([event.at - took_s, event.at, "evaluation"])
        heard_at = event.at
    if began is not None:
        column = COLUMNS.index("at")
        last = float(log.progress.rows[-1, column]) if log.progress.length else began
        spans.append([began, max(began, last), "training"])
    return spans[-500:]


def series_document(
    log: FoldedLog,
    *,
    over: str,
    px: int,
    scalars: Sequence[str],
    scalar_px: int | None = None,
    between: tuple[float, float] = (-math.inf, math.inf),
    price_per_h: float | None = None,
    preview: Table | None = None,
) -> dict[str, JSON]:
    """Columns of progress, rates by group and logged scalars between two positions of an axis, for `px` pixels.

    Args:
        log: the run's events.
        over: the axis: samples, wall_s, updates, or cost (of the price). Another one is an error of the page.
        px: pixels of the charts; at most two points for each.
        scalars: names of logged scalars.
        scalar_px: pixels of a scalar's chart; None for `px`.
        between: first and last position.
        price_per_h: of the device [USD].
        preview: rows of progress to draw instead of the log's.
    """
    rows = (log.progress if preview is None else preview).rows
    x = _axis(rows, over, price_per_h)
    named = {name: rows[:, index] for index, name in enumerate(COLUMNS) if name not in ("updates", "at", "samples")}
    with np.errstate(invalid="ignore", divide="ignore"):
        named["waiting"] = np.where(rows[:, -1] > 0, rows[:, -2] / rows[:, -1], np.nan)
    del named["data_s"], named["split_s"], named["wall_s"]
    named = {name: values for name, values in named.items() if np.isfinite(values).any()}
    document: dict[str, JSON] = {
        "num_points": log.progress.length,
        "progress": downsampled(x, named, *between, px),
        "scalars": {},
    }
    samples = rows[:, 0]

    def points(table: Table, px: int) -> dict[str, JSON]:
        x_values = (
            table.rows[:, 0] if over == "samples" or not len(samples) else np.interp(table.rows[:, 0], samples, x)
        )
        return downsampled(x_values, {"y": table.rows[:, 1]}, *between, px)

    document["rates"] = [points(table, px // 4) for table in log.rates]
    for name in scalars:
        if (table := log.scalars.get(name)) is not None and table.length:
            document["scalars"][name] = points(table, scalar_px or px)
    if over != "samples" and len(samples):
        document["evaluations"] = _evaluations(log, lambda at: float(np.interp(at, samples, x)))
    return document


def _axis(rows: np.ndarray, over: str, price_per_h: float | None) -> np.ndarray:
    name = "wall_s" if over == "cost" else over
    if name not in ("samples", "wall_s", "updates"):
        raise BadRun(f"there is no axis {short(over, 40)!r}")
    x = np.nan_to_num(rows[:, COLUMNS.index(name)], nan=0.0)
    ascending: np.ndarray = np.maximum.accumulate(x) if len(x) else x
    return ascending * ((price_per_h or 0.0) / 3600) if over == "cost" else ascending


def confusion_document(examples: Sequence[ExampleSet]) -> list[dict[str, JSON]]:
    """Confusion matrices of the splits that have one: a row of counts for each class of the targets, and its words.

    Classes go by their numbers where not every one has a name of its own.
    """
    matrices: list[dict[str, JSON]] = []
    for example in examples:
        if example.confusion is not None:
            counts = [list(line[:_MOST_CLASSES]) for line in example.confusion[:_MOST_CLASSES]]
            is_named = len(example.classes) == len(example.confusion) == len(set(example.classes))
            names = [short(example.classes[index] if is_named else index, 40) for index in range(len(counts))]
            words = _most_confused(counts, names)
            matrices.append({"split": short(example.split, 40), "counts": counts, "classes": names, "words": words})
    return matrices


def _most_confused(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The pair of classes that is confused most often."""
    pairs = [
        (cell, row, column)
        for row, cells in enumerate(counts)
        for column, cell in enumerate(cells)
        if row != column and cell
    ]
    if not pairs:
        return "no class is taken for another"
    cell, row, column = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
    times = "once" if cell == 1 else f"{cell:,} times"
    return f"most often {names[row]} taken for {names[min(column, len(names) - 1)]}, {times}"
