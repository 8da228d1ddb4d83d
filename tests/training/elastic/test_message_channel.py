from __future__ import annotations

import socket

from stoker.training.elastic.worker_pool import MessageChannel


def test_messages_arrive_whole_and_in_order() -> None:
    """However many at once, and however large."""
    mine, theirs = map(MessageChannel, socket.socketpair())
    assert mine.pending() == ([], True)
    for number in range(3):
        assert theirs.send("event", line="x\n" * 10_000, number=number)
    messages, is_open = mine.pending()
    assert ([one["number"] for one in messages], is_open) == ([0, 1, 2], True)
    assert messages[0] == {"kind": "event", "line": "x\n" * 10_000, "number": 0}
    theirs.close()
    assert mine.pending() == ([], False)
    mine.close()


def test_what_was_sent_before_the_end_is_heard() -> None:
    """The last messages of a process that died are not lost, and have no answer."""
    mine, theirs = map(MessageChannel, socket.socketpair())
    theirs.send("finished")
    theirs.close()
    assert [one["kind"] for one in mine.messages()] == ["finished"]
    assert not mine.send("called")
    mine.close()
