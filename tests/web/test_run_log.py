from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench.web.planted import as_log, long_log
from stoker.records import Event
from stoker.records.progress import read_event
from stoker.reporting import history, summary
from stoker.reporting.folded_log import COLUMNS, FoldedLog, downsampled
from stoker.web.run_log import RunLog
from tests.reporting import story

SAMPLES, LOSS = COLUMNS.index("samples"), COLUMNS.index("loss")


def log_of(tmp_path: Path, content: bytes) -> RunLog:
    """The log of a run with this content, read."""
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "events.jsonl").write_bytes(content)
    log = RunLog(tmp_path, "run")
    log.read()
    return log


@pytest.mark.parametrize("events", [story.whole_run(), story.killed_and_resumed()], ids=["whole", "resumed"])
def test_columns_are_the_live_history(tmp_path: Path, events: list[Event]) -> None:
    """What a chart shows is what a report's figure shows: no sample twice after a resume."""
    log = log_of(tmp_path, as_log(events))
    live = [event for event in history.live_history(events) if event.kind == "progress"]
    assert log.progress.rows[:, SAMPLES].tolist() == [event.fields["samples"] for event in live]
    assert log.progress.rows[:, LOSS].tolist() == [event.fields["loss"] for event in live]
    assert log.evaluations[("valid", "accuracy")] == [
        (event.fields["samples"], event.fields["metrics"]["accuracy"])
        for event in history.live_history(events)
        if event.kind == "evaluated" and event.fields["split"] == "valid"
    ]


def test_a_log_read_in_pieces_is_the_log_read_at_once(tmp_path: Path) -> None:
    """Wherever a line is cut off while it is written."""
    content = as_log(story.killed_and_resumed())
    whole = log_of(tmp_path, content)
    pieces = RunLog(tmp_path, "run")
    for end in range(0, len(content), 7919):
        (tmp_path / "run" / "events.jsonl").write_bytes(content[:end])
        os.truncate(tmp_path / "run" / "events.jsonl", end)
        pieces.read()
        assert pieces.is_whole
    (tmp_path / "run" / "events.jsonl").write_bytes(content)
    pieces.read()
    assert np.array_equal(pieces.progress.rows, whole.progress.rows, equal_nan=True)
    assert pieces.evaluations == whole.evaluations
    assert pieces.offset == whole.offset == len(content)


@pytest.mark.parametrize("events", [story.whole_run(), story.killed_and_resumed()], ids=["whole", "resumed"])
def test_events_in_memory_fold_as_the_log_that_holds_them(tmp_path: Path, events: list[Event]) -> None:
    """A report is made of the former, the live page of the latter."""
    log, folded = log_of(tmp_path, as_log(events)), FoldedLog()
    folded.take(events)
    assert np.array_equal(folded.progress.rows, log.progress.rows, equal_nan=True)
    assert (folded.evaluations, folded.best) == (log.evaluations, log.best)
    assert folded.superseded_s == pytest.approx(log.superseded_s)
    assert [kept.event for kept in folded.kept] == [kept.event for kept in log.kept]


def test_condensed_progress_has_the_same_times_and_rates(tmp_path: Path) -> None:
    """A report made of few events shows what one made of all would."""
    content = long_log(4000)
    (tmp_path / "run").mkdir()
    log = log_of(tmp_path, content)
    few = log.events()
    assert len(few) < 600
    every = story.report([read_event(line) for line in content.split(b"\n")[:-1]], status="unfinished")
    condensed = story.report(few, status="unfinished")
    mine, theirs = ({one.phase: one.seconds for one in summary.time_split(of)} for of in (condensed, every))
    for phase in {*mine, *theirs}:
        assert mine.get(phase, 0.0) == pytest.approx(theirs.get(phase, 0.0), abs=1e-6), phase
    assert summary.training_speed(few) == pytest.approx(summary.training_speed(every.events))
    assert history.samples_done(condensed) == history.samples_done(every)


def test_a_log_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    """A run's directory may be removed and made again under its name."""
    log = log_of(tmp_path, as_log(story.whole_run()))
    path = tmp_path / "run" / "events.jsonl"
    path.rename(tmp_path / "old")
    path.write_bytes(as_log(story.young_run()))
    assert log.read()
    assert log.progress.length == 1
    path.unlink()
    assert log.read()
    assert log.progress.length == 0


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    """Bytes, giant lines, deep documents and numbers that no run has cost their own line only."""
    line = as_log(story.whole_run()[:3])
    bad = [
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"kind": "progress", "at": 1, "fields": {"samples": -5}}\n',
        b'{"kind": "progress", "at": 1, "fields": {"samples": 1e999}}\n',
        b'"' + b"y" * 9_000_000 + b'"\n',
    ]
    log = log_of(tmp_path, line + b"".join(bad) + as_log(story.whole_run()[3:5]))
    assert log.num_damaged >= len(bad)
    assert log.progress.length == 3


def test_a_pixel_keeps_the_least_and_the_most() -> None:
    """A spike of one point in a million is seen in the overview."""
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[34_567], y[70_000] = 9.0, np.nan
    found = downsampled(x, {"y": y}, 0, 1e9, 500)
    assert len(found["x"]) <= 1000
    assert max(value for value in found["y"] if value is not None) == 9.0
    assert found["x"] == sorted(found["x"])
    near = downsampled(x, {"y": y}, 69_990, 70_010, 500)
    assert near["x"][0] == 69_989
    assert near["y"][near["x"].index(70_000)] is None


def test_what_was_logged_goes_back_with_a_resume(tmp_path: Path) -> None:
    """Scalars and texts beyond the position of a resume were never of this run's history."""
    log = log_of(
        tmp_path,
        as_log(
            [
                *story.young_run(),
                Event(
                    kind="logged",
                    at=1.0,
                    fields={
                        "samples": 9,
                        "scalars": {"gate": [[5, 0.5], [9, 0.25]]},
                        "texts": [{"name": "t", "samples": 9, "text": "late"}],
                    },
                ),
                Event(kind="resumed", at=2.0, fields={"samples": 6}),
                Event(kind="logged", at=3.0, fields={"samples": 9, "scalars": {"gate": [[9, 0.75]]}}),
            ]
        ),
    )
    assert log.scalars["gate"].rows.tolist() == [[5, 0.5], [9, 0.75]]
    assert log.texts == []
