"""A rendezvous: the place of a process in a generation; `require_same` compares job, code and versions there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.errors import BadJob, RunFailed
from stoker.training.elastic.rendezvous_store import wait_for

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs


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
        RuntimeError: the generation ended before the rendezvous did.
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
