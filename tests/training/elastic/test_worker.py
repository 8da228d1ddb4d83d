from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired
from stoker.training.elastic.worker import SupervisedWorker
from stoker.training.elastic.worker_pool import Message, MessageChannel


class Ends:
    """A member, and the supervisor's end of its channel; `is_orphan` is set when the member finds itself alone."""

    def __init__(self) -> None:
        mine, theirs = map(MessageChannel, socket.socketpair())
        self.is_orphan = threading.Event()
        self.channel, self.theirs = mine, theirs
        self.member = SupervisedWorker(3, theirs, "127.0.0.1", 1, orphaned=self.is_orphan.set)
        self._heard: Iterator[Message] = (one for one in mine.messages() if one["kind"] != "alive")

    def hear(self) -> Message:
        return next(self._heard)

    def announce(self, number: int) -> None:
        self.channel.send("meeting", number=number, rank=1, size=2, notes={"update": 7}, num_veterans=1)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends; the member hears of the end before the test is over."""
    both = Ends()
    yield both
    both.channel._end.shutdown(socket.SHUT_RDWR)
    both.channel.close()
    assert both.is_orphan.wait(60.0)
    both.theirs.close()


def test_a_member_says_that_it_lives_and_comes(ends: Ends) -> None:
    """It shows life before anything is asked, and gets its place in a generation."""
    ends.announce(1)
    meeting = ends.member.meet()
    assert meeting == Rendezvous(number=1, rank=1, size=2, name="1", notes={"update": 7}, num_veterans=1)
    assert ends.hear() == {"kind": "meet"}
    assert (ends.member.worker, ends.member.can_reform) == (3, True)
    ends.member.event("{}")
    ends.member.finished()
    assert [ends.hear(), ends.hear()] == [{"kind": "event", "line": "{}"}, {"kind": "finished"}]


def test_a_call_holds_until_the_next_generation(ends: Ends) -> None:
    """It is for the generation that it ends; one that comes with the next announcement is for that one."""
    ends.announce(1)
    ends.member.meet()
    assert not ends.member.is_called()
    ends.channel.send("called")
    ends.announce(2)
    ends.member.lost("called", {"update": 8})
    assert not ends.member.is_called()
    ends.announce(3)
    ends.channel.send("called")
    assert ends.member.lost("a socket closed").number == 3
    while not ends.member.is_called():
        pass
    told = [ends.hear() for _ in range(3)]
    assert told[1] == {"kind": "lost", "generation": 1, "why": "called", "notes": {"update": 8}}
    assert told[2] == {"kind": "lost", "generation": 2, "why": "a socket closed", "notes": {}}


def test_whoever_is_dismissed_stays_so(ends: Ends) -> None:
    """With the run's exit code, and however often it asks."""
    ends.channel.send("dismissed", code=4)
    for _ in range(2):
        with pytest.raises(WorkerRetired) as caught:
            ends.member.meet()
        assert caught.value.exit_code == 4
    assert ends.member.is_called()


def test_what_was_asked_for_is_done_when_the_generation_breaks(ends: Ends) -> None:
    """At once, in the thread that hears of it, and before the next generation is known; not for a mere call."""
    done: list[str] = []
    ends.member.on_broken(lambda: done.append("aborted"))
    ends.announce(1)
    ends.member.meet()
    ends.channel.send("called", is_broken=False)
    ends.announce(2)
    ends.member.lost("called")
    assert done == []
    ends.channel.send("called", is_broken=True)
    ends.announce(3)
    ends.member.lost("a socket closed")
    assert done == ["aborted"]


def test_a_group_made_while_the_generation_breaks_is_cut_as_well(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the news comes before the group is made or after it; the store's own connection stays."""
    monkeypatch.setattr(SupervisedWorker, "store", None)
    ends.announce(1)
    ends.member.meet()
    with ends.member.joining():
        early = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(early.getsockname())
        theirs, _ = early.accept()
    ends.channel.send("called", is_broken=True)
    assert (mine.recv(1), theirs.recv(1)) == (b"", b"")
    with ends.member.joining():
        late = socket.create_connection(early.getsockname())
    assert late.recv(1) == b""
    for end in (early, mine, theirs, late):
        end.close()
