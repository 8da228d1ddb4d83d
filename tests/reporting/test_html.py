"""The report as a page."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from stoker.records import Event, Report, dumps, from_json, to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.records.progress import read_event
from stoker.records.run import Example, ExampleSet
from stoker.reporting.run_page import render_html
from tests.reporting import story

VOID = {"meta", "br", "img", "link", "hr", "input", "line", "rect", "circle"}


class Page(HTMLParser):
    """Checks that elements nest, and collects ids, tags and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.data = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.data = self.data or data
        elif "style" not in self.open:
            self.text += f" {data}"


def page(report: Report) -> Page:
    """The report's page, which is well-formed."""
    found = Page(render_html(report))
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    return found


@pytest.fixture(scope="module")
def whole() -> str:
    """The page of a run that was never stopped."""
    return render_html(story.report(story.whole_run()))


def test_a_page_shows_what_came_of_the_run() -> None:
    """Result, effort, best, plan and why, forecast and measured, contract, machine, what happened."""
    text = page(story.report(story.killed_and_resumed())).text
    for expected in (
        story.NAME,
        "92.61 %",
        "4 min 4 s",
        "1,419 samples/s",
        "93.26 % at 270,000",
        "micro-batch 512",
        "BatchNorm couples samples in groups of 512",
        "✓ yes",
        "cuts a BatchNorm group",
        "same law",
        "AMD EPYC 9B14",
        "2.13.0+cpu",
        "resumed at 135,648",
        "40 % of the CPU",
        "forward, backward, update",
        "were superseded",
    ):
        assert expected in text


def documents(html: str) -> Any:
    """What the page's scripts are given: state, series, confusion."""
    return json.loads(Page(html).data)


def test_a_page_needs_nothing_from_outside(whole: str) -> None:
    """No element refers anywhere, the policy forbids loading, and what draws the charts is inside once."""
    assert Page(whole).references == []
    assert "default-src 'none'" in whole.replace("&#39;", "'")
    assert whole.count("* uPlot.js (") == 1
    assert not re.search(r"^(import|export) ", whole, re.MULTILINE), "a module that is left asks for another"


def test_only_the_scripts_of_the_page_may_run(whole: str) -> None:
    """The policy names the SHA-256 of each script that runs, as a browser computes it, and no `unsafe-inline`."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', whole)
    assert policy is not None
    allowed = html.unescape(policy[1]).split("script-src ")[1].split(";")[0].split()
    programs = re.findall(r"<script>(.*?)</script>", whole, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in programs]
    assert allowed == [f"'sha256-{digest}'" for digest in digests]
    assert len(programs) == 1
    assert "\r" not in "".join(programs), "a browser would compute the digest of other line ends"


@pytest.mark.slow
def test_a_report_is_small(whole: str) -> None:
    """Well below a megabyte, also of a run of very many events and logged values; pictures come on top."""
    assert len(whole.encode()) < 400_000
    events = story.whole_run()
    for number in range(5000):
        fields = {"samples": 3 * number + 0.5, "loss": 1 / (number + 1.1), "lr": 1 / (number + 3), "wall_s": number / 7}
        events.append(Event(kind="progress", at=story.START_S, fields=fields))
    scalars = {f"value {n}": [[x * 1.1, x / 7] for x in range(1000)] for n in range(200)}
    texts = [{"name": "text", "samples": at, "text": "x" * 9_990} for at in range(50)]
    events.append(Event(kind="logged", at=0.0, fields={"samples": 9, "scalars": scalars, "images": [], "texts": texts}))
    picture = base64.b64encode(bytes(3000)).decode()  # as a PNG of 32 x 32 pixels in colours takes
    shown = (Example(index=1, target="cat", output="dog (91 %)", loss=3.25, picture=picture),) * 24
    square = tuple(tuple(range(64)) for _ in range(64))
    examples = [
        ExampleSet(split=split, num_samples=9, worst=shown[:12], first=shown[12:], confusion=square)
        for split in ("valid", "test")
    ]
    for number in range(400):
        metrics = {f"metric {n}": n / (number + 7) for n in range(30)}
        fields = {"split": "valid", "samples": 40 * number + 1, "metrics": metrics}
        events.append(Event(kind="evaluated", at=story.START_S + number, fields=fields))
    plain, page = render_html(story.report(events)), render_html(story.report(events), examples)
    assert len(page.encode()) < 1_000_000
    assert len(page.encode()) - len(plain.encode()) < 48 * 1.1 * len(picture) + 2 * 15_000
    found = documents(page)
    assert 1000 < len(found["series"]["samples"]["progress"]["x"]) <= 1400
    assert [text[1] for text in found["state"]["texts"]] == list(range(40, 50)), "the newest"
    assert len(found["series"]["wall_s"]["scalars"]) == 60


def test_the_data_are_what_the_live_page_is_sent() -> None:
    """Every progress in order, none twice after a resume, over samples and time; evaluations, best, forecast."""
    found = documents(render_html(story.report(story.killed_and_resumed())))
    progress = found["series"]["samples"]["progress"]
    assert {"x", "loss", "lr", "samples_per_s", "resident_bytes"} <= set(progress)
    assert progress["x"] == sorted(set(progress["x"]))
    assert len(found["series"]["wall_s"]["progress"]["loss"]) == len(progress["loss"])
    assert found["state"]["row"]["price_per_h"] is None
    state = found["state"]
    killed, resumed = [span for span in state["spans"] if span[2] == "training"]
    assert story.START_S < killed[0] < killed[1] < resumed[0] - 3000, "an hour between them"
    assert [one["at"] for one in state["events"] if one["kind"] == "planned"] == [story.START_S + 6.4]
    assert [one["samples"] for one in state["events"] if one["kind"] == "resumed"] == [135_648]
    assert state["best"]["samples"] == 270_000
    assert [270_000, state["best"]["metrics"]["accuracy"]] in state["evaluations"]["valid accuracy"]
    assert state["forecast"]["samples_per_s"][0] == pytest.approx(1420, rel=0.1)


def test_of_a_gpu_the_data_have_its_memory() -> None:
    """As well as the process's; without a GPU there is no such column, and the page draws the process's."""
    found = documents(render_html(story.report(story.on_gpu(story.whole_run()))))
    progress = found["series"]["samples"]["progress"]
    assert progress["allocated_bytes"][-1] == pytest.approx(progress["resident_bytes"][-1] / 8, rel=1e-3)
    plain = documents(render_html(story.report(story.whole_run())))
    assert "allocated_bytes" not in plain["series"]["samples"]["progress"]


def test_values_that_are_not_finite_leave_gaps() -> None:
    """A nan would be no JSON, and the rest is drawn."""
    events = [Event(kind="progress", at=0.0, fields={"samples": n, "loss": y}) for n, y in enumerate((1.0, "nan", 2.0))]
    fields = {"split": "valid", "samples": 2, "metrics": {"accuracy": float("nan"), "loss": 1.0}, "best": True}
    events.append(Event(kind="evaluated", at=0.0, fields=fields))
    found = documents(render_html(story.report(events, has_plan=False)))
    assert found["series"]["samples"]["progress"]["loss"] == [1, None, 2]
    assert found["state"]["evaluations"] == {"valid accuracy": [[2, None]], "valid loss": [[2, 1]]}
    assert found["state"]["best"]["metrics"] == {"loss": 1}


def test_names_and_texts_from_users_are_escaped() -> None:
    """A run, a job, a metric, a setting, a warning and a failure may hold markup; none of it becomes markup."""
    evil = "</script><script>alert(1)</script>"
    events = story.whole_run()
    events.append(dataclasses.replace(events[-1], kind="warned", fields={"message": evil}))
    for event in events:
        if event.kind == "evaluated":
            event.fields["metrics"] = {evil: 0.5, "loss": 1.0}
    report = story.report(events, name=evil, status="failed", failure=evil)
    report = dataclasses.replace(report, spec=story.spec(evil, note=evil))
    expected = page(story.report(events)).tags.count("script")
    made = page(report)
    assert made.tags.count("script") == expected == 2
    assert made.text.count(evil) >= 5
    assert evil in json.dumps(json.loads(made.data)["state"]["evaluations"]), "shown by scripts, which only make text"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (story.report(story.failed_run(), status="failed", failure="the loss is nan"), "the loss is nan"),
        (story.report(story.failed_run(), status="failed", failure="x"), "the last checkpoint holds 46,080 samples"),
        (story.report(story.young_run(), status="unfinished"), "trained on 1,536 of 324,000 samples"),
        (story.report([], status="failed", has_plan=False), "no reason was recorded"),
        (story.report(story.whole_run()[2:40], status="unfinished", has_plan=False), "of 324,000 samples in"),
    ],
    ids=["failed", "saved", "young", "refused", "no plan"],
)
def test_a_page_of_less_than_a_whole_run_is_sensible(report: Report, expected: str) -> None:
    """What is missing is left out, what is known is there, and nothing says None or nan."""
    text = page(report).text
    assert expected in text
    assert "None" not in text
    assert not re.search(r"\bnan\b", text.replace("loss is nan", ""))


def test_plans_of_a_stated_time_compare_by_what_they_learn_in_it() -> None:
    """All of them take as long; the slower one trains on half the samples."""
    report = story.report(story.whole_run())
    assert report.decision is not None
    chosen = report.decision.candidates[0]
    fewer = dataclasses.replace(chosen.forecast, total_samples=chosen.forecast.total_samples // 2)
    slower = dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, threads=1), forecast=fewer)
    decision = dataclasses.replace(report.decision, candidates=(chosen, slower))
    assert "2.00× the time" in page(dataclasses.replace(report, decision=decision)).text


def test_a_run_without_charts_carries_no_scripts() -> None:
    """A page with nothing to draw is smaller still."""
    assert len(render_html(story.report([], status="failed", failure="x", has_plan=False))) < 50_000


def test_a_page_is_the_same_each_time() -> None:
    """Nothing in it depends on when or where it was made."""
    assert render_html(story.report(story.young_run())) == render_html(story.report(story.young_run()))


def test_odd_events_of_another_machine_leave_a_report() -> None:
    """Every field of every kind, of another type or size: a reader refuses the line, or the page stands."""
    odd = [-1, 1e300, 10**400, "nan", "x", [1], {"x": {}}, ["a", None], [[]], {"a": {"b": 1}}, None, True]
    events, refused = story.whole_run(), 0
    for original in {event.kind: event for event in events}.values():
        for name in original.fields:
            for value in odd:
                event = dataclasses.replace(original, fields=original.fields | {name: value})
                try:
                    events.append(read_event(dumps(event)))
                except ValueError:
                    refused += 1
    assert refused > 100
    assert "</html>" in render_html(story.report(events))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document has strings."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))
    if isinstance(value, str):
        yield path


def changed(value: Any, path: tuple[Any, ...], suffix: str) -> Any:
    """A copy of a document with one of its strings longer."""
    if not path:
        return value + suffix
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], suffix)
    return copy


def test_no_string_of_any_record_is_markup() -> None:
    """Whatever a record from elsewhere may hold: every string that reading it accepts, and those of events."""
    evil = '"><img src=x onerror=alert(1)></script><script>alert(2)'
    report, num_changed = story.report(story.whole_run(), failure="x"), 0
    for name in ("run", "spec", "decision", "device", "environment", "coupling"):
        record = getattr(report, name)
        if record is None:
            continue
        document = to_json(record)
        for path in list(leaves(document)):
            candidate = changed(document, path, evil)
            try:
                from_json(candidate, type(record))
            except ValueError:
                continue
            document, num_changed = candidate, num_changed + 1
        report = dataclasses.replace(report, **{name: from_json(document, type(record))})
    told = {"message", "run", "checkpoint", "why", "reason", "guarantee", "class", "name"}
    events = []
    for event in report.events:
        fields = to_json(event.fields)
        for path in [path for path in leaves(fields) if path[-1] in told]:
            fields, num_changed = changed(fields, path, evil), num_changed + 1
        events.append(dataclasses.replace(event, fields=fields))
    html = render_html(dataclasses.replace(report, events=tuple(events)))
    assert num_changed > 50
    assert "<img src=x" not in html
    assert "<script>alert" not in html
    assert "&lt;img src=x" in html


def test_the_head_tells_the_threads_that_trained() -> None:
    """Of a run that went on with one thread: by share of the samples, and the plan's chips are those of most of it."""
    schedule = PlanSchedule(story.PLAN, (story.changed_plan(1620, threads=1),))
    found = render_html(dataclasses.replace(story.report(story.whole_run()), schedule=schedule))
    machine = "2 cores, 1 thread for 99.5 % of the samples, 2 threads for 0.5 %"
    assert documents(found)["state"]["machine"] == machine
    text = Page(found).text
    strip = text[text.index("when it ran") :]
    assert strip.index("the plan above") < strip.index("99.5 %") < strip.index("2 threads") < strip.index("0.5 %")
    assert documents(render_html(story.report(story.whole_run())))["state"]["machine"] == "2 cores, 2 threads"
