"""Reading a run's events."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Event, PlanSwitch
from stoker.records.plan_schedule import PlanSchedule
from stoker.reporting.history import (
    best_evaluation,
    evaluation_metrics,
    finite,
    live_history,
    number,
    of_kind,
    planned_plan,
    plans_in_force,
    samples_done,
    updates_done,
)
from tests.reporting import story


def progress(samples: int) -> Event:
    """Progress at a position."""
    return Event(kind="progress", at=0.0, fields={"samples": samples})


def test_a_resume_that_was_not_written_supersedes_as_well() -> None:
    """Its first progress lies before the last one; what was said at its own position is said again as well."""
    events = [progress(10), progress(20), evaluated(20), progress(12)]
    assert live_history(events) == (events[0], events[3])
    events = [progress(10), progress(20), evaluated(20), progress(30), progress(20)]
    assert live_history(events) == (events[0], events[4])


def evaluated(samples: int, split: str = "valid", **fields: object) -> Event:
    """An evaluation at a position."""
    return Event(kind="evaluated", at=0.0, fields={"samples": samples, "split": split, **fields})


def resumed(samples: int) -> Event:
    """A resume from a position."""
    return Event(kind="resumed", at=0.0, fields={"samples": samples})


def test_a_resume_drops_what_lay_beyond_its_position() -> None:
    """Progress, evaluations and checkpoints that the killed process was ahead by are superseded."""
    ahead = [progress(300), evaluated(300), Event(kind="checkpointed", at=0.0, fields={"samples": 300})]
    live = live_history([progress(100), progress(200), *ahead, resumed(200), progress(300)])
    assert [(event.kind, event.fields["samples"]) for event in live] == [
        ("progress", 100),
        ("progress", 200),
        ("resumed", 200),
        ("progress", 300),
    ]


def test_what_is_not_a_measurement_survives_a_resume() -> None:
    """Warnings, starts and plans are part of the story even if the samples they were at are done again."""
    warned = Event(kind="warned", at=0.0, fields={"message": "slow", "samples": 300})
    assert warned in live_history([warned, resumed(0)])


def test_an_evaluation_made_again_at_the_same_place_counts_once() -> None:
    """A run killed after evaluating at its last checkpoint evaluates there again; splits stay separate."""
    events = [evaluated(200, metrics={"loss": 1.0}), resumed(200), evaluated(200, metrics={"loss": 1.0}, again=True)]
    live = live_history([*events, evaluated(200, "test")])
    assert [event.fields.get("again") for event in of_kind(live, "evaluated")] == [True, None]


def test_how_far_a_run_came_is_told_by_events_until_it_is_finished() -> None:
    """The record of a run that trains, or was killed, is of its beginning; what was rolled back does not count."""
    events = [Event(kind="progress", at=0.0, fields={"samples": n, "updates": n // 10}) for n in (100, 200, 300)]
    report = story.report(events, status="unfinished")
    begun = dataclasses.replace(report, run=dataclasses.replace(report.run, samples=0, updates=0))
    assert (samples_done(begun), updates_done(begun)) == (300, 30)
    again = dataclasses.replace(begun, events=(*events, resumed(150)))
    assert (samples_done(again), updates_done(again)) == (150, 10)
    finished = dataclasses.replace(report, run=dataclasses.replace(report.run, status="finished", samples=310))
    assert samples_done(finished) == 310
    assert samples_done(dataclasses.replace(report, events=())) == report.run.samples


@given(st.lists(st.one_of(st.integers(0, 50).map(progress), st.integers(0, 50).map(resumed)), max_size=40))
def test_live_progress_never_lies_beyond_a_later_resume(events: list[Event]) -> None:
    """Whatever happened, no event that stayed is ahead of a resume that came after it."""
    live = live_history(events)
    for index, event in enumerate(live):
        if event.kind == "resumed":
            assert all(
                before.fields["samples"] <= event.fields["samples"] for before in of_kind(live[:index], "progress")
            )


def test_numbers_come_as_json_wrote_them() -> None:
    """The codec's "nan" is a number that is not finite; text, booleans and absent fields are none."""
    event = Event(kind="progress", at=0.0, fields={"loss": "nan", "lr": 1, "best": True, "path": "x"})
    assert math.isnan(number(event, "loss") or 0.0)
    assert finite(event, "loss") is None
    assert finite(event, "lr") == 1.0
    assert [number(event, name) for name in ("best", "path", "absent")] == [None, None, None]


def test_metrics_are_known_by_their_bare_names() -> None:
    """`valid/accuracy` and `accuracy` of a valid evaluation are the same metric."""
    event = evaluated(1, metrics={"valid/accuracy": 0.5, "loss": 1, "note": "text"})
    assert evaluation_metrics(event) == {"accuracy": 0.5, "loss": 1.0}


def test_the_best_evaluation_is_the_last_one_marked() -> None:
    """Each new best is marked as it comes, so the last mark stands."""
    best = evaluated(2, best=True)
    assert best_evaluation([evaluated(1, best=True), best, evaluated(3, best=False)]) is best
    assert best_evaluation([evaluated(1)]) is None


def test_a_planned_event_carries_a_plan_or_words() -> None:
    """A plan in words is no plan record."""
    assert planned_plan(story.whole_run()[0]) == story.PLAN
    assert planned_plan(Event(kind="planned", at=0.0, fields={"plan": "fp32"})) is None


def in_force(*changes: PlanSwitch) -> list[tuple[float, int, int, float]]:
    """(start, threads, micro-batch, share) of each plan of a run of 324,000 samples with these changes of plan."""
    report = dataclasses.replace(story.report(()), schedule=PlanSchedule.of(story.PLAN, changes))
    whole = dataclasses.replace(report, run=dataclasses.replace(report.run, samples=story.TOTAL_SAMPLES))
    return [(one.start, one.plan.threads, one.plan.micro_batch, round(one.share, 3)) for one in plans_in_force(whole)]


def test_plans_in_force_have_their_share_of_the_samples() -> None:
    """A run is described by what it trained under, not by what was planned."""
    assert in_force() == [(0, 2, 512, 1.0)]
    assert in_force(story.changed_plan(1620, threads=1)) == [(0, 2, 512, 0.005), (1620, 1, 512, 0.995)]
    assert in_force(story.changed_plan(0, threads=1)) == [(0, 1, 512, 1.0)]


def test_a_roll_back_takes_its_new_plan_to_the_checkpoint() -> None:
    """What was trained beyond it under another plan does not count."""
    changes = (story.changed_plan(162_000, threads=1), story.changed_plan(81_000, micro_batch=256))
    assert in_force(*changes) == [(0, 2, 512, 0.25), (81_000, 2, 256, 0.75)]
