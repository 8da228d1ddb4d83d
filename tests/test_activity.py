"""What is being done is shown with its step and a clock once it takes more than a second."""

from __future__ import annotations

import io

from rich.console import Console

from stoker import activity
from stoker.activity import doing
from stoker.reporting.display import ActivityLines
from stoker.reporting.panel import RunSnapshot, frame


def test_only_what_takes_more_than_a_second_is_shown() -> None:
    """With the activities around it, its step, and the time since the outermost began; afterwards nothing."""
    with doing("planning") as planning, doing("tracing", of=4) as tracing:
        tracing.step = 2
        assert activity.in_words(lambda: planning.began_s + 0.9) is None
        assert activity.in_words(lambda: planning.began_s + 12.3) == "planning: tracing, 2 of 4 (12 s)"
        assert activity.in_words(lambda: planning.began_s + 75) == "planning: tracing, 2 of 4 (1 min 15 s)"
    assert activity.in_words(lambda: planning.began_s + 75) is None


def test_an_exception_ends_an_activity() -> None:
    """Else the displays of later runs would show it for ever."""
    try:
        with doing("failing") as failing:
            raise ValueError
    except ValueError:
        pass
    assert activity.in_words(lambda: failing.began_s + 5) is None


def test_plain_lines_come_after_a_second_and_then_now_and_then() -> None:
    """One for each activity, another every ten seconds; none for what is quick."""
    now, lines = [0.0], list[str]()
    look = ActivityLines(lines.append, clock=lambda: now[0])
    for what, seconds in (("planning", 25), ("updating", 1), ("evaluating", 3), *[("slow", 3)] * 4):
        with doing(what) as under_way:
            under_way.began_s = now[0]
            for _ in range(2 * seconds):
                now[0] += 0.5
                look()
    assert lines == [
        "Planning (1 s) …",
        "Planning (11 s) …",
        "Planning (21 s) …",
        "Updating (1 s) …",
        "Evaluating (1 s) …",
        "Slow (1 s) …",
        "Slow (2 s) …",
    ]


def test_the_panel_shows_it_before_and_in_training() -> None:
    """Below what is known of the run."""
    for phase in ("planning", "training"):
        console = Console(file=io.StringIO(), width=100)
        with doing("evaluating test", of=40) as under_way:
            under_way.began_s -= 7
            under_way.step = 3
            console.print(frame(RunSnapshot(phase=phase), 0.0))
        assert "evaluating test, 3 of 40 (7 s)" in console.file.getvalue()  # type: ignore[attr-defined]
