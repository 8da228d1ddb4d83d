"""One line for each event."""

import dataclasses
import typing

import pytest

from stoker.planning.model.search_space import execution_settings
from stoker.records import Event, EventKind, to_json
from stoker.reporting.event_text import describe_event, plan_notes
from tests.planning.test_explanation import explained
from tests.planning.trials import CPU, measurement, profile
from tests.reporting import story


@pytest.mark.parametrize("kind", typing.get_args(EventKind))
def test_every_kind_of_event_is_told_even_without_fields(kind: EventKind) -> None:
    """An event from an older or a terser source still gives a line."""
    assert describe_event(Event(kind=kind, at=0.0)).startswith(
        {
            "progress": "0 samples",
            "checkpointed": "checkpoint",
            "evaluated": "valid",
            "noted": "note",
            "warned": "warning",
        }.get(kind, kind)
    )


def test_a_whole_run_reads_as_sentences() -> None:
    """The lines have the numbers people look for."""
    lines = [describe_event(event) for event in story.killed_and_resumed()]
    plan = "bf16 · micro-batch 512 · channels-last · 2 threads · memory loader · fused optimiser"
    data = "fashion-mnist (indexed data): order computed from (seed, epoch, position)"
    for expected in (
        f"planned in 6.4 s: {plan}; forecast 3 min 53 s (3 min 34 s to 4 min 12 s, measured here)",
        f"started: 324,000 samples in 636 updates; {data}; same law",
        "resumed at 135,648 samples from the last checkpoint",
        "valid at 270,000 samples: accuracy 93.26 % · loss 0.2156 (best so far)",
    ):
        assert expected in lines


def test_a_stop_whose_place_is_unknown_names_none() -> None:
    """A failure outside the loop has no position; "at 0 samples" would be wrong."""
    assert describe_event(Event(kind="stopped", at=0.0, fields={"reason": "asked", "samples": 0})) == "stopped: asked"


def test_a_loss_that_is_no_number_is_told_as_such() -> None:
    """`nan` is news, and must not break the line."""
    fields = {"samples": 512, "total_samples": 1024, "loss": "nan", "eta_s": None, "samples_per_s": 100.0}
    assert (
        describe_event(Event(kind="progress", at=0.0, fields=fields))
        == "50.0 % 512 of 1,024 samples · loss nan · 100 samples/s"
    )


def test_a_starting_run_shows_of_its_explanation_what_concerns_its_user() -> None:
    """Plan and forecast are above it; how they were found is in `stoker plan` and the report."""
    lines = explained(lambda plan: measurement(plan, 0.1, gradient_error=0.0))
    error = "errors of forecasts here so far (median): time from traces alone over ten times off"
    fields = {"plan": "bf16", "explanation": [*lines, error, "others use 80% of the CPU"]}
    plan = next(iter(execution_settings(profile(), CPU)))
    plan = dataclasses.replace(plan, micro_batch=512)
    first = f"a CPU, 4 cores: {plan.in_words()}"
    event = Event(
        kind="planned",
        at=0.0,
        fields={
            **fields,
            "plan": to_json(plan),
            "explanation": [first, *lines[1:], error, "others use 80% of the CPU"],
        },
    )
    assert plan_notes(event) == [lines[1], "others use 80% of the CPU"]
    assert lines[1].startswith("samples are separable")
    assert plan_notes(Event(kind="planned", at=0.0, fields={"plan": "bf16"})) == []
