"""Displays of a run while it happens."""

import io
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from stoker.records import Event
from stoker.reporting import display as display_module
from stoker.reporting.display import Display, JsonDisplay, LiveDisplay, PlainDisplay, choose_display
from tests.reporting import story


class Clock:
    """A clock that stands where it was set, in seconds since 1970."""

    def __init__(self, now: float = story.START_S) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    """A terminal that keeps what was written to it."""
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, color_system=None, width=width, _environ={}), stream


def without_controls(text: str) -> str:
    """The text without the terminal's control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def broken_pipe() -> io.TextIOWrapper:
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def test_json_is_one_object_a_line_with_kind_and_time() -> None:
    """Every event is there in order, with all its fields, and nothing else."""
    stream = io.StringIO()
    events = story.killed_and_resumed()
    with JsonDisplay(stream) as display:
        for event in events:
            display(event)
    documents = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(d.pop("event"), d.pop("at")) for d in documents] == [(event.kind, event.at) for event in events]
    assert documents == [event.fields for event in events]


def test_json_lines_are_ascii_and_strict() -> None:
    """A loss that is not finite is a string that any JSON reader reads; line separators in texts are escaped."""
    stream = io.StringIO()
    JsonDisplay(stream)(Event(kind="warned", at=1.0, fields={"message": "µ\u2028\n", "loss": float("nan")}))
    line = stream.getvalue()
    assert line.isascii()
    assert line.count("\n") == 1
    assert json.loads(line, parse_constant=pytest.fail) == {
        "event": "warned",
        "at": 1.0,
        "message": "µ\u2028\n",
        "loss": "nan",
    }


def test_a_reader_that_left_does_not_stop_training() -> None:
    """Writing to a broken pipe is given up quietly, also when the stream is closed at the end."""
    for display_class in (JsonDisplay, PlainDisplay):
        stream = broken_pipe()
        with display_class(stream) as display:
            for event in story.young_run():
                display(event)
        stream.close()


def test_a_process_whose_output_is_cut_off_ends_well() -> None:
    """`stoker train --json | head -1` ends with exit code 0 and no complaint at exit."""
    code = (
        "import sys\nfrom stoker.reporting.display import JsonDisplay\nfrom stoker.records import Event\n"
        "display = JsonDisplay(sys.stdout)\nsys.stdin.readline()\n"
        "for n in range(9): display(Event(kind='warned', at=0.0, fields={'message': 'x' * 9000}))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        child.stdin.write(b"go\n")
        child.stdin.close()
        complaints = child.stderr.read()
        assert child.wait(timeout=60) == 0
    assert complaints == b""


def test_plain_lines_are_few_and_say_the_same() -> None:
    """Progress at most every ten seconds of the run; everything notable; checkpoints not."""
    stream = io.StringIO()
    events = story.whole_run()
    with PlainDisplay(stream) as display:
        for event in events:
            display(event)
    lines = stream.getvalue().splitlines()
    progress = [line for line in lines if "to go" in line]
    assert 20 <= len(progress) <= 26
    assert sum(line.startswith("valid at") for line in lines) == 6
    assert not any("checkpoint at" in line for line in lines)
    assert "  channels-last: convolutions run 12 % faster than contiguous" in lines
    assert lines[-1] == f"report: runs/{story.NAME}/report.html"
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_reach_a_stream_that_knows_no_unicode() -> None:
    """A log in ASCII gets question marks instead of no line."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainDisplay(stream)(story.whole_run()[0])
    assert b"bf16 ? micro-batch 512" in raw.getvalue()


def test_the_live_panel_follows_the_run_and_leaves_the_result() -> None:
    """While it runs the panel counts; at the end only permanent lines and the result remain."""
    console, stream = terminal()
    clock = Clock()
    with LiveDisplay(console, clock=clock, redraws=False) as display:
        for event in story.killed_and_resumed():
            clock.now = event.at
            display(event)
    text = without_controls(stream.getvalue())
    assert "162,000 of 324,000 samples" in text
    assert "resumed at 135,648 samples" in text
    assert "another process is using 40 % of the CPU" in text
    closing = text[text.rindex("✓") :]
    assert "test accuracy 92.61 %" in closing
    assert "of 324,000 samples" not in closing
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_an_exception_while_live_gives_the_cursor_back() -> None:
    """The terminal is left as it was found, and the exception goes on."""
    console, stream = terminal()

    def training() -> None:
        with LiveDisplay(console, redraws=False) as display:
            display(story.whole_run()[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training()
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_the_panel_is_redrawn_between_events() -> None:
    """The clock goes on while nothing happens; the thread ends with the display."""
    drawn = threading.Event()

    class Watched(Clock):
        calls = 0

        def __call__(self) -> float:
            if threading.current_thread().name == "stoker-display":
                drawn.set()
            return super().__call__()

    console, _ = terminal()
    before = set(threading.enumerate())
    with LiveDisplay(console, clock=Watched()) as display:
        display(story.whole_run()[1])
        assert drawn.wait(timeout=60)
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_while_drawing_can_draw() -> None:
    """A loader worker born in the middle of a drawing does not find the terminal locked for ever."""
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            with display_module._DRAWING:
                sum(range(20_000))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if display_module._DRAWING.acquire(timeout=60) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_over.set()
        thread.join()


def test_a_terminal_that_closed_does_not_stop_training() -> None:
    """Rich would exit the process on a broken pipe; the display falls silent instead."""
    stream = broken_pipe()
    console = Console(file=stream, force_terminal=True, width=100, _environ={})
    with LiveDisplay(console, redraws=False) as display:
        for event in story.whole_run():
            display(event)
    assert console.quiet
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_closing_twice_and_speaking_after_the_end_are_harmless() -> None:
    """A sink may hear of an event after the run is over."""
    console, stream = terminal()
    display = LiveDisplay(console, redraws=False)
    for event in story.whole_run():
        display(event)
    display.close()
    length = len(stream.getvalue())
    display(story.whole_run()[0])
    display.close()
    assert len(stream.getvalue()) == length


@pytest.mark.parametrize(
    ("as_json", "is_terminal", "environment", "expected"),
    [
        (True, True, {}, JsonDisplay),
        (False, True, {"TERM": "xterm"}, LiveDisplay),
        (False, True, {"TERM": "dumb"}, PlainDisplay),
        (False, False, {}, PlainDisplay),
    ],
)
def test_the_display_fits_the_place(
    as_json: bool, is_terminal: bool, environment: dict[str, str], expected: type[Display]
) -> None:
    """JSON if asked for, the panel in a terminal, plain lines elsewhere."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, _environ=environment)
    with choose_display(as_json=as_json, stdout=io.StringIO(), console=console) as display:
        assert type(display) is expected
