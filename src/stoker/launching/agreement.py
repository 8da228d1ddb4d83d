"""Whether the processes of a generation are the same: job, code, versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stoker.errors import BadJob, RunFailed
from stoker.launching.launched import ranks_in_words
from stoker.launching.meeting import Dismissed, Meeting
from stoker.launching.stores import wait_for

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs

PATIENCE_S = 60.0
"""Longest that ranks wait for each other's facts [s]."""


def require_same(store: Store, meeting: Meeting, facts: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
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
    _await(store, told, meeting, patience_s)
    found = differences([json.loads(one) for one in store.multi_get(told)])
    store.set(heard[meeting.rank], "")
    if meeting.rank == 0:  # it may be the one that serves the store to the others
        _await(store, heard, meeting, patience_s)
    if not found:
        return
    what = f"the {meeting.size} processes do not run the same: {'; '.join(found)}"
    if meeting.rank != 0:
        raise Dismissed(BadJob.exit_code, f"rank {meeting.rank} leaves: rank 0 refused the run, since {what}")
    raise BadJob(
        what,
        remedy="Start all of them with the same job file, settings and versions.",
    )


def _await(store: Store, keys: Sequence[str], meeting: Meeting, patience_s: float) -> None:
    """Wait for the keys of all ranks; see `require_same` for what is raised.

    Rank 0 waits for half as long again: it may serve the store, which the others use until they have given up.
    """
    if wait_for(store, keys, patience_s if meeting.rank != 0 else 1.5 * patience_s):
        return
    if meeting.rank != 0:
        raise Dismissed(RunFailed.exit_code)
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
