"""A worker's side of the supervisor: it says that it lives, hears of generations, and dies with the supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stoker.errors import RunFailed
from stoker.launching.channel import Channel, Message
from stoker.launching.meeting import Dismissed, Meeting
from stoker.launching.stores import connect

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs

HEARTBEAT_S = 0.5
"""Time from one sign of life to the next [s]."""

_STORE_PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


class Supervised:
    """The link of a worker to the supervisor that started it.

    Args:
        worker: this one's number.
        channel: to the supervisor.
        host: where the store is.
        port: likewise.
        orphaned: called, in a thread, when the supervisor is gone: by default ends the process at once.
    """

    can_reform = True
    patience_s: float | None = None  # nobody states one: the supervisor notices who is lost

    def __init__(
        self, worker: int, channel: Channel, host: str, port: int, orphaned: Callable[[], None] | None = None
    ) -> None:
        self.worker, self._channel, self._address = worker, channel, (host, port)
        self._orphaned = orphaned or _end_at_once
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._called, self._broken = threading.Event(), threading.Event()
        self._secret: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._verdict: int | None = None
        self._act: Callable[[], None] | None = None
        self._number = 0
        for work in (self._beat, self._listen):
            threading.Thread(target=work, name=f"stoker-member-{work.__name__}", daemon=True).start()

    @classmethod
    def from_environment(cls, variable: str) -> Supervised:
        """The link that the supervisor described in the value of its variable."""
        about = json.loads(variable)
        die_with_parent()
        channel = Channel(socket.socket(fileno=about["descriptor"]))
        return cls(about["worker"], channel, about["host"], about["port"])

    @cached_property
    def store(self) -> Store:
        """The supervisor's store, sealed by the run's secret; a wait for a process that is lost ends."""
        from stoker.launching.sealed import Sealed  # noqa: PLC0415 - importing this package does not load PyTorch

        store = connect(*self._address, patience_s=_STORE_PATIENCE_S)
        return Sealed(store, bytes.fromhex(self._secret.get()), self._broken.is_set)

    def meet(self) -> Meeting:
        """Say that this worker is ready, and wait for a generation."""
        self._channel.send("meet")
        return self._next()

    def lost(self, why: str, notes: dict[str, Any]) -> Meeting:
        """Say that the generation is over, and wait for the next."""
        self._channel.send("lost", generation=self._number, why=why, notes=notes)
        return self._next()

    def is_called(self) -> bool:
        """Whether the supervisor wants the generation to end."""
        return self._called.is_set()

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Have something done at once when the generation breaks, or now if it is broken."""
        self._act = act
        if act is not None and self._broken.is_set():
            act()

    def event(self, line: str) -> None:
        """Send a line."""
        self._channel.send("event", line=line)

    def finished(self) -> None:
        """Say that all is done."""
        self._channel.send("finished")

    def _next(self) -> Meeting:
        if self._verdict is not None:
            raise Dismissed(self._verdict)
        answer = self._answers.get()
        if answer["kind"] == "dismissed":
            self._verdict = int(answer["code"])
            raise Dismissed(self._verdict)
        self._number = answer["number"]
        return Meeting(
            number=answer["number"], rank=answer["rank"], size=answer["size"], name=str(answer["number"]),
            notes=answer["notes"], num_veterans=answer["num_veterans"], age_s=answer.get("age_s", 0.0),
        )  # fmt: skip

    def _beat(self) -> None:
        pause = threading.Event()
        while self._channel.send("alive"):
            pause.wait(HEARTBEAT_S)

    def _listen(self) -> None:
        for message in self._channel.messages():
            if message["kind"] == "secret":
                self._secret.put(message["secret"])
            if message["kind"] in {"called", "dismissed"}:
                self._called.set()
            if message.get("is_broken") or message["kind"] == "dismissed":
                self._broken.set()
                if self._act is not None:
                    self._act()
            if message["kind"] == "meeting":  # here, where no call to the new generation can get lost
                self._called.clear()
                self._broken.clear()
            if message["kind"] in {"meeting", "dismissed"}:
                self._answers.put(message)
        self._orphaned()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it does."""
    with contextlib.suppress(OSError, AttributeError):  # without it, the closed channel says so a little later
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_at_once() -> None:
    """Nobody is left to tell, and nothing may be written beside whoever continues the run."""
    os._exit(RunFailed.exit_code)
