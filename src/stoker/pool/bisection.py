"""The search for the first update of a block on which its agent and a verifier disagree, by hashes of their states.

What: a verifier's replay came to another state than the agent committed to. Both start from one committed state and
end in different ones, so there is a first update on which they differ. In rounds both state the digests of their states
after the same updates (`points`, `MOST_POINTS` at most), which narrows the stretch between the last state on which they
agree and the first on which they do not, until one update is left. Both then supply the states around it, and a third
agent, the arbiter, makes that one update again.

The side that is wrong cannot hide it: its states begin with the committed one, end with what it claimed before, and so
hold a step that does not follow. A side that knows the other's digests may choose which of its steps that is, not
whether there is one.

Costs: a replay of the block by each side for each round, one round up to 64 updates, two up to 4,096, three up to
262,144; one more for the states; and one update for the arbiter. 64 digests are 4.3 KB of the log.
Source: Arasu et al., "Verde: Verification via Refereed Delegation for Machine Learning Programs" (2025), for the game;
the digests are those of `CheckpointManifest.state_digest`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from stoker.pool.events import Refused

MOST_POINTS = 64
"""Digests that a side states at a time."""

Party = Literal["agent", "verifier"]


def points(low: int, high: int) -> tuple[int, ...]:
    """Updates after which states are compared next, between one that agrees and one that differs [updates].

    >>> points(10, 13), points(0, 640)[:2], points(0, 640)[-1]
    ((11, 12, 13), (10, 20), 640)
    """
    count = min(MOST_POINTS, high - low)
    return tuple(low + (number * (high - low)) // count for number in range(1, count + 1))


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side has stated.

    Attributes:
        end: digest of its state after the last update of the stretch; "": not stated yet.
        states: digests of this round; (): not stated yet.
        before, after: SHA-256 of the blobs with its states around the update that was found.
        has_given_up: it cannot make the block again.
    """

    end: str = ""
    states: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    has_given_up: bool = False

    @property
    def blobs(self) -> frozenset[str]:
        """What it supplied."""
        return frozenset({self.before, self.after} - {""})


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """How far the search has come.

    Attributes:
        begin: updates before the block, whose state is committed [updates].
        low, high: the states agree after `low` updates, and differ after `high` [updates].
        low_state: digest of the state after `low` updates; "" at the beginning of the block.
        agent, verifier: the sides.
        since_s: when both were asked for what comes next [s since 1970].
    """

    begin: int
    low: int
    high: int
    low_state: str = ""
    agent: Side
    verifier: Side
    since_s: float = 0.0

    def side(self, party: Party) -> Side:
        """One of the sides."""
        return self.agent if party == "agent" else self.verifier

    @property
    def is_void(self) -> bool:
        """Whether the sides do not differ at all: the verifier has stated the agent's own state."""
        return bool(self.agent.end) and self.agent.end == self.verifier.end

    @property
    def update(self) -> int:
        """The update on which the sides differ first, once it is found [updates, from 1]; else 0."""
        return self.high if self.agent.end and self.high - self.low == 1 and not self.is_void else 0

    def waits_for(self, party: Party) -> bool:
        """Whether a side has still to state digests, or to supply its states."""
        side = self.side(party)
        return not (side.has_given_up or self.is_void or (side.after if self.update else side.states))

    @property
    def is_ready(self) -> bool:
        """Whether an arbiter can make the update."""
        return bool(self.update and self.agent.after and self.verifier.after)

    def traced(self, party: Party, states: tuple[str, ...], now_s: float) -> Bisection:
        """After one side stated its digests; () gives up.

        Raises:
            Refused: it has answered before, or the digests are none of the stretch.
        """
        if self.update or not self.waits_for(party):
            raise Refused(f"no digests are asked of the {party} now")
        side, wanted = self.side(party), points(self.low, self.high)
        if not states:
            return self._with(party, replace(side, has_given_up=True))
        if len(states) != len(wanted):
            raise Refused(f"{len(states)} digests were stated, {len(wanted)} are asked for")
        if side.end and states[-1] != side.end:
            raise Refused(
                f"the states of the {party} end in {states[-1][:12]}…, and it stated {side.end[:12]}… after update "
                f"{self.high:,} before"
            )
        found = self._with(party, replace(side, states=states))
        return _narrowed(found, wanted, now_s) if found.agent.states and found.verifier.states else found

    def supplied(self, party: Party, before: str, after: str, now_s: float) -> Bisection:
        """After one side supplied the states around the update; without `after` it gives up.

        Raises:
            Refused: no update is found yet, it has answered before, or one of the two is missing.
        """
        if not self.update or not self.waits_for(party):
            raise Refused(f"no states are asked of the {party} now")
        side = self.side(party)
        if not after:
            return self._with(party, replace(side, has_given_up=True))
        if bool(before) != (self.low > self.begin):
            how = "missing" if self.low > self.begin else "committed already"
            raise Refused(f"the state before update {self.high:,} is {how}")
        found = self._with(party, replace(side, before=before, after=after))
        return replace(found, since_s=now_s) if found.is_ready else found

    def _with(self, party: Party, side: Side) -> Bisection:
        return replace(self, agent=side) if party == "agent" else replace(self, verifier=side)


def _narrowed(search: Bisection, wanted: tuple[int, ...], now_s: float) -> Bisection:
    """A search up to the first state of this round that differs; where none does, the verifier's claim was none."""
    pairs = list(zip(search.agent.states, search.verifier.states, strict=True))
    first = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
    agent_end, verifier_end = pairs[first]
    return replace(
        search,
        low=wanted[first - 1] if first else search.low,
        low_state=pairs[first - 1][0] if first else search.low_state,
        high=wanted[first],
        agent=replace(search.agent, end=agent_end, states=()),
        verifier=replace(search.verifier, end=verifier_end, states=()),
        since_s=now_s,
    )
