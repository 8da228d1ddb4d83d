"""A study in the terminal: what is typed becomes numbers, what happens becomes lines, trials become a table."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from stoker.cli.tune import (
    parse_parallel,
    parse_seconds,
    render_study,
    study_document,
)
from stoker.errors import BadJob
from stoker.records.study import Parameter, StudyEvent, StudyResult, StudySettings, StudyTrial, TrialState
from stoker.reporting.event_text import describe_study_event, format_settings
from tests.flow.command import stoker_here

SETTINGS = StudySettings(
    name="tune-some",
    job="some.py",
    job_digest="0" * 64,
    fixed={"epochs": "3"},
    space=(Parameter(name="lr", kind="log", low=1e-3, high=1.0),),
    objective="valid/accuracy",
    higher_is_better=True,
    sampler="tpe",
    pruner="asha",
    seed=0,
    on="here",
    first_samples=100,
    total_samples=300,
)
RESULT = StudyResult(
    settings=SETTINGS,
    trials=(
        StudyTrial(number=0, state="finished", parameters={"lr": 0.123456789}, value=0.9, samples=300, wall_s=2.0),
        StudyTrial(number=1, state="failed", parameters={"lr": 0.5}, reason="no such file\nand more"),
    ),
    importance={"lr": 1.0},
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5 min", 90.0), ("2h30min", 9000.0), ("1d", 86400.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    """With a unit, or as seconds."""
    assert parse_seconds(text) == seconds


def test_what_is_no_time_and_no_number_is_refused() -> None:
    """With an example."""
    with pytest.raises(BadJob, match=r"--time soon: wanted a time with its unit .* such as 12h or 90min"):
        parse_seconds("soon")
    with pytest.raises(BadJob, match="wanted auto, or a number"):
        parse_parallel("many")
    assert (parse_parallel("AUTO"), parse_parallel("3")) == (None, 3)


def test_trials_are_a_table_with_the_command_for_the_best() -> None:
    """Settings in full in the command, in a few figures in the table; errors by their first line."""
    console = Console(file=io.StringIO(), width=100)
    render_study(RESULT, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "lr=0.1235" in text
    assert "failed: no such file" in text
    assert "and more" not in text
    assert "train the best: stoker train some.py --set epochs=3 --set lr=0.123456789" in text
    assert "what mattered: lr 100%" in text


def test_the_command_for_the_best_can_be_pasted_into_a_shell() -> None:
    """Also where the job's path has a space."""
    console = Console(file=io.StringIO(), width=100)
    settings = dataclasses.replace(RESULT.settings, job="my jobs/some.py")
    render_study(dataclasses.replace(RESULT, settings=settings), console)
    assert isinstance(console.file, io.StringIO)
    assert "stoker train 'my jobs/some.py' --set epochs=3" in console.file.getvalue()


def test_the_reason_of_a_failure_is_told_in_full() -> None:
    """However long it is: what went wrong is often at the end of it."""
    reason = f"{'a long path/' * 20}: no such file"
    fields = {
        "number": 3,
        "state": "failed",
        "value": None,
        "samples": 0,
        "reason": reason,
        "objective": "valid/loss",
        "best": None,
    }
    assert describe_study_event(StudyEvent(kind="ended", at=0.0, fields=fields)) == [
        f"trial 3 failed after 0 samples ({reason})"
    ]
    console = Console(file=io.StringIO(), width=400)
    render_study(
        dataclasses.replace(RESULT, trials=(StudyTrial(number=3, state="failed", parameters={}, reason=reason),)),
        console,
    )
    assert isinstance(console.file, io.StringIO)
    assert reason in console.file.getvalue()


def test_a_population_is_shown_with_who_went_on_from_whom() -> None:
    """And how the best came about: no one command trains it, for its settings changed on the way."""

    def trial(number: int, lr: float, parent: int | None = None) -> StudyTrial:
        interval, member = divmod(number, 4)
        state: TrialState = "finished" if interval == 2 else "handed on"
        return StudyTrial(
            number=number,
            state=state,
            parameters={"lr": lr},
            value=interval + lr,
            samples=100,
            member=member,
            curve=((100 * interval + 100, 0.1),),
            interval=interval,
            parent=parent,
            run=f"trials/{number:04}",
        )

    trials = (trial(0, 0.1), trial(1, 0.2), trial(4, 0.1, 0), trial(5, 0.3, 0), trial(8, 0.1, 4), trial(9, 0.4, 4))
    settings = dataclasses.replace(SETTINGS, sampler="pbt", pruner="none", members=4, intervals=3)
    console = Console(file=io.StringIO(), width=200)
    render_study(StudyResult(settings=settings, trials=trials), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (
        "the best came about by lr=0.1 up to 200 samples (trials 0, 4), then lr=0.4 up to 300 samples (trial 9)" in text
    )
    assert "its model: the run tune-some/trials/0009" in text
    assert "1/2 from 4" in text
    assert "stoker train" not in text


def test_the_document_has_the_best_first() -> None:
    """For `--json`."""
    document = study_document(RESULT)
    assert document["best"]["number"] == 0
    assert [one["number"] for one in document["trials"]] == [0, 1]


def test_every_event_has_words() -> None:
    """A trial's end with its reason and the best so far."""
    fields = {
        "number": 3,
        "state": "pruned",
        "value": 0.5,
        "samples": 1150,
        "reason": "asha at 1,150 samples",
        "objective": "valid/accuracy",
        "best": {"trial": 1, "value": 0.75},
    }
    assert describe_study_event(StudyEvent(kind="ended", at=0.0, fields=fields)) == [
        "trial 3 pruned: valid/accuracy 0.5 after 1,150 samples (asha at 1,150 samples); best 0.75 (trial 1)"
    ]
    begun = {"trial": 9, "parameters": {"lr": 0.1}, "run": "", "member": 2, "interval": 1, "parent": 4}
    assert describe_study_event(StudyEvent(kind="began", at=0.0, fields=begun)) == [
        "trial 9 begins (member 2, interval 1, from trial 4): lr=0.1"
    ]
    warned = StudyEvent(kind="warned", at=0.0, fields={"message": "look"})
    assert describe_study_event(warned) == ["warning: look"]
    assert format_settings({"a": True, "b": None, "c": 0.1234567, "d": 3}) == "a=true b=none c=0.1235 d=3"


def test_a_command_without_a_space_says_what_it_wants() -> None:
    """Exit code 2, and the two ways to use it."""
    outcome = stoker_here("tune")
    assert outcome.code == 2
    assert "--space" in outcome.err
    assert "--show" in outcome.err
