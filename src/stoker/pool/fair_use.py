"""Fair use of a team's pool: whose turn it is where devices are short.

What: the operator makes teams, each with a weight, a priority and a quota. A renter that finds nothing waits, in the
log. While there are not enough devices of a kind for all who wait, the next one goes to the highest priority, and among
equals to the team with the smallest weighted dominant share. For a higher priority a running lease is preempted, once
it has a committed checkpoint, with the notice that its offer promised.
Use when: one pool, several teams. Costs: a look over offers and leases for each lease that is opened.
Does not do: reserve devices for a request that needs several offers at once.
Source: A. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011, section 4; its resources are here kinds of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.pool.events import NotNow, TeamMade, Waiting
from stoker.pool.lease import LIVE, Lease

if TYPE_CHECKING:
    from stoker.pool.state import ListedOffer, State


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A renter that waits, and since when [s since 1970]."""

    renter: str
    request: Waiting
    since_s: float

    def asks_for(self, kind: str) -> bool:
        """Whether such a device would do."""
        return not self.request.kinds or kind in self.request.kinds

    def takes(self, kind: str, now_s: float) -> bool:
        """Whether it still waits, and such a device would do."""
        return now_s < self.request.until_s and self.asks_for(kind)


def team_of(state: State, renter: str) -> TeamMade:
    """The team of a key; a key without one is a team of its own, of weight 1, without a quota."""
    return next((team for team in state.teams.values() if renter in team.members), TeamMade(team=renter[:64]))


def devices_held(state: State) -> dict[str, Counter[str]]:
    """Devices in live leases, by team and kind."""
    held: dict[str, Counter[str]] = {}
    for name in state.unsettled:
        lease = state.leases[name]
        if lease.state in LIVE:
            held.setdefault(team_of(state, lease.renter).team, Counter())[lease.device] += lease.num_devices
    return held


def dominant_share(team: TeamMade, held: Mapping[str, Counter[str]], offered: Counter[str]) -> float:
    """The largest share that a team has of any kind of device, divided by its weight."""
    mine = held.get(team.team, Counter())
    return max((count / max(1, offered[kind]) for kind, count in mine.items()), default=0.0) / team.weight


def require_turn(state: State, renter: str, listed: ListedOffer, now_s: float) -> None:
    """Refuse an offer to a team that is over its quota, or while it is the turn of others who wait.

    Raises:
        NotNow: with the quota, or who comes first.
    """
    team, device = team_of(state, renter), listed.offer.device
    held = devices_held(state) if state.teams or state.waiting else {}
    now_held = sum(held.get(team.team, Counter()).values())
    if team.most_devices and now_held + device.count > team.most_devices:
        raise NotNow(
            f"team {team.team} has {now_held} devices, and its quota is {team.most_devices}",
            remedy="Wait for one of its leases to end.",
        )
    asking = {
        one.renter: one for one in state.waiting.values() if one.renter != renter and one.takes(device.kind, now_s)
    }
    if not asking:
        return
    offered, free = Counter[str](), 0
    for known in state.offers.values():
        if known.lease_id or state.is_free(known, now_s):
            offered[known.offer.device.kind] += known.offer.device.count
        free += state.is_free(known, now_s) and known.offer.device.kind == device.kind
    mine = (-team.priority, dominant_share(team, held, offered))
    first = []
    for one in asking.values():  # one device each, however many requests a key has
        other = team_of(state, one.renter)
        is_full = other.most_devices and sum(held.get(other.team, Counter()).values()) >= other.most_devices
        if other.team != team.team and not is_full and (-other.priority, dominant_share(other, held, offered)) < mine:
            first.append(other.team)
    if len(first) >= free:
        raise NotNow(
            f"{free} free offers of {device.kind}, and {len(first)} who wait come before team {team.team}: "
            f"{', '.join(sorted(set(first)))[:200]}",
            remedy="Wait as well (a `waiting` event keeps the place), or take another kind of device.",
        )


def to_preempt(state: State, now_s: float) -> list[Lease]:
    """Running leases that make room for who waits with a higher priority: the least important, one for each request."""
    chosen: list[Lease] = []
    for one in sorted(state.waiting.values(), key=lambda one: one.since_s):
        waits = team_of(state, one.renter)
        if not waits.priority:  # before all offers are looked at, each second
            continue
        suits = [listed for listed in state.offers.values() if one.takes(listed.offer.device.kind, now_s)]
        if any(state.is_free(listed, now_s) for listed in suits):
            continue
        leases = [state.leases[listed.lease_id] for listed in suits if listed.lease_id]
        if any(lease.state == "reclaiming" for lease in leases):
            continue  # one is being freed
        weaker = [
            lease
            for lease in leases
            if lease.state == "running"
            and lease.commitments
            and lease not in chosen
            and team_of(state, lease.renter).priority < waits.priority
        ]
        if weaker:
            chosen.append(min(weaker, key=lambda lease: (team_of(state, lease.renter).priority, -lease.opened_s)))
    return chosen
