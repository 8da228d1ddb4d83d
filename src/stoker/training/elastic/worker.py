"""A worker process of a run, as it sees itself: its generation, its link to the supervisor, and its connections."""

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
from typing import TYPE_CHECKING, Any, Self

from stoker.errors import RunFailed
from stoker.training.elastic.rendezvous import FACTS_PATIENCE_S, LauncherLink, Rendezvous, WorkerRetired, require_same
from stoker.training.elastic.rendezvous_store import AuthenticatedStore, connect
from stoker.training.elastic.worker_pool import MEMBER_VARIABLE, Message, MessageChannel

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs


class ElasticWorker:
    """This process, as one of several of a run.

    Its methods are for the training thread; `is_called` and `event` may be called in any thread.

    Attributes:
        worker: number of the process on its machine, which selects its device and stays when ranks change.
        can_reform: a supervisor forms another generation after a loss, and receives events.
    """

    def __init__(self, link: LauncherLink | SupervisorLink) -> None:
        self._link = link
        self.worker, self.can_reform = link.worker, link.can_reform
        self._meeting: Rendezvous | None = None

    @classmethod
    def from_environment(cls) -> ElasticWorker | None:
        """The worker that a Supervisor or a launcher such as torchrun started; None without either.

        Call it early and once: it starts the signs of life. The supervisor's variable is removed from the environment,
        so that children of this process are not taken for workers.

        Raises:
            BadJob: a launcher's variables are invalid.
        """
        about = os.environ.pop(MEMBER_VARIABLE, None)
        if about is not None:
            return cls(SupervisorLink.from_environment(about))
        link = LauncherLink.from_environment()
        return None if link is None else cls(link)

    @property
    def store(self) -> Store:
        """The store in which the processes of a generation meet, under its name."""
        return self._link.store

    def meet(self) -> Rendezvous:
        """Wait for the first generation of this process.

        Raises:
            RunFailed: a process did not come; raised in one of the others.
            WorkerRetired: likewise, in the others; or the run ended without this process.
        """
        self._meeting = self._link.meet()
        return self._meeting

    def lost(self, why: str, notes: dict[str, Any] | None = None) -> Rendezvous:
        """Report that the generation is over for this process, which has left it, and wait for the next.

        Args:
            why: the reason; `RENDEZVOUS_REQUESTED` after `is_called`.
            notes: facts for the next generation, as JSON.

        Raises:
            WorkerRetired: this process is not in the next generation.
            RunFailed: there is none, without `can_reform`.
        """
        self._meeting = self._link.lost(why, notes or {})
        return self._meeting

    def is_called(self) -> bool:
        """Whether the generation has to end after the present update, by `lost`; a read of a flag."""
        return self._link.is_called()

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Call `act` in another thread as soon as another process is known to be lost, or the run is over.

        For communication that does not notice a loss: NCCL waits for a dead peer until its timeout, unless its group is
        aborted. `act` runs before the next generation is announced. None: call nothing.
        """
        self._link.on_broken(act)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Cut the connections of the process group made in the block as soon as the generation is broken.

        So every process notices a loss at once, also one without a connection to the lost process. Replaces an earlier
        `on_broken`.
        """
        _ = self.store  # connected before the block, so that it is not cut
        with Connections() as connections:
            yield
        self._link.on_broken(connections.cut)

    def event(self, line: str) -> None:
        """Send a line to the supervisor, which receives lines in order; without a supervisor it is dropped."""
        self._link.event(line)

    def finished(self) -> None:
        """Report that the work is complete; from rank 0, that the run is."""
        self._link.finished()

    def require_same(self, facts: Mapping[str, str], *, patience_s: float = FACTS_PATIENCE_S) -> None:
        """Compare facts, such as versions and the job's digest, with those of all processes of this generation.

        Every process calls it after each rendezvous, before any other communication.

        Args:
            facts: of this process, by name.
            patience_s: longest wait for the others' facts [s], unless the user set one for the rendezvous.

        Raises:
            BadJob: they differ; on rank 0.
            RunFailed: a process did not send its facts; on rank 0.
            WorkerRetired: either, on the other ranks.
            RuntimeError: the generation broke meanwhile, as in a collective call: see `lost`.
        """
        assert self._meeting is not None, "meet first"
        stated_s = self._link.patience_s
        require_same(self.store, self._meeting, facts, patience_s=patience_s if stated_s is None else stated_s)


HEARTBEAT_S = 0.5
"""Time between two signs of life [s]."""

_STORE_PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


class SupervisorLink:
    """The link of a worker to the supervisor that started it.

    Args:
        worker: number of this worker.
        channel: to the supervisor.
        host, port: address of the store.
        orphaned: called in a thread when the supervisor is gone; None: end the process at once, since whoever continues
            the run writes into the same directory.
    """

    can_reform = True
    patience_s: float | None = None  # the supervisor notices losses itself

    def __init__(
        self, worker: int, channel: MessageChannel, host: str, port: int, orphaned: Callable[[], None] | None = None
    ) -> None:
        self.worker, self._channel, self._address = worker, channel, (host, port)
        self._orphaned = orphaned or (lambda: os._exit(RunFailed.exit_code))
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
        """The link described in the supervisor's environment variable."""
        about = json.loads(variable)
        die_with_parent()
        channel = MessageChannel(socket.socket(fileno=about["descriptor"]))
        return cls(about["worker"], channel, about["host"], about["port"])

    @cached_property
    def store(self) -> Store:
        """The supervisor's store, authenticated by the run's secret; a wait for a lost process ends."""
        store = connect(*self._address, patience_s=_STORE_PATIENCE_S)
        return AuthenticatedStore(store, bytes.fromhex(self._secret.get()), self._broken.is_set)

    def meet(self) -> Rendezvous:
        """Report that this worker is ready, and wait for a generation."""
        self._channel.send("meet")
        return self._next()

    def lost(self, why: str, notes: dict[str, Any]) -> Rendezvous:
        """Report the end of the generation, and wait for the next."""
        self._channel.send("lost", generation=self._number, why=why, notes=notes)
        return self._next()

    def is_called(self) -> bool:
        """Whether the supervisor asks the generation to end."""
        return self._called.is_set()

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Call `act` when the generation breaks, or now if it is broken."""
        self._act = act
        if act is not None and self._broken.is_set():
            act()

    def event(self, line: str) -> None:
        """Send a line."""
        self._channel.send("event", line=line)

    def finished(self) -> None:
        """Report that the work is complete."""
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
            if message["kind"] == "meeting":  # cleared here, where no call to the new generation can get lost
                self._called.clear()
                self._broken.clear()
            if message["kind"] in {"meeting", "dismissed"}:
                self._answers.put(message)
        self._orphaned()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, in whatever way."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere the closed channel ends it a little later
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The TCP connections opened within the block, such as those of a process group, which `cut` shuts down.

    A call that waits on a cut connection fails at once, in this process and at the other end. Use when: a generation is
    broken. Gloo notices a loss only in processes connected to the dead one; others would wait for their whole timeout,
    since neither `destroy_process_group` nor `abort` closes connections (2.13.0).
    Does not distinguish: connections that another thread opens within the same block.
    """

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: set[str] = set()

    def __enter__(self) -> Self:
        """Note the sockets open before the block."""
        self._before = set(_sockets())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Note the sockets opened in the block."""
        self._own = set(_sockets()) - self._before

    def cut(self) -> None:
        """Shut down those still open; may be called from any thread, and again."""
        for name, descriptor in _sockets().items():
            if name in self._own:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    if end.family in {socket.AF_INET, socket.AF_INET6}:
                        end.getpeername()  # fails for a listening socket, which stays
                        end.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """Sockets of this process: their unique names, each with a descriptor."""
    sockets = {}
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                sockets[name] = int(path.name)
    return sockets
