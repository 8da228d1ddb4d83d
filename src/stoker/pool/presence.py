"""Which agents are there: who asks the control plane for work, replays blocks of others, and answers probes.

What: every request for work says that its agent is there. An idle one asks again after two seconds, one with a job at
each beat. Nothing of it stands in the log: a pool that was started again hears of its agents within a beat.
Two limits: an offer is not matched any more after `HERE_S`, since a lease there would wait for nothing; a verifier that
has begun a replay is given up after `PRESENT_S`, since another one would be paid as well.
Silence counts only while the control plane was up (`UptimeClock`): a process that was stopped, or whose machine was,
has received nothing, and that says nothing about any agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.pool.lease import BEAT_S

HERE_S = 2.5 * BEAT_S
"""An agent that did not ask for work for so long is away: its offers are not matched [s]."""
MOST_GAP_S = 3.0
"""Most that counts of the time between two ticks of a control plane, which ticks each second [s]."""
PRESENT_S = 9 * BEAT_S
"""A verifier that did not ask for work for so long is waited for no longer [s]."""


class UptimeClock:
    """Seconds in which this process was up and could receive, since it was made [s].

    The listener ticks at least once a second. Of a longer time between two ticks `MOST_GAP_S` count: in the rest the
    process was stopped, or could take nothing, such as while its disk hung.

    Args:
        elapsed: time that has passed [s].
    """

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._began_s = self._ticked_s = elapsed()
        self._up_s = 0.0

    def __call__(self) -> float:
        """Seconds so far; right before the next tick as well."""
        return self._up_s + min(self._elapsed() - self._ticked_s, MOST_GAP_S)

    @property
    def paused_s(self) -> float:
        """Seconds so far in which it was not."""
        return self._elapsed() - self._began_s - self()

    def tick(self) -> None:
        """Note that this process is up now."""
        now_s = self._elapsed()
        self._up_s += min(now_s - self._ticked_s, MOST_GAP_S)
        self._ticked_s = now_s


class Presence:
    """The agents that asked for work.

    Args:
        clock: that silence is measured by [s].

    Attributes:
        probed: keys of those that answer probes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_s: dict[str, float] = {}
        self._not_replaying: set[str] = set()
        self._up_since_s = clock()
        self.probed: set[str] = set()

    def ask(self, key: str, *, wait_s: float, replays: bool, probes: bool) -> None:
        """Note that an agent asks for work, and waits for it so long [s]."""
        self._asked_s[key] = self._clock() + wait_s
        (self._not_replaying.discard if replays else self._not_replaying.add)(key)
        (self.probed.add if probes else self.probed.discard)(key)

    def answered(self, key: str) -> None:
        """Note that an agent has its answer, and waits no longer."""
        self._asked_s[key] = self._clock()

    def keys(self) -> set[str]:
        """Agents that asked within `PRESENT_S`; others are forgotten, since keys cost nothing."""
        now_s = self._clock()
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if now_s - at_s < PRESENT_S}
        self._not_replaying &= self._asked_s.keys()
        self.probed &= self._asked_s.keys()
        return set(self._asked_s)

    def here(self) -> set[str]:
        """Agents whose offers can be matched."""
        now_s = self._clock()
        return {key for key, at_s in self._asked_s.items() if now_s - at_s < HERE_S}

    def is_away(self, key: str) -> bool:
        """Whether an agent is known to be away; of a pool that was just started nothing is known."""
        now_s = self._clock()
        return now_s - self._asked_s.get(key, self._up_since_s) >= HERE_S

    def replaying(self) -> set[str]:
        """Present agents that replay blocks of others."""
        return self.keys() - self._not_replaying
