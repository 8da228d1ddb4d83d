"""A function in a process of its own: what it returns, says and raises arrives here, and how it ended."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadArtifact, BadJob
from stoker.store.child_process import ChildProcess, Raised, require_picklable


class Unusual(BadArtifact):
    """Takes other arguments than it keeps, so that it cannot be unpickled."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{number} {word}", remedy="Mend it.")


def counted(values: list[int]) -> int:
    """How many values there are; prints them."""
    print(values)
    return len(values)


def refusing(_word: str) -> None:
    """An error of Stoker's, of a class of its own."""
    raise Unusual(3, "things")


def broken(_word: str) -> None:
    """Any other error."""
    raise ZeroDivisionError("not\nby nought")


def killed(_word: str) -> None:
    """Ends without a message."""
    os.kill(os.getpid(), signal.SIGKILL)


def doubling(number: int, pipe: Connection) -> str:
    """Asks for the double of a number, and says what it got."""
    pipe.send(number)
    return f"got {pipe.recv()}"


def last_message(function: Any, argument: Any) -> Any:
    """What a function's process sends in the end."""
    process = ChildProcess(function, argument, name="test")
    try:
        return process.receive()
    finally:
        process.close()


def test_a_result_arrives_and_what_is_printed_is_kept(tmp_path: Path) -> None:
    """On the CPUs it was given, with its output in a file."""
    cpu = min(os.sched_getaffinity(0))
    process = ChildProcess(counted, [4, 5], name="test", cpus={cpu}, output=tmp_path / "out.txt")
    assert process.receive() == 2
    assert process.receive() is None
    process.close()
    assert (tmp_path / "out.txt").read_text() == "[4, 5]\n"


def test_an_error_arrives_as_the_class_that_travels(capfd: pytest.CaptureFixture[str]) -> None:
    """A StokerError with its message and remedy; any other in words, its traceback on the standard error."""
    error = last_message(refusing, "")
    assert (type(error), error.message, error.remedy) == (BadArtifact, "3 things", "Mend it.")
    assert last_message(broken, "") == Raised("ZeroDivisionError: not")
    assert "Traceback" in capfd.readouterr().err


def test_how_it_ended_is_said_where_it_sent_nothing() -> None:
    """A signal by its name; another cause than memory, if the kernel counted none."""
    process = ChildProcess(killed, "", name="test")
    assert process.receive() is None
    assert process.ending() == (False, "was killed by SIGKILL")
    process.close()


def test_it_asks_and_is_answered() -> None:
    """Messages go both ways before the last one."""
    process = ChildProcess(doubling, 21, name="test", talks=True)
    process.answer(2 * process.receive())
    assert process.receive() == "got 42"
    process.close()


def test_what_no_process_can_be_given_is_refused() -> None:
    """A lambda has no name to import it by."""
    with pytest.raises(BadJob, match="cannot be given to another process"):
        require_picklable(lambda: None)
