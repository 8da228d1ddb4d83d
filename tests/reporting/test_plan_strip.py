"""A run that tried plans on its own updates: which ran when, what each gave, and what its report judges."""

from __future__ import annotations

import dataclasses

from stoker.records import NOT_COMPARED, Coupling, Event, Plan, PlanSwitch, Report, to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.reporting.event_text import describe_event, plan_notes
from stoker.reporting.history import plans_in_force, since_settled
from stoker.reporting.panel import frame
from stoker.reporting.plan_strip import WIDTH, plan_strip
from stoker.reporting.run_page import render_html
from stoker.reporting.summary import forecast_rows, summary_lines
from tests.reporting import story
from tests.reporting.test_panel import drawn, halfway

SAFE = dataclasses.replace(story.PLAN, precision="fp32", memory_format="contiguous")
LOST = dataclasses.replace(story.PLAN, captured=True)
SETTLED_AT = 30 * story.BATCH


def switch(update: int, plan: Plan, kind: str = "trial", left_out: Plan | None = None) -> PlanSwitch:
    """A switch of plan at an update."""
    why = {"left out": f"{LOST.in_words()} is left out: it raised RuntimeError: no", "settled": "twice as fast"}
    return PlanSwitch(
        update=update, samples=update * story.BATCH, plan=plan, kind=kind, why=why.get(kind, ""), left_out=left_out
    )


TRIALS = (
    switch(0, SAFE),
    switch(6, story.PLAN),
    switch(12, LOST),
    switch(13, story.PLAN, "left out", LOST),
    switch(20, SAFE),
)
TIMED = [{"plan": to_json(SAFE), "update_s": 0.8}, {"plan": to_json(story.PLAN), "update_s": 0.4}]
SETTLING = Event(
    kind="settled",
    at=story.START_S + 20,
    fields={
        "samples": SETTLED_AT,
        "plan": to_json(story.PLAN),
        "why": "twice as fast",
        "forecast": to_json(story.forecast()),
        "explanation": [],
        "took_updates": 24,
        "speedup": 2.0,
        "timed": TIMED,
    },
)
BEGUN = Event(
    kind="planned",
    at=story.START_S,
    fields={
        "plan": to_json(SAFE),
        "forecast": to_json(story.forecast()),
        "took_s": 1.0,
        "is_settled": False,
        "explanation": [f"begins under {SAFE.in_words()}, which is legal", "other plans are tried"],
    },
)


def settled_run() -> Report:
    """The story's run, as one that settled after 30 updates."""
    report = story.report(sorted([*story.whole_run(), SETTLING], key=lambda event: event.at))
    return dataclasses.replace(report, schedule=PlanSchedule.of(SAFE, (*TRIALS, switch(30, story.PLAN, "settled"))))


def unsettled_run() -> Report:
    """The story's run in its first updates, while plans are tried."""
    report = story.report(story.young_run(), status="unfinished")
    assert report.decision is not None
    decision = dataclasses.replace(report.decision, is_settled=False)
    return dataclasses.replace(report, decision=decision, schedule=PlanSchedule.of(SAFE, TRIALS[:1]))


def test_the_schedule_says_which_plan_ran_when() -> None:
    """What was written before each switch counts, and no event is asked."""
    found = [(one.start / story.BATCH, one.plan.precision, one.is_trial) for one in plans_in_force(settled_run())]
    assert found == [
        (0, "fp32", True),
        (6, "bf16", True),
        (12, "bf16", True),
        (13, "bf16", True),
        (20, "fp32", True),
        (30, "bf16", False),
    ]


def test_the_strip_has_a_row_for_each_plan_and_the_settled_one_first() -> None:
    """Each has its stretches, its time against the settled plan's, and why it stands there."""
    strip = plan_strip(settled_run())
    assert strip is not None
    kept, safe, lost = strip.rows
    assert (kept.is_kept, kept.ratio, kept.remark, len(kept.blocks)) == (True, 1.0, "settled: twice as fast", 3)
    assert (safe.ratio, safe.remark, len(safe.blocks)) == (2.0, "begun under", 2)
    assert (lost.words, lost.update_s, lost.remark) == ("captured", None, "left out: it raised RuntimeError: no")
    assert strip.mark is not None
    assert all(left + width <= strip.mark + 1e-9 for row in (safe, lost) for left, width in row.blocks)
    assert sum(width for row in strip.rows for _, width in row.blocks) >= WIDTH - 1e-9
    assert plan_strip(story.report(story.whole_run())) is None


def test_rates_are_those_of_the_settled_plan() -> None:
    """Progress of an update before the settling does not count; the rest of the run does."""
    report = settled_run()
    slow = tuple(
        dataclasses.replace(event, fields={**event.fields, "samples_per_s": 1.0})
        if event.kind == "progress" and event.fields["samples"] <= SETTLED_AT
        else event
        for event in report.events
    )
    report = dataclasses.replace(report, events=slow)
    rate = next(row.measured for row in forecast_rows(report) if row.quantity == "throughput")
    assert rate is not None
    assert abs(rate / story.RATE - 1) < 0.02
    firsts = [event for event in since_settled(report) if event.kind == "progress"]
    assert firsts[0].fields["samples"] > SETTLED_AT


def test_a_settled_run_says_so_in_text_and_page() -> None:
    """The forecast is reported as the one of the settling."""
    report = settled_run()
    assert "settled after 15,360 samples: twice as fast" in summary_lines(report)
    assert not any(line.startswith("plan from") for line in summary_lines(report))
    page = render_html(report)
    assert "The forecast was made when a plan was settled, after 15,360 samples" in page
    assert "Plans took turns at the first 15,360 samples" in page
    assert describe_event(SETTLING).endswith(
        "2.00x as fast as the plan it began under, after 24 updates of trials; forecast 3 min 53 s (3 min 34 s to "
        "4 min 12 s, measured here)"
    )


def test_a_run_that_has_not_settled_has_no_forecast() -> None:
    """A guess is not compared with what was measured; samples that were not compared are reported as such."""
    coupling = Coupling(kind="whole_group", group=512, causes=("assumption",), evidence=NOT_COMPARED)
    report = dataclasses.replace(unsettled_run(), coupling=coupling)
    assert "forecast: none without a settled plan" in summary_lines(report)
    page = render_html(report)
    assert "Forecast and measured" not in page
    assert "not compared: each update took its 512 samples at once" in page
    assert describe_event(BEGUN).startswith("begins at once under fp32")
    assert plan_notes(BEGUN) == ["other plans are tried"]


def test_the_panel_says_which_plan_is_being_tried() -> None:
    """By what it settles differently; after settling there is a forecast again, and nothing of trials."""
    now = halfway().after(BEGUN)
    fields = {"samples": 1, "samples_per_s": 900.0, "trying": story.PLAN.in_words()}
    now = now.after(Event(kind="progress", at=now.at, fields=fields))
    text = drawn(frame(now, now.at))
    assert "trying plans: bf16 · channels-last" in text
    assert "no forecast yet" in text
    now = now.after(SETTLING).after(Event(kind="progress", at=now.at, fields={"samples": 2, "samples_per_s": 1500.0}))
    text = drawn(frame(now, now.at))
    assert "trying plans" not in text
    assert "as forecast" in text
