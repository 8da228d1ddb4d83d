"""What several processes tell each other between two updates, so that all of them go on or all of them stop.

Only for the thread that trains: these calls are collectives, and take their turn with those of the updates.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records.codec import JSON
from stoker.stepping import NotFinite
from stoker.stepping.world import World, gather_json
from stoker.store import disk_errors

APPEARS_S = 5.0
"""How long a network file system may take to show one machine what another one wrote [s]."""

Said = tuple[str, str, str | None]
"""An error as it is told: its class, message and remedy."""
_CLASSES: dict[str, type[StokerError]] = {"NotFinite": NotFinite, "BadRun": BadRun}


def gathered(world: World, mine: JSON) -> list[JSON]:
    """What each process gives, by rank; each of them calls this. Of several processes tuples come as lists."""
    return [mine] if world.layout.world_size == 1 else gather_json(mine, world.device)


def said(problem: StokerError) -> Said:
    """The error, to be told to others."""
    return type(problem).__name__, problem.message, problem.remedy


def heard(told: Said) -> StokerError:
    """The error that another process told."""
    kind, message, remedy = told
    return _CLASSES.get(kind, RunFailed)(message, remedy=remedy)


def raise_together(world: World, problem: StokerError | None) -> None:
    """Raise in every process the error that the first one has that has any.

    Raises:
        StokerError: of the same class and in the same words everywhere.
    """
    raise_first(gathered(world, None if problem is None else said(problem)), problem)


def raise_first(told: Sequence[Said | None], cause: BaseException | None = None) -> None:
    """Raise the first of the errors that processes told, if there are any."""
    for one in told:
        if one is not None:
            raise heard(one) from cause


def appears(path: Path) -> bool:
    """Whether a path that another process just made is there, or comes to be soon."""
    until = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # makes network file systems look again
        time.sleep(0.05)
    return True


def require_seen_by_all(world: World, directory: Path) -> None:
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
    name = gathered(world, nonce.name)[0]
    raise_together(world, problem)
    try:
        sees = gathered(world, appears(directory / name))
    finally:
        if world.is_first:
            nonce.unlink(missing_ok=True)
    require_all_see(directory, sees)


def require_all_see(directory: Path, sees: Sequence[bool]) -> None:
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
