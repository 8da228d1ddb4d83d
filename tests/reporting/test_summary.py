"""Where the time went, the forecast and what was measured, and the lines for the terminal."""

import dataclasses

import pytest

from stoker.records import Estimate, Event, Report
from stoker.records.plan_schedule import PlanSchedule
from stoker.reporting.run_page import render_html
from stoker.reporting.summary import forecast_rows, summary_lines, time_split, wall_seconds
from tests.reporting import story


@pytest.fixture
def whole() -> Report:
    """A run that was never stopped."""
    return story.report(story.whole_run())


@pytest.fixture
def resumed() -> Report:
    """A run that was killed and continued."""
    return story.report(story.killed_and_resumed())


def told(*events: Event, **changes: object) -> Report:
    """A report of a few events, without a plan."""
    return dataclasses.replace(story.report(events, has_plan=False), **changes)


def test_shares_of_the_time_add_up(whole: Report) -> None:
    """Every second of wall time and of planning is in exactly one share."""
    shares = time_split(whole)
    assert sum(share.fraction for share in shares) == pytest.approx(1.0)
    assert sum(share.seconds for share in shares) == pytest.approx(wall_seconds(whole) + 6.4)


def test_stretches_are_summed_and_the_last_evaluation_is_not_lost() -> None:
    """Each progress event has the time since the one before; an evaluation after the last progress counts too."""
    stretch = {"update": 2.0, "data": 0.5, "evaluation": 1.0, "checkpoint": 0.0}
    report = told(
        *(Event(kind="progress", at=0.0, fields={"samples": n, "split_s": stretch, "wall_s": n}) for n in (5, 10)),
        Event(kind="evaluated", at=0.0, fields={"samples": 5, "took_s": 2.0}),
        Event(kind="evaluated", at=0.0, fields={"samples": 10, "took_s": 3.0}),
    )
    seconds = {share.phase: share.seconds for share in time_split(report)}
    assert seconds == {"update": 4.0, "data": 1.0, "evaluation": 5.0}


def test_a_phase_nobody_announced_keeps_its_own_name() -> None:
    """A new part of the loop shows up in the report without a change here."""
    report = told(Event(kind="progress", at=0.0, fields={"samples": 1, "split_s": {"all_reduce": 3.0, "update": 1.0}}))
    assert [(share.phase, share.label) for share in time_split(report)] == [
        ("update", "forward, backward, update"),
        ("all_reduce", "all_reduce"),
    ]


def test_a_plan_that_gave_way_to_another_is_told_with_it() -> None:
    """What was measured is of both; what was forecast is of the first."""
    change = story.changed_plan(1024, micro_batch=256)
    new, schedule = change.plan, PlanSchedule(story.PLAN, (change,))
    report = dataclasses.replace(story.report(story.whole_run()), schedule=schedule)
    assert f"plan from 1,024 samples on, 99.7 % of them: {new.in_words()}" in summary_lines(report)
    page = render_html(report)
    assert f'title="{new.in_words()}">the plan above' in page
    assert f'title="{story.PLAN.in_words()}">micro-batch 512' in page
    assert "The forecast is of the plan that the run began with" in page
    assert "The forecast is of the plan" not in render_html(story.report(story.whole_run()))


def test_time_under_the_profiler_is_no_training_time() -> None:
    """A rate that is shown with it leaves it out, and so does the rate of the run."""
    stretches = ((500, 100.0, {"update": 5.0, "profiling": 45.0}), (1500, 200.0, {"update": 5.0}))
    report = told(
        *(
            Event(kind="progress", at=0.0, fields={"samples": at, "samples_per_s": rate, "split_s": split})
            for at, rate, split in stretches
        )
    )
    assert "150 samples/s while training" in summary_lines(report)[1]


def test_a_killed_run_says_how_far_it_came() -> None:
    """Its record, which could not be written, says 0."""
    report = story.report(story.young_run(), status="unfinished")
    killed = dataclasses.replace(report, run=dataclasses.replace(report.run, samples=0, updates=0, wall_s=0.0))
    assert summary_lines(killed)[1].startswith("trained on 1,536 of 324,000 samples in 1.8 s")
    page = render_html(killed)
    assert "trained on 1,536 of 324,000 samples" in page
    assert "3 updates" in page


def test_a_run_that_says_nothing_of_time_has_no_shares() -> None:
    """No division by zero, and no made-up bar."""
    assert time_split(told()) == ()


def test_superseded_stretches_are_not_counted(resumed: Report) -> None:
    """The time of samples that were done again is counted once, so shares still fit the wall time."""
    training_s = sum(share.seconds for share in time_split(resumed) if share.phase in ("update", "data"))
    assert training_s < wall_seconds(resumed)


def test_measured_stands_beside_forecast(whole: Report) -> None:
    """The measured values are those the events tell: total, update, rate, evaluation, checkpoint, peak memory."""
    rows = {row.quantity: row for row in forecast_rows(whole)}
    assert rows["total time"].measured == whole.run.wall_s
    assert rows["throughput"].measured == pytest.approx(story.RATE, rel=0.02)
    assert rows["one update"].measured == pytest.approx(
        story.TOTAL_SAMPLES / (story.UPDATES_PER_EPOCH * story.EPOCHS) / rows["throughput"].measured
    )
    assert rows["one evaluation"].measured == pytest.approx(1.8)
    assert rows["one checkpoint"].measured == pytest.approx(0.011)
    assert rows["peak memory"].measured == 880 * 2**20
    assert all(row.is_inside for row in rows.values())


def test_the_memory_of_a_gpu_run_that_did_not_finish_is_the_devices(whole: Report) -> None:
    """The most that progress has of it: the process's own says nothing of the forecast."""
    events = [event for event in whole.events if event.kind != "finished"]
    on_gpu = dataclasses.replace(whole, device=dataclasses.replace(story.DEVICE, kind="cuda"))
    told = dataclasses.replace(on_gpu, events=tuple(story.on_gpu(events)))
    untold = dataclasses.replace(on_gpu, events=tuple(events))
    highest = max(e.fields["allocated_bytes"] for e in told.events if e.kind == "progress")
    assert [forecast_rows(report)[-1].measured for report in (told, untold)] == [highest, None]


def test_a_value_outside_its_interval_says_so(whole: Report) -> None:
    """A forecast of half the time is missed, and by how much is reported."""
    decision = story.decision()
    fast = dataclasses.replace(decision.chosen, forecast=story.forecast(scale=0.5))
    report = dataclasses.replace(whole, decision=dataclasses.replace(decision, candidates=(fast,)))
    total = forecast_rows(report)[0]
    assert total.is_inside is False
    assert total.ratio == pytest.approx(whole.run.wall_s / 116.5)
    assert any("total time" in line and "outside the interval" in line for line in summary_lines(report))


def with_forecast(report: Report, **changed: Estimate) -> Report:
    """The report with other forecasts."""
    chosen = story.decision().chosen
    other = dataclasses.replace(chosen, forecast=dataclasses.replace(chosen.forecast, **changed))
    return dataclasses.replace(report, decision=dataclasses.replace(story.decision(), candidates=(other,)))


def test_a_value_inside_an_interval_that_holds_nearly_anything_is_no_success(whole: Report) -> None:
    """The width is said where the hit is counted, in the page and in the terminal, and the hit is not green."""
    wide = Estimate(value=15.0, low=4.0, high=1272.0, unit="s", basis="calibrated")
    report = with_forecast(whole, total_s=wide)
    (line,) = [line for line in summary_lines(report) if line.startswith("total time")]
    assert "inside the interval 4.0 s to 21 min 12 s, which spans 1 : 318 and says little" in line
    page = render_html(report)
    assert "6 of 6 measured values lie in their interval, made to hold 8 of 10; " in page
    assert "1 of these intervals is too wide to say much (total time 1 : 318)." in page
    assert page.count("✓ yes") == 5
    assert "yes, of 1 : 318" in page
    assert "too wide to say" not in render_html(whole)


def test_an_unfinished_run_has_no_total_yet() -> None:
    """The forecast total is compared with nothing until the run has finished."""
    rows = forecast_rows(story.report(story.young_run(), status="unfinished"))
    assert rows[0].measured is None
    assert rows[0].is_inside is None
    assert rows[0].ratio is None


def test_without_a_plan_there_is_no_forecast() -> None:
    """A run that was refused before planning has no rows."""
    assert forecast_rows(told()) == ()


def test_the_summary_names_result_effort_and_forecast(resumed: Report) -> None:
    """What someone wants to know when the run is over, in a handful of lines."""
    lines = summary_lines(resumed)
    assert len(lines) <= 8
    text = "\n".join(lines)
    for expected in (
        "92.61 %",
        "best accuracy on valid 93.26 % at 270,000 samples",
        "324,000 samples in 4 min",
        "forecast",
        "bf16",
        "warnings: 1",
        "40 % of the CPU",
    ):
        assert expected in text


def test_the_summary_of_a_failed_run_says_why() -> None:
    """The reason is there, and how far the run came."""
    report = story.report(story.failed_run(), status="failed", failure="the loss is nan after 70,656 samples")
    text = "\n".join(summary_lines(report))
    assert "failed: the loss is nan after 70,656 samples" in text
    assert "70,144 of 324,000 samples" in text
