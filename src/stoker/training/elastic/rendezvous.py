"""A rendezvous: the place of a process in a generation, and how processes of a launcher such as torchrun meet.

A launcher sets the usual environment variables. Its processes form one generation: when that is lost, they fail, and
the launcher may start all of them again. `require_same` compares job, code and versions of the processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from stoker.errors import BadJob, RunFailed, first_line
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
from stoker.units import format_seconds

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs


@dataclass(frozen=True)
class Rendezvous:
    """The place of a process in a generation: processes that train together until one is lost, or another one joins.

    Attributes:
        number: of the generation, from 1.
        rank: of this process, from 0; survivors of the generation before keep their order and come first.
        size: number of processes.
        name: of the generation, unique in the store.
        notes: given to `ElasticWorker.lost` by survivors of the generation before; of equal keys the lowest rank's.
        num_veterans: number of ranks, from 0, that hold the weights of the generation before; 0 at the start of a run.
        age_s: time since the first generation of the run met [s].
    """

    number: int
    rank: int
    size: int
    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    num_veterans: int = 0
    age_s: float = 0.0


class WorkerRetired(Exception):
    """Raised to exit quietly; another rank reports the cause.

    `exit_code` is 0 if the run was finished without this process. `why` is a message for its own log, where processes
    have no common output.
    """

    def __init__(self, exit_code: int, why: str = "") -> None:
        super().__init__(why or f"dismissed with exit code {exit_code}")
        self.exit_code, self.why = exit_code, why


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


class LauncherLink:
    """The link of a process to the others of the same launcher."""

    can_reform = False

    def __init__(self, place: LauncherPlacement) -> None:
        self._place = place
        self.patience_s = None if place.patience_s == PATIENCE_S else place.patience_s  # None: not stated by the user
        self._sealed: Store | None = None
        self.worker = place.local

    @classmethod
    def from_environment(cls) -> LauncherLink | None:
        """The link, if the environment of this process is a launcher's."""
        place = LauncherPlacement.from_environment(os.environ)
        return None if place is None else cls(place)

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

    def lost(self, why: str, notes: dict[str, Any]) -> NoReturn:
        """Fail: a launcher's processes have one generation.

        Raises:
            RunFailed: always.
        """
        raise RunFailed(
            f"rank {self._place.rank} of {self._place.size} lost the others: {why}",
            remedy="Start it again: it continues from the last checkpoint. Under `stoker train --on Nxhere` the "
            "others would have gone on by themselves.",
        )

    def is_called(self) -> bool:
        """No process joins later."""
        return False

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """There is no supervisor to say so."""

    def event(self, line: str) -> None:
        """Rank 0 shows its events itself."""

    def finished(self) -> None:
        """The launcher sees the process end."""

    def _report_missing(self, name: str) -> NoReturn:
        """Raise the error that names missing processes, in the lowest rank that came."""
        place = self._place
        came = [rank for rank in range(place.size) if self._open.check([f"{name}/here/{rank}"])]
        if place.rank != min(came):
            raise WorkerRetired(RunFailed.exit_code)
        missing = [rank for rank in range(place.size) if rank not in came]
        # This process may serve the store: the others have to learn of the outcome before it ends.
        self._open.set(f"{name}/outcome", "somebody is missing")
        wait_for(self._open, [f"{name}/left/{rank}" for rank in came if rank != place.rank], _FAREWELL_S)
        raise RunFailed(
            f"{len(came)} of {place.size} processes met at {place.host}:{place.port} in "
            f"{format_seconds(place.patience_s)}: {ranks_in_words(came)} came, {ranks_in_words(missing)} did not",
            remedy=f"See what became of {ranks_in_words(missing)}; {PATIENCE_VARIABLE}=SECONDS waits longer.",
        )


def ranks_in_words(ranks: list[int]) -> str:
    """Text for ranks, ascending.

    >>> ranks_in_words([0, 1, 2, 5]), ranks_in_words([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    text = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise BadJob(
            f"{name}={environ[name]} in the environment is no whole number",
            remedy=f"Launchers set it; unset {', '.join(USUAL_VARIABLES)} to train in one process.",
        ) from None


FACTS_PATIENCE_S = 60.0
"""Longest wait of the ranks for each other's facts [s]."""


def require_same(
    store: Store, meeting: Rendezvous, facts: Mapping[str, str], *, patience_s: float = FACTS_PATIENCE_S
) -> None:
    """Compare this rank's facts (job, code, versions) with those of all ranks of its generation.

    Raises:
        BadJob: they differ; raised on rank 0.
        RunFailed: a rank did not send its facts in time; likewise.
        WorkerRetired: either, on the other ranks.
        RuntimeError: the generation broke meanwhile.
    """
    sent = [f"{meeting.name}/facts/{rank}" for rank in range(meeting.size)]
    received = [f"{meeting.name}/facts-heard/{rank}" for rank in range(meeting.size)]
    store.set(sent[meeting.rank], json.dumps(dict(facts)))
    _await_facts(store, sent, meeting, patience_s)
    differing = differences([json.loads(value) for value in store.multi_get(sent)])
    store.set(received[meeting.rank], "")
    if meeting.rank == 0:  # it may serve the store to the others
        _await_facts(store, received, meeting, patience_s)
    if not differing:
        return
    what = f"the {meeting.size} processes do not run the same: {'; '.join(differing)}"
    if meeting.rank != 0:
        raise WorkerRetired(BadJob.exit_code, f"rank {meeting.rank} leaves: rank 0 refused the run, since {what}")
    raise BadJob(what, remedy="Start all of them with the same job file, settings and versions.")


def _await_facts(store: Store, keys: Sequence[str], meeting: Rendezvous, patience_s: float) -> None:
    """Wait for the keys of all ranks; raises as `require_same`.

    Rank 0 waits half as long again: it may serve the store, which the others use until they give up.
    """
    if wait_for(store, keys, patience_s if meeting.rank != 0 else 1.5 * patience_s):
        return
    if meeting.rank != 0:
        raise WorkerRetired(RunFailed.exit_code)
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    raise RunFailed(
        f"{ranks_in_words(missing)} of {meeting.size} did not say in {patience_s:g} s what they run",
        remedy="See what became of them; the same command starts again.",
    )


def differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Differences between ranks, a line for each fact.

    >>> differences([{"torch": "2.13"}, {"torch": "2.12"}, {"torch": "2.13"}])
    ['torch is 2.13 on ranks 0, 2 and 2.12 on rank 1']
    """
    lines = []
    for name in dict.fromkeys(name for facts in facts_of_ranks for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            holders.setdefault(facts.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            values = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items()]
            lines.append(f"{name} is {' and '.join(values)}")
    return lines
