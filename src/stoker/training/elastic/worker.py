"""A worker process of a run, as it sees itself: its generation, its link to the supervisor, and its connections."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from stoker.errors import BadJob, RunFailed, first_line
from stoker.training.elastic.rendezvous import (
    Rendezvous,
    WorkerRetired,
    ranks_in_words,
)
from stoker.training.elastic.rendezvous_store import (
    AuthenticatedStore,
    agreed_key,
    connect,
    interface_of,
    launched_secret,
    listen,
    local_address,
    serve,
    wait_for,
)
from stoker.training.elastic.worker_pool import MEMBER_VARIABLE, Message, MessageChannel
from stoker.units import format_seconds

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs


class ElasticWorker(abc.ABC):
    """This process, as one of several of a run: a worker of a supervisor (`SupervisedWorker`) or of a launcher.

    Its methods are for the training thread; `is_called` and `event` may be called in any thread.

    Attributes:
        worker: number of the process on its machine, which selects its device and stays when ranks change.
        can_reform: a supervisor forms another generation after a loss, and receives events.
        patience_s: longest wait for the others that the user stated [s]; None: not stated.
    """

    worker: int
    can_reform: bool
    patience_s: float | None

    @staticmethod
    def from_environment() -> ElasticWorker | None:
        """The worker that a Supervisor or a launcher such as torchrun started; None without either.

        Call it early and once: it starts the signs of life. The supervisor's variable is removed from the environment,
        so that children of this process are not taken for workers.

        Raises:
            BadJob: a launcher's variables are invalid.
        """
        if (about := os.environ.pop(MEMBER_VARIABLE, None)) is not None:
            return SupervisedWorker.of(about)
        place = LauncherPlacement.from_environment(os.environ)
        return None if place is None else LaunchedWorker(place)

    @property
    @abc.abstractmethod
    def store(self) -> Store:
        """The store in which the processes of a generation meet, under its name."""

    @abc.abstractmethod
    def meet(self) -> Rendezvous:
        """Wait for the first generation of this process.

        Raises:
            RunFailed: a process did not come; raised in one of the others.
            WorkerRetired: likewise, in the others; or the run ended without this process.
        """

    @abc.abstractmethod
    def lost(self, why: str, notes: dict[str, Any] | None = None) -> Rendezvous:
        """Report that the generation is over for this process, which has left it, and wait for the next.

        Args:
            why: the reason; `RENDEZVOUS_REQUESTED` after `is_called`.
            notes: facts for the next generation, as JSON.

        Raises:
            WorkerRetired: this process is not in the next generation.
            RunFailed: there is none, without `can_reform`.
        """

    def is_called(self) -> bool:
        """Whether the generation has to end after the present update, by `lost`; a read of a flag."""
        return False

    def on_broken(self, act: Callable[[], None] | None) -> None:  # noqa: B027 - only a supervisor notices it
        """Call `act` in another thread as soon as another process is known to be lost, or the run is over.

        For communication that does not notice a loss: NCCL waits for a dead peer until its timeout, unless its group is
        aborted. `act` runs before the next generation is announced. None: call nothing.
        """

    def event(self, line: str) -> None:  # noqa: B027 - as `on_broken`
        """Send a line to the supervisor, which receives lines in order; without a supervisor it is dropped."""

    def finished(self) -> None:  # noqa: B027 - as `on_broken`
        """Report that the work is complete; from rank 0, that the run is."""

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Cut the connections of the process group made in the block as soon as the generation is broken.

        So every process notices a loss at once, also one without a connection to the lost process. Replaces an earlier
        `on_broken`.
        """
        _ = self.store  # connected before the block, so that it is not cut
        with Connections() as connections:
            yield
        self.on_broken(connections.cut)


HEARTBEAT_S = 0.5
"""Time between two signs of life [s]."""

_STORE_PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


class SupervisedWorker(ElasticWorker):
    """A worker of a supervisor on this machine, which forms another generation after a loss.

    Args:
        worker: number of this worker.
        channel: to the supervisor.
        host, port: address of the store.
        orphaned: called in a thread when the supervisor is gone; None: end the process at once, since the process that
            continues the run writes into the same directory.
    """

    can_reform = True
    patience_s = None  # the supervisor notices losses itself

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
    def of(cls, variable: str) -> SupervisedWorker:
        """The worker described in the supervisor's environment variable."""
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

    def lost(self, why: str, notes: dict[str, Any] | None = None) -> Rendezvous:
        """Report the end of the generation, and wait for the next."""
        self._channel.send("lost", generation=self._number, why=why, notes=notes or {})
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
            number=answer["number"],
            rank=answer["rank"],
            size=answer["size"],
            name=str(answer["number"]),
            notes=answer["notes"],
            num_veterans=answer["num_veterans"],
            age_s=answer.get("age_s", 0.0),
        )

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


USUAL_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that every launcher sets."""

PATIENCE_VARIABLE = "STOKER_RENDEZVOUS"
"""Environment variable: longest time that processes wait for each other at the start [s]; 300 by default."""

PATIENCE_S = 300.0

_COMPLETE, _FAREWELL_S = "complete", 5.0


@dataclass(frozen=True)
class LauncherPlacement:
    """The environment of a launched process: `rank` of `size`, number `local` on its machine; the store at host:port.

    `has_store`: the launcher serves the store, else rank 0 does. `attempt` distinguishes restarts. `speaks`: this
    process reports that the store cannot be reached; the others cannot ask who reports it.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    speaks: bool = True
    has_store: bool = False
    attempt: str = "0"
    patience_s: float = PATIENCE_S

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LauncherPlacement | None:
        """The placement in the environment; None without a launcher.

        torchrun keeps one store over its restarts, whose count distinguishes them. With a new store each time
        (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) the count does not matter, and may differ between machines.

        Raises:
            BadJob: a variable is not a number, or the rank is out of range.
        """
        if any(not environ.get(name) for name in USUAL_VARIABLES):
            return None
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise BadJob(f"RANK={rank} is not one of WORLD_SIZE={size} ranks", remedy="Ranks count from 0.")
        is_shared = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
        return cls(
            rank=rank,
            size=size,
            local=_number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else rank,
            # The first of each machine; and rank 1, since rank 0 may be the one that is missing.
            speaks=environ.get("LOCAL_RANK", "0") == "0" or rank == 1,
            host=environ["MASTER_ADDR"],
            port=_number(environ, "MASTER_PORT"),
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "0",
            patience_s=float(_number(environ, PATIENCE_VARIABLE)) if environ.get(PATIENCE_VARIABLE) else PATIENCE_S,
        )


class LaunchedWorker(ElasticWorker):
    """A worker of a launcher such as torchrun, whose processes form one generation.

    When it is lost they fail, and the launcher may start all of them again.
    """

    can_reform = False

    def __init__(self, place: LauncherPlacement) -> None:
        self._place = place
        self.patience_s = None if place.patience_s == PATIENCE_S else place.patience_s  # None: not stated by the user
        self._sealed: Store | None = None
        self.worker = place.local

    @cached_property
    def _open(self) -> TCPStore:
        """The store at MASTER_ADDR and MASTER_PORT, served by the launcher or by rank 0.

        Raises:
            RunFailed: nothing answers there.
            WorkerRetired: likewise, and another process of this machine reports it.
        """
        place = self._place
        is_server = place.rank == 0 and not place.has_store
        began = time.monotonic()
        try:
            if is_server:
                store = serve(listen(place.host, place.port), patience_s=place.patience_s)
            else:
                store = connect(place.host, place.port, patience_s=place.patience_s)
            # Gloo listens only on the interface towards the store, unless another one was asked for.
            interface = interface_of(local_address(place.host, place.port, place.patience_s))
            if interface is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        except (RuntimeError, OSError) as problem:
            if not place.speaks:
                raise WorkerRetired(RunFailed.exit_code) from None
            where, took = f"{place.host}:{place.port}", format_seconds(time.monotonic() - began)
            if is_server:
                raise RunFailed(
                    f"rank 0 cannot serve the meeting of {place.size} processes at {where}: {first_line(problem)}",
                    remedy="Give a MASTER_PORT that is free, and a MASTER_ADDR of this machine.",
                ) from problem
            raise RunFailed(
                f"rank {place.rank} of {place.size} got no answer from {where} in {took}: {first_line(problem)}",
                remedy="See that rank 0 was started, and that MASTER_ADDR and MASTER_PORT can be reached from here; "
                f"{PATIENCE_VARIABLE}=SECONDS waits longer.",
            ) from problem
        return store

    @property
    def store(self) -> Store:
        """The store, authenticated by the key that all processes agreed on at the rendezvous."""
        assert self._sealed is not None, "meet first"
        return self._sealed

    def meet(self) -> Rendezvous:
        """Wait for all processes.

        Raises:
            RunFailed: a process did not come (raised in the lowest rank that came), or does not know the secret.
            WorkerRetired: likewise, in the other ranks.
        """
        place = self._place
        name = f"launched/{place.attempt}"
        outcome, store = f"{name}/outcome", self._open
        try:
            store.set(f"{name}/here/{place.rank}", "")
            if store.add(f"{name}/count", 1) == place.size:
                store.set(outcome, _COMPLETE)
            if not wait_for(store, [outcome], place.patience_s):
                self._report_missing(name)
            if store.get(outcome) != _COMPLETE.encode():
                store.set(f"{name}/left/{place.rank}", "")
                raise WorkerRetired(RunFailed.exit_code)
        except RuntimeError:  # the process that served the store has given up, and reported why
            raise WorkerRetired(RunFailed.exit_code) from None
        key = agreed_key(store, launched_secret(), name, place.rank, place.size, place.patience_s)
        self._sealed = AuthenticatedStore(store, key)
        return Rendezvous(number=1, rank=place.rank, size=place.size, name=name)

    def lost(self, why: str, notes: dict[str, Any] | None = None) -> NoReturn:
        """Fail: a launcher's processes have one generation.

        Raises:
            RunFailed: always.
        """
        raise RunFailed(
            f"rank {self._place.rank} of {self._place.size} lost the others: {why}",
            remedy="Start it again: it continues from the last checkpoint. Under `stoker train --on Nxhere` the "
            "others would have gone on by themselves.",
        )

    def _report_missing(self, name: str) -> NoReturn:
        """Raise the error that names missing processes, in the lowest rank that came."""
        place = self._place
        came = [rank for rank in range(place.size) if self._open.check([f"{name}/here/{rank}"])]
        if place.rank != min(came):
            raise WorkerRetired(RunFailed.exit_code)
        missing = [rank for rank in range(place.size) if rank not in came]
        # This process may serve the store: the others have to learn of the outcome before it ends.
        self._open.set(f"{name}/outcome", "a rank is missing")
        wait_for(self._open, [f"{name}/left/{rank}" for rank in came if rank != place.rank], _FAREWELL_S)
        raise RunFailed(
            f"{len(came)} of {place.size} processes met at {place.host}:{place.port} in "
            f"{format_seconds(place.patience_s)}: {ranks_in_words(came)} came, {ranks_in_words(missing)} did not",
            remedy=f"See what became of {ranks_in_words(missing)}; {PATIENCE_VARIABLE}=SECONDS waits longer.",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise BadJob(
            f"{name}={environ[name]} in the environment is no whole number",
            remedy=f"Launchers set it; unset {', '.join(USUAL_VARIABLES)} to train in one process.",
        ) from None


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

    def __exit__(self, *_: object) -> None:
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
        with suppress(OSError):  # closed since it was listed
            name = str(path.readlink())
            if name.startswith("socket:"):
                sockets[name] = int(path.name)
    return sockets
