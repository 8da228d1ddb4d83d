from __future__ import annotations

import os

from stoker.training.elastic.worker_pool import OutputRelay, WorkerOutput


def test_lines_come_whole_whatever_the_pieces() -> None:
    """A line is reported when it is complete; what has no end of line, at the end."""
    mine, theirs = os.pipe()
    printed = WorkerOutput(mine)
    os.write(theirs, "ein Wört".encode()[:-3])
    assert printed.pending() == ([], True)
    os.write(theirs, b"\xb6rt\nzwei\ndr")
    assert printed.pending() == (["ein Wört", "zwei"], True)
    os.close(theirs)
    assert printed.pending() == (["dr"], False)
    assert list(printed.last) == ["ein Wört", "zwei", "dr"]
    os.close(mine)


def test_the_rest_is_read_without_waiting_for_the_end() -> None:
    """Children of a worker may hold its output open: what is there is taken, also without an end of line."""
    mine, theirs = os.pipe()
    printed = WorkerOutput(mine)
    os.write(theirs, b"one\ntw")
    assert printed.rest() == ["one", "tw"]
    os.close(theirs)
    os.close(mine)


def test_the_same_is_not_shown_twice() -> None:
    """Another worker's lines are shown, all of them and under its name, only if one of them is new."""
    shown: list[str] = []
    speaker = OutputRelay(shown.append)
    speaker.say(["a", "b"])
    speaker.add("worker 1", ["b", "", "a"])
    speaker.add("worker 2", ["a", "c"])
    speaker.add("worker 3", ["a", "c"])
    assert shown == ["a", "b", "worker 2", "a", "c"]
