"""A run of several agents: one site of `Job(sync=…)` at each, their leases opened together, and what state it is in.

What: sites are chosen by what the gang costs until it is done: all meters run until the slowest has ended, and an
exchange takes what the slowest pair of agents needs where large messages go directly (`pair_links`), and else what the
slowest link to the pool needs, through which they go then. After all agents have accepted,
each site is a run of leases of its own (`rented_run.py`): where an agent is lost the next one goes on from the site's
last block, with the messages that were sent in between, and the others wait for it. Where it finds no offer for a
minute, the leases of all sites are closed, so that none is paid for waiting, and opened together again, all or none.
Use when: a job asks for local SGD or DiLoCo. Costs: the sum of the sites.
Does not do: moves to better offers, several devices at an agent, waiting in the pool's queue.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import BadJob, PlaceFailed
from stoker.launching.launcher import Handle, LaunchTarget, seen_now
from stoker.planning.slow_links import Recommendation, recommend, stated_link
from stoker.pool import events as on
from stoker.pool.client import PoolClient
from stoker.pool.escrow import credits_text
from stoker.pool.events import NotNow, Refused
from stoker.pool.forwarding import BULK_BYTES, require_forwardable
from stoker.pool.job_box import PoolOrder
from stoker.pool.lease import LIVE, RELEASED
from stoker.pool.leased_job import BlobCache
from stoker.pool.matching import DEFAULT_LINK_BYTES_PER_S, Match
from stoker.pool.pair_links import NO_LINKS, DirectLink, DirectLinks
from stoker.pool.rented_run import (
    STOPPED,
    RentedRun,
    close_lease,
    most_forwarding,
    short_of_credits,
)
from stoker.pool.shown_lease import AWAY, ShownLease, resting_offers
from stoker.pool.terms import Exchanges, Terms, ranked_offers
from stoker.records.launch import LaunchPhase, LaunchState
from stoker.units import GIB, format_seconds

POLL_S = 1.0
"""What an exchange through the pool takes besides its bytes: agents look for messages now and then [s]."""
PAUSED = "paused: "
"""How the reason of a lease begins that its renter closed since another site found no offer."""
WAITED_S = 60.0
"""For so long the other sites wait, and are paid, while one finds no offer [s]: about what starting all again takes."""
_MOST_CONSIDERED = 40
_TRIES = 5
_MOST_GANGS = 20
"""Times that a gang is opened at most, until it is complete."""


@dataclass(frozen=True, kw_only=True)
class GangMatch:
    """Offers for the sites of a run.

    Attributes:
        matches: by site.
        hours: until the slowest is done, exchanges included [h].
        exchange_s: for which all wait in one exchange [s].
        links: direct paths between its agents, as far as their messages go over them.
        credits: of all sites [micro-credits].
        score: `credits` and the worth of `hours` [micro-credits].
    """

    matches: tuple[Match, ...]
    hours: float
    exchange_s: float
    credits: int
    score: float
    links: DirectLinks


def _link(rate: float) -> float:
    return rate or DEFAULT_LINK_BYTES_PER_S


def _upload(match: Match) -> float:
    return _link(match.listed.offer.upload_bytes_per_s)


def _direct_sites(matches: Sequence[Match], links: DirectLinks) -> list[int]:
    """Sites whose messages go directly: those with a path to each other one; of the rest they go through the pool."""
    agents = [one.listed.agent for one in matches]
    return [
        site
        for site, agent in enumerate(agents)
        if all((agent, other) in links for number, other in enumerate(agents) if number != site)
    ]


def exchange_s(matches: Sequence[Match], num_bytes: float, links: DirectLinks = NO_LINKS) -> float:
    """Time of one exchange between offers [s].

    Of messages that go directly the slowest site sends to all others, or fetches from them, one after the other; of
    those through the pool it is the slowest upload, then the slowest downloads.
    """
    agents, direct = [one.listed.agent for one in matches], _direct_sites(matches, links)
    took_s = {
        (site, other): num_bytes / links[agents[site], agents[other]].bytes_per_s
        for site in direct
        for other in range(len(matches))
        if other != site
    }
    ends = itertools.product(range(len(matches)), (0, 1))
    line_s = max(sum(each_s for pair, each_s in took_s.items() if pair[end] == site) for site, end in ends)
    delay_s = max((links[agents[one], agents[other]].delay_s for one, other in took_s), default=0.0)
    rest = [one for site, one in enumerate(matches) if site not in direct]
    through_s = 0.0
    if rest:
        down = min(_link(one.listed.offer.download_bytes_per_s) for one in matches)
        num_fetched = len(rest) - (len(rest) == len(matches))
        through_s = num_bytes / min(map(_upload, rest)) + num_fetched * num_bytes / down
    return line_s + delay_s + through_s + POLL_S


def best_gang(
    offers: Sequence[Match],
    sites: int,
    exchanges: Exchanges,
    value_per_hour: int,
    most_credits: float = math.inf,
    links: DirectLinks = NO_LINKS,
) -> GangMatch | None:
    """The offers, all of one determinism class, on which all sites are done for the least; None: there are not enough.

    For each speed that the slowest site, and each link that the slowest link may have, the cheapest offers that keep up
    are the best ones: all meters run until the slowest is done. With direct paths likewise, for the slowest pair.

    Args:
        offers: for one site each, with their hours, the best first.
        sites: number of sites.
        exchanges: between them.
        value_per_hour: what an hour of waiting is worth [micro-credits].
        most_credits: that may be spent [micro-credits].
        links: direct paths between agents; see `links_for`.
    """
    by_class: dict[str, list[Match]] = {}
    for one in offers:
        if one.listed.offer.determinism_class:
            by_class.setdefault(one.listed.offer.determinism_class, []).append(one)
    best: GangMatch | None = None
    for same in by_class.values():
        cheap = sorted(same[:_MOST_CONSIDERED], key=lambda one: (one.listed.offer.price_per_hour, one.hours))
        for able in itertools.chain(_through_pool(cheap, sites, exchanges), _paired(cheap, sites, links)):
            found = _gang_of(able, exchanges, value_per_hour, links)
            if found.credits <= most_credits and (best is None or found.score < best.score):
                best = found
    return best


def _through_pool(cheap: Sequence[Match], sites: int, exchanges: Exchanges) -> Iterator[list[Match]]:
    """For each slowest speed and slowest link to the pool the cheapest offers that keep up."""
    for slowest in {one.hours for one in cheap}:
        for link_s in {exchange_s((one,) * sites, exchanges.num_bytes) for one in cheap}:
            able = [
                one
                for one in cheap
                if one.hours <= slowest and exchange_s((one,) * sites, exchanges.num_bytes) <= link_s
            ][:sites]
            if len(able) == sites:
                yield able


def _paired(cheap: Sequence[Match], sites: int, links: DirectLinks) -> Iterator[list[Match]]:
    """For each offer, slowest speed and slowest pair the cheapest others that keep up, each with a path to all others.

    An agent knows its links to few others, so that these are few sets.
    """

    def rate(one: Match, other: Match) -> float:
        there = links.get((one.listed.agent, other.listed.agent))
        back = links.get((other.listed.agent, one.listed.agent))
        return 0.0 if there is None or back is None else min(there.bytes_per_s, back.bytes_per_s)

    for first in cheap if links else ():
        near = [one for one in cheap if rate(first, one) > 0]
        for slowest, least in itertools.product(
            {max(one.hours, first.hours) for one in near}, {rate(first, one) for one in near}
        ):
            able = [first]
            for one in near:
                if one.hours <= slowest and len(able) < sites and all(rate(one, other) >= least for other in able):
                    able.append(one)
            if len(able) == sites:
                yield able


def waiting_s(matches: Sequence[Match], exchanges: Exchanges, links: DirectLinks = NO_LINKS) -> float:
    """Time for which all sites wait in one exchange of all weights [s]: what the updates made during it do not cover.

    Each fragment is an exchange of its own. Of a message that went directly the pool gets its copy between exchanges: a
    line on which that takes longer is waited for as well.
    """
    fragment_s = exchange_s(matches, exchanges.num_bytes / exchanges.fragments, links)
    update_s = max(one.metered_hours for one in matches) * 3600 / max(1, exchanges.num_updates)
    waits_s = exchanges.fragments * max(0.0, fragment_s - exchanges.overlap * update_s)
    copies_s = [exchanges.num_bytes / _upload(matches[site]) for site in _direct_sites(matches, links)]
    return max(waits_s, max(copies_s, default=0.0) - exchanges.interval * update_s)


def links_for(client: PoolClient, exchanges: Exchanges) -> DirectLinks:
    """Direct paths between agents for a job whose messages go over them: those are large ones."""
    if exchanges.num_bytes / exchanges.fragments < BULK_BYTES:
        return NO_LINKS
    documents: Any = client.state("links")
    return {
        (one["source"], one["target"]): DirectLink(bytes_per_s=one["bytes_per_s"], delay_s=one["delay_s"])
        for one in documents
    }


def _gang_of(
    matches: Sequence[Match], exchanges: Exchanges, value_per_hour: int, links: DirectLinks = NO_LINKS
) -> GangMatch:
    each_s = waiting_s(matches, exchanges, links)
    waited_h = exchanges.count * each_s / 3600
    # Where sites ran before, their pace has the waiting in it.
    waits = [0.0 if one.forecast is not None and one.forecast.has_exchanges else waited_h for one in matches]
    hours = max(one.hours + wait for one, wait in zip(matches, waits, strict=True))
    metered_h = max(one.metered_hours + wait for one, wait in zip(matches, waits, strict=True))
    # Replays cost the share of the price that they have in the match of a single lease.
    credits_ = sum(one.credits * (metered_h / one.metered_hours if one.metered_hours else 1.0) for one in matches)
    return GangMatch(
        matches=tuple(replace(one, metered_hours=metered_h) for one in matches),
        hours=hours,
        exchange_s=each_s,
        credits=round(credits_),
        score=credits_ + value_per_hour * hours,
        links=links,
    )


def forwarding_of(exchanges: Exchanges, job: str, rules: on.Founded, most: int) -> int:
    """What all messages of one site cost on their way through the pool [micro-credits]; only large ones cost anything.

    Raises:
        Refused: it is more than `most`, or more bytes than the pool forwards for a lease.
    """
    num_bytes = math.ceil(exchanges.num_bytes)
    if num_bytes < BULK_BYTES:
        return 0
    rounded = exchanges.count if rules.forward_price else 0  # each fee is rounded up
    whole = require_forwardable(job, exchanges.count * num_bytes, rules, most=max(0, most - rounded))
    return whole + rounded


def recommended(found: GangMatch, exchanges: Exchanges) -> Recommendation | None:
    """The interval between exchanges that would suit these links; None where the time of an update is not known.

    A pace that has exchanges in it does not say it.
    """
    known = [one.forecast for one in found.matches if one.forecast is not None]
    forecasts = [one for one in known if not one.has_exchanges]
    if not (forecasts and exchanges.num_updates and exchanges.parameters):
        return None
    turns = len(found.matches) - 1
    empty_s = exchange_s(found.matches, 0.0, found.links)
    each_s = (exchange_s(found.matches, GIB, found.links) - empty_s) / GIB  # of a byte: to each of the others
    links = stated_link(bytes_per_s=turns / each_s, latency_s=empty_s / turns, sites=len(found.matches))
    step_s = max(one.run_s for one in forecasts) / exchanges.num_updates
    return recommend(links, gradient_bytes=4.0 * exchanges.parameters, step_s=step_s)


class GangRun:
    """A run of several sites.

    Args:
        client: of the pool, with the renter's key.
        handle: of the run; its `sites` is their number, its `firsts` the first lease of each that counts.
        blobs: of the run.
    """

    def __init__(self, client: PoolClient, handle: Handle, blobs: BlobCache) -> None:
        self.client, self.handle, self.blobs = client, handle, blobs
        self.sites = tuple(RentedRun(client, site_handle(handle, site), blobs) for site in range(int(handle["sites"])))

    def leases(self) -> list[list[ShownLease]]:
        """The leases of each site, the oldest first."""
        return [run.leases() for run in self.sites]

    def open(self, order: PoolOrder, limit_s: float, avoided: Collection[str] = ()) -> GangMatch:
        """Open the leases of all sites, or none.

        Raises:
            PlaceFailed: there are not enough free offers of one class.
            BadJob: none are within what may be spent.
            Refused: the deposits are not covered, or others were faster.
        """
        before, skipped = self.leases(), set(avoided)
        for tries_left in reversed(range(_TRIES)):
            found = self.match(limit_s, skipped)
            paid_s = self._paid_s(found, limit_s)
            bodies = []
            for run, match, leases in zip(self.sites, found.matches, before, strict=True):
                site_order = replace(order, site=int(run.handle["site"]), sites=len(self.sites))
                bodies.append(run.opening(match, paid_s, run.continued(site_order, leases), len(leases)))
            try:
                self.client.post(on.GangOpened(leases=tuple(bodies)), patience_s=20.0)
            except NotNow:
                if not tries_left:
                    raise
                free = {one.listed.offer.offer_id for one in self._offers(limit_s, skipped)}
                skipped |= {one.listed.offer.offer_id for one in found.matches} - free
                continue
            return found
        raise AssertionError("unreachable: the last try returns or raises")

    def match(self, limit_s: float, avoided: Collection[str] = ()) -> GangMatch:
        """The best free offers for all sites.

        Raises:
            PlaceFailed, BadJob: as `open`.
            Refused: the run's messages would cost more on their way through the pool than is to be spent on that.
        """
        terms, sites = Terms.of_handle(self.handle), len(self.sites)
        forwarding_of(terms.exchanges, self.handle["job"], self.client.rules(), terms.most_forwarding)
        offers, most = self._offers(limit_s, avoided), self.handle["max_credits"]
        links = links_for(self.client, terms.exchanges)
        done = [one for of_site in self.leases() for one in of_site if one.messages or one.commitments]
        if done:  # what was sent stands
            offers = [one for one in offers if one.listed.offer.determinism_class == done[0].determinism_class]
        found = best_gang(offers, sites, terms.exchanges, terms.value_per_hour, links=links)
        if found is None:
            raise PlaceFailed(
                f"the pool has {len(offers)} free offers for the job, and no {sites} of one determinism class, as the "
                "sites of a gang have to be",
                remedy="`stoker pool offers` lists what there is; --place-option agents=… takes fewer.",
            )
        if most is not None and found.credits > most:
            cheaper = best_gang(offers, sites, terms.exchanges, terms.value_per_hour, most, links)
            if cheaper is None:
                raise BadJob(
                    f"{sites} sites are expected to cost {found.credits / 1e6:g} credits together, and --max-cost is "
                    f"{most / 1e6:g}",
                    remedy="Raise it, take fewer agents, or lower --verify: replays are paid as well.",
                )
            return cheaper
        return found

    def _paid_s(self, found: GangMatch, limit_s: float) -> float:
        """The time that is paid for at these offers, `limit_s` at most [s].

        Raises:
            BadJob: what is left of the money ends before the run.
        """
        paid_s = min(limit_s, *(float(one.listed.offer.max_s) for one in found.matches))
        if (most := self.handle["max_credits"]) is None:
            return paid_s
        terms, firsts = Terms.of_handle(self.handle), self.handle["firsts"]
        mine = [one for of_site, first in zip(self.leases(), firsts, strict=True) for one in of_site[first:]]
        spare = most_forwarding(self.client.rules(), terms) * len(self.sites)
        left = max(0, int(most) - sum(lease.most_spent for lease in mine) - spare)
        rate = sum(one.listed.offer.price_per_hour for one in found.matches) * (1 + terms.most_checked)
        affordable_s = 3600 * left / max(1, rate)
        if affordable_s < min(limit_s, 3600 * found.hours):
            takes = min(limit_s, 3600 * found.hours) / 3600 * rate / 1e6
            raise short_of_credits(
                left, int(most), f"{len(self.sites)} sites, replays included, take {takes:.4g}", spare
            )
        return min(paid_s, affordable_s)

    def _offers(self, limit_s: float, avoided: Collection[str] = ()) -> list[Match]:
        target = LaunchTarget(text="pool", kind="pool", address="", device=self.handle["device"], devices_each=1)
        return ranked_offers(
            self.client, target, Terms.of_handle(self.handle), run_s=limit_s, avoided=frozenset(avoided)
        )

    def state(self) -> LaunchState:
        """The state of all sites; opens what is due: all leases again, or the next one of a site."""
        leases = self.leases()
        if not all(leases):
            return seen_now(phase="failed", why="the pool knows no lease of one of the sites")
        newest = [of_site[-1] for of_site in leases]
        if any(one.is_run_stopped and one.state in LIVE for one in newest):  # who stopped it has not closed all
            self.stop()
            leases = self.leases()
            newest = [of_site[-1] for of_site in leases]
        if not newest[0].is_gang_begun:
            return self._complete(newest, leases)
        of_start = [one for chain, first in zip(leases, self.handle["firsts"], strict=True) for one in chain[first:]]
        if wrong := next((one for one in of_start if one.outcome), None):
            self.stop(f"stopped: a block of {wrong.lease_id} is wrong")
            return seen_now(
                phase="failed",
                why=f"a block of {wrong.lease_id} is wrong, and the other sites have gone on from what it sent; "
                "start the run again with --new",
                evidence=wrong.in_words(),
            )
        if _is_paused(newest):
            return self._paused(newest, leases)
        states = [run.state() for run in self.sites]
        phases: list[LaunchPhase] = [state.phase for state in states]
        restarts = sum(state.restarts for state in states)
        ends: tuple[LaunchPhase, ...] = ("failed", "stopped")
        for phase in ends:
            if phase in phases:
                site = phases.index(phase)
                self.stop(f"stopped: site {site} has {phase}")
                return replace(states[site], why=f"site {site}: {states[site].why}", restarts=restarts)
        if why := self._waits_in_vain(phases):
            return self._paused(newest, leases, why)
        # The least advanced one speaks for all.
        order: tuple[LaunchPhase, ...] = ("queued", "requeued", "starting", "running", "saving", "finished")
        site = min(range(len(states)), key=lambda number: order.index(phases[number]) if phases[number] in order else 0)
        why = states[site].why if phases[site] == "finished" else f"site {site}: {states[site].why}"
        return replace(states[site], why=why, restarts=restarts)

    def _complete(self, newest: list[ShownLease], leases: list[list[ShownLease]]) -> LaunchState:
        """A gang of which not all agents have accepted: it is waited for, or opened again with other offers."""
        num_there = sum(one.state in LIVE and bool(one.accepted_s) for one in newest)
        words = f"{num_there} of {len(newest)} agents have accepted"
        if all(one.state in LIVE for one in newest):
            if away := [one for one in newest if one.is_left_alone]:  # the others are released
                close_lease(self.client, away[0], AWAY)
            return seen_now(phase="queued", why=f"{words}; no meter runs before all have")
        if any(one.reason.startswith("stopped") for one in newest):
            return seen_now(phase="stopped", why="stopped as asked, before all agents had accepted")
        if live := [one for one in newest if one.state in LIVE]:
            return seen_now(phase="queued", why=f"{words}; {len(live)} are released")
        declined = [[one for one in chain if not one.accepted_s and one.reason != RELEASED] for chain in leases]
        num_gangs = max(map(_num_never_begun, leases, self.handle["firsts"]))
        if num_gangs >= _MOST_GANGS:
            return seen_now(phase="failed", why=f"{num_gangs} gangs were never complete; the last: {words}")
        return self._opened_again(leases, declined, words)

    def _waits_in_vain(self, phases: Sequence[str]) -> str:
        """Why the sites are to wait no longer, as words: one has found no offer for a while; "": they go on, or wait.

        Not once a site has results: it has sent its last message, and the others need it no more.
        """
        if "queued" not in phases:
            return ""
        pool, newest = self.client.state("pool"), [chain[-1] for chain in self.leases()]
        now_s, up_since_s = float(pool["now_s"]), float(pool["up_since_s"])  # before that no offer could be taken
        if any(one.result for one in newest):
            return ""
        for site, last in enumerate(newest):
            waited_s = now_s - max(last.closed_s, up_since_s)
            if phases[site] == "queued" and last.state not in LIVE and waited_s > WAITED_S:
                return f"site {site} has found no offer for {format_seconds(waited_s)}"
        return ""

    def _paused(
        self, newest: list[ShownLease], leases: list[list[ShownLease]], why: str = "a site found no offer"
    ) -> LaunchState:
        """End the leases of a gang of which one site is missing; once all have ended, open all again, or none."""
        if any(one.state in LIVE for one in newest):
            self.stop(f"{PAUSED}{why}")
            return seen_now(phase="queued", why=f"{why}: the others are closed, so that none is paid for waiting")
        others = [[one for one in chain if not one.reason.startswith(PAUSED)] for chain in leases]
        return self._opened_again(leases, others, why)

    def _opened_again(self, leases: list[list[ShownLease]], failed: list[list[ShownLease]], why: str) -> LaunchState:
        """Open the leases of all sites again, each to go on from its last block; offers of leases in `failed` rest."""
        if any(chain[-1].is_run_stopped for chain in leases):
            return seen_now(phase="stopped", why=f"stopped as asked, while it had no leases: {why}")
        avoided = set[str]().union(*(resting_offers(chain, _now(self.client)) for chain in failed))
        left_s = min(run.left_s(chain) for run, chain in zip(self.sites, leases, strict=True))
        if left_s < 1 or (self.handle["until_s"] and time.time() > self.handle["until_s"]):
            return seen_now(phase="failed", why=f"the time of the run is over: {why}")
        order = replace(self.sites[0].order(leases[0][0]), site=0)
        try:
            self.open(order, left_s, avoided)
        except BadJob as problem:
            return seen_now(phase="failed", why=f"{why}; {problem.message}")
        except (PlaceFailed, Refused) as problem:
            return seen_now(phase="queued", why=f"{why}; waiting for other offers: {problem.message}")
        return seen_now(phase="requeued", why=f"{why}: all were opened again")

    def stop(self, reason: str = STOPPED) -> None:
        """Close the leases of all sites; what was committed stays."""
        for of_site in self.leases():
            if of_site and of_site[-1].state in LIVE:
                close_lease(self.client, of_site[-1], reason, patience_s=20.0)

    def log(self) -> bytes:
        """The log of the first site."""
        return self.sites[0].log()

    def fetch(self, into: Path) -> None:
        """The newest state of the first site: the weights that all share are equal."""
        self.sites[0].fetch(into)


def _is_paused(newest: Sequence[ShownLease]) -> bool:
    """Whether leases of a gang, the newest of each site, were closed since one site found no offer."""
    return any(one.closed_by == one.renter and one.reason.startswith(PAUSED) for one in newest)


def _num_never_begun(chain: Sequence[ShownLease], first: int) -> int:
    """Leases of a site in a row, up to the newest, in which nothing ran; of this start, since earlier ones may have."""
    return sum(1 for _ in itertools.takewhile(lambda one: not one.running_s, reversed(chain[first:])))


def _now(client: PoolClient) -> float:
    return float(client.state("pool")["now_s"])


def site_names(job: str, sites: int) -> list[str]:
    """The names of the runs of all sites."""
    return [f"{job}-s{site}" for site in range(sites)]


def site_handle(handle: Handle, site: int) -> Handle:
    """The handle of one site's run: its share of the money, and no moves."""
    sites, most = int(handle["sites"]), handle["max_credits"]
    return {
        **handle,
        "job": site_names(handle["job"], sites)[site],
        "gang": handle["job"],
        "site": site,
        "first": int(handle["firsts"][site]),
        "max_credits": None if most is None else int(most) // sites,
        "options": {**handle["options"], "move": "no"},
    }


def gang_text(found: GangMatch, exchanges: Exchanges, forwarding: int = 0) -> str:
    """What a gang costs, how long its exchanges take, and which interval would suit its links, as words.

    `forwarding`: of the messages of each site [micro-credits].
    """
    names = ", ".join(one.listed.offer.offer_id for one in found.matches)
    share = exchanges.count * found.exchange_s / 3600 / found.hours if found.hours else 0.0
    text = (
        f"{len(found.matches)} sites at {names}: {found.credits / 1e6:.2f} credits together, {found.hours:.2f} h until "
        f"the slowest is done. {exchanges.count:,} exchanges of {found.exchange_s:.1f} s are {100 * share:.0f} % of it"
    )
    if num_direct := len(_direct_sites(found.matches, found.links)):
        text += f"; the messages of {num_direct} sites go directly, with a copy to the pool"
    if forwarding:
        text += f"; its messages go through the pool for {credits_text(len(found.matches) * forwarding)} more"
    advice = recommended(found, exchanges)
    if advice is not None and advice.interval > exchanges.interval:
        text += f". For these links every=stoker.updates({advice.interval}) is recommended, not {exchanges.interval}"
    return text
