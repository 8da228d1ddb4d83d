"""A job of several agents, one site at each: jobs count and exchange their states in the place of training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from stoker.errors import BadJob, PlaceFailed
from stoker.pool import control_plane, gang_run, presence, watch
from stoker.pool.isolation import Host, Program
from stoker.pool.job_box import JobBox
from stoker.pool.lease import LIVE
from stoker.pool.leased_job import LeasedJob
from stoker.pool.pool_launcher import LAUNCHER
from tests.pool.counting import EVERY, link
from tests.pool.server import in_thread, shift, until
from tests.pool.test_pool_flow import Market, launched, nothing_said, open_folder


class LyingBox(JobBox):
    def training(self, host: Host) -> Program:
        program = super().training(host)
        return replace(program, environment={**program.environment, "STOKER_LIE": "1"})


class LyingJob(LeasedJob):
    box_type = LyingBox


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> Iterator[Market]:
    """A pool whose launcher acts for its renter."""
    for module, name in ((presence, "PRESENT_S"), (presence, "HERE_S"), (watch, "PRESENT_S")):
        monkeypatch.setattr(module, name, 5.0)
    monkeypatch.setattr(control_plane, "_AWAY_S", float("inf"))  # its clock jumps
    with open_folder() as folder, ExitStack() as stack:
        _, operator = stack.enter_context(in_thread(folder, verdicts_to_slash=2))
        yield launched(Market(folder, operator, stack), monkeypatch)


def counted(updates: int, sites: int = 2) -> bytes:
    """The state that all sites come to."""
    states = [b"\0" * 32] * sites
    for update in range(updates):
        states = [link(state, update) for state in states]
        if not (update + 1) % EVERY:
            states = [hashlib.sha256(b"".join(states)).digest()] * sites
    return states[0]


def until_heard(market: Market) -> None:
    """Until the agent of the first site has sent a beat since, or its lease has ended."""
    before = market.leases()[0].beat_index
    until(lambda: (lease := market.leases()[0]).beat_index > before or lease.state not in LIVE)


@pytest.mark.slow
def test_a_job_of_two_agents_runs_is_checked_and_comes_home(market, tmp_path):
    """Opened together, exchanged through the pool, each block replayed by others, and fetched as from one lease."""
    with nothing_said(market.lenders):
        for name, price in (("ox", 0.4), ("cow", 0.5), ("eye", 0.9)):
            market.lend(name, price)
        told = []
        handle = LAUNCHER.start(market.submission("updates=400", agents="2"), told.append)
        assert any("2 sites at ox, cow" in text for text in told)
        phases = market.follow(handle)
        assert phases[-1] == "finished"
        leases = market.leases()
        assert [(one.offer_id, one.site, one.gang) for one in leases] == [
            ("ox", 0, handle["job"]),
            ("cow", 1, handle["job"]),
        ]
        for lease in leases:
            assert [one.update for one in lease.messages] == list(range(EVERY - 1, 400, EVERY))
            assert {one.block for one in lease.challenges if one.equal} == set(range(len(lease.commitments)))
            assert lease.paid_s > 0
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert (tmp_path / "home" / "model.safetensors").read_bytes() == counted(400)
        assert (tmp_path / "home" / "events.jsonl").read_bytes() == LAUNCHER.events(handle, 0)
        assert not (tmp_path / "home" / "launch").exists()
        market.require_right()


@pytest.mark.slow
def test_agents_that_reach_each_other_exchange_directly(monkeypatch, tmp_path):
    """Their links are measured while they are idle; messages and checkpoints go between them, and are replayed."""
    peer = pytest.importorskip("stoker.pool.peer", reason="stoker[p2p] is not installed")
    for module, name in ((presence, "PRESENT_S"), (presence, "HERE_S"), (watch, "PRESENT_S")):
        monkeypatch.setattr(module, name, 5.0)
    with open_folder() as folder, ExitStack() as stack:
        plane, operator = stack.enter_context(in_thread(folder, verdicts_to_slash=2, bulk_bytes=1))
        market = launched(Market(folder, operator, stack), monkeypatch)
        with nothing_said(market.lenders):
            ends, given = [], list[str]()
            real = peer.Peer._given
            monkeypatch.setattr(
                peer.Peer, "_given", lambda self, path, wanted: given.append(path.name) or real(self, path, wanted)
            )
            for name, price in (("ox", 0.4), ("cow", 0.5), ("eye", 0.9)):
                lender = market.lend(name, price)
                ends.append(peer.Peer(lender.client, folder / f"held-{name}", tell=lender.said.append))
            ends.append(peer.Peer(market.renter, folder / "held-renter", keeps=True))
            for one in ends:
                stack.callback(one.close)
                assert one.wait_ready(20)
            until(lambda: len(market.renter.state("links")) == 6, 60)
            handle = LAUNCHER.start(market.submission("updates=400", agents="2"), lambda _: None)
            assert market.follow(handle)[-1] == "finished"
            for lease in market.leases():
                assert lease.messages
                assert all(plane.blobs.path(one.blob).is_file() for one in lease.messages), "for replays"
                assert all(one.seal for one in lease.commitments)
                num_direct = len(set(given) & {one.blob for one in lease.messages})
                assert num_direct > len(lease.messages) / 2
                assert {one.block for one in lease.challenges if one.equal} == set(range(len(lease.commitments)))
            LAUNCHER.fetch(handle, tmp_path / "home")
            assert (tmp_path / "home" / "model.safetensors").read_bytes() == counted(400)
            market.require_right()


def test_too_few_agents_and_what_no_gang_can_be(market):
    """A sentence, and no lease is opened."""
    market.lend("ox", 0.4)
    with pytest.raises(PlaceFailed, match="no 2 of one determinism class"):
        LAUNCHER.start(market.submission("updates=400", agents="2"), lambda _: None)
    with pytest.raises(BadJob, match="agents=many: wanted a number, 1 to 16"):
        LAUNCHER.start(market.submission("updates=400", agents="many"), lambda _: None)
    market.lend("cow", 0.5)
    with pytest.raises(BadJob, match="2 sites are expected to cost"):
        LAUNCHER.start(replace(market.submission("updates=400", agents="2"), max_cost=0.0001), lambda _: None)
    assert market.leases() == []
    market.require_right()


@pytest.mark.slow
def test_an_agent_that_declines_releases_the_other_and_both_sites_run_elsewhere(market):
    """The leases of both are closed without pay, and opened again together at offers that take them."""
    with nothing_said(market.lenders):
        prude = market.lend("prude", 0.1)
        prude.agent.lending = replace(prude.agent.lending, longest_window_s=1.0)
        for name, price in (("ox", 0.4), ("cow", 0.5)):
            market.lend(name, price)
        handle = LAUNCHER.start(market.submission("updates=100", agents="2", verify="none"), lambda _: None)
        assert market.follow(handle)[-1] == "finished"
        before, after = market.leases()[:2], market.leases()[-2:]  # a slow machine may try others in between
        assert {one.offer_id for one in before} == {"prude", "ox"}
        assert {one.offer_id for one in after} == {"ox", "cow"}
        assert [one.paid_s for one in before] == [0, 0]
        assert {one.state for one in before} == {"final"}
        assert sorted(str(one.reason).partition(":")[0] for one in before) == ["refused", "released"]
        market.require_right()


@pytest.mark.slow
def test_a_site_is_lost_and_goes_on_elsewhere_while_the_other_waits(market, tmp_path):
    """From its last block, with the messages that were sent: the same state, and no lease of the other one ends."""
    with nothing_said(market.lenders):
        for name, price in (("ox", 0.4), ("mayfly", 0.5), ("eye", 0.9)):
            market.lend(name, price)
        handle = LAUNCHER.start(market.submission("updates=1500", "pace=0.004", agents="2"), lambda _: None)
        until(lambda: len(market.leases()) == 2 and min(len(one.commitments) for one in market.leases()) >= 2, 60.0)
        market.lenders["mayfly"].kill()
        for shifted_s in range(10, 80, 10):
            shift(market.folder, shifted_s)
            until_heard(market)
        until(lambda: any(one.reason == "lost" for one in market.leases()), 60.0)
        assert market.follow(handle)[-1] == "finished"
        leases = market.leases()
        assert [(one.offer_id, one.site) for one in leases] == [("ox", 0), ("mayfly", 1), ("eye", 1)]
        assert leases[2].commitments[0].update > leases[1].commitments[-1].update > 0
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert (tmp_path / "home" / "model.safetensors").read_bytes() == counted(1500)
        market.require_right()


@pytest.mark.slow
def test_no_site_is_paid_for_waiting_while_another_finds_no_offer(market, tmp_path, monkeypatch):
    """All leases are closed; with offers for both, both are opened again, and come to the state of an unbroken run."""
    monkeypatch.setattr(gang_run, "WAITED_S", 20.0)
    with nothing_said(market.lenders):
        for name, price in (("ox", 0.4), ("mayfly", 0.5)):
            market.lend(name, price)
        handle = LAUNCHER.start(market.submission("updates=1500", "pace=0.004", agents="2"), lambda _: None)
        until(lambda: len(market.leases()) == 2 and min(len(one.commitments) for one in market.leases()) >= 2, 60.0)
        market.lenders["mayfly"].kill()
        for shifted_s in range(10, 110, 10):
            shift(market.folder, shifted_s)
            until_heard(market)
            LAUNCHER.state(handle)
        until(lambda: LAUNCHER.state(handle) and market.leases()[0].state == "closed", 60.0)
        assert market.leases()[0].reason.startswith("paused: site 1 has found no offer for")
        assert LAUNCHER.state(handle).phase == "queued"
        market.lend("eye", 0.9)
        market.lend("bat", 9.0)
        assert market.follow(handle)[-1] == "finished"
        leases = market.leases()
        assert [(one.offer_id, one.site) for one in leases[2:]] == [("ox", 0), ("eye", 1)]
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert (tmp_path / "home" / "model.safetensors").read_bytes() == counted(1500)
        market.require_right()


@pytest.mark.slow
def test_a_site_that_sends_false_messages_is_slashed(market):
    """Its blocks are right; the messages that it signed are not those that a replay writes. The others are paid."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        market.lend("liar", 0.5, job_type=LyingJob)
        market.lend("eye", 9.0)
        market.lend("bat", 9.0)
        handle = LAUNCHER.start(market.submission("updates=300", agents="2"), lambda _: None)
        until(lambda: market.slashed("liar") == 1, 60.0)
        assert LAUNCHER.state(handle).why.endswith("gone on from what it sent; start the run again with --new")
        with pytest.raises(PlaceFailed, match="the other sites have gone on from what it sent"):
            LAUNCHER.start(market.submission("updates=300", agents="2"), lambda _: None)
        assert market.slashed("ox") == market.slashed("eye") == 0
        market.require_right()
