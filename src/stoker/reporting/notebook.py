"""A run in a notebook: a live table below its cell, and what a run shows when it is the last thing in one.

IPython is neither needed nor imported: it is asked only where a notebook has it loaded already.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from stoker.records import Event, Report
from stoker.reporting.display import Display
from stoker.reporting.markup import Markup, element, escaped, facts, joined
from stoker.reporting.rank_section import rank_lines
from stoker.reporting.snapshot import Snapshot
from stoker.reporting.summary import summary_lines
from stoker.reporting.telling import told
from stoker.reporting.wording import format_metrics, format_samples
from stoker.units import format_rate, format_seconds

Show = Callable[[str], None]
"""Puts HTML in the place of what it showed before."""

_EVERY_S = 0.5
_MOST_LINES = 8
_QUIET = frozenset({"progress", "checkpointed"})


class NotebookDisplay(Display):
    """A sink that keeps one piece of HTML below a cell up to date: how far a run is, and what happened.

    Args:
        show: puts HTML in the place of what it showed before.
        clock: seconds since 1970, as in `Event.at`.
    """

    def __init__(self, show: Show, *, clock: Callable[[], float] = time.time) -> None:
        self._show, self._clock = show, clock
        self._snapshot = Snapshot()
        self._lines: list[str] = []
        self._shown_at = float("-inf")

    def __call__(self, event: Event) -> None:
        """Take the event in; show it at once, or with the next one where it is one of many."""
        self._snapshot = self._snapshot.after(event)
        if event.kind not in _QUIET:
            self._lines.append(told(event))
        if event.kind in _QUIET and self._clock() - self._shown_at < _EVERY_S:
            return
        self._shown_at = self._clock()
        self._show(_page(self._snapshot, self._lines))

    def close(self) -> None:
        """What was shown last stays."""


def notebook_display() -> NotebookDisplay | None:
    """A display for the notebook that this code runs in; None where it is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is None or shell is None or not hasattr(shell, "kernel"):
        return None
    handles: list[Any] = []

    def show(page: str) -> None:
        content = ipython.display.HTML(page)
        if handles:
            handles[0].update(content)
        else:
            handles.append(ipython.display.display(content, display_id=True))

    return NotebookDisplay(show)


def run_html(report: Report) -> str:
    """A run in a few lines of HTML, for a notebook."""
    first, *others = [*summary_lines(report), *rank_lines(report)]
    lines = joined(element("div", escaped(line)) for line in others)
    return element("div", element("b", escaped(first)), lines)


def _page(now: Snapshot, lines: list[str]) -> Markup:
    rows = [
        ("done", f"{100 * now.fraction:.1f} % · {format_samples(now.samples)} samples"),
        ("loss", "" if now.loss is None else f"{now.loss:.4g}"),
        ("best on valid", format_metrics(now.best)),
        ("rate", "" if not now.samples_per_s else format_rate(now.samples_per_s)),
        ("time", "" if not now.wall_s else format_seconds(now.wall_s)),
    ]
    bar = element("progress", value=f"{now.fraction:.4f}", max="1", style="width:100%")
    happened = joined(element("div", escaped(line)) for line in lines[-_MOST_LINES:])
    listed = facts([(term, escaped(value)) for term, value in rows])
    return element("div", element("b", escaped(now.run or "stoker")), bar, listed, element("small", happened))
