"""A run in a notebook."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from stoker.records import Event
from stoker.reporting.display import NotebookDisplay, choose_display, notebook_display, run_html
from stoker.testing import FakeClock
from tests.reporting import story
from tests.reporting.test_html import Page
from tests.reporting.test_merged_ranks import pair
from tests.reporting.test_rank_section import with_ranks


class Kernel:
    """As much of IPython as is asked for: what was displayed, and what it was updated to."""

    def __init__(self, *, has_kernel: bool = True) -> None:
        self.shown: list[str] = []
        shell = types.SimpleNamespace(kernel=object()) if has_kernel else types.SimpleNamespace()
        handle = types.SimpleNamespace(update=self.shown.append)
        self.module: Any = types.ModuleType("IPython")
        self.module.get_ipython = lambda: shell
        self.module.display = types.SimpleNamespace(
            HTML=str, display=lambda content, display_id: self._first(content, handle) if display_id else None
        )

    def _first(self, content: str, handle: object) -> object:
        self.shown.append(content)
        return handle


def test_a_run_is_shown_in_one_place_below_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Well-formed at every moment; what happened stays readable; closing leaves the last of it."""
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", kernel.module)
    display = choose_display()
    assert isinstance(display, NotebookDisplay)
    with display:
        for event in story.whole_run():
            display(event)
    assert all(Page(shown).open == [] for shown in kernel.shown)
    last = Page(kernel.shown[-1]).text
    assert story.NAME in last
    assert "100.0 %" in last
    assert "finished 324,000 samples" in last


def test_progress_is_shown_at_most_twice_a_second() -> None:
    """Everything else at once."""
    shown: list[str] = []
    clock = FakeClock()
    display = NotebookDisplay(shown.append, clock=clock)
    events = story.whole_run()
    progress = [event for event in events if event.kind == "progress"]
    for event in progress[:5]:
        display(event)
    assert len(shown) == 1
    clock.advance(0.6)
    display(progress[5])
    display(next(event for event in events if event.kind == "evaluated"))
    assert len(shown) == 3


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without IPython, nor in its terminal."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_display() is None
    monkeypatch.setitem(sys.modules, "IPython", Kernel(has_kernel=False).module)
    assert notebook_display() is None


def test_a_run_shows_its_summary() -> None:
    """In a few lines, escaped."""
    page = Page(run_html(story.report(story.whole_run())))
    assert page.open == []
    assert story.NAME in page.text
    assert "Processes do work of their own" not in page.text


def test_a_run_on_several_processes_shows_how_far_they_paid() -> None:
    """The verdict about them, after what came of the run."""
    page = Page(run_html(with_ranks(pair())))
    assert "Processes do work of their own" in page.text


def test_a_run_of_any_name_is_escaped() -> None:
    """In the summary, and in what is shown while it trains."""
    evil = "<script>alert(1)</script>"
    shown: list[str] = []
    display = NotebookDisplay(shown.append, clock=FakeClock())
    display(Event(kind="planned", at=0.0, fields={"run": evil, "plan": evil}))
    for made in (*shown, run_html(story.report([], name=evil))):
        assert "&lt;script&gt;" in made
        assert "<script" not in made
