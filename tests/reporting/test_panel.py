"""What the live display draws."""

import dataclasses
import functools
import io
import time

from rich.console import Console, RenderableType

from stoker.records import Estimate, Event, Layout, to_json
from stoker.reporting.event_text import describe_event
from stoker.reporting.panel import RunSnapshot, Sparkline, closing, frame, permanent_lines, time_of_day
from stoker.units import format_bytes
from tests.reporting import story


def drawn(renderable: RenderableType, *, width: int = 100, encoding: str = "utf-8") -> str:
    """The text that a console of that width and encoding shows."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(renderable)
    stream.flush()
    return raw.getvalue().decode(encoding)


def halfway() -> RunSnapshot:
    """A run half done."""
    events = story.whole_run()
    return functools.reduce(RunSnapshot.after, events[: len(events) // 2], RunSnapshot())


def test_the_panel_answers_how_far_how_long_how_well() -> None:
    """Position, time to go and when it ends, rate against forecast, metrics with the best, time, memory, checkpoint."""
    now = halfway()
    text = drawn(frame(now, now.at + 3))
    ends = time_of_day(now.at + (now.eta_s or 0), now.at)
    for expected in (
        story.NAME,
        "bf16 · micro-batch 512",
        "162,000 of 324,000 samples",
        "3.00 of 6 epochs",
        "50.0 %",
        "to go",
        f"until {ends}",
        "as forecast (1,395 to 1,573)",
        "accuracy 92.02 %",
        "best 92.02 %",
        "update 9",
        "1.2 GiB",
        "s ago",
        "25.2 MiB",
        "AMD EPYC 9B14",
        "learning rate 0.016",
    ):
        assert expected in text


def test_of_a_gpu_the_panel_has_its_own_memory() -> None:
    """What is allocated there, which the forecast is of, and not what the process has of the host."""
    events = story.on_gpu(story.young_run())
    now = functools.reduce(RunSnapshot.after, events, RunSnapshot())
    text = drawn(frame(now, now.at))
    assert f"{format_bytes(events[-1].fields['allocated_bytes'])}  " in text
    assert "of the device, at its peak" in text
    assert format_bytes(events[-1].fields["resident_bytes"]) not in text


def test_a_rate_of_several_processes_is_told_as_such() -> None:
    """How many train together is shown with the rate, also after one was lost; one alone says nothing of it."""
    assert "together" not in drawn(frame(halfway(), halfway().at))
    plan = dataclasses.replace(story.PLAN, layout=Layout(replicas=4))
    now = halfway().after(Event(kind="planned", at=1.0, fields={"plan": to_json(plan)}))
    assert "4 processes together · as forecast" in drawn(frame(now, now.at))
    fewer = {"old": to_json(plan), "new": to_json(dataclasses.replace(plan, layout=Layout(replicas=3)))}
    now = now.after(Event(kind="replanned", at=2.0, fields=fewer))
    assert "3 processes together" in drawn(frame(now, now.at))
    assert "3 replicas" in drawn(frame(now, now.at))


def test_the_time_to_go_counts_down_by_the_clock() -> None:
    """Between events the estimate shrinks with time and stops at nothing left."""
    now = halfway()
    now = now.after(Event(kind="progress", at=now.at, fields={"samples": 1, "eta_s": 30.0}))
    assert "30 s to go" in drawn(frame(now, now.at))
    assert "18 s to go" in drawn(frame(now, now.at + 12))
    assert "0 s to go" in drawn(frame(now, now.at + 99))


def test_nothing_is_shown_that_is_not_known() -> None:
    """Before the first event there is a sign of life and no row of zeros."""
    text = drawn(frame(RunSnapshot(), 0.0))
    assert "planning" in text
    assert "0.0 %" not in text
    assert "None" not in text


def test_a_slow_run_is_told_against_its_forecast() -> None:
    """A rate below the interval says so with the interval."""
    now = halfway().after(Event(kind="progress", at=0.0, fields={"samples": 1, "samples_per_s": 900.0}))
    assert "slower than forecast (1,395 to 1,573)" in drawn(frame(now, now.at))


def test_a_narrow_terminal_loses_no_line_end() -> None:
    """Lines wrap inside the panel, and no line is wider than the terminal."""
    lines = drawn(frame(halfway(), halfway().at), width=48).splitlines()
    assert max(map(len, lines)) <= 48


def test_a_terminal_without_unicode_gets_no_blocks() -> None:
    """The panel and the bar fall back to ASCII; the sparkline is left out."""
    text = drawn(frame(halfway(), halfway().at), encoding="ascii")
    assert "\\u2588" not in text
    assert "\\u256d" not in text
    assert "learning rate" in text


def test_a_sparkline_falls_with_its_curve() -> None:
    """The first column of a falling loss is the highest, the last the lowest; a flat one is level."""
    falling = Sparkline(tuple((n, 10.0 / (n + 1)) for n in range(200))).blocks(16)
    assert (falling[0], falling[-1], len(falling)) == ("█", "▁", 16)
    assert set(Sparkline(((0, 1.0), (1, 1.0))).blocks(8)) == {"▄"}
    assert Sparkline(()).blocks(8) == ""


def test_evaluations_stand_under_each_other() -> None:
    """The metric begins in the same column whatever the position."""
    lines = [
        drawn(line).splitlines()[0] for e in story.whole_run() if e.kind == "evaluated" for line in permanent_lines(e)
    ]
    assert len({line.index("accuracy") for line in lines}) == 1
    assert sum("best so far" in line for line in lines) == 5


def test_routine_events_leave_no_line() -> None:
    """Progress and checkpoints are in the panel; a line for each would drown the rest."""
    assert [permanent_lines(e) for e in story.whole_run() if e.kind in ("progress", "checkpointed", "finished")].count(
        []
    ) > 200


def test_markup_in_a_name_is_text() -> None:
    """A run called like a style tag neither vanishes nor breaks the panel."""
    now = RunSnapshot(run="[bold]x[/]", plan="[red]fp32", phase="planning")
    text = drawn(frame(now, 0.0))
    assert "[bold]x[/]" in text
    assert "[red]fp32" in text


def test_closing_lines_tell_result_and_report() -> None:
    """What stays on the terminal: result, effort, best, and where the report is."""
    text = drawn(closing(functools.reduce(RunSnapshot.after, story.whole_run(), RunSnapshot())))
    for expected in ("✓ test accuracy 92.61 %", "324,000 samples in 3 min 55 s", "93.26 % at 270,000", "report.html"):
        assert expected in text


def test_without_held_out_data_the_result_is_the_loss_of_training() -> None:
    """In the panel's last lines and in the last plain line."""
    event = Event(kind="finished", at=0.0, fields={"samples": 324_000, "metrics": {}, "loss": 0.125})
    assert "✓ training loss" in drawn(closing(halfway().after(event)))
    assert describe_event(event).endswith(": training loss 0.125")


def test_a_stopped_run_says_why_and_where_it_goes_on() -> None:
    """The reason, the position, and the checkpoint from which the same command continues."""
    now = halfway().after(Event(kind="stopped", at=0.0, fields={"reason": "SIGTERM", "samples": 162_000}))
    text = drawn(closing(now))
    assert "stopped at 162,000 samples: SIGTERM" in text
    assert "saved at 135,648 samples; the same command continues from there" in text


def test_the_end_is_told_as_far_off_as_it_is() -> None:
    """Today by the second, this week with the day, later with the date."""
    noon = time.mktime((2026, 1, 7, 12, 0, 0, 0, 0, -1))
    assert time_of_day(noon + 60, noon) == "12:01:00"
    assert time_of_day(noon + 86400, noon).endswith(" 12:00")
    assert time_of_day(noon + 30 * 86400, noon) == "2026-02-06 12:00"


def test_planning_has_a_clock() -> None:
    """From when the display began, and from the plan on for what comes before the first batch."""
    began = RunSnapshot(at=story.START_S)
    assert "planning (12 s)" in drawn(frame(began, story.START_S + 12))
    planned = began.after(story.whole_run()[0])
    assert "preparing the first batch (3 s)" in drawn(frame(planned, story.whole_run()[0].at + 3))


def test_a_rate_in_a_forecast_that_holds_nearly_anything_is_not_as_forecast() -> None:
    """The interval is said to be wide."""
    now = halfway()
    wide = Estimate(value=1400.0, low=12.0, high=3800.0, unit="samples/s", basis="calibrated")
    now = dataclasses.replace(now, forecast=dataclasses.replace(story.forecast(), samples_per_s=wide))
    assert "in a wide forecast (12 to 3,800)" in drawn(frame(now, now.at))
