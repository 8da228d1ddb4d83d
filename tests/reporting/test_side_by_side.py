import json
import re
from dataclasses import replace

from stoker.records import Event, JobSpec, Report, Run
from stoker.reporting.side_by_side import render_side_by_side
from tests.reporting.test_html import Page

SPEC = JobSpec(
    name="j",
    entry=None,
    entry_digest=None,
    parameters={},
    settings={},
    data_class="indexed",
    data_fingerprint="f",
    num_train=9,
    weights_digest="w",
)


def a_report(name: str, losses: list[float]) -> Report:
    """A run that was asked for its loss every 100 samples, that is every two seconds."""
    events: list[Event] = []
    for at, loss in enumerate(losses, start=1):
        progress = {"samples": 100 * at, "loss": loss, "wall_s": 2.0 * at}
        valid = {"split": "valid", "samples": 100 * at, "metrics": {"accuracy": 1 - loss}}
        events += [Event(kind="progress", at=2.0 * at, fields=progress), Event(kind="evaluated", at=2.0, fields=valid)]
    run = Run(name=name, status="finished", created_at="2026-01-01", spec_digest=SPEC.digest(), total_samples=300)
    return Report(run=run, spec=SPEC, decision=None, device=None, environment=None, coupling=None, events=tuple(events))


def test_every_measure_has_a_chart_over_samples_and_one_over_time() -> None:
    """Both runs are in each; time is what progress says, read off between its points."""
    page = render_side_by_side([a_report("one", [0.5, 0.25]), a_report("two", [0.4, 0.2])])
    for words in ("Over samples", "Over training time", "Valid accuracy", "Train loss", "last: one 0.25, two 0.2"):
        assert words in page
    assert "training time [s]" in page


def test_a_run_that_tells_of_no_time_is_not_drawn_over_time() -> None:
    """Its samples are no seconds."""
    silent = a_report("silent", [0.5, 0.25])
    silent = replace(silent, events=tuple(event for event in silent.events if event.kind == "evaluated"))
    page = render_side_by_side([a_report("one", [0.4, 0.2]), silent])
    assert "last: one 0.8, silent 0.75" in page.partition("Over training time")[0]
    assert "silent 0.75" not in page.partition("Over training time")[2].partition("<script")[0]


def test_dark_is_a_repainting_of_every_colour() -> None:
    """A colour in a figure that the page cannot repaint would be unreadable in the dark."""
    data = json.loads(Page(render_side_by_side([a_report("one", [0.5, 0.25]), a_report("two", [0.4, 0.2])])).data)
    used = set(re.findall(r'"(#[0-9a-f]{6})"', json.dumps(data["figures"])))
    assert used
    assert used <= set(data["dark"])


def test_names_of_runs_are_text_and_not_markup() -> None:
    """A name with angle brackets cannot write into the page."""
    report = a_report("x", [0.5])
    page = render_side_by_side([replace(report, run=replace(report.run, name="<script>alert(1)</script>"))])
    assert "<script>alert(1)" not in page
