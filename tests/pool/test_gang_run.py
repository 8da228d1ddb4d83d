"""Which offers the sites of a run take, and what is said of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.launching.launcher import seen_now
from stoker.pool import events as on
from stoker.pool import gang_run, rented_run
from stoker.pool.client import _Busy
from stoker.pool.escrow import pay_for
from stoker.pool.events import CREDIT, Refused
from stoker.pool.gang_run import GangRun, best_gang, exchange_s, forwarding_of, gang_text, links_for, waiting_s
from stoker.pool.job_box import PoolOrder
from stoker.pool.lease import RELEASED, SENT_OTHERWISE
from stoker.pool.matching import Match, RunForecast
from stoker.pool.pair_links import DirectLink
from stoker.pool.rented_run import RentedRun
from stoker.pool.state import ListedOffer
from stoker.pool.terms import Exchanges
from tests.pool.book import offer
from tests.pool.fake_pool import shown

CLASS = "c" * 64
RARE = Exchanges(num_bytes=1e6, count=10, parameters=250_000, interval=50, num_updates=500)


def match(name: str, price: float, hours: float, link: float = 1e6, **more: Any) -> Match:
    """An offer of so many credits an hour, on which a site alone takes so many hours; its link to the pool in bytes/s.

    Its agent has its name.
    """
    fields = {"upload_bytes_per_s": link, "download_bytes_per_s": link, "determinism_class": CLASS, **more}
    rate = round(price * CREDIT)
    return Match(
        listed=ListedOffer(offer=offer(name, price_per_hour=rate, **fields), agent=name, offered_s=0.0),
        forecast=RunForecast(run_s=3600 * hours),
        hours=hours,
        metered_hours=hours,
        credits=pay_for(round(3600 * hours), rate),
    )


def names(offers: list[Match], sites: int = 2, exchanges: Exchanges = RARE, value: float = 1.0) -> list[str]:
    """The offers that are taken."""
    found = best_gang(offers, sites, exchanges, round(value * CREDIT))
    return [] if found is None else sorted(one.listed.offer.offer_id for one in found.matches)


def test_an_exchange_takes_the_slowest_upload_and_all_downloads() -> None:
    """Of 1 MB at three sites, with a second in which agents look; a link that was not measured counts as 100 Mbit/s."""
    links = [(2e6, 2e6), (1e6, 4e6), (4e6, 2e6)]
    of_three = [match(str(up), 1.0, 1.0, upload_bytes_per_s=up, download_bytes_per_s=down) for up, down in links]
    assert exchange_s(of_three, 1e6) == pytest.approx(1 / 1 + 2 * 1 / 2 + 1)
    assert exchange_s([match("a", 1.0, 1.0, 0.0)] * 2, 12.5e6) == pytest.approx(3.0)


def paths(*pairs: str, rate: float = 1e8, delay_s: float = 0.0) -> dict[tuple[str, str], DirectLink]:
    """Direct links of pairs such as `ab`, both ways."""
    link = DirectLink(bytes_per_s=rate, delay_s=delay_s)
    return {ends: link for one, two in pairs for ends in ((one, two), (two, one))}


def test_a_direct_exchange_takes_what_the_slowest_pair_needs() -> None:
    """Each site sends to all others; one without a path to some sends through the pool, from which all fetch it."""
    three = [match(name, 1.0, 1.0, 1e6) for name in "abc"]
    links = paths("ab", "ac", "bc", rate=1e7, delay_s=0.25)
    assert exchange_s(three, 1e7, links) == pytest.approx(2 * 1.0 + 0.25 + 1)
    links["c", "b"] = DirectLink(bytes_per_s=1e6, delay_s=0.25)
    assert exchange_s(three, 1e7, links) == pytest.approx(1.0 + 10.0 + 0.25 + 1)
    del links["c", "b"]
    assert exchange_s(three, 1e7, links) == pytest.approx(2.0 + 0.25 + (10.0 + 10.0) + 1)
    assert exchange_s(three, 1e7, {}) == pytest.approx(10.0 + 2 * 10.0 + 1)


def test_the_copy_to_the_pool_is_waited_for_where_the_line_is_too_slow_for_it() -> None:
    """It goes between exchanges: 50 updates of 1 s cover 32 s of it, and no 100 s."""
    sites = [match(name, 1.0, 500 / 3600, 1e6) for name in "ab"]
    large = replace(RARE, num_bytes=3.2e7)
    assert waiting_s(sites, large, paths("ab")) == pytest.approx(3.2e7 / 1e8 + 1)
    assert waiting_s(sites, replace(large, num_bytes=1e8), paths("ab")) == pytest.approx(100 - 50)


def test_the_gang_with_fast_pairs_is_taken_where_exchanges_are_large() -> None:
    """A dearer pair in one network, for messages that take minutes through the pool; a cheap one for small ones."""
    large = replace(RARE, num_bytes=3.2e7, interval=500, num_updates=5000)
    offers = [match("a", 1.0, 1.0), match("b", 1.0, 1.0), match("x", 1.1, 1.0), match("y", 1.1, 1.0)]
    slow, fast = paths("ab", rate=1e5), paths("xy")
    found = best_gang(offers, 2, large, 20 * CREDIT, links={**slow, **fast})
    assert found is not None
    assert sorted(one.listed.agent for one in found.matches) == ["x", "y"]
    assert found.exchange_s == pytest.approx(1.32)
    assert "the messages of 2 sites go directly, with a copy to the pool" in gang_text(found, large)
    assert names(offers, exchanges=large, value=20.0) == ["a", "b"]
    client: Any = SimpleNamespace(
        state=lambda what: (
            [{"source": "x", "target": "y", "bytes_per_s": 1e8, "delay_s": 0.0}] if what == "links" else 0
        )
    )
    assert links_for(client, large) == {("x", "y"): DirectLink(bytes_per_s=1e8, delay_s=0.0)}
    assert links_for(client, RARE) == {}, "small messages go through the pool"


def test_no_set_of_linked_offers_is_better() -> None:
    """Against all pairs and threes of eight random offers, of which some know their links."""
    draw = random.Random(5)
    large = replace(RARE, num_bytes=3.2e7, interval=5)
    for number in range(30):
        offers = [match(one, draw.uniform(0.1, 2), draw.uniform(1, 2), draw.choice([1e6, 1e7])) for one in "abcdefgh"]
        links = dict[tuple[str, str], DirectLink]()
        for pair in itertools.combinations("abcdefgh", 2):
            if draw.random() < 0.6:
                links |= paths("".join(pair), rate=draw.choice([1e6, 1e7, 1e8]))
        found = best_gang(offers, 2, large, CREDIT, links=links)
        assert found is not None
        scores = []
        for two in itertools.combinations(offers, 2):
            one = best_gang(two, 2, large, CREDIT, links=links)
            assert one is not None
            scores.append(one.score)
        assert found.score == pytest.approx(min(scores)), number


def test_sites_wait_for_what_updates_do_not_cover() -> None:
    """Of 1 MB over 1 MB/s: 3 s with the look; a fragment of four takes 1.5 s, four times; updates of 1 s go on."""
    sites = [match("a", 1.0, 500 / 3600), match("b", 1.0, 400 / 3600)]
    for changes, expected_s in (({}, 3.0), ({"fragments": 4}, 6.0), ({"overlap": 2}, 1.0), ({"overlap": 5}, 0.0)):
        assert waiting_s(sites, replace(RARE, **changes)) == pytest.approx(expected_s)


def test_what_ran_as_a_gang_has_its_exchanges_in_its_pace() -> None:
    """They are not counted twice; leases opened for it say the whole time, and its money."""
    alone = [match("a", 1.0, 1.0), match("b", 2.0, 1.0)]
    both = [replace(one, forecast=replace(RunForecast(run_s=3600.0), has_exchanges=True)) for one in alone]
    waited_h = RARE.count * 3.0 / 3600
    for offers, hours in ((alone, 1.0 + waited_h), (both, 1.0)):
        found = best_gang(offers, 2, RARE, CREDIT)
        assert found is not None
        assert found.hours == pytest.approx(hours)
        assert [one.metered_hours for one in found.matches] == pytest.approx([hours, hours])
        assert found.credits == pytest.approx(3 * CREDIT * hours, rel=1e-5)


def test_a_slow_cheap_offer_costs_the_time_of_the_others() -> None:
    """All meters run until the slowest is done, so that the cheapest site is not the cheapest gang."""
    offers = [match("fast", 1.0, 1.0), match("swift", 1.2, 1.0), match("slow", 0.1, 3.0)]
    assert names(offers) == ["fast", "swift"]
    assert names([*offers, match("idle", 0.1, 3.0)], value=0.0) == ["idle", "slow"]
    assert names(offers[:1]) == []


def test_a_thin_link_matters_as_often_as_there_are_exchanges() -> None:
    """A cheaper offer on a slow link is taken for few exchanges, and left for many."""
    offers = [match("fibre", 1.0, 1.0), match("cable", 1.0, 1.0), match("modem", 0.5, 1.0, 1e5)]
    assert "modem" in names(offers)
    often = Exchanges(num_bytes=1e6, count=1000, parameters=250_000, interval=1, num_updates=1000)
    assert names(offers, exchanges=often) == ["cable", "fibre"]


def test_sites_are_of_one_class() -> None:
    """Cheaper ones of two classes are no gang, nor are those that state none; money has a limit."""
    other = [match("b1", 1.0, 1.0, determinism_class="d" * 64), match("b2", 1.0, 1.0, determinism_class="d" * 64)]
    offers = [match("a1", 0.1, 1.0), *other, match("n1", 0.1, 1.0, determinism_class="")]
    assert names(offers) == ["b1", "b2"]
    assert best_gang(offers, 2, RARE, CREDIT, most_credits=CREDIT) is None


def test_no_set_of_offers_is_better() -> None:
    """Against all sets of three of nine random offers, at several worths of an hour."""
    draw = random.Random(3)
    for number in range(40):
        offers = [
            match(f"o{one}", draw.uniform(0.1, 2), draw.uniform(1, 4), draw.choice([1e4, 1e5, 1e6])) for one in range(9)
        ]
        value = draw.choice([0, CREDIT, 20 * CREDIT])
        found = best_gang(offers, 3, RARE, value)
        assert found is not None
        scores = []
        for three in itertools.combinations(offers, 3):
            one = best_gang(three, 3, RARE, value)
            assert one is not None
            scores.append(one.score)
        assert found.score == pytest.approx(min(scores)), number


def test_the_interval_that_links_suit_is_said() -> None:
    """Where exchanges take most of the time, with the sum of the money and the share."""
    often = Exchanges(num_bytes=1e6, count=1000, parameters=1_000_000, interval=1, num_updates=1000)
    found = best_gang([match("a", 1.0, 1.0), match("b", 1.0, 1.0)], 2, often, CREDIT)
    assert found is not None
    text = gang_text(found, often)
    assert text.startswith("2 sites at a, b: 3.67 credits together, 1.83 h until the slowest is done")
    assert "1,000 exchanges of 3.0 s are 45 % of it" in text
    assert "every=stoker.updates(8) is recommended, not 1" in text
    assert "recommended" not in gang_text(found, RARE)
    ran = [replace(one, forecast=RunForecast(run_s=3600.0, has_exchanges=True)) for one in found.matches]
    assert "recommended" not in gang_text(replace(found, matches=tuple(ran)), often), "updates are shorter"


def test_the_delay_of_direct_paths_counts_once_an_exchange_and_not_for_each_byte() -> None:
    """Paths of the rate that the links to the pool have together suit about the same interval."""
    often = Exchanges(num_bytes=1e6, count=1000, parameters=1_000_000, interval=1, num_updates=1000)
    found = best_gang([match("a", 1.0, 1.0), match("b", 1.0, 1.0)], 2, often, CREDIT)
    assert found is not None
    direct = replace(found, links=paths("ab", rate=5e5, delay_s=0.05))
    assert "every=stoker.updates(8) is recommended, not 1" in gang_text(direct, often)


def test_large_messages_have_a_price_before_anything_is_opened() -> None:
    """An exchange that nobody pays for would end each lease of a site, one after the other."""
    rules = on.Founded(name="p", forward_price=50_000, forward_quota_bytes=100 << 30)
    large = Exchanges(num_bytes=32 << 20, count=100)
    assert forwarding_of(large, "run", rules, CREDIT) == 100 * 50_000 // 32 + 100
    assert forwarding_of(RARE, "run", rules, 0) == 0
    assert forwarding_of(large, "run", on.Founded(name="p"), 0) == 0
    with pytest.raises(Refused, match=r"lease run: 3\.1 GiB through the pool cost 0\.15625 credits"):
        forwarding_of(large, "run", rules, 156_300)
    with pytest.raises(Refused, match="which forwards 100"):
        forwarding_of(Exchanges(num_bytes=32 << 20, count=10_000), "run", rules, 10**12)
    found = best_gang([match("a", 1.0, 1.0), match("b", 1.0, 1.0)], 2, large, CREDIT)
    assert found is not None
    assert "; its messages go through the pool for 0.3127 credits more" in gang_text(found, large, 156_350)


HANDLE = {
    "job": "run",
    "pool": "",
    "key": "",
    "until_s": 1.0,
    "sites": 2,
    "firsts": [19, 0],
    "first": 0,
    "limit_s": 60.0,
    "max_credits": None,
    "address": "",
    "device": "",
    "options": {},
}


def test_a_lost_site_goes_on_in_the_class_of_its_last_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first one may have been of a gang of another class that was never complete."""
    classes = {"run-s0.0": "d" * 64, "run-s0.1": CLASS}
    client: Any = SimpleNamespace(lease=lambda name: shown(determinism_class=classes[name]), rules=found_offer)
    monkeypatch.setattr(rented_run, "ranked_offers", lambda *_, **__: [match("a", 1.0, 1.0)])
    run = RentedRun(client, {**HANDLE, "job": "run-s0", "gang": "run"}, client)
    with pytest.raises(LookupError, match="there is an offer"):
        run.open(PoolOrder(run="run", tree="1" * 64, code="c", stoker="s", job_file="job.py"), 2, set(), 60.0)


def test_a_message_that_no_agent_makes_again_ends_the_run() -> None:
    """A site's agent that lied and committed nothing leaves one behind: not a hundred agents are paid to find it."""
    client: Any = None
    run = RentedRun(client, {**HANDLE, "job": "run-s0", "gang": "run"}, client)
    reason = f"{SENT_OTHERWISE} after update 5 than this machine makes"
    lease = shown(reason=reason, closed_by="agent")
    state = run._next([lease, lease], reason)
    assert (state.phase, state.why[:50]) == ("failed", "two agents in a row make another message than the ")
    alone = run._next([replace(lease, reason="lost"), lease], "lost")
    assert alone.why.startswith("the deadline is over")  # one alone may be wrong: what comes next is looked at


class Sites:
    """A gang of two whose leases and phases a test sets, and what is posted of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.phases, self.posted, self.opened = 0.0, ["running", "queued"], list[on.Closed](), list[float]()
        self.newest = [self.lease("run-s0.0", "running"), self.lease("run-s1.0", "closed", reason="lost")]
        self.up_since_s = 0.0
        client: Any = SimpleNamespace(post=self._post, lease=None, state=self._pool)
        self.gang = GangRun(client, {**HANDLE, "firsts": [0, 0], "until_s": 0.0}, client)
        order = PoolOrder(run="run", tree="1" * 64, code="c", stoker="s", job_file="j")
        monkeypatch.setattr(GangRun, "leases", lambda _: [[shown(**one)] for one in self.newest])
        monkeypatch.setattr(GangRun, "open", lambda _, __, limit_s, ___: self.opened.append(limit_s))
        monkeypatch.setattr(RentedRun, "order", lambda *_: order)
        monkeypatch.setattr(RentedRun, "state", lambda run: seen_now(phase=self.phases[run.handle["site"]], why="so"))  # type: ignore[arg-type]

    @staticmethod
    def lease(name: str, state: str, **more: Any) -> dict[str, Any]:
        """A lease of 20 s."""
        fields = {"reason": "", "result": "", "outcome": "", "closed_by": "", "renter": "r", "closed_s": 100.0}
        about = {"is_gang_begun": True, "accepted_s": 1.0, "commitments": [], "running_s": 20, "offer_id": "box"}
        return {"lease_id": name, "state": state, "delegate": "pool", "check_fraction": 0, **fields, **about, **more}

    def _pool(self, what: str) -> dict[str, float]:
        assert what == "pool"
        return {"now_s": self.now_s, "up_since_s": self.up_since_s}

    def _post(self, body: on.Closed, **_: Any) -> None:
        self.posted.append(body)
        for one in self.newest:
            if one["lease_id"] == body.lease_id:
                one |= {"state": "closed", "reason": body.reason, "closed_by": "r"}


def test_sites_are_not_paid_long_for_waiting_until_another_finds_an_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute; then all are closed, and opened together once there are offers for all, with the time that is left."""
    sites = Sites(monkeypatch)
    sites.now_s = 100.0 + gang_run.WAITED_S
    assert sites.gang.state().phase == "queued"
    assert sites.posted == []
    sites.now_s += 1
    state = sites.gang.state()
    assert (state.phase, state.why[:38]) == ("queued", "site 1 has found no offer for 1 min 1 ")
    assert [body.lease_id for body in sites.posted] == ["run-s0.0"]
    sites.phases = ["finished", "finished"]  # no site opens a lease of its own any more
    assert sites.gang.state().phase == "requeued"
    assert sites.opened == [40.0]


def test_time_in_which_the_pool_was_away_is_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was stopped for minutes could show no offer: the sites that go on are not closed for that."""
    sites = Sites(monkeypatch)
    sites.now_s, sites.up_since_s = 1000.0, 990.0
    assert sites.gang.state().phase == "queued"
    assert sites.posted == []
    sites.now_s += gang_run.WAITED_S
    assert sites.gang.state().why.startswith("site 1 has found no offer for 1 min 10 s")


def test_a_gang_that_is_paused_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its leases is live, so that none says it; and what a busy pool did not close is not taken for closed."""
    sites = Sites(monkeypatch)
    sites.now_s = 1000.0
    assert sites.gang.state().phase == "queued"
    sites.newest[1]["is_run_stopped"] = True
    assert (sites.gang.state().phase, sites.opened) == ("stopped", [])

    def busy(*_: Any, **__: Any) -> None:
        raise _Busy("too many requests")

    sites.newest[0]["state"] = "running"
    monkeypatch.setattr(sites.gang.client, "post", busy)
    with pytest.raises(_Busy):
        sites.gang.stop()


def test_a_site_with_results_needs_the_others_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is not opened again; and one whose wrong block is found ends the run, paused or not."""
    sites = Sites(monkeypatch)
    sites.now_s, sites.newest[0]["result"] = 1000.0, "0" * 64
    assert sites.gang.state().phase == "queued"
    assert sites.posted == []
    sites.newest[0] |= {"result": "", "outcome": "slashed", "challenges": [], "agent": "a" * 64}
    assert sites.gang.state().phase == "failed"


def found_offer() -> None:
    """What is asked once there is an offer."""
    raise LookupError("there is an offer")


def test_leases_of_earlier_starts_are_no_gangs_that_were_never_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site of 19 leases that ran, whose first gang of this start is not complete, is opened again."""
    opened = list[float]()
    monkeypatch.setattr(GangRun, "open", lambda _, __, limit_s, *___: opened.append(limit_s))
    monkeypatch.setattr(
        RentedRun, "order", lambda *_: PoolOrder(run="run", tree="1" * 64, code="c", stoker="s", job_file="j")
    )
    monkeypatch.setattr(gang_run, "_now", lambda _: 0.0)
    ended = shown(state="final", reason=RELEASED, closed_by="pool")
    client: Any = None
    gang = GangRun(client, {**HANDLE, "until_s": 0.0}, client)
    state = gang._complete([ended, ended], [[ended] * 20, [ended]])
    assert (state.phase, opened) == ("requeued", [60.0])
    late = GangRun(client, HANDLE, client)._complete([ended, ended], [[ended] * 20, [ended]])
    assert (late.phase, len(opened)) == ("failed", 1), "its deadline is over"
