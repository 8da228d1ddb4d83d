from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from stoker.cli.predictions import prediction_options
from stoker.errors import BadJob
from stoker.records.prediction import PredictionEvent, PredictionEventKind, PredictionSummary
from stoker.reporting.display import choose_display
from stoker.reporting.event_text import describe_prediction_event

STARTED = {
    "out": "out",
    "rows": 2000,
    "parts": 4,
    "done_parts": 0,
    "batch_rows": 8,
    "part_rows": 500,
    "threads": 1,
    "instances": 2,
}
PROGRESS = {
    "rows": 500,
    "bad_rows": 1,
    "total_rows": 2000,
    "parts": 1,
    "total_parts": 4,
    "rows_per_s": 250.0,
    "eta_s": 6.0,
}
SUMMARY = PredictionSummary(
    rows=1999,
    bad_rows=1,
    parts=4,
    computed_rows=2000,
    wall_s=8.0,
    rows_per_s=250.0,
    compute_seconds=7.0,
    padding_waste_ratio=0.125,
    out="out",
)


def _event(kind: PredictionEventKind, at: float = 0.0, **fields: Any) -> PredictionEvent:
    return PredictionEvent(kind=kind, at=at, fields=fields)


def _shown(events: list[PredictionEvent], *, is_terminal: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100)
    with choose_display(subject="prediction", as_json=False, stdout=io.StringIO(), console=console) as display:
        for event in events:
            display(event)
    return stream.getvalue()


def test_what_happened_in_words() -> None:
    """How a job is cut up, how far it is, and what came of it, with units and places."""
    started = describe_prediction_event(_event("started", **{**STARTED, "done_parts": 1}))
    assert started == "2,000 rows in 4 parts, 1 of them done before: batches of 8, 2 instances of 1 thread, into out"
    assert (
        describe_prediction_event(_event("progress", **PROGRESS)) == "500 of 2,000 rows, 1 bad, 250 rows/s, 6.0 s to go"
    )
    assert describe_prediction_event(_event("progress", **{**PROGRESS, "eta_s": None})).endswith("unknown to go")
    assert describe_prediction_event(_event("finished", **asdict(SUMMARY))).splitlines() == [
        "1,999 rows answered, 1 bad row in out/bad_rows.jsonl; 2,000 computed in 8.0 s (250 rows/s, 12.5% padding)",
        "predictions: out/predictions",
    ]
    again = {**asdict(SUMMARY), "computed_rows": 0, "bad_rows": 0}
    assert "no bad rows; all of it was done before" in describe_prediction_event(_event("finished", **again))
    assert describe_prediction_event(_event("warned", message="elsewhere")) == "warning: elsewhere"


def test_lines_are_not_many() -> None:
    """Without a terminal, progress is reported every ten seconds."""
    moments = [float(second) for second in range(1, 26)]
    shown = _shown([_event("started", 0.0, **STARTED), *(_event("progress", at, **PROGRESS) for at in moments)])
    assert shown.count("to go") == 2


def test_a_bar_in_a_terminal_leaves_the_lines_that_matter() -> None:
    """The bar shows rows and rate while it works; the summary stays."""
    events = [_event("started", **STARTED), _event("progress", **PROGRESS), _event("finished", **asdict(SUMMARY))]
    shown = _shown(events, is_terminal=True)
    assert "500/2000" in shown
    assert "1,999 rows answered" in shown


def test_json_is_one_object_a_line() -> None:
    """Nothing but events on standard output."""
    stdout = io.StringIO()
    with choose_display(
        subject="prediction", as_json=True, stdout=stdout, console=Console(file=io.StringIO())
    ) as display:
        display(_event("progress", 5.0, **PROGRESS))
    assert json.loads(stdout.getvalue()) == {"event": "progress", "at": 5.0, **PROGRESS}


def test_options_are_taken_apart() -> None:
    """Columns to keep come with commas between; a way to resize that is unknown is refused."""
    options = prediction_options(columns=["x=a"], keep="id, name,", resize="crop", batch=4)
    assert (options.columns, options.keep, options.resize, options.batch_rows) == (("x=a",), ("id", "name"), "crop", 4)
    with pytest.raises(BadJob, match="--resize squash"):
        prediction_options(columns=None, keep="", resize="squash", batch=None)
