"""Events folded into what a live display shows."""

import functools
from collections.abc import Iterable

import pytest

from stoker.records import Event
from stoker.reporting.panel import RunSnapshot
from tests.reporting import story


def fold(events: Iterable[Event]) -> RunSnapshot:
    """The run as it stands after `events`."""
    return functools.reduce(RunSnapshot.after, events, RunSnapshot())


def test_a_finished_run_is_known_in_full() -> None:
    """The fold of a whole run has its name, result, best, time and report."""
    now = fold(story.whole_run())
    assert (now.phase, now.is_over, now.fraction) == ("finished", True, 1.0)
    assert now.run == story.NAME
    assert now.device == "AMD EPYC 9B14"
    assert now.metrics["test/accuracy"] == 0.92614
    assert now.best_samples == 270_000
    assert now.report == f"runs/{story.NAME}/report.html"


def test_time_is_summed_over_stretches() -> None:
    """Each progress event has the time since the last one; the display shows the whole."""
    events = [e for e in story.whole_run() if e.kind == "progress"]
    assert fold(events).split_s["update"] == pytest.approx(sum(e.fields["split_s"]["update"] for e in events))


def test_a_time_to_go_that_is_no_longer_known_is_taken_back() -> None:
    """A stale estimate is worse than none; what is merely not repeated stays."""
    known = Event(kind="progress", at=1.0, fields={"samples": 1, "eta_s": 9.0, "lr": 0.1})
    unknown = Event(kind="progress", at=2.0, fields={"samples": 2, "eta_s": None})
    now = fold([known, unknown])
    assert now.eta_s is None
    assert now.learning_rate == 0.1


def test_the_loss_curve_spans_the_run_in_bounded_memory() -> None:
    """Of ten thousand losses a few hundred are kept, from the first to the last."""
    progress = (Event(kind="progress", at=0.0, fields={"samples": n, "loss": 1.0}) for n in range(10_000))
    losses = fold(progress).losses
    assert len(losses) <= 512
    assert losses[0][0] == 0
    assert losses[-1][0] > 9_900


def test_a_run_that_goes_back_forgets_what_it_will_do_again() -> None:
    """Losses, and the best evaluation if it is among that; what was before stays."""
    events = [Event(kind="progress", at=0.0, fields={"samples": n, "loss": 1.0}) for n in (100, 200, 300)]
    best = Event(kind="evaluated", at=0.0, fields={"samples": 250, "metrics": {"accuracy": 0.9}, "best": True})
    resumed = Event(kind="resumed", at=1.0, fields={"samples": 200})
    now = fold([*events, best, resumed])
    assert (now.samples, [at for at, _ in now.losses], now.best, now.best_samples) == (200, [100, 200], {}, 0)
    later = Event(kind="resumed", at=1.0, fields={"samples": 250})
    assert fold([*events, best, later]).best == {"accuracy": 0.9}


def test_a_loss_that_is_not_finite_is_shown_but_not_drawn() -> None:
    """The number says nan; the curve keeps to what can be drawn."""
    now = fold([Event(kind="progress", at=0.0, fields={"samples": 1, "loss": "nan"})])
    assert now.loss != now.loss
    assert now.losses == ()


def test_the_test_split_is_not_taken_for_validation() -> None:
    """The last evaluation shown while training is on held-out data."""
    valid = Event(kind="evaluated", at=0.0, fields={"split": "valid", "metrics": {"accuracy": 0.9}})
    test = Event(kind="evaluated", at=0.0, fields={"split": "test", "metrics": {"accuracy": 0.1}})
    assert fold([valid, test]).valid == {"accuracy": 0.9}


def test_a_stop_without_a_position_keeps_the_last_one() -> None:
    """A failure outside the loop says 0 samples, and is not believed."""
    events = [
        Event(kind="progress", at=0.0, fields={"samples": 512}),
        Event(kind="stopped", at=0.0, fields={"samples": 0}),
    ]
    assert fold(events).samples == 512


def test_a_run_elsewhere_waits_in_words_until_it_trains() -> None:
    """Its phase follows from notes; other notes, and those of a run that trains, change nothing."""

    def note(phase: str) -> Event:
        return Event(kind="noted", at=5.0, fields={"message": f"{phase} at slurm:gpu", "phase": phase})

    waiting = fold([note("queued")])
    assert (waiting.phase, waiting.waiting, waiting.at) == ("planning", "queued at slurm:gpu", 5.0)
    training = Event(kind="progress", at=6.0, fields={"samples": 1})
    assert fold([note("queued"), training, note("running")]).phase == "training"
    assert fold([training, note("preempted")]).waiting == "preempted at slurm:gpu"
    assert fold([note("queued"), Event(kind="planned", at=6.0, fields={})]).waiting == ""
    assert fold([Event(kind="noted", at=0.0, fields={"message": "hello"})]).waiting == ""
