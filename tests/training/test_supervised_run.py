"""What is reported of the processes of a run, for its user."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stoker
from stoker.reporting import event_text
from stoker.training import supervised_run
from stoker.training.elastic.membership import RENDEZVOUS_REQUESTED
from stoker.training.supervised_run import WorkerListener, train_supervised
from tests.flow.builders import Heard, blobs_job
from tests.reporting.story import decision, estimate

pytestmark = pytest.mark.usefixtures("place")


def told(what: str, **fields: Any) -> str:
    """The line that is shown."""
    heard = Heard()
    WorkerListener([heard]).on_loss(what, fields)
    (event,) = heard
    return event_text.describe_event(event)


@pytest.mark.parametrize(
    ("count", "why", "expected"),
    [
        (2, RENDEZVOUS_REQUESTED, "recovered at 0 samples: 2 processes go on, because another one is back"),
        (1, "process 1 is lost", "recovered at 0 samples: one process goes on, because process 1 is lost"),
    ],
)
def test_it_is_said_why_processes_met_again(count: int, why: str, expected: str) -> None:
    """Not in the words that they have among themselves."""
    assert told("met", generation=2, workers=list(range(count)), why=why, seconds=1.0) == expected


def test_a_stall_is_named_with_how_long_it_is_waited_for() -> None:
    """And so is its end: that nothing is lost is news, too."""
    silent = told("silent", worker=1, rank=1, seconds=5.1, is_stopped=True, patience_s=300.0)
    assert "process 1 (rank 1) is stopped since 5.1 s; the others wait for it, 5 min" in silent
    assert "STOKER_WATCHDOG=SECONDS" in silent
    assert "process 1 (rank 1) is back after 31.0 s" in told("awake", worker=1, rank=1, seconds=31.0)


@pytest.mark.parametrize(
    ("evaluate_s", "sync", "silence_s", "answer_s"),
    [
        (1.0, None, 300.0, 20.0),
        (100.0, None, 1000.0, 1000.0),
        (1.0, stoker.DiLoCo(every=stoker.updates(200)), 200 * 0.345 * 10, 200 * 0.345 * 10),
    ],
)
def test_processes_are_waited_for_as_long_as_the_slowest_phase_asks(
    evaluate_s: float, sync: Any, silence_s: float, answer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute on a cold disk is no loss; nor are minutes of an evaluation, or of an interval between sites."""
    asked: dict[str, Any] = {}

    class Noting:
        def __init__(self, _command: object, **settings: Any) -> None:
            asked.update(settings)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("stoker.training.supervised_run.Supervisor", Noting)
    monkeypatch.setattr(supervised_run, "Run", lambda *_, **__: None)
    planned = decision()
    slow = dataclasses.replace(planned.chosen.forecast, evaluate_s=estimate(evaluate_s, 0.1, "s"))
    planned = dataclasses.replace(planned, candidates=(dataclasses.replace(planned.chosen, forecast=slow),))
    entry = SimpleNamespace(path=Path("job.py"), setting_words=())
    prepared: Any = SimpleNamespace(entry=entry, job=blobs_job(sync=sync))
    directory: Any = SimpleNamespace(path=Path("run"))
    train_supervised(prepared, directory, planned, [Heard()])
    assert asked["silence_s"] == pytest.approx(silence_s)
    assert asked["answer_s"] == pytest.approx(answer_s)
