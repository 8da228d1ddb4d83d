"""Where a run was executed elsewhere, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.records import Event
from stoker.reporting.launch_text import launch_words
from tests.reporting.story import forecast, launched

LAUNCH = launched(submitted_at="2026-11-25T10:00:00+00:00")


@pytest.mark.parametrize(("wait_s", "words"), [(0.2, "ssh:box"), (90.0, "ssh:box · waited 1 min 30 s")])
def test_a_wait_is_said_where_there_was_one(wait_s: float, words: str) -> None:
    """A host without a queue starts at once."""
    assert LAUNCH.submitted_s is not None
    assert launch_words(LAUNCH, [Event(kind="planned", at=LAUNCH.submitted_s + wait_s, fields={})]) == words


@pytest.mark.parametrize(("before_s", "words"), [(None, "$0.50, forecast $0.75"), (7200.0, "$0.50, forecast $1.00")])
def test_what_was_spent_stands_against_a_forecast(before_s: float | None, words: str) -> None:
    """Of the start, where there was one; else of the plan that the run settled on."""
    launch = replace(LAUNCH, price_per_h=0.5, spent=0.5, forecast_s=before_s)
    assert launch_words(launch, [], forecast(5400.0 / 233.0)) == f"ssh:box · {words}"
