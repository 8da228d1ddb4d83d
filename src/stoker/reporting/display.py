"""Displays of runs, studies and predictions: live in a terminal or a notebook, plain lines, or one JSON object a line.

A display is a sink for events: it is called with each one, shows it, and decides nothing about training. What it writes
to may vanish (a closed terminal, `| head`); it then falls silent, and training goes on. IPython is never imported; it
is used only where a notebook has loaded it already.
"""

from __future__ import annotations

import abc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Literal, Self, TextIO, TypeVar, cast

import rich.control
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from stoker import activity
from stoker.records import Event, Report, to_json
from stoker.records.prediction import PredictionEvent
from stoker.reporting import pages
from stoker.reporting.event_text import AnyEvent, describe_event, event_lines
from stoker.reporting.panel import RunSnapshot, closing, frame, permanent_lines, trying_words
from stoker.reporting.rank_section import rank_lines
from stoker.reporting.summary import summary_lines
from stoker.reporting.wording import format_metrics, format_samples
from stoker.units import format_rate, format_seconds

REDRAWS_PER_S = 2.0
"""How often the live display is drawn [1/s]; each drawing costs a few milliseconds of one core."""

LINES_EVERY_S = 10.0
"""Time between two lines on what goes on [s]."""


E_contra = TypeVar("E_contra", bound=AnyEvent, contravariant=True)


class Display(abc.ABC, Generic[E_contra]):
    """A sink for events that shows them to someone; close it, or use it as a context manager."""

    @abc.abstractmethod
    def __call__(self, event: E_contra) -> None:
        """Show what happened."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was found; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonDisplay(Display[AnyEvent]):
    """One JSON object a line, flushed: `{"event": kind, "at": seconds since 1970, ...the event's fields}`.

    Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = _Outlet(stream)

    def __call__(self, event: AnyEvent) -> None:
        """Write the event as a line."""
        fields = {name: value for name, value in event.fields.items() if name not in ("event", "at")}
        document = to_json({"event": event.kind, "at": event.at, **fields})
        self._stream.write_line(json.dumps(document, allow_nan=False))

    def close(self) -> None:
        """Nothing is held back: every line was flushed."""


class PlainDisplay(Display[AnyEvent]):
    """Lines of text for each notable event, and for progress at most every `LINES_EVERY_S` seconds of the run.

    With `looks`, a thread writes a line on what takes more than a second, and again as often.
    """

    def __init__(self, stream: TextIO, *, looks: bool = False) -> None:
        self._stream = _Outlet(stream)
        self._shown_at = float("-inf")
        self._looking = _Repeating(ActivityLines(self._stream.write_line)) if looks else None

    def __call__(self, event: AnyEvent) -> None:
        """Write lines if the event is worth them; a prediction's first progress comes after `LINES_EVERY_S` too."""
        if event.kind in ("checkpointed", "logged"):
            return
        if event.kind == "progress" and event.at - self._shown_at < LINES_EVERY_S:
            return
        if event.kind == "progress" or (event.kind == "started" and isinstance(event, PredictionEvent)):
            self._shown_at = event.at
        with _DRAWING:
            for line in event_lines(event):
                self._stream.write_line(line)

    def close(self) -> None:
        """Nothing is held back: every line was flushed."""
        if self._looking is not None:
            self._looking.stop()


class ActivityLines:
    """Writes what takes more than a second as lines, when it is called: one at first, then every `LINES_EVERY_S`.

    What comes again and again, such as slow updates, is written as often as if it were one.

    Args:
        write: writes a line.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._known, self._written_s = "", 0.0

    def __call__(self) -> None:
        """Write a line if one is due."""
        now, text, current = self._clock(), activity.in_words(self._clock), activity.outermost()
        if text is None or current is None:
            return
        if current.what == self._known and now - self._written_s < LINES_EVERY_S:
            return
        self._known, self._written_s = current.what, now
        self._write(f"{text[0].upper()}{text[1:]} …")


@contextmanager
def waiting(what: str, console: Console) -> Iterator[None]:
    """Within the block, shows on `console` what is being done, as a line with a clock, or as plain lines."""
    with activity.doing(what):
        if console.is_terminal and not console.is_dumb_terminal:
            with console.status(_Clocked(what)):
                yield
            return
        outlet = _Outlet(cast("TextIO", console.file))
        looking = _Repeating(ActivityLines(outlet.write_line))
        try:
            yield
        finally:
            looking.stop()


class _Clocked:
    """The current activity, each time it is drawn."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __rich__(self) -> Text:
        return Text(f"{activity.in_words() or self._what} …")


class BarDisplay(Display[PredictionEvent]):
    """A bar that grows with the rows of a prediction; lines that stay stand above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("", total=None, visible=False)

    def __call__(self, event: PredictionEvent) -> None:
        """Let the bar grow, or print the event's lines."""
        if event.kind == "progress":
            fields = event.fields
            text = f"{format_rate(fields['rows_per_s'], 'rows')}, {fields['bad_rows']:,} bad"
            self._progress.update(
                self._task,
                completed=fields["rows"],
                total=fields["total_rows"],
                description=text,
                visible=True,
                refresh=True,
            )
            return
        if event.kind == "finished":
            self._progress.update(self._task, visible=False)
        self._console.print("\n".join(event_lines(event)), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


class LiveDisplay(Display[Event]):
    """A panel that is redrawn in place, with a permanent line above it for what should stay readable.

    Args:
        console: where to draw; for people, so on standard error.
        clock: seconds since 1970, as in `Event.at`; the time to go counts down by it between events.
        redraws: whether a thread redraws twice a second; without, the panel changes only with events.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.time, redraws: bool = True) -> None:
        self._console = console
        self._clock = clock
        self._snapshot = RunSnapshot(at=clock())
        self._is_closed = False
        console.on_broken_pipe = self._fall_silent  # type: ignore[method-assign]  # rich's own would exit the process
        self._live = Live(
            console=console,
            get_renderable=lambda: frame(self._snapshot, self._clock()),
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what a job prints lands above the panel, and still in a pipe
        )
        self._live.start(refresh=True)
        self._redrawing = _Repeating(self._live.refresh) if redraws else None

    def __call__(self, event: Event) -> None:
        """Fold the event into the panel, and print its permanent line if it has one."""
        if self._is_closed:
            return
        self._snapshot = self._snapshot.after(event)
        with _DRAWING:
            for line in permanent_lines(event):
                self._console.print(line)
            if self._redrawing is None:
                self._live.refresh()
        if self._snapshot.is_over:
            self.close()

    def close(self) -> None:
        """Take the panel away; a run that ended leaves its closing lines in its place."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._redrawing is not None:
            self._redrawing.stop()
        self._live.stop()
        if self._snapshot.is_over:
            self._console.print(closing(self._snapshot))

    def _fall_silent(self) -> None:
        self._console.quiet = True


def choose_display(
    *,
    subject: Literal["run", "study", "prediction"] = "run",
    as_json: bool = False,
    stdout: TextIO = sys.stdout,
    console: Console | None = None,
) -> Display[Any]:
    """The display for where we are: JSON lines on standard output if asked for, else live or plain on `console`.

    By default that is standard error. Lines are all there is of a study, whose trials run for hours.
    """
    if as_json:
        return JsonDisplay(stdout)
    if console is None and (notebook := notebook_display()) is not None:
        return notebook
    console = Console(stderr=True) if console is None else console
    if subject == "study" or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(cast("TextIO", console.file), looks=True)
    return LiveDisplay(console) if subject == "run" else BarDisplay(console)


_CONTROLS = dict.fromkeys((0x1B, *range(0x7F, 0xA0)))
"""ESC and its like: in a file name or a message they would be commands to the terminal."""
getattr(rich.control, "_CONTROL_STRIP_TRANSLATE", {}).update(_CONTROLS)  # Rich itself leaves ESC in texts

_DRAWING = threading.RLock()
"""Held while something is drawn, and while a process is forked: no worker may be born holding the terminal."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


class _Repeating(threading.Thread):
    """Draws again and again until stopped."""

    def __init__(self, draw: Callable[[], None]) -> None:
        super().__init__(name="stoker-display", daemon=True)
        self._draw = draw
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(1 / REDRAWS_PER_S):
            with _DRAWING:
                if not self._is_over.is_set():
                    self._draw()

    def stop(self) -> None:
        self._is_over.set()
        self.join()


class _Outlet:
    """A text stream that may be closed by its reader: from then on writing to it does nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def write_line(self, line: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            shown = line.translate(_CONTROLS)
            self._stream.write(shown.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # it has no reader, it cannot be written, or it was closed on our side
            stream, self._stream = self._stream, None
            # What is still buffered goes nowhere, so that Python's flush at exit does not complain of the pipe again.
            with suppress(OSError, ValueError):  # a stream without a descriptor has no flush at exit to fear
                descriptor = stream.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


Show = Callable[[str], None]
"""Puts HTML in the place of what it showed before."""

_EVERY_S = 0.5
_MOST_LINES = 8
_QUIET = frozenset({"progress", "checkpointed", "logged"})


class NotebookDisplay(Display[Event]):
    """A sink that keeps one piece of HTML below a cell up to date: how far a run is, and what happened.

    Args:
        show: puts HTML in the place of what it showed before.
        clock: seconds since 1970, as in `Event.at`.
    """

    def __init__(self, show: Show, *, clock: Callable[[], float] = time.time) -> None:
        self._show, self._clock = show, clock
        self._snapshot = RunSnapshot()
        self._lines: list[str] = []
        self._shown_at = float("-inf")

    def __call__(self, event: Event) -> None:
        """Take the event in; show it at once, or with the next one where it is one of many."""
        self._snapshot = self._snapshot.after(event)
        if event.kind not in _QUIET:
            self._lines.append(describe_event(event))
        if event.kind in _QUIET and self._clock() - self._shown_at < _EVERY_S:
            return
        self._shown_at = self._clock()
        self._show(_page(self._snapshot, self._lines))

    def close(self) -> None:
        """Nothing is left to do: the last output stays."""


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
    return pages.render("notebook", lines=[*summary_lines(report), *rank_lines(report)])


def _page(now: RunSnapshot, lines: list[str]) -> str:
    rows = [
        ("done", f"{100 * now.fraction:.1f} % · {format_samples(now.samples)} samples"),
        ("loss", "" if now.loss is None else f"{now.loss:.4g}"),
        ("best on valid", format_metrics(now.best)),
        ("rate", "" if not now.samples_per_s else format_rate(now.samples_per_s)),
        ("time", "" if not now.wall_s else format_seconds(now.wall_s)),
        ("trying plans", trying_words(now) if now.trying else ""),
    ]
    return pages.render("notebook_live", now=now, rows=rows, lines=lines[-_MOST_LINES:])
