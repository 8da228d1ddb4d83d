"""Messages between the processes of a run: answers and errors that all share, and letters to rank 0.

`gather_from_ranks` and the functions on it are collectives, for the training thread alone: they take their turn with
those of the updates. Threads that write checkpoints use `RankMailbox`, which goes through the store in which the
processes met: a collective from a second thread would get in between, and a file cannot be written on a full disk.
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
"""Longest delay until a network file system shows one machine what another one wrote [s]."""

EncodedError = tuple[str, str, str | None]
"""An error as a message: its class, text and remedy."""
_CLASSES: dict[str, type[StokerError]] = {"NotFinite": NotFinite, "BadRun": BadRun}


def gather_from_ranks(world: World, mine: JSON) -> list[JSON]:
    """One value from each process, by rank; every process calls this. From several processes tuples come as lists."""
    return [mine] if world.layout.world_size == 1 else gather_json(mine, world.device)


def encode_error(problem: StokerError) -> EncodedError:
    """The error as a message to other processes."""
    return type(problem).__name__, problem.message, problem.remedy


def decode_error(encoded: EncodedError) -> StokerError:
    """The error of another process."""
    kind, message, remedy = encoded
    return _CLASSES.get(kind, RunFailed)(message, remedy=remedy)


def raise_on_all_ranks(world: World, problem: StokerError | None) -> None:
    """Raise the error of the lowest rank that has one, in every process; every process calls this.

    Raises:
        StokerError: the same class and text everywhere.
    """
    raise_first_error(gather_from_ranks(world, None if problem is None else encode_error(problem)), problem)


def raise_first_error(errors: Sequence[EncodedError | None], cause: BaseException | None = None) -> None:
    """Raise the first of the processes' errors, if there are any."""
    for error in errors:
        if error is not None:
            raise decode_error(error) from cause


def becomes_visible(path: Path) -> bool:
    """Whether a path that another process just made exists, now or within a few seconds."""
    until = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # makes a network file system refresh
        time.sleep(0.05)
    return True


def require_visible_to_all_ranks(world: World, directory: Path) -> None:
    """Refuse a directory in which some process does not find what rank 0 writes; every process calls this.

    Raises:
        BadRun: it is not one directory for all; the processes are named.
        RunFailed: rank 0 cannot write there.
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
    """Refuse a directory in which not every process finds what rank 0 wrote; `sees` is by rank.

    Raises:
        BadRun: some do not find it; they are named.
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
    return c10d._get_default_store()  # noqa: SLF001 - PyTorch has no public way to it


class RankMailbox:
    """One JSON message from each rank to rank 0, through the store, under the unique key `name`."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._size = PrefixStore(f"letters/{name}", store), size

    def post(self, rank: int, letter: JSON) -> None:
        """Send this process's letter."""
        self._store.set(str(rank), json.dumps(letter))

    def letters(self, is_enough: Callable[[], bool], is_last: Callable[[JSON], bool]) -> list[JSON] | None:
        """All letters, by rank; after one that `is_last`, those that have come; None if `is_enough` comes first."""
        letters: dict[int, JSON] = {}
        wait_s = _FIRST_WAIT_S
        while len(letters) < self._size:
            new = [rank for rank in range(self._size) if rank not in letters and self._store.check([str(rank)])]
            for rank in new:
                letters[rank] = json.loads(self._store.get(str(rank)))
                self._store.delete_key(str(rank))
            if any(is_last(letters[rank]) for rank in new):
                break
            if not new:
                if is_enough():
                    return None
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return [letters[rank] for rank in sorted(letters)]
