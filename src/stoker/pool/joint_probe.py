"""Whether offers can be had at one moment: a device that is offered twice meets its time alone, and not together.

What: agents whose devices are idle are asked at one moment for the product of `hardware_proof`, which fills the memory
that they claim, each with a seed of its own. Two kinds of probes:

- a *screen* of up to 16 offers of one kind of device, once, all together. Who is slower than it claims, or than it was
  alone, is suspected with the others of the screen that are too.
- a *pair*, in three rounds: each alone, and both together, in turns. The pair *clashes* if each meets its time alone,
  and in none of the rounds both meet it together; the clash is of who was late in most of the rounds.

Who clashed with another one twice in a row is marked: it is not matched while the other's offer stands, and the times
are in the log. Where one was in time and the other late, the one stays free: an agent that is late on purpose stops
itself, and no one else. An offer that is withdrawn frees the other; so does a later probe of the same two offers
without a clash. Other offers of the same agents free them only once one of the two is gone: they may be other devices.

The limit is 1.6 times the best time alone: two programs on one device take twice as long each, or one has no memory
(measured: docs/pool.md). One bad sample decides nothing: the best of three times alone, all three rounds, and two
probes at different times have to agree.

It proves that both claims did not hold at one moment, on three occasions, twice, by the clock of the control plane. It
does not prove which of the two is false, nor what a device is. It does not see: offers of which one is leased; agents
that decline (`--no-probe`), which have no time in `probed_s`; a device that is twice as fast and large as both claim.
Costs: some seconds of an idle device; the control plane checks rows on its CPU (`hardware_proof`).
Use when: a pool has several owners.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from typing import TYPE_CHECKING

from stoker.pool.events import Probed, ProbeTimes

if TYPE_CHECKING:
    from stoker.pool.state import ListedOffer

ROUNDS = 3
"""Rounds of a pair."""
SLOW = 1.6
"""Times the time alone from which on an answer counts as late [1]."""
BELOW_CLAIM = 1.2
"""Times the claimed time from which on an offer is slower than it claims [1]; with `SLOW` below two, the time of two
programs on one device: who is slow alone to hide a second program is slower than it claims."""
PROBES_TO_MARK = 2
"""Clashes with one other agent in a row until an agent is marked."""
MOST_SCREENED, MOST_SCREENED_DEVICES = 16, 32
"""Offers of one screen, and devices of all of them."""
_MOST_DEVICES = MOST_SCREENED_DEVICES // 2
"""Devices of one offer that are probed, so that two offers always fit into a screen; others of it are not asked."""
MOST_PAIRS = 24
"""Pairs that one screen makes suspect."""

Pair = tuple[str, str]
"""Of a clash: the agent that was late, and with whom."""


@dataclass(frozen=True)
class Clash:
    """Probes in a row in which an agent was late with another one, and the offers with which that was found first."""

    count: int
    offers: frozenset[str]

    def is_of_standing(self, offers: Mapping[str, ListedOffer], now_s: float) -> bool:
        """Whether both offers stand: no other ones of the same agents free them then."""
        return all(name in offers and offers[name].stands(now_s) for name in self.offers)


def counted(known: Clash | None, probed: Collection[str], *, is_late: bool, is_standing: bool) -> Clash | None:
    """What is known of a pair of agents after a probe of two of their offers; None: no clash.

    Args:
        known: before.
        probed: names of the offers.
        is_late: whether they clashed.
        is_standing: whether the offers of `known` stand.
    """
    if known is None or not is_standing:
        return Clash(1 if known is None else known.count + 1, frozenset(probed)) if is_late else None
    if is_late:
        return replace(known, count=known.count + 1)
    return None if known.offers == frozenset(probed) else known


def is_slower_than_claimed(times: ProbeTimes) -> bool:
    """Whether an offer did not reach its own claim even alone."""
    best_s = min(filter(None, times.alone_s), default=0.0)
    return bool(times.claimed_s and best_s > BELOW_CLAIM * times.claimed_s)


def is_never_in_time(times: ProbeTimes) -> bool:
    """Whether an offer of a pair was far from its claim in each answer, alone as well: to ask again soon is of no use.

    In a screen alone it is not known who is late for others' sake.
    """
    best_s = min(filter(None, (*times.alone_s, *times.together_s)), default=0.0)
    return bool(times.alone_s) and (not best_s or bool(times.claimed_s and best_s > SLOW * times.claimed_s))


def limit_s(times: ProbeTimes) -> float:
    """The time within which an offer has to answer together with others [s]; 0: it is not known.

    >>> limit_s(ProbeTimes(offer_id="a", agent="a" * 64, claimed_s=4.0, alone_s=(3.0, 2.0, 9.0)))
    3.2
    """
    return SLOW * (min(filter(None, times.alone_s), default=0.0) or times.claimed_s)


def is_late(times: ProbeTimes, number: int) -> bool:
    """Whether an offer gave no right answer in time in round `number`, together with the others."""
    return not 0 < times.together_s[number] <= limit_s(times)


def is_screen(probed: Probed) -> bool:
    """Whether this is no probe of a pair that decides something."""
    rounds = {len(one.together_s) for one in probed.offers}
    return len(probed.offers) != 2 or min(rounds) < ROUNDS or not all(map(_has_answered_alone, probed.offers))


def clashes(probed: Probed) -> dict[Pair, bool]:
    """Of a pair: which agent clashed with which other one; nothing of a screen."""
    if is_screen(probed):
        return {}
    one, other = probed.offers
    late = [[is_late(times, number) for number in range(len(times.together_s))] for times in (one, other)]
    does_clash = all(map(any, zip(*late, strict=True)))
    found: dict[Pair, bool] = {}
    for times, with_times, rounds in ((one, other, late[0]), (other, one, late[1])):
        pair = (times.agent, with_times.agent)
        found[pair] = found.get(pair, False) or (does_clash and 2 * sum(rounds) > len(rounds))
    return found


def _has_answered_alone(times: ProbeTimes) -> bool:
    return len(times.alone_s) >= ROUNDS and all(times.alone_s)


def suspects(probed: Probed) -> list[tuple[str, str]]:
    """Offers to be probed in pairs after a screen, by name: those that were late, then each of them with the others."""
    late = [one.offer_id for one in probed.offers if is_late(one, 0)]
    others = [one.offer_id for one in probed.offers if one.offer_id not in late]
    pairs = [*combinations(late, 2), *((one, other) for one in late for other in others)]
    return pairs[:MOST_PAIRS]


def probed_devices(listed: ListedOffer) -> int:
    """How many devices of an offer are probed."""
    return min(listed.offer.device.count, _MOST_DEVICES)


def to_screen(
    offers: Sequence[ListedOffer], networks: Mapping[str, str], seen_s: Mapping[str, float], chance: random.Random
) -> list[ListedOffer]:
    """Offers of one kind of device to ask at one moment; none where no kind has two.

    Offers of one key and of one address come first, then those that were screened longest ago.

    Args:
        offers: whose agents are there, and idle.
        networks: addresses of agents.
        seen_s: when an offer was screened last [s].
        chance: order among equals.
    """
    of_kind: dict[str, list[ListedOffer]] = defaultdict(list)
    for one in offers:
        of_kind[one.offer.device.kind].append(one)
    kinds = [found for found in of_kind.values() if len(found) > 1]
    if not kinds:
        return []
    oldest_s = {id(found): min(seen_s.get(one.offer.offer_id, 0.0) for one in found) for found in kinds}
    chance.shuffle(kinds)
    found = min(kinds, key=lambda found: oldest_s[id(found)])
    chance.shuffle(found)
    found.sort(key=lambda one: seen_s.get(one.offer.offer_id, 0.0))
    first = found[0]
    found.sort(key=lambda one: not _is_related(one, first, networks))  # stable
    num_devices = [*accumulate(map(probed_devices, found[:MOST_SCREENED]))]
    return found[: sum(number <= MOST_SCREENED_DEVICES for number in num_devices)]


def _is_related(one: ListedOffer, other: ListedOffer, networks: Mapping[str, str]) -> bool:
    """Whether two offers are of one key, or come from one address."""
    return one.agent == other.agent or networks.get(one.agent, one.agent) == networks.get(other.agent, other.agent)


def blocked_by(
    listed: ListedOffer, offers: Collection[ListedOffer], marked: Collection[Pair], now_s: float
) -> ListedOffer | None:
    """The standing offer with which an offer cannot be had at one moment; None: there is none."""
    others = {other for late, other in marked if late == listed.agent}
    return next(
        (
            one
            for one in (offers if others else ())
            if one.agent in others and one.offer.offer_id != listed.offer.offer_id and one.stands(now_s)
        ),
        None,
    )
