"""What a process is told of the generation that it belongs to.

A process started by some other launcher, which sets the usual environment: torchrun, or what a cluster has.

There is one generation: when it is lost, the process fails, and the launcher may start all of them again.

Whether the processes of a generation are the same: job, code, versions.
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
from stoker.training.elastic.rendezvous_store import connect, interface_of, listen, local_address, serve, wait_for
from stoker.units import format_seconds

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs


@dataclass(frozen=True)
class Rendezvous:
    """A generation: processes that train together until one of them is lost, or another one comes.

    Attributes:
        number: counts generations of a run, from 1.
        rank: of this process, from 0; survivors of the generation before keep their order and come first.
        size: how many processes there are.
        name: of the generation, which no other one in the store has.
        notes: what was given to `Member.lost` by those that came from the generation before; of what several name, the
            word of the lowest rank counts.
        num_veterans: so many ranks, from 0, come straight from the generation before and have its weights; the others
            have none. 0: nobody has, as at the start of a run.
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
    """This process takes no further part; why is told elsewhere, so it leaves without a word.

    `exit_code` is what it ends with: 0 if the run was finished without it. `why` is what to say all the same, where
    processes have no common output.
    """

    def __init__(self, exit_code: int, why: str = "") -> None:
        super().__init__(why or f"dismissed with exit code {exit_code}")
        self.exit_code, self.why = exit_code, why


USUAL_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""All of them are set by a launcher."""

PATIENCE_VARIABLE = "STOKER_RENDEZVOUS"
"""Environment variable: longest that processes wait for each other at the start [s]; 300 where it is not set."""

PATIENCE_S = 300.0

_COMPLETE, _FAREWELL_S = "complete", 5.0


@dataclass(frozen=True)
class LauncherPlacement:
    """Where a launcher put this process: `rank` of `size`, number `local` on its machine; the store is at host:port.

    `has_store`: the launcher serves it, else rank 0 does. `attempt` tells starts of the same processes apart. `speaks`:
    this process says if the store cannot be reached, where nobody can be asked who else is there.
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
        """What the environment says; None if no launcher set it.

        torchrun keeps one store over its restarts, which are told apart by their count. Where it is told to make a new
        one each time (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), counts do not matter, and may differ between machines.

        Raises:
            BadJob: a variable is no number, or the rank is not one of so many.
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
            # The first of each machine; beside rank 0, which may be what is missing, the next.
            speaks=environ.get("LOCAL_RANK", "0") == "0" or rank == 1,
            host=environ["MASTER_ADDR"],
            port=_number(environ, "MASTER_PORT"),
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "0",
            patience_s=float(_number(environ, PATIENCE_VARIABLE)) if environ.get(PATIENCE_VARIABLE) else PATIENCE_S,
        )


class LauncherLink:
    """The link of a process to the others that the same launcher started."""

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
        """The store at MASTER_ADDR and MASTER_PORT, which rank 0 serves there alone unless the launcher does.

        Raises:
            RunFailed: nothing answers there.
            Dismissed: likewise, and another process of this machine says so.
        """
        place = self._place
        is_server = place.rank == 0 and not place.has_store
        began = time.monotonic()
        try:
            if is_server:
                store = serve(listen(place.host, place.port), patience_s=place.patience_s)
            else:
                store = connect(place.host, place.port, patience_s=place.patience_s)
            self._keep_to_interface()
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

    def _keep_to_interface(self) -> None:
        """Let gloo listen on the interface on the way to the store alone, unless another one was asked for."""
        way = local_address(self._place.host, self._place.port, self._place.patience_s)
        interface = interface_of(way)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    @property
    def store(self) -> Store:
        """The store, sealed by the key that all processes agreed on when they met."""
        assert self._sealed is not None, "meet first"
        return self._sealed

    def meet(self) -> Rendezvous:
        """Wait for all the others.

        Raises:
            RunFailed: somebody did not come, raised in the first of those that came; or does not know the secret.
            Dismissed: likewise, in the others.
        """
        place = self._place
        name = f"launched/{place.attempt}"
        outcome, store = f"{name}/outcome", self._open
        try:
            store.set(f"{name}/here/{place.rank}", "")
            if store.add(f"{name}/count", 1) == place.size:
                store.set(outcome, _COMPLETE)
            if not wait_for(store, [outcome], place.patience_s):
                self._nobody_came(name)
            if store.get(outcome) != _COMPLETE.encode():
                store.set(f"{name}/left/{place.rank}", "")
                raise WorkerRetired(RunFailed.exit_code)
        except RuntimeError:  # whoever served the store has given up, and said why
            raise WorkerRetired(RunFailed.exit_code) from None
        from stoker.training.elastic.rendezvous_store import AuthenticatedStore, agreed_key, launched_secret  # noqa: PLC0415 - loads PyTorch

        key = agreed_key(store, launched_secret(), name, place.rank, place.size, place.patience_s)
        self._sealed = AuthenticatedStore(store, key)
        return Rendezvous(number=1, rank=place.rank, size=place.size, name=name)

    def lost(self, why: str, notes: dict[str, Any]) -> NoReturn:
        """Fail: there is no other generation.

        Raises:
            RunFailed: always.
        """
        raise RunFailed(
            f"rank {self._place.rank} of {self._place.size} lost the others: {why}",
            remedy="Start it again: it continues from the last checkpoint. Under `stoker train --on Nxhere` the "
            "others would have gone on by themselves.",
        )

    def is_called(self) -> bool:
        """Nobody comes later."""
        return False

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Nobody says that it is."""

    def event(self, line: str) -> None:
        """Nobody listens: rank 0 shows its events itself."""

    def finished(self) -> None:
        """The launcher sees the process end."""

    def _nobody_came(self, name: str) -> NoReturn:
        place = self._place
        came = [rank for rank in range(place.size) if self._open.check([f"{name}/here/{rank}"])]
        if place.rank != min(came):
            raise WorkerRetired(RunFailed.exit_code)
        missing = [rank for rank in range(place.size) if rank not in came]
        # This process may serve the store: the others are to hear of it before it ends.
        self._open.set(f"{name}/outcome", "somebody is missing")
        wait_for(self._open, [f"{name}/left/{rank}" for rank in came if rank != place.rank], _FAREWELL_S)
        raise RunFailed(
            f"{len(came)} of {place.size} processes met at {place.host}:{place.port} in "
            f"{format_seconds(place.patience_s)}: {ranks_in_words(came)} came, {ranks_in_words(missing)} did not",
            remedy=f"See what became of {ranks_in_words(missing)}; {PATIENCE_VARIABLE}=SECONDS waits longer.",
        )


def ranks_in_words(ranks: list[int]) -> str:
    """Ranks, ascending, as a reader would name them.

    >>> ranks_in_words([0, 1, 2, 5]), ranks_in_words([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise BadJob(
            f"{name}={environ[name]} in the environment is no whole number",
            remedy=f"Launchers set it; unset {', '.join(USUAL_VARIABLES)} to train in one process.",
        ) from None


FACTS_PATIENCE_S = 60.0
"""Longest that ranks wait for each other's facts [s]."""


def require_same(
    store: Store, meeting: Rendezvous, facts: Mapping[str, str], *, patience_s: float = FACTS_PATIENCE_S
) -> None:
    """Compare this rank's facts with those of all others of its generation.

    Raises:
        BadJob: they differ; raised on rank 0.
        RunFailed: somebody did not tell its own in time; likewise.
        Dismissed: either, on the other ranks.
        RuntimeError: the generation broke meanwhile.
    """
    told = [f"{meeting.name}/facts/{rank}" for rank in range(meeting.size)]
    heard = [f"{meeting.name}/facts-heard/{rank}" for rank in range(meeting.size)]
    store.set(told[meeting.rank], json.dumps(dict(facts)))
    _await_facts(store, told, meeting, patience_s)
    found = differences([json.loads(one) for one in store.multi_get(told)])
    store.set(heard[meeting.rank], "")
    if meeting.rank == 0:  # it may be the one that serves the store to the others
        _await_facts(store, heard, meeting, patience_s)
    if not found:
        return
    what = f"the {meeting.size} processes do not run the same: {'; '.join(found)}"
    if meeting.rank != 0:
        raise WorkerRetired(BadJob.exit_code, f"rank {meeting.rank} leaves: rank 0 refused the run, since {what}")
    raise BadJob(
        what,
        remedy="Start all of them with the same job file, settings and versions.",
    )


def _await_facts(store: Store, keys: Sequence[str], meeting: Rendezvous, patience_s: float) -> None:
    """Wait for the keys of all ranks; see `require_same` for what is raised.

    Rank 0 waits for half as long again: it may serve the store, which the others use until they have given up.
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


def differences(everybody: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs between ranks, a line for each fact.

    >>> differences([{"torch": "2.13"}, {"torch": "2.12"}, {"torch": "2.13"}])
    ['torch is 2.13 on ranks 0, 2 and 2.12 on rank 1']
    """
    lines = []
    for name in dict.fromkeys(name for facts in everybody for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(everybody):
            holders.setdefault(facts.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            words = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items()]
            lines.append(f"{name} is {' and '.join(words)}")
    return lines
