"""What several processes tell each other between two updates, so that all of them go on or all of them stop.

Only for the thread that trains: these calls are collectives, and take their turn with those of the updates.

How threads that write tell the first process that they are done, without a word in training's own channels.

A collective from a second thread would get in between those of the updates; a file cannot be written where the disk is
full. So they go through the store in which the processes met.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed import distributed_c10d as c10d

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records.codec import JSON
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.world import World, gather_json
from stoker.store import disk_errors

APPEARS_S = 5.0
"""How long a network file system may take to show one machine what another one wrote [s]."""

EncodedError = tuple[str, str, str | None]
"""An error as it is told: its class, message and remedy."""
_CLASSES: dict[str, type[StokerError]] = {"NotFinite": NotFinite, "BadRun": BadRun}


def gather_from_ranks(world: World, mine: JSON) -> list[JSON]:
    """What each process gives, by rank; each of them calls this. Of several processes tuples come as lists."""
    return [mine] if world.layout.world_size == 1 else gather_json(mine, world.device)


def encode_error(problem: StokerError) -> EncodedError:
    """The error, to be told to others."""
    return type(problem).__name__, problem.message, problem.remedy


def decode_error(told: EncodedError) -> StokerError:
    """The error that another process told."""
    kind, message, remedy = told
    return _CLASSES.get(kind, RunFailed)(message, remedy=remedy)


def raise_on_all_ranks(world: World, problem: StokerError | None) -> None:
    """Raise in every process the error that the first one has that has any.

    Raises:
        StokerError: of the same class and in the same words everywhere.
    """
    raise_first_error(gather_from_ranks(world, None if problem is None else encode_error(problem)), problem)


def raise_first_error(told: Sequence[EncodedError | None], cause: BaseException | None = None) -> None:
    """Raise the first of the errors that processes told, if there are any."""
    for one in told:
        if one is not None:
            raise decode_error(one) from cause


def becomes_visible(path: Path) -> bool:
    """Whether a path that another process just made is there, or comes to be soon."""
    until = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # makes network file systems look again
        time.sleep(0.05)
    return True


def require_visible_to_all_ranks(world: World, directory: Path) -> None:
    """Refuse a directory in which some process does not find what the first one writes; each of them calls this.

    Raises:
        BadRun: it is not one directory for all; the processes are named.
        RunFailed: the first one cannot write there.
    """
    nonce, problem = directory / f".seen-{secrets.token_hex(8)}", None
    if world.is_first:
        try:
            with disk_errors(nonce, "a file that all processes look for"):
                nonce.touch()
        except StokerError as error:
            problem = error
    name = gather_from_ranks(world, nonce.name)[0]
    raise_on_all_ranks(world, problem)
    try:
        sees = gather_from_ranks(world, becomes_visible(directory / name))
    finally:
        if world.is_first:
            nonce.unlink(missing_ok=True)
    require_seen_by_each_rank(directory, sees)


def require_seen_by_each_rank(directory: Path, sees: Sequence[bool]) -> None:
    """Refuse a directory in which not every process finds what the first one wrote; `sees` is by rank.

    Raises:
        BadRun: the processes are named that do not.
    """
    blind = [str(rank) for rank, does in enumerate(sees) if not does]
    if blind:
        who = f"process {blind[0]} does" if len(blind) == 1 else f"processes {', '.join(blind)} do"
        raise BadRun(
            f"{directory} is not one directory for all {len(sees)} processes: what process 0 writes there, "
            f"{who} not find.",
            remedy="Put the run on a disk that all machines share, under one path (--run-dir DIR, or STOKER_RUNS).",
        )


_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.25


def process_group_store() -> Store:
    """The store in which the processes of this world met."""
    return c10d._get_default_store()  # noqa: SLF001 - PyTorch gives no other way to it


class RankMailbox:
    """One letter of each process to the first one, about the subject `name`, which no other one has."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._size = PrefixStore(f"letters/{name}", store), size

    def post(self, rank: int, letter: JSON) -> None:
        """Send this process's letter."""
        self._store.set(str(rank), json.dumps(letter))

    def letters(self, is_enough: Callable[[], bool], is_last: Callable[[JSON], bool]) -> list[JSON] | None:
        """All letters, by rank, once they are there; after one that `is_last`, only those that are there.

        None once `is_enough`, before they are.
        """
        found: dict[int, JSON] = {}
        wait_s = _FIRST_WAIT_S
        while len(found) < self._size:
            new = [rank for rank in range(self._size) if rank not in found and self._store.check([str(rank)])]
            for rank in new:
                found[rank] = json.loads(self._store.get(str(rank)))
                self._store.delete_key(str(rank))
            if any(is_last(found[rank]) for rank in new):
                break
            if not new:
                if is_enough():
                    return None
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return [found[rank] for rank in sorted(found)]
