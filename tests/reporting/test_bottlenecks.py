"""What the page and the terminal say of what holds a run back, and of a profile."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from stoker.records import Achieved, Bottleneck, Bound, Estimate, Event, Kernel, KernelTable, Share, to_json
from stoker.reporting.colours import BOUND_COLOURS, COLOURS
from stoker.reporting.display import PlainDisplay
from stoker.reporting.event_text import closing_lines
from stoker.reporting.panel import RunSnapshot
from stoker.reporting.run_page import render_html
from stoker.reporting.summary import summary_lines
from tests.reporting import story
from tests.reporting.test_html import page

GAIN = Estimate(value=0.31, low=0.2, high=0.4, unit="of the training time", basis="calibrated")
FOUND = Bottleneck(
    bound_by="arithmetic",
    sentence="Arithmetic bounds this run: products take 58 % of the training time.",
    shares=(
        Share(what="arithmetic", value=120.0),
        Share(what="memory bandwidth", value=60.0),
        Share(what="data", value=20.0),
    ),
    achieved=(
        Achieved(what="bf16 arithmetic", value=2.5e11, unit="FLOP/s", ceiling=4.3e11),
        Achieved(what="memory traffic", value=9e10, unit="bytes/s", ceiling=6e10),
        Achieved(what="fp32 arithmetic", value=1e9, unit="FLOP/s"),
    ),
    mfu=0.58,
    evidence=("an update takes 344 ms",),
    advice="Take a larger batch.",
    gain=GAIN,
)
TABLE = KernelTable(
    device="cpu",
    first_update=5,
    updates=5,
    kernels=(
        Kernel(
            operation="mkldnn_convolution",
            where="net.py:7 forward, Conv2d",
            phase="forward",
            calls=20,
            host_s=0.3,
            device_s=0.0,
            flops_per_s=2.5e11,
        ),
        Kernel(operation="add_", where="", phase="backward", calls=1500, host_s=0.1, device_s=0.0),
    ),
    peak_bytes=300 * 2**20,
    peak_shares=(Share(what="relu", value=200.0 * 2**20, where="net.py:7 forward"),),
    files={"trace": "run.5.pt.trace.json", "kernels": "kernels.csv"},
)


class Written(list[str]):
    """A stream that keeps its lines."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        self.append(text.rstrip("\n"))

    def flush(self) -> None:
        """Nothing is held back."""


def finished(**fields: Any) -> Event:
    """The end of a run."""
    return Event(kind="finished", at=1.0, fields={"samples": 10, "wall_s": 1.0, "metrics": {}, "report": "r", **fields})


def test_the_page_shows_the_verdict_its_picture_and_the_one_change() -> None:
    """With what was reached of what the device reaches; what is above it is explained, what is unknown said."""
    text = page(dataclasses.replace(story.report(story.whole_run()), bottleneck=FOUND)).text
    for expected in (
        "What holds the run back",
        FOUND.sentence,
        "60.0 %",
        "30.0 %",
        "250 GFLOP/s of 430 GFLOP/s measured, 58 %",
        "caches serve what memory could not",
        "1 GFLOP/s; the ceiling was not measured",
        "Take a larger batch. Saves about 31 % of the training time (20 to 40 %, calibrated).",
        "an update takes 344 ms",
    ):
        assert expected in text


def test_a_page_without_a_verdict_has_no_section_of_it() -> None:
    """As of runs that were not finished, or are older."""
    assert "What holds the run back" not in page(story.report(story.whole_run())).text


def test_an_impossible_utilisation_is_on_the_page() -> None:
    """In words, without a figure of it."""
    found = dataclasses.replace(FOUND, mfu=None, achieved=(), problems=("That cannot be.",))
    text = page(dataclasses.replace(story.report(story.whole_run()), bottleneck=found)).text
    assert "That cannot be." in text
    assert "MFU" not in text


def test_the_page_shows_the_top_of_the_table_and_leads_to_the_files() -> None:
    """Links are relative: the run's directory may be moved as a whole."""
    found = page(dataclasses.replace(story.report(story.whole_run()), kernels=TABLE))
    assert found.references == ["profile/run.5.pt.trace.json", "profile/kernels.csv"]
    odd = dataclasses.replace(TABLE, files={"trace": "run#2 50%.json"})
    found = page(dataclasses.replace(story.report(story.whole_run()), kernels=odd))
    assert found.references == ["profile/run%232%2050%25.json"]
    for expected in (
        "mkldnn_convolution",
        "net.py:7 forward, Conv2d",
        "75.0 %",
        "250 GFLOP/s",
        "1,500",
        "Updates 6 to 10",
        "At its peak, 300.0 MiB",
        "200.0 MiB relu (net.py:7 forward)",
        "ui.perfetto.dev",
    ):
        assert expected in found.text


def test_names_from_users_are_escaped() -> None:
    """A file of the user's may be called anything."""
    evil = Kernel(operation="<b>", where="<script>", phase="forward", calls=1, host_s=1.0, device_s=0.0)
    html = render_html(
        dataclasses.replace(story.report([]), kernels=dataclasses.replace(TABLE, kernels=(evil,)), bottleneck=FOUND)
    )
    assert "&lt;script&gt;" in html
    assert "<td><b>" not in html


def test_every_bound_has_a_colour_of_its_own() -> None:
    """The picture distinguishes them, by colours that the page has."""
    assert set(BOUND_COLOURS) == set(get_args(Bound))
    assert len(set(BOUND_COLOURS.values())) == len(BOUND_COLOURS)
    assert set(BOUND_COLOURS.values()) <= set(COLOURS)


def test_the_terminal_says_it_when_the_run_ends() -> None:
    """The plain display and the live one's closing lines: sentence with MFU, the change with its gain, the files."""
    event = finished(bottleneck=to_json(FOUND), profile={"folder": "runs/a/profile", "files": TABLE.files})
    written = Written()
    PlainDisplay(written)(event)
    assert f"{FOUND.sentence} MFU 58 % of the measured ceiling." in written
    assert any(line.startswith("Take a larger batch. Saves about 31 %") for line in written)
    assert any("runs/a/profile/run.5.pt.trace.json (open at ui.perfetto.dev" in line for line in written)
    assert RunSnapshot().after(event).verdict == tuple(closing_lines(event))
    told = summary_lines(dataclasses.replace(story.report(story.whole_run()), bottleneck=FOUND))
    assert told[-2:] == closing_lines(event)[:2]


@pytest.mark.parametrize("fields", [{}, {"bottleneck": None, "profile": None}])
def test_a_run_without_a_verdict_ends_as_before(fields: dict[str, Any]) -> None:
    """Nothing is said of what is unknown."""
    assert closing_lines(finished(**fields)) == []


def test_what_is_unknown_is_said_quietly() -> None:
    """A verdict is in large type; that there is none is a note."""
    unknown = dataclasses.replace(FOUND, bound_by="unknown", sentence="What bounds this run is unknown.", gain=None)
    known, quiet = (
        render_html(dataclasses.replace(story.report(story.whole_run()), bottleneck=one)) for one in (FOUND, unknown)
    )
    assert f'<p class="level"><strong>{FOUND.sentence}' in known
    assert '<p class="note">What bounds this run is unknown.' in quiet
    assert '<p class="advice">' in known
    assert '<p class="advice">' not in quiet
