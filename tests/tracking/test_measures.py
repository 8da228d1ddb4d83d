import math

import pytest

from stoker.records import Event
from stoker.tracking.base import MetricPoint
from stoker.tracking.csv_tracker import table
from stoker.tracking.run_tracking import point_of, points_of


def test_a_progress_event_becomes_numbers_of_training() -> None:
    """Losses, rates and norms are called what trackers call them; what is no number is left out."""
    fields = {"samples": 64, "loss": 0.5, "lr": 0.1, "lrs": [0.1, 0.2], "eta_s": None, "split_s": {"data": 1.0}}
    fields |= {"resident_bytes": 900, "allocated_bytes": 200}
    point = point_of(Event(kind="progress", at=7.0, fields=fields))
    assert point is not None
    assert (point.samples, point.at) == (64, 7.0)
    assert point.values == {
        "train/loss": 0.5,
        "train/lr": 0.1,
        "train/lr/group0": 0.1,
        "train/lr/group1": 0.2,
        "train/resident_bytes": 900,
        "train/allocated_bytes": 200,
    }


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    """JSON's word for NaN is a NaN again: a diverged run must not look like one without a loss."""
    point = point_of(Event(kind="progress", at=0.0, fields={"samples": 1, "loss": "nan"}))
    assert point is not None
    assert math.isnan(point.values["train/loss"])


@pytest.mark.parametrize("kind", ["warned", "checkpointed", "planned", "stopped"])
def test_events_without_measures_are_not_sent(kind: str) -> None:
    """Only training, evaluation and the end have numbers for charts."""
    assert point_of(Event(kind=kind, at=0.0, fields={"samples": 5, "message": "x"})) is None  # type: ignore[arg-type]


def test_a_value_of_ones_own_does_not_replace_the_axis() -> None:
    """`stoker.log(scalars={"samples": …})` is a column of its own; the first one stays the position."""
    event = Event(
        kind="logged", at=3.0, fields={"samples": 64, "scalars": {"samples": [[64, 0.5]], "seconds": [[64, 9]]}}
    )
    points = points_of(event)
    assert points == [MetricPoint(samples=64, at=3.0, values={"logged/samples": 0.5, "logged/seconds": 9.0})]
    assert table(points, 1.0) == "samples,seconds,logged/samples,logged/seconds\n64,2.000,0.5,9.0\n"
