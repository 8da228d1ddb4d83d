"""Homes behind NATs, in network namespaces of this machine: direct paths, cut lines, prices, and a job through it."""

from __future__ import annotations

import pytest

pytest.importorskip("iroh", reason="stoker[p2p] is not installed")

from bench.pool import nat
from bench.pool.nat_lab import problem
from stoker.pool.isolation import Bubblewrap

pytestmark = [pytest.mark.places, pytest.mark.skipif(bool(problem()), reason=f"no NAT lab here: {problem()}")]


def test_two_port_preserving_nats_are_passed() -> None:
    """With new sockets each time, and at once: both sides dial."""
    found = nat.paths(tries=3)
    assert found["direct"] == 3, found


def test_one_symmetric_nat_is_said_and_priced() -> None:
    """No path: the renter pays for the way through the pool within its limit, or the error says which limit to set."""
    found = nat.priced()
    assert found["network"] == "symmetric"
    assert "--place-option forwarding" in found["refused"]["failed"]
    assert "a lease at most" in found["over the quota"]
    assert found["paid"]["forwarded_bytes"] == found["paid"]["bulk"]["pool_bytes"] - len(b"order")
    assert found["paid"]["log"] == "right"


@pytest.mark.parametrize("what", ["line", "renter"])
def test_a_cut_in_the_middle_loses_nothing(what: str) -> None:
    """The rest comes when the line, or the renter, is back; none of it through the pool."""
    found = nat.cut(what, size_bytes=8 << 20, after_s=1.5, away_s=4.0)
    assert not found["failed"], found
    assert found["is_equal"]
    assert found["bulk"]["pool_bytes"] == len(b"order")


def test_a_job_through_two_nats() -> None:
    """Code and messages through the pool, checkpoints of 22 MiB directly; each block is replayed, and equal."""
    if why := Bubblewrap().trial():
        pytest.skip(why)
    found = nat.job()
    assert found["exit_code"] == 0, found["renter_said"]
    assert found["log"] == "right"
    assert found["replays"] == found["replays_equal"] > 0
    assert found["at_home"]
    assert all(lease["bulk"]["direct_bytes"] > 16 << 20 for lease in found["leases"]), found
    assert all(lease["bulk"]["pool_bytes"] < 16 << 20 for lease in found["leases"]), found


def test_a_job_whose_agent_has_a_symmetric_nat() -> None:
    """It runs and is replayed all the same; its checkpoints go through the pool, and the renter pays their price."""
    if why := Bubblewrap().trial():
        pytest.skip(why)
    found = nat.job("symmetric", price="0.05usd")
    assert found["exit_code"] == 0, found["renter_said"]
    assert found["networks"] == {"agent": "symmetric", "checker": "direct"}
    assert found["replays"] == found["replays_equal"] > 0
    assert all(lease["bulk"]["direct_bytes"] == 0 for lease in found["leases"]), found
    assert all(lease["forwarded_credits"] > 1000 for lease in found["leases"]), found
