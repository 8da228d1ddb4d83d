"""The tables of `stoker runs`, `stoker plan` and `stoker verify`."""

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from stoker.cli.jobs import render_verdicts
from stoker.cli.plan_table import render_decision
from stoker.cli.runs import diff_document, render_diff, render_runs, runs_document
from stoker.records import Event, Report, Verdict, to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.store import CheckpointStore
from tests.cli.page import Page
from tests.flow.command import stoker_here
from tests.reporting import story
from tests.store.builders import make_run, save


@pytest.fixture
def first() -> Report:
    """A finished run."""
    return story.report(story.whole_run())


@pytest.fixture
def second(first: Report) -> Report:
    """A run of another batch, under another plan, with a lower accuracy and no test loss."""
    chosen = dataclasses.replace(story.decision().chosen, plan=dataclasses.replace(story.PLAN, precision="fp32"))
    return dataclasses.replace(
        first,
        run=dataclasses.replace(
            first.run, name="fashion-resnet-77aa01", metrics={"test/accuracy": 0.9189}, wall_s=470.0
        ),
        spec=story.spec(batch=256),
        decision=dataclasses.replace(story.decision(), candidates=(chosen,)),
    )


def test_runs_are_listed_with_what_came_of_them(first: Report) -> None:
    """One line a run: name, status, result or failure, how far, how long; the path if it is not the name."""
    failed = story.report(story.failed_run(), status="failed", failure="the loss is nan\nmore", name="broken-1")
    one = Page()
    render_runs(
        [(Path("runs") / story.NAME, first.run, first.spec), (Path("/else/where"), failed.run, failed.spec)], one
    )
    text = one.text
    for expected in (
        story.NAME,
        "finished",
        "test/accuracy 92.61 %",
        "324,000",
        "3 min 55 s",
        "broken-1",
        "failed",
        "the loss is nan",
        "70,144 (22 %)",
        "/else/where",
    ):
        assert expected in text
    assert f"runs/{story.NAME}" not in text
    assert "more" not in text


NARROW = "a-job-with-a-long-name-of-its-own-1a2b3c"


def listed_in(console: Console, first: Report) -> str:
    """The list of one run with a long name."""
    render_runs([(Path(NARROW), dataclasses.replace(first.run, name=NARROW), first.spec)], console, ("batch",))
    return str(console.file.getvalue())  # type: ignore[attr-defined]  # both are buffers


def test_into_a_pipe_nothing_is_folded(first: Report) -> None:
    """One line a run, whatever the width: names can be searched for, and copied; with date and time of day."""
    line = next(line for line in listed_in(Page(width=60), first).splitlines() if NARROW in line)
    for expected in ("finished", "test/accuracy 92.61 %", "324,000", "3 min 55 s"):
        assert expected in line
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", line)


def test_in_a_narrow_terminal_names_and_times_stay_whole(first: Report) -> None:
    """What is cut is the result; the time of day distinguishes runs of one day."""
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    text = listed_in(terminal, first)
    assert NARROW in text
    assert re.search(r"\d\d-\d\d \d\d:\d\d", text)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_diff_shows_as_much_of_a_digest_as_tells_two_apart(first: Report) -> None:
    """Twelve figures; the document has them all."""
    other = dataclasses.replace(first, spec=dataclasses.replace(first.spec, weights_digest="ab" * 32))
    one = Page()
    render_diff(first, other, one)
    assert "abababababab…" in one.text
    assert "ab" * 32 not in one.text
    assert any("ab" * 32 in row for row in diff_document(first, other)["job"])  # type: ignore[union-attr]


def test_an_empty_list_says_how_to_begin() -> None:
    """No empty table."""
    one = Page()
    render_runs([], one)
    assert "stoker train" in one.text


def test_no_run_that_meets_the_conditions_is_told_from_no_run_at_all() -> None:
    """Where the conditions leave none, they are what is to be looked at."""
    one = Page()
    render_runs([], one, known=7)
    assert "none of the 7 runs here meets all conditions of --where" in one.text


def test_a_name_with_markup_is_shown_as_it_is(first: Report) -> None:
    """Square brackets in names are no styles."""
    run = dataclasses.replace(first.run, name="[red]x")
    one = Page()
    render_runs([(Path("[red]x"), run, first.spec)], one)
    assert "[red]x" in one.text


def test_the_list_as_json_holds_the_records(first: Report) -> None:
    """A script finds path, job and the whole record of each run."""
    document = json.loads(json.dumps(runs_document([(Path("a/b"), first.run, first.spec)])))
    (only,) = document["runs"]
    assert (only["path"], only["job"], only["run"]["name"]) == ("a/b", "fashion-resnet", story.NAME)
    assert only["spec_digest"] == first.spec.digest()


def test_a_damaged_record_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are listed, and which cannot be read is said; nothing was listed at all."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path))
    make_run(tmp_path / "whole", name="whole")
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / "run.json").write_text("{")
    listed, document = stoker_here("runs"), stoker_here("runs", "--json")
    assert (listed.code, document.code) == (0, 0)
    assert "whole" in listed.out
    assert f"not listed: {tmp_path / 'zz' / 'run.json'} cannot be used" in listed.out
    found = json.loads(document.out)
    assert [Path(one["path"]).name for one in found["runs"]] == ["whole"]
    assert [Path(one["path"]).name for one in found["unreadable"]] == ["zz"]
    assert "none of the 1 runs" in stoker_here("runs", "--where", "status=failed").out


def test_a_killed_run_is_shown_as_far_as_its_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says 0: no process was left to write it."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path))
    run = make_run(tmp_path / "killed", name="killed", total_samples=5000)
    save(CheckpointStore(run.checkpoints), 1250)
    assert "(25 %)" in stoker_here("runs").out
    assert json.loads(stoker_here("runs", "--json").out)["runs"][0]["run"]["samples"] == 1250


def test_a_diff_shows_job_plan_and_outcome(first: Report, second: Report) -> None:
    """Each difference with both values, and by how much the numbers changed."""
    one = Page()
    render_diff(first, second, one)
    rows = [line.split() for line in one.text.splitlines()]
    assert ["batch", "512", "256"] in rows
    assert ["precision", "bf16", "fp32"] in rows
    assert ["test/accuracy", "92.61", "%", "91.89", "%", "-0.72", "points"] in rows
    assert ["test/loss", "0.2291"] in rows
    assert ["time", "3", "min", "55", "s", "7", "min", "50", "s", "2.00×"] in rows


def test_a_diff_of_equal_runs_says_the_same(first: Report) -> None:
    """Nothing is listed as a difference."""
    one = Page()
    render_diff(first, first, one)
    assert one.text.count("the same") == 2
    assert "none" in one.text


def test_a_diff_compares_the_plans_in_force_and_says_how_they_came_about(first: Report) -> None:
    """A run that went on with one thread is not under the same plan; where, and why, is said."""
    new = dataclasses.replace(story.PLAN, threads=1)
    fields = {"samples": 1024, "old": to_json(story.PLAN), "new": to_json(new), "why": "others hold 1.0 of 2 cores"}
    change = Event(kind="replanned", at=story.START_S, fields=fields)
    schedule = PlanSchedule(story.PLAN, (story.changed_plan(1024, threads=1),))
    run = dataclasses.replace(first.run, name="b-1")
    other = dataclasses.replace(first, run=run, events=(*first.events, change), schedule=schedule)
    line = "replanned at 1,024 samples: threads 2 → 1, because others hold 1.0 of 2 cores"
    one = Page()
    render_diff(first, other, one)
    assert ["threads", "2", "1"] in [row.split() for row in one.text.splitlines()]
    assert f"b-1 {line}" in one.text
    document = json.loads(json.dumps(diff_document(first, other)))
    assert document["plan"] == [["threads", "2", "1"]]
    assert document["plan_changes"] == {"a": [], "b": [line]}
    both = Page()
    render_diff(other, other, both)
    assert "the same at the end" in both.text


def test_a_diff_without_plans_does_not_call_them_equal(first: Report) -> None:
    """A plan that was not recorded cannot be compared."""
    one = Page()
    render_diff(first, dataclasses.replace(first, decision=None), one)
    assert "not recorded for both" in one.text


def test_the_diff_as_json_holds_both_sides(first: Report, second: Report) -> None:
    """Names with both values; null where one side has none."""
    document = json.loads(json.dumps(diff_document(first, second)))
    assert ["batch", "512", "256"] in document["job"]
    assert document["plan"] == [["precision", "bf16", "fp32"]]
    assert document["metrics"]["test/accuracy"] == [0.92614, 0.9189]
    assert document["metrics"]["test/loss"] == [0.2291, None]


def test_a_decision_shows_the_chosen_plan_and_why() -> None:
    """The chosen plan in words with memory, update and time to finish; the others by what they change and cost."""
    one = Page()
    render_decision(story.decision(), one, explain=False)
    text = one.text
    for expected in (
        "bf16 · micro-batch 512",
        "0.9 / 24 GiB",
        "345 ms",
        "3 min 53 s",
        "fp32 · micro-batch 512",
        "1.12× the time",
        "3 min 34 s to 4 min 12 s",
        "measured here",
        "• channels-last:",
        "3 plans were rejected",
    ):
        assert expected in text
    assert "cuts a BatchNorm group" not in text


def test_explaining_shows_what_each_rejected_plan_lost_by() -> None:
    """With `--explain` every rejection has its reason."""
    one = Page()
    render_decision(story.decision(), one, explain=True)
    for rejection in story.decision().rejected:
        assert rejection.reason in one.text


def test_a_decision_of_one_plan_says_what_it_rests_on() -> None:
    """No comparison is made up: what it rests on stands there."""
    only = dataclasses.replace(story.decision(), candidates=story.decision().candidates[:1], rejected=())
    one = Page()
    render_decision(only, one, explain=True)
    assert "measured here" in one.text
    assert "rejected" not in one.text


def verdict(passed: bool, level: str = "same mathematics") -> Verdict:
    """One verdict."""
    return Verdict(question="Separable?", answer="Yes.", passed=passed, level=level, evidence="differ by 2.2e-16")


def test_verdicts_are_marked_and_the_level_comes_last() -> None:
    """A check mark, the answer, the evidence; the last line is what holds."""
    one = Page()
    level = Verdict(question="Which level holds?", answer="Same law.", passed=True, level="same law", evidence="")
    render_verdicts("net", [verdict(True), level], console=one)
    lines = one.text.splitlines()
    assert any("✓" in line and "Separable?" in line for line in lines)
    assert any("differ by 2.2e-16" in line for line in lines)
    assert lines[-1] == "holds: Same law."


def test_what_did_not_hold_is_counted_and_crossed() -> None:
    """A failed verdict cannot be overlooked; the last line says that nothing is promised, and not that levels hold."""
    one = Page()
    none = Verdict(question="Which level holds?", answer="None.", passed=False, level="none", evidence="")
    render_verdicts("net", [verdict(True), verdict(False, "bit-equal"), none], console=one)
    lines = one.text.splitlines()
    assert sum("✗" in line for line in lines) == 2
    assert lines[-1] == "1 of 2 did not hold: no level is promised until they do"
    assert "holds:" not in one.text


def test_what_a_resume_did_again_is_once_in_the_table(tmp_path: Path) -> None:
    """Samples only grow: what a kill took back is left out, as in the report's figures."""
    directory = make_run(tmp_path / "killed")
    for event in story.killed_and_resumed():
        directory.append_event(event)
    table = tmp_path / "m.csv"
    assert stoker_here("runs", "export", str(directory.path), "-o", str(table)).code == 0
    with table.open(encoding="utf-8", newline="") as file:
        lines = [(int(row["samples"]), row["train/loss"] != "") for row in csv.DictReader(file)]
    losses = [samples for samples, has_loss in lines if has_loss]
    assert losses == sorted(set(losses))
