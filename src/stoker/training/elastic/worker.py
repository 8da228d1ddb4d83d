"""A process of a run as it sees itself: which generation it belongs to, and what becomes of it.

A worker's side of the supervisor: it says that it lives, hears of generations, and dies with the supervisor.

Connections to other processes, cut so that nobody waits on them.

What: TCP connections that were opened within a block, such as those of a process group; cutting them makes a call that
waits on one fail at once, in this process and at the other end.
Use when: a generation is broken. Gloo tells only those that talk to the dead process directly; who talks to one of
these waits for all of its patience, since neither `destroy_process_group` nor `abort` closes connections (2.13.0).
Does not see: connections opened by another thread within the same block, which it takes for the group's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from stoker.errors import RunFailed
from stoker.training.elastic.rendezvous import FACTS_PATIENCE_S, LauncherLink, Rendezvous, WorkerRetired, require_same
from stoker.training.elastic.rendezvous_store import connect
from stoker.training.elastic.worker_pool import MEMBER_VARIABLE, Message, MessageChannel

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs


class GenerationLink(Protocol):
    """How a member reaches those that organise it; what each call does is said at Member."""

    worker: int
    can_reform: bool
    patience_s: float | None

    @property
    def store(self) -> Store:
        """See Member, as for all that follows."""
        ...

    def meet(self) -> Rendezvous:
        """Wait for the first generation."""
        ...

    def lost(self, why: str, notes: dict[str, Any]) -> Rendezvous:
        """Give the generation up, and wait for the next."""
        ...

    def is_called(self) -> bool:
        """Whether the generation is to end."""
        ...

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Have something done when the generation breaks."""
        ...

    def event(self, line: str) -> None:
        """Send a line."""
        ...

    def finished(self) -> None:
        """Say that all is done."""
        ...


class ElasticWorker:
    """This process, as a member of a run over several.

    Its calls are made in the thread that trains; `is_called` and `event` may be made in any.

    Attributes:
        worker: number of the process on its machine, which stays when ranks change: which device it takes.
        can_reform: whether there is another generation after one is lost, and somebody who hears events.
    """

    def __init__(self, link: GenerationLink) -> None:
        self._link = link
        self.worker, self.can_reform = link.worker, link.can_reform
        self._meeting: Rendezvous | None = None

    @classmethod
    def from_environment(cls) -> ElasticWorker | None:
        """The member that this process was started as, by a Supervisor or a launcher such as torchrun; None: neither.

        To be called early and once: from then on the supervisor hears that the process lives. What the supervisor said
        is taken out of the environment, so that children of this process do not take themselves for it.

        Raises:
            BadJob: a launcher's variables make no sense.
        """
        about = os.environ.pop(MEMBER_VARIABLE, None)
        link: GenerationLink | None = (
            LauncherLink.from_environment() if about is None else SupervisorLink.from_environment(about)
        )
        return None if link is None else cls(link)

    @property
    def store(self) -> Store:
        """Where the members of a generation find each other, under its name."""
        return self._link.store

    def meet(self) -> Rendezvous:
        """Wait for the generation that this process belongs to.

        Raises:
            RunFailed: somebody did not come; in one of the processes.
            Dismissed: likewise, in the others; or the run ended without this process.
        """
        self._meeting = self._link.meet()
        return self._meeting

    def lost(self, why: str, notes: dict[str, Any] | None = None) -> Rendezvous:
        """Say that the generation is over for this member, which has parted from it, and wait for the next.

        Args:
            why: a sentence; "called" where `is_called` was the reason.
            notes: what the next generation is to know, for JSON.

        Raises:
            Dismissed: this process is not in it any more.
            RunFailed: there is none, as `can_reform` says.
        """
        self._meeting = self._link.lost(why, notes or {})
        return self._meeting

    def is_called(self) -> bool:
        """Whether this generation is to end: at the next boundary of updates, `lost("called")`. Costs nothing."""
        return self._link.is_called()

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Have something done, in another thread, as soon as another member is known to be lost, or the run is over.

        For what does not notice by itself: NCCL waits for a dead peer until its patience is over, unless its group is
        aborted. It is done before the next generation is announced. None: nothing is done any more.
        """
        self._link.on_broken(act)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within the block a process group is made, whose connections are cut as soon as the generation is broken.

        So every member notices at once, also one that does not talk to the lost process itself. Takes the place of
        what `on_broken` was told before.
        """
        _ = self.store  # connected before the block: it is not to be cut
        with Connections() as connections:
            yield
        self._link.on_broken(connections.cut)

    def event(self, line: str) -> None:
        """Send a line to the supervisor, which gets them in order. Without a supervisor there is nobody to get it."""
        self._link.event(line)

    def finished(self) -> None:
        """Say that all is done here; of rank 0, that the run is."""
        self._link.finished()

    def require_same(self, facts: Mapping[str, str], *, patience_s: float = FACTS_PATIENCE_S) -> None:
        """Compare facts, such as versions and the job's digest, with those of all members of this generation.

        Every member calls it after each meeting, before anything else is done together.

        Args:
            facts: of this member, by name.
            patience_s: longest that they wait for each other's [s], where nobody stated how long for this meeting.

        Raises:
            BadJob: they differ; on rank 0.
            RunFailed: somebody did not tell its own; on rank 0.
            Dismissed: either, on the other ranks.
            RuntimeError: the generation broke meanwhile, as a collective call would say it: see `lost`.
        """
        assert self._meeting is not None, "meet first"
        stated_s = self._link.patience_s
        require_same(self.store, self._meeting, facts, patience_s=patience_s if stated_s is None else stated_s)


HEARTBEAT_S = 0.5
"""Time from one sign of life to the next [s]."""

_STORE_PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


class SupervisorLink:
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
        self, worker: int, channel: MessageChannel, host: str, port: int, orphaned: Callable[[], None] | None = None
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
    def from_environment(cls, variable: str) -> SupervisorLink:
        """The link that the supervisor described in the value of its variable."""
        about = json.loads(variable)
        die_with_parent()
        channel = MessageChannel(socket.socket(fileno=about["descriptor"]))
        return cls(about["worker"], channel, about["host"], about["port"])

    @cached_property
    def store(self) -> Store:
        """The supervisor's store, sealed by the run's secret; a wait for a process that is lost ends."""
        from stoker.training.elastic.rendezvous_store import AuthenticatedStore  # noqa: PLC0415 - importing this package does not load PyTorch

        store = connect(*self._address, patience_s=_STORE_PATIENCE_S)
        return AuthenticatedStore(store, bytes.fromhex(self._secret.get()), self._broken.is_set)

    def meet(self) -> Rendezvous:
        """Say that this worker is ready, and wait for a generation."""
        self._channel.send("meet")
        return self._next()

    def lost(self, why: str, notes: dict[str, Any]) -> Rendezvous:
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

    def _next(self) -> Rendezvous:
        if self._verdict is not None:
            raise WorkerRetired(self._verdict)
        answer = self._answers.get()
        if answer["kind"] == "dismissed":
            self._verdict = int(answer["code"])
            raise WorkerRetired(self._verdict)
        self._number = answer["number"]
        return Rendezvous(
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


_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """TCP connections that this process opens within the block."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: set[str] = set()

    def __enter__(self) -> Self:
        """Begin."""
        self._before = set(_sockets())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Those that are there now, and were not."""
        self._own = set(_sockets()) - self._before

    def cut(self) -> None:
        """Cut those that still exist; may be called from any thread, and again."""
        for name, descriptor in _sockets().items():
            if name in self._own:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    if end.family in {socket.AF_INET, socket.AF_INET6}:
                        end.getpeername()  # fails for one that listens, which is to stay
                        end.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """Sockets of this process: their names, which are never those of others, and a descriptor of each."""
    found = {}
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found
