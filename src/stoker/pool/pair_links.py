"""Direct links between agents, measured by both ends, for gangs whose sites exchange large messages.

What: the pool names pairs of idle agents of one determinism class that are connected to its rendezvous. Each end in
turn sends the other a small and a larger file over the direct path, fetches as much, and signs what it measured
(`linked` events). Of a pair the lower rate and the longer delay of both statements count, and nothing where one says
that there is no path: an agent that states more than is so gains nothing from it alone, and one that states less loses
only its own links.
Costs: 4.25 MiB each way for each statement, a day; an agent is in one group, so that it has `GROUP - 1` links, and
states each, as the other end does. Where others come and go, or state again and again that there is no path, an agent
has part in `MOST_A_DAY` measurements at most.
Does not measure: pairs at the same time, which may share a line; agents of one owner can state what they like of a link
between themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from stoker.errors import StokerError
from stoker.pool.events import Refused
from stoker.pool.link_probe import SIZES, measured_rate

GROUP = 8
"""Agents that measure the links between all of them: 7 links each, and gangs of up to 8 sites with direct paths."""
FRESH_S, NO_PATH_S = 24 * 3600.0, 6 * 3600.0
"""How long a statement counts; one that there is no path [s]."""
KEPT_S = 8 * 24 * 3600.0
"""How long a statement is kept: a gang goes on with the paths that it began with [s]."""
ASKED_S = 90.0
"""Time for an agent to state what it was asked for [s]."""
MOST_A_DAY = 8 * (GROUP - 1)
"""Measurements in which an agent has part within `FRESH_S`; a group that stays needs a quarter of them."""
MOST_BYTES = 2 * sum(SIZES)
"""What an agent serves of files without content for one statement of another, both ways together [bytes]."""
_LEAST_RATE = 1.0
"""A slower path is none [bytes/s]."""
_SLOW_S = 3.0
"""Where the small file takes so long, the larger one is left out [s]."""
_TURNS = 3


@dataclass(frozen=True, kw_only=True)
class StatedLink:
    """What one agent says of its direct path to another, since `at_s` [s since 1970].

    Rates in bytes/s, 0: there is no path. `delay_s`: of a request without content, there and back [s].
    """

    upload_bytes_per_s: float
    download_bytes_per_s: float
    delay_s: float
    at_s: float

    def is_fresh(self, now_s: float) -> bool:
        """Whether it still counts."""
        has_path = self.upload_bytes_per_s > 0 and self.download_bytes_per_s > 0
        return now_s - self.at_s < (FRESH_S if has_path else NO_PATH_S)


@dataclass(frozen=True, kw_only=True)
class DirectLink:
    """A direct path from one agent to another: its rate [bytes/s] and its delay there and back [s]."""

    bytes_per_s: float
    delay_s: float


Statements = Mapping[tuple[str, str], StatedLink]
"""By (who says it, of its path to whom)."""
DirectLinks = Mapping[tuple[str, str], DirectLink]
"""By (source, target)."""
NO_LINKS: DirectLinks = {}


def direct_link(stated: Statements, source: str, target: str, now_s: float) -> DirectLink | None:
    """What both ends say of the path from one to the other; None: one says nothing, or that there is none."""
    own, others = stated.get((source, target)), stated.get((target, source))
    if own is None or others is None or not (own.is_fresh(now_s) and others.is_fresh(now_s)):
        return None
    rate = min(own.upload_bytes_per_s, others.download_bytes_per_s)
    return DirectLink(bytes_per_s=rate, delay_s=max(own.delay_s, others.delay_s)) if rate >= _LEAST_RATE else None


def direct_links(stated: Statements, now_s: float, agents: AbstractSet[str]) -> dict[tuple[str, str], DirectLink]:
    """All direct paths between some agents."""
    found = {pair: direct_link(stated, *pair, now_s) for pair in stated if agents >= {*pair}}
    return {pair: link for pair, link in found.items() if link is not None}


def groups_of(agents: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """Agents that are to know the links between them: of one determinism class, those behind one address together.

    Args:
        agents: determinism class and network address by key.
    """
    by_class = itertools.groupby(sorted((*about, key) for key, about in agents.items()), key=lambda one: one[0])
    ordered = [[key for *_, key in same] for name, same in by_class if name]
    groups = [same[first : first + GROUP] for same in ordered for first in range(0, len(same), GROUP)]
    return [group for group in groups if len(group) > 1]


def next_measurements(
    groups: Iterable[Sequence[str]], stated: Statements, busy: AbstractSet[str], now_s: float
) -> list[tuple[str, str]]:
    """Who is to measure its path to whom now: an agent has part in one measurement at a time.

    Args:
        groups: agents that are to know the links between them.
        stated: what they have said.
        busy: agents that measure now, or are not to be asked.
        now_s: the clock [s since 1970].
    """
    taken, found = set(busy), list[tuple[str, str]]()
    for group in groups:
        for pair in itertools.permutations(group, 2):
            known = stated.get(pair)
            if taken.isdisjoint(pair) and (known is None or not known.is_fresh(now_s)):
                taken.update(pair)
                found.append(pair)
    return found


class LinkSchedule:
    """Which agent measures its path to which other one now.

    Attributes:
        asked: by agent, the other one, the name of the measurement (64 hexadecimal digits), and since when it is asked
            [s since 1970].
    """

    def __init__(self) -> None:
        self.asked: dict[str, tuple[str, str, float]] = {}
        self._begun: set[str] = set()
        self._resting: dict[str, float] = {}
        self._part_s: dict[str, list[float]] = {}

    def look(
        self, agents: Mapping[str, tuple[str, str]], stated: Statements, now_s: float, name: Callable[[], str]
    ) -> list[str]:
        """Ask those who are due, and forget who did not answer; who was asked now.

        Args:
            agents: determinism class and network address of the agents that can be asked.
            stated: what they have said.
            now_s: the clock [s since 1970].
            name: a new name for a measurement.
        """
        for agent, (other, _, since_s) in list(self.asked.items()):
            if not self.asks(agent, other, stated):
                del self.asked[agent]
            elif now_s - since_s >= ASKED_S:
                del self.asked[agent]
                self._resting[agent] = now_s + NO_PATH_S  # not the other one, whose absence is a statement
        self._resting = {agent: until_s for agent, until_s in self._resting.items() if now_s < until_s}
        self._begun &= {name for _, name, _ in self.asked.values()}
        recent = {
            agent: [since_s for since_s in times if now_s - since_s < FRESH_S] for agent, times in self._part_s.items()
        }
        self._part_s = {agent: times for agent, times in recent.items() if times}
        used_up = {agent for agent, times in self._part_s.items() if len(times) >= MOST_A_DAY}
        busy = {*self._resting, *used_up, *self.asked, *(other for other, *_ in self.asked.values())}
        pairs = next_measurements(groups_of(agents), stated, busy, now_s)
        self.asked |= {agent: (other, name(), now_s) for agent, other in pairs}
        for end in itertools.chain(*pairs):
            self._part_s.setdefault(end, []).append(now_s)
        return [agent for agent, _ in pairs]

    def begin(self, agent: str, name: str) -> str:
        """The agent to which one measures its path by this name; once, since the other end serves bytes for it.

        Raises:
            Refused: it was not asked for that, or has begun it.
        """
        other, asked, _ = self.asked.get(agent, ("", "", 0.0))
        if asked != name or name in self._begun:
            raise Refused("the pool has not asked for that link, or it is being measured")
        self._begun.add(name)
        return other

    def asks(self, agent: str, other: str, stated: Statements) -> bool:
        """Whether an agent is asked for its path to another one, and has not stated it since."""
        if agent not in self.asked or self.asked[agent][0] != other:
            return False
        known = stated.get((agent, other))
        return known is None or known.at_s < self.asked[agent][2]


class DirectPath(Protocol):
    """A path to another agent, over which files without content go."""

    def send(self, num_bytes: int) -> None:
        """Send so many bytes, and wait for the answer."""
        ...

    def fetch(self, num_bytes: int) -> None:
        """Fetch so many bytes."""
        ...


def measured_path(path: DirectPath, clock: Callable[[], float]) -> StatedLink:
    """Measure a path; rates of 0 where it breaks.

    Args:
        path: to another agent.
        clock: time [s].
    """

    def took_s(transfer: Callable[[int], None], num_bytes: int) -> float:
        began_s = clock()
        transfer(num_bytes)
        return clock() - began_s

    try:
        delay_s = min(took_s(path.send, 0) for _ in range(_TURNS))
        rates = []
        for transfer in (path.send, path.fetch):
            small_s = took_s(transfer, SIZES[0])
            is_slow = small_s > _SLOW_S
            rates.append(SIZES[0] / small_s if is_slow else measured_rate(small_s, took_s(transfer, SIZES[1])))
    except StokerError:
        return StatedLink(upload_bytes_per_s=0.0, download_bytes_per_s=0.0, delay_s=0.0, at_s=0.0)
    return StatedLink(upload_bytes_per_s=rates[0], download_bytes_per_s=rates[1], delay_s=delay_s, at_s=0.0)
