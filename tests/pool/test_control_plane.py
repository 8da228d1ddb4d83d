from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from stoker.errors import BadJob, BadRun, PlaceFailed, PlaceUnreachable
from stoker.pool import admission, blobs, control_plane, presence
from stoker.pool import client as pool_client
from stoker.pool import events as on
from stoker.pool.blobs import BlobLimits, BlobStore, NoRoom
from stoker.pool.client import DiskFailed, OnItsWay, PoolAddress, PoolClient
from stoker.pool.commitment import chain_head
from stoker.pool.control_plane import ControlPlane, steady_clock
from stoker.pool.escrow import pay_for
from stoker.pool.events import CREDIT, Refused, canonical, draft_of, sha256
from stoker.pool.job_box import PoolOrder
from stoker.pool.keys import Key, own_key, read_key
from stoker.pool.lease import Challenge, Lease
from stoker.pool.log import audit
from stoker.pool.presence import HERE_S, MOST_GAP_S, Presence, UptimeClock
from stoker.pool.request_limits import RequestRates
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import Record
from stoker.records.codec import dumps, to_json
from tests.pool.book import offer, opened
from tests.pool.server import in_thread, shift, until


def joined(operator: PoolClient, *, credit: int = 10 * CREDIT) -> PoolClient:
    """A client with a new key that the operator admitted."""
    client = PoolClient(operator.address, Key.made())
    assert client.key is not None
    operator.post(on.Deposited(account=client.key.public, amount=credit))
    return client


def balance(operator: PoolClient, client: PoolClient) -> int:
    """What a client's key has [micro-credits]."""
    assert client.key is not None
    found: int = operator.state("balances")["balances"].get(client.key.public, 0)
    return found


def raw(client: PoolClient, content: bytes) -> tuple[int, dict[str, Any]]:
    """Post bytes as they are."""
    connection = http.client.HTTPConnection(client.address.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/events", content)
    answer = connection.getresponse()
    document = json.loads(answer.read())
    connection.close()
    return answer.status, document


def test_a_job_from_offer_to_pay(tmp_path: Path) -> None:
    """Over HTTP: blobs, a lease that waits for its agent, beats that the pool co-signs, results, and the meter."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        order = renter.put_blob(b"what to run")
        body = opened(order=order, delegate=plane.key.public, window_s=0)
        threading.Timer(0.2, renter.post, [body]).start()
        work = agent.work(wait_s=20)
        assert [lease.lease_id for lease in work["leases"]] == ["job"]
        agent.post(on.Accepted(lease_id="job"))
        agent.get_blob(order, tmp_path / "order")
        assert (tmp_path / "order").read_bytes() == b"what to run"
        lists = ("leases", "challenges", "searches", "probes", "links")
        assert agent.work() == {**{name: [] for name in lists}, "leaving": {}, "live": ["job"]}
        assert renter.key is not None
        assert plane.leases.rents(renter.key.public)
        agent.post(on.Beat(lease_id="job", index=0, running_s=2))
        until(lambda: renter.lease("job").paid_s == 2)
        (tmp_path / "results").write_bytes(b"weights" * 100_000)
        result = agent.put_blob(tmp_path / "results")
        agent.post(on.Finished(lease_id="job", result=result))
        until(lambda: renter.lease("job").state == "final")
        assert not plane.leases.rents(renter.key.public)
        renter.get_blob(result, tmp_path / "home")
        assert (tmp_path / "home").read_bytes() == b"weights" * 100_000
        pay = pay_for(2, CREDIT // 2)
        assert (balance(operator, agent), balance(operator, renter)) == (10 * CREDIT + pay, 10 * CREDIT - pay)
        events = operator.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert all(event.draft.is_signed() for event in events)
    assert not audit(tmp_path / "log.db").problem


def test_an_event_that_is_sent_twice_counts_once(tmp_path: Path) -> None:
    """A repeated request has the same answer; another event under its nonce is refused."""
    with in_thread(tmp_path) as (plane, operator):
        nonce = "ab" * 16
        body = on.Deposited(account="0" * 64, amount=7)
        first = operator.post(body, nonce=nonce)
        assert operator.post(body, nonce=nonce) == first
        assert plane.state.accounts.balance("0" * 64) == 7
        with pytest.raises(Refused, match="a nonce is used once"):
            operator.post(replace(body, amount=8), nonce=nonce)
        stale = draft_of(body, plane.key, plane.key.public, time_s=time.time() - 500, nonce=nonce)
        assert raw(operator, canonical(to_json(stale)))[1]["seq"] == first.seq


def test_garbage_costs_nobody_anything(tmp_path: Path) -> None:
    """What is no event, unsigned, stale, too long or from a stranger is refused in a sentence, and logs nothing."""
    with in_thread(tmp_path) as (plane, operator):
        seq, stranger = plane.state.seq, Key.made()
        good = draft_of(on.Deposited(account="0" * 64, amount=7), plane.key, plane.key.public)
        document = to_json(good)
        cases: list[tuple[bytes, str]] = [
            (b"", "no signed event"),
            (b"\xff\x00garbage", "no signed event"),
            (b"[" * 5000, "no signed event"),
            (b"x" * 70_000, "at most 65536 bytes"),
            (canonical({**document, "extra": 1}), "unknown field"),
            (canonical({**document, "signature": "0" * 128}), "signature is not of the key"),
            (canonical({**document, "body": {"account": "0" * 64, "amount": 10**6}}), "signature is not of the key"),
            (canonical({**document, "actor": stranger.public}), "signature is not of the key"),
            (canonical({**document, "time_s": float(10**9)}), "signature is not of the key"),
            (canonical({**document, "time_s": "nan"}), "time_s is no time"),
        ]
        bodies = [
            (draft_of(on.Offered(offer=offer(now_s=time.time())), stranger, plane.key.public), "not admitted"),
            (draft_of(on.Deposited(account=stranger.public, amount=9), stranger, plane.key.public), "not admitted"),
            (draft_of(on.Deposited(account="0" * 64, amount=7), plane.key, "1" * 64), "for the pool"),
            (draft_of(on.Accepted(lease_id="x"), plane.key, plane.key.public, time_s=5.0), "Set this machine's clock"),
        ]
        cases += [(canonical(to_json(draft)), text) for draft, text in bodies]
        for content, text in cases:
            status, answer = raw(operator, content)
            assert 400 <= status < 500, answer
            assert text in answer["error"] + answer["remedy"], answer
        assert plane.state.seq == seq


def test_what_is_not_there_is_not_committed_to(tmp_path: Path) -> None:
    """A hash without its blob, or of one that the agent may not read, counts neither as a block nor as results."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter, other = joined(operator), joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"what to run")))
        agent.post(on.Accepted(lease_id="job"))
        foreign = other.put_blob(b"of another job")
        for digest in ("0" * 64, foreign):
            with pytest.raises(Refused, match="has not sent"):
                agent.post(on.Committed(lease_id="job", block=0, update=1, state="1" * 64, blob=digest))
            with pytest.raises(Refused, match="has not sent"):
                agent.post(on.Finished(lease_id="job", result=digest))
        own = agent.put_blob(b"a checkpoint")
        plane.blobs.limits = replace(plane.blobs.limits, most_lease_bytes=20)
        with pytest.raises(Refused, match="kept for one lease"):
            agent.post(on.Committed(lease_id="job", block=0, update=1, state="1" * 64, blob=own))
        plane.blobs.limits = replace(plane.blobs.limits, most_lease_bytes=23)
        agent.post(on.Committed(lease_id="job", block=0, update=1, state="1" * 64, blob=own))
        (listed,) = operator.state("leases")
        assert (listed["num_blocks"], "commitments" in listed) == (1, False)
        assert len(operator.lease("job").commitments) == 1


def test_text_that_is_no_unicode_is_no_event(tmp_path: Path) -> None:
    """It would be stored otherwise than it was signed, and spoil the audit of the whole log."""
    with in_thread(tmp_path) as (plane, operator):
        agent = joined(operator)
        assert agent.key is not None
        body = to_json(on.Offered(offer=offer(now_s=time.time())))
        body["offer"]["determinism_class"] = "\ud800"
        unsigned = replace(draft_of(on.Withdrawn(offer_id="x"), agent.key, plane.key.public), kind="offered", body=body)
        signed = replace(unsigned, signature=agent.key.sign(unsigned.message()))
        document = {**to_json(signed), "body": body}
        status, answer = raw(agent, canonical(document))
        assert (status, "no Unicode" in answer["error"]) == (409, True), answer
    assert not audit(tmp_path / "log.db").problem


def test_who_may_replay(tmp_path: Path) -> None:
    """Keys that lend; in an open pool, where keys cost nothing, only those that were admitted or have passed."""
    with in_thread(tmp_path, is_open=True) as (plane, operator):
        admitted, stranger, idle = joined(operator), PoolClient(operator.address, Key.made()), joined(operator)
        assert admitted.key is not None
        assert stranger.key is not None
        for number, client in enumerate((admitted, stranger)):
            client.post(on.Offered(offer=offer(f"box{number}", time.time())))
        for client in (admitted, stranger, idle):
            client.work()
        assert set(plane.verifiers()) == {admitted.key.public}
        plane.state.records[stranger.key.public] = Record(passed=1)
        assert set(plane.verifiers()) == {admitted.key.public, stranger.key.public}


def test_a_pool_that_slept_ends_no_lease(tmp_path: Path) -> None:
    """After a minute in which the pool itself was away the silence of agents counts from its return."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"what to run")))
        agent.post(on.Accepted(lease_id="job"))
        before = plane.up_since_s
        shift(tmp_path, 70)
        until(lambda: plane.up_since_s > before + 60)
        assert renter.lease("job").state == "running"


def test_a_clock_that_jumps_into_the_next_year_is_not_followed() -> None:
    """Nor is it kept: what time passes counts on, and small corrections are followed."""
    wall, elapsed = [1000.0], [5.0]
    now = steady_clock(lambda: wall[0], lambda: elapsed[0])
    wall[0], elapsed[0] = 1010.5, 15.0
    assert now() == 1010.5
    wall[0] = 1e9
    assert now() == 1010.5
    elapsed[0] = 20.0
    assert now() == 1015.5
    wall[0] = 1016.0
    assert now() == 1016.0


def test_large_answers_and_events_count_for_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few requests a second for megabytes, or events that fill the log, are a flood as well."""
    monkeypatch.setattr(control_plane, "_ANSWER_BYTES", 64)
    rates = RequestRates(per_address=1.0, per_key=1.0, burst_s=20.0)
    with in_thread(tmp_path, rates=rates) as (_, operator):
        operator.state("pool")
        with pytest.raises(Refused, match="sends more than 1 requests a second"):
            operator.state("pool")
    with in_thread(tmp_path / "other", rates=replace(rates, per_address=1e6)) as (_, operator):
        team = on.TeamMade(team="all", members=("a" * 64,) * 900)
        with pytest.raises(Refused, match="sends more than 1 requests a second"):
            operator.post(team)
        assert operator.post(replace(team, members=())).seq == 2


def test_an_event_that_does_not_come_holds_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that announces a body, of which nothing follows."""
    monkeypatch.setattr(control_plane, "HEAD_S", 0.05)
    with in_thread(tmp_path) as (_, operator):
        parts = urlsplit(operator.address.url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=60) as connection:
            connection.sendall(b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b"409" in connection.recv(64)


def test_a_renter_has_a_bounded_number_of_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a member's own agent they cost nothing, and the pool looks at each of them every second for a week."""
    monkeypatch.setattr(admission, "MOST_UNSETTLED", 2)
    with in_thread(tmp_path, is_open=True) as (_, operator):
        agent, renter = joined(operator), joined(operator)
        strangers = [PoolClient(operator.address, Key.made()) for _ in range(2)]
        order = renter.put_blob(b"what to run")
        terms = {
            "order": order,
            "rate_per_hour": 0,
            "deposit": 0,
            "bond": 0,
            "forecast": on.Forecast(hours=0, credits=0),
        }
        for number in range(6):
            name = f"box{number}"
            agent.post(on.Offered(offer=offer(name, now_s=time.time(), price_per_hour=0, min_s=0)))
        for number, client in enumerate((renter, renter, *strangers)):
            client.post(opened(f"job{number}", offer_id=f"box{number}", **terms))
        for client in (renter, strangers[0], PoolClient(operator.address, Key.made())):
            with pytest.raises(Refused, match="that are not settled"):
                client.post(opened("more", offer_id="box5", **terms))


def test_a_renter_settles_no_lease_before_its_last_beat_is_agreed_to(tmp_path: Path) -> None:
    """Closed and settled in one moment, the seconds since the last look of the pool would be unpaid."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        assert operator.key is not None
        renter.post(opened(order=renter.put_blob(b"what to run"), delegate=operator.key.public))
        agent.post(on.Accepted(lease_id="job"))
        ran = {"beat_index": 0, "running_s": 9, "unsigned": ((0, 9),), "state": "closed", "closed_s": time.time()}
        beaten = replace(plane.state.leases["job"], **ran)
        assert renter.key is not None
        final = draft_of(on.Final(lease_id="job"), renter.key, operator.key.public)
        plane.state.leases["job"] = beaten
        with pytest.raises(Refused, match="up to 0 are not co-signed yet"):
            plane.admission.require(final)
        plane.state.leases["job"] = beaten.cosigned(0)
        plane.admission.require(final)


def test_a_flood_is_slowed_down(tmp_path: Path) -> None:
    """More than the rate of an address, or of a key, is refused with 429; others are answered."""
    with in_thread(tmp_path, rates=RequestRates(per_address=1e6, per_key=0.001, burst_s=5000)) as (_, operator):
        agent = joined(operator)
        for _number in range(5):
            agent.post(on.Offered(offer=offer(now_s=time.time())))
        with pytest.raises(Refused, match="requests a second"):
            agent.post(on.Offered(offer=offer(now_s=time.time())))
        other = joined(operator)
        assert other.key is not None
        unsigned = {**to_json(draft_of(on.Withdrawn(offer_id="x"), Key.made(), "0" * 64)), "actor": other.key.public}
        for _number in range(9):
            assert raw(other, canonical(unsigned))[0] == 401
        other.post(on.Offered(offer=offer("other", time.time())))
        assert operator.state("pool")["seq"] == 9


def test_blobs_are_for_those_who_have_part_in_the_lease(tmp_path: Path) -> None:
    """Others cannot read an order; a key without credits or a lease cannot fill the disk."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter, other = joined(operator, credit=0), joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        order = renter.put_blob(b"secret")
        with pytest.raises(Refused, match="have part in a lease"):
            agent.get_blob(order, tmp_path / "got")
        renter.post(opened(order=order, bond=0))
        agent.get_blob(order, tmp_path / "got")
        with pytest.raises(Refused, match="have part in a lease"):
            other.get_blob(order, tmp_path / "stolen")
        with pytest.raises(Refused, match="not admitted"):
            PoolClient(operator.address, Key.made()).get_blob(order, tmp_path / "stolen")
        with pytest.raises(Refused, match="not signed"):
            PoolClient(operator.address).get_blob(order, tmp_path / "stolen")
        assert not (tmp_path / "stolen").exists()
        with pytest.raises(Refused, match="keys that have credits"):
            joined(operator, credit=0).put_blob(b"junk")
        with pytest.raises(Refused, match="is not admitted to this pool"):
            PoolClient(operator.address, Key.made()).put_blob(b"junk")
        with pytest.raises(Refused, match="there is no blob"):
            renter.get_blob("0" * 64, tmp_path / "none")
        with pytest.raises(Refused, match="names no blob"):
            renter.get_blob("log.db", tmp_path / "none")
        agent.post(on.Offered(offer=offer("second", time.time())))
        other.post(opened("theft", offer_id="second", order=order, bond=0))
        with pytest.raises(Refused, match="have part in a lease"):
            other.get_blob(order, tmp_path / "stolen")
        assert not other.has_blob(order)
        with pytest.raises(Refused, match="the hash"):
            renter._request("PUT", f"/v1/blobs/{'1' * 64}", b"other content", size=13)
        assert sorted(path.name for path in plane.blobs.folder.iterdir()) == [order, "senders"]
        assert other.put_blob(b"secret") == order
        other.get_blob(order, tmp_path / "own")


def test_uploads_at_the_same_moment_share_one_limit(tmp_path: Path) -> None:
    """What is on its way counts as sent already, and the disk keeps room for the log."""
    store = BlobStore(tmp_path, BlobLimits(most_unnamed_bytes=10, least_free_bytes=0))
    one, two = (sha256(name * 6) for name in (b"1", b"2"))

    async def both() -> None:
        is_read = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            await is_read.wait()
            yield b"1" * 6

        async def quick() -> AsyncIterator[bytes]:
            yield b"2" * 6

        first = asyncio.create_task(store.write(one, slow(), 6, "a key", lambda _: False))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="no room for a blob"):
            await store.write(two, quick(), 6, "a key", lambda _: False)
        await store.write(two, quick(), 6, "another", lambda _: False)
        is_read.set()
        await first
        store.limits = replace(store.limits, least_free_bytes=1 << 60)
        with pytest.raises(NoRoom, match="disk full"):
            await store.write("3" * 64, quick(), 6, "a third", lambda _: False)

    asyncio.run(both())
    assert store.path(one).is_file()


def test_a_key_keeps_a_number_of_blobs_that_no_lease_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further one is counted with them: a hundred a second, of a byte each, would stop the pool."""
    monkeypatch.setattr(blobs, "MOST_UNNAMED", 3)
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        order = renter.put_blob(b"0")
        for number in (b"1", b"2"):
            renter.put_blob(number)
        with pytest.raises(Refused, match="has sent 3 blobs that no lease of it names"):
            renter.put_blob(b"3")
        renter.post(opened(order=order))
        gone = renter.put_blob(b"3")
        plane.blobs._now = lambda: time.time() + 3601
        assert gone in plane.blobs.delete_unneeded(plane.leases.needed())
        for number in (b"4", b"5", b"6"):
            renter.put_blob(number)
        with pytest.raises(Refused, match="has sent 3 blobs"):
            renter.put_blob(b"7")
        again = BlobStore(tmp_path / "blobs")
        assert renter.key is not None
        with pytest.raises(NoRoom, match="has sent 4 blobs"):
            again._unnamed_bytes(renter.key.public, lambda _: False)


def test_records_of_ones_verdicts_are_named(tmp_path: Path) -> None:
    """A verifier gives a thousand of them in a day, which are kept until their leases are settled."""
    with in_thread(tmp_path) as (plane, operator):
        verifier = joined(operator)
        assert verifier.key is not None
        record = verifier.put_blob(b"a record")
        challenge = Challenge(block=0, verifier=verifier.key.public, fee=0, since_s=0.0, equal=True, evidence=record)
        assert not plane.leases.is_named_by(record, verifier.key.public)
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened())
        lease = replace(plane.state.leases["job"], challenges=(challenge,))
        plane.state.leases["job"] = lease
        plane.leases.note(lease)
        assert plane.leases.is_named_by(record, verifier.key.public)
        assert not plane.leases.is_named_by(record, "0" * 64)


def test_no_offer_is_held_without_a_deposit(tmp_path: Path) -> None:
    """A forecast of nothing does not let a key without credits hold an offer."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time(), min_s=0)))
        free = opened(deposit=0, bond=0, forecast=on.Forecast(hours=0.0, credits=0))
        with pytest.raises(Refused, match=r"0\.008333 credits are missing"):
            renter.post(free)
        assert not plane.state.leases


def test_leases_of_others_are_no_room_for_ones_blobs(tmp_path: Path) -> None:
    """A blob counts against its sender unless the sender's own lease names it; what a lease names is bounded."""
    limits = BlobLimits(most_unnamed_bytes=10, most_lease_bytes=15, least_free_bytes=0)
    with in_thread(tmp_path, blob_limits=limits) as (_, operator):
        agent, renter, other = joined(operator), joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        order, full = renter.put_blob(b"1" * 8), sha256(b"2" * 8)
        with pytest.raises(Refused, match="no room for a blob"):
            renter.put_blob(b"2" * 8)
        other.post(opened("another", order=order))
        with pytest.raises(Refused, match="no room for a blob"):
            renter.put_blob(b"2" * 8)
        other.post(on.Closed(lease_id="another", reason="enough"))
        renter.post(opened(order=order))
        assert renter.put_blob(b"2" * 8) == full
        agent.post(on.Closed(lease_id="job", reason="refused"))
        with pytest.raises(Refused, match="at most 15 B are kept for one lease"):
            renter.post(opened("big", order=order, inputs=(full,)))


def test_blobs_that_nothing_needs_go_after_an_hour(tmp_path: Path) -> None:
    """Of unsettled leases all are kept, however old."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        kept, gone = renter.put_blob(b"needed"), renter.put_blob(b"not needed")
        renter.post(opened(order=kept))
        assert plane.blobs.delete_unneeded(plane.leases.needed()) == []
        plane.blobs._now = lambda: time.time() + 3601
        assert plane.blobs.delete_unneeded(plane.leases.needed()) == [gone]
        assert renter.has_blob(kept)


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    """All is rebuilt from the log; a second pool on the folder, or another key, is refused."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened())
        agent.post(on.Accepted(lease_id="job"))
        with pytest.raises(BadRun, match="another process serves"):
            ControlPlane(tmp_path, plane.key)
        before = operator.leases(), operator.state("balances"), operator.state("offers")
    with in_thread(tmp_path) as (_, operator):
        offers = [{**one, "is_present": False} for one in before[2]]
        assert (operator.leases(), operator.state("balances"), operator.state("offers")) == (*before[:2], offers)
    with pytest.raises(Refused, match="Use the key that the pool was founded with"):
        ControlPlane(tmp_path, Key.made())


def test_news_comes_when_it_happens(tmp_path: Path) -> None:
    """A reader who waits has an event at once, and one who waits for nothing has an empty answer."""
    with in_thread(tmp_path) as (plane, operator):
        seq = plane.state.seq
        threading.Timer(0.2, operator.post, [on.Deposited(account="0" * 64, amount=1)]).start()
        started = time.monotonic()
        assert [event.kind for event in operator.events(seq, wait_s=60)] == ["deposited"]
        assert time.monotonic() - started < 45  # the wait was ended
        assert operator.events(seq + 1) == []


def test_who_is_away_is_known_before_a_replay_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle agent asks every two seconds: its offer is not matched long after, but a verifier has more time."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        agent.work()
        renter.post(opened())
        assert not operator.lease("job").is_agent_away
        assert operator.state("offers")[0]["is_present"]
        monkeypatch.setattr(presence, "HERE_S", 0.0)
        assert operator.lease("job").is_agent_away
        assert not operator.state("offers")[0]["is_present"]
        assert agent.key is not None
        assert plane.verifiers().keys() == {agent.key.public}
        plane.presence.ask(agent.key.public, wait_s=60.0, replays=False, probes=False)
        assert operator.state("offers")[0]["is_present"], "it waits for an answer"
        assert not plane.verifiers()
    with in_thread(tmp_path) as (_, operator):
        monkeypatch.setattr(presence, "HERE_S", 60.0)
        assert not operator.lease("job").is_agent_away, "a pool that was started again has heard of nobody yet"


def test_a_pool_that_was_frozen_calls_no_agent_away(tmp_path: Path) -> None:
    """It has heard nobody for half a minute, and renters close leases of agents that are away before they accept."""
    with in_thread(tmp_path) as (plane, operator):
        passed = [0.0]
        plane.uptime = UptimeClock(lambda: passed[0])
        plane.presence = Presence(plane.uptime)
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        agent.work()
        renter.post(opened(order=renter.put_blob(b"what to run")))
        passed[0] += 2 * HERE_S
        assert not renter.lease("job").is_agent_away
        assert renter.state("offers")[0]["is_present"]
        for _ in range(round(HERE_S)):
            plane.uptime.tick()
            passed[0] += 1.0
        assert renter.lease("job").is_agent_away, "by now it was heard of for so long by a pool that listens"
        assert plane.uptime.paused_s == 2 * HERE_S - MOST_GAP_S


def test_a_pool_whose_disk_hangs_hears_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers meanwhile, and takes no beat: each look waits for the log's turn."""
    monkeypatch.setattr(control_plane, "_TICK_S", 0.0)
    passed = [0.0]

    async def hang() -> float:
        plane = ControlPlane(tmp_path, own_key("control", tmp_path), on.Founded(name="test"))
        plane.uptime = UptimeClock(lambda: passed[0])
        async with plane._turn:
            looking = asyncio.create_task(plane._listen())
            for _ in range(30):
                passed[0] += 1.0
                await asyncio.sleep(0.0)
        looking.cancel()
        await asyncio.wait([looking])
        plane.log.close()
        return plane.uptime.paused_s

    assert asyncio.run(hang()) == 30 - MOST_GAP_S


def test_a_pool_that_has_much_to_do_still_hears_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting blobs may take longer than the time after which it counts as away."""
    monkeypatch.setattr(control_plane, "_CLEAN_S", -1.0)
    monkeypatch.setattr(control_plane, "_TICK_S", 0.01)
    has_begun, may_end = threading.Event(), threading.Event()

    def delete_unneeded(_: object) -> list[str]:
        has_begun.set()
        may_end.wait()
        return []

    with in_thread(tmp_path) as (plane, _):
        looks = list[float]()
        monkeypatch.setattr(plane.blobs, "delete_unneeded", delete_unneeded)
        assert has_begun.wait(60)
        monkeypatch.setattr(plane.uptime, "tick", lambda: looks.append(time.monotonic()))
        try:
            until(lambda: len(looks) > 2)
        finally:
            may_end.set()


def test_a_stopped_run_is_shown_to_its_renter(tmp_path: Path) -> None:
    """With each of its leases, and by name: also where it goes on as a gang of that name."""
    with in_thread(tmp_path) as (_, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened("run.0", order=renter.put_blob(b"what to run")))
        assert not renter.lease("run.0").is_run_stopped
        renter.post(on.RunStopped(run="run"))
        assert renter.lease("run.0").is_run_stopped
        assert renter.key is not None
        assert renter.state("stopped", renter=renter.key.public) == ["run"]
        assert renter.state("stopped", renter="0" * 64) == []


def test_what_is_shown_of_offers(tmp_path: Path) -> None:
    """Whether the agent is there, whether the device is free, and evidence about the agent."""
    with in_thread(tmp_path) as (_, operator):
        agent = joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        (shown,) = operator.state("offers")
        assert (shown["is_present"], shown["is_free"], shown["record"]["finished"]) == (False, True, 0)
        agent.work()
        assert operator.state("offers")[0]["is_present"]
        renter = joined(operator)
        renter.post(opened())
        assert renter.key is not None
        for only, count in (
            ({"prefix": "jo"}, 1),
            ({"prefix": "x"}, 0),
            ({"renter": renter.key.public, "unsettled": "1"}, 1),
            ({"agent": renter.key.public}, 0),
        ):
            assert len(operator.leases(**only)) == count
        assert not operator.state("offers")[0]["is_free"]
        with pytest.raises(Refused, match="is not shown"):
            operator.state("keys")
        with pytest.raises(Refused, match="there is no lease"):
            operator.lease("none")


def test_addresses(tmp_path: Path) -> None:
    """Without a key, with plain HTTP to elsewhere, or without any address: refused with what is wanted."""
    for text, words in (
        ("", "no pool is named"),
        ("http://127.0.0.1:1", "wanted https"),
        ("http://example.org:1#" + "a" * 64, "has no TLS"),
        ("https://example.org:1#" + "A" * 64, "wanted https"),
        ("https://example.org:99999#" + "a" * 64, "wanted https"),
        ("https://example.org:ssh#" + "a" * 64, "wanted https"),
        ("https://[::1#" + "a" * 64, "wanted https"),
    ):
        with pytest.raises(BadJob, match=words):
            PoolAddress.parse(text, {})
    address = PoolAddress.parse(None, {"STOKER_POOL": "https://host:1#" + "a" * 64})
    assert PoolAddress.parse(str(address)) == address
    with pytest.raises(PlaceUnreachable, match="does not answer"):
        PoolClient("http://127.0.0.1:9#" + "a" * 64).events()


def test_another_server_at_the_address_is_found_out(tmp_path: Path) -> None:
    """Its receipts are not signed by the pool's key."""
    with in_thread(tmp_path) as (plane, operator):
        mistaken = PoolClient(replace(operator.address, key=Key.made().public), plane.key)
        with pytest.raises((PlaceFailed, Refused)):
            mistaken.post(on.Deposited(account="0" * 64, amount=1))


def test_an_answer_that_breaks_off_is_no_answer(tmp_path: Path) -> None:
    """A server that is killed while it answers: the client tries again, and does not take a half for the whole."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for rest in (b"", b'{"events":[]}', b"x"):
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(head + rest)
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        client = PoolClient(
            PoolAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "a" * 64), Key.made(), timeout_s=1.0
        )
        for _number in range(2):
            with pytest.raises(PlaceUnreachable, match="broke off"):
                client.events()
        with pytest.raises(PlaceUnreachable, match="broke off"):
            client.get_blob("b" * 64, tmp_path / "blob")
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_what_has_come_of_a_blob_is_kept_while_its_holder_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by who has little patience before anything comes: else a large one begins again at each break."""
    content, clock = b"0123456789", [0.0]

    def receive(_: Any, __: str, file: Any, *___: Any) -> None:
        clock[0] += 30.0
        if not file.tell():
            file.write(content[:5])
            raise PlaceUnreachable("it broke off")
        if clock[0] < 150:
            raise OnItsWay("its holder is away")
        file.write(content[5:])

    client = PoolClient(PoolAddress("http://127.0.0.1:9", "a" * 64), Key.made())
    monkeypatch.setattr(client, "_receive", receive)
    monkeypatch.setattr(pool_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    is_over: Any = SimpleNamespace(is_set=lambda: False, wait=lambda _: False)
    client.get_blob(sha256(content), tmp_path / "blob", patience_s=10.0, is_over=is_over)
    assert (tmp_path / "blob").read_bytes() == content


@pytest.mark.parametrize("status", ["200 OK", "425 Too Early"])
def test_a_blob_that_is_not_wanted_any_more_is_not_waited_for(tmp_path: Path, status: str) -> None:
    """Neither the rest of one that is coming, nor one that its holder is said to be sending to the pool."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 50\r\n\r\n{{}}".encode())
                is_over.set()
                connection.shutdown(socket.SHUT_WR if status.startswith("425") else socket.SHUT_RD)
                has_ended.wait(60)

        has_ended, thread = threading.Event(), threading.Thread(target=answer)
        thread.start()
        client = PoolClient(PoolAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "a" * 64), Key.made())
        with pytest.raises((PlaceUnreachable, Refused), match=r"not wanted any more|status 425"):
            client.get_blob("b" * 64, tmp_path / "blob", is_over=is_over)
        has_ended.set()
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_keys_are_files_for_one_user(tmp_path: Path) -> None:
    """Made once, closed to others, and refused if others can read them or they are damaged."""
    key = own_key("mine", tmp_path / "keys")
    path = tmp_path / "keys" / "mine.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert own_key("mine", tmp_path / "keys").public == key.public
    assert key.private.private_bytes_raw().hex() not in repr(key)
    path.chmod(0o644)
    with pytest.raises(BadRun, match="others may read it"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("rubbish")
    with pytest.raises(BadRun, match="is no key"):
        own_key("mine", tmp_path / "keys")
    with pytest.raises(BadRun, match="no name of a key"):
        own_key("../mine", tmp_path / "keys")


def test_a_lease_is_shown_without_looking_at_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may name ten thousand blobs, and anybody may ask for it: what is here is known, also after a restart."""
    with in_thread(tmp_path) as (_, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"what to run")))
    with in_thread(tmp_path) as (plane, _):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", lambda *_, **__: pytest.fail("the disk was looked at"))
            document = plane._lease_document(plane.state.leases["job"])
        assert document["bulk"]["pool_bytes"] == len(b"what to run")
        plane.blobs._now = lambda: time.time() + 7200.0
        assert plane.blobs.delete_unneeded(set()) == [document["order"]]
        assert plane._lease_document(plane.state.leases["job"])["bulk"]["pool_bytes"] == 0


def test_no_lease_is_final_before_its_seconds_are_agreed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pool cannot co-sign, as with a signer that is away, a lease that it co-signs for waits."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"what to run"), delegate=plane.key.public, window_s=0))
        agent.post(on.Accepted(lease_id="job"))
        own, tried = plane._own, list[on.Body]()

        def away(body: on.Body) -> Any:
            if isinstance(body, on.Cosigned):
                tried.append(body)
                raise PlaceUnreachable("the signer is away")
            return own(body)

        monkeypatch.setattr(plane, "_own", away)
        agent.post(on.Beat(lease_id="job", index=0, running_s=2))
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"results")))
        seen = len(tried)
        until(lambda: len(tried) >= seen + 2)
        assert operator.lease("job").state == "closed"
        monkeypatch.setattr(plane, "_own", own)
        until(lambda: operator.lease("job").state == "final")
        assert operator.lease("job").paid_s == 2


def test_no_lease_is_disputed_before_its_seconds_are_agreed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dispute nothing is co-signed any more, and an agent that is cleared would not be paid for its last beats."""
    found, looked = control_plane.due, list[on.Body]()

    def due(state: Any, *more: Any, **named: Any) -> list[on.Body]:
        is_closed = "job" in state.leases and state.leases["job"].state == "closed"
        disputed = [on.Disputed(lease_id="job", reason="a replay was unequal")] if is_closed else []
        looked.extend(disputed)
        return [*found(state, *more, **named), *disputed]

    monkeypatch.setattr(control_plane, "due", due)
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"what to run"), delegate=plane.key.public, window_s=3600))
        agent.post(on.Accepted(lease_id="job"))
        own, is_there = plane._own, threading.Event()

        def slow(body: on.Body) -> Any:
            assert not isinstance(body, on.Cosigned) or is_there.wait(60)
            return own(body)

        monkeypatch.setattr(plane, "_own", slow)
        agent.post(on.Beat(lease_id="job", index=0, running_s=2))
        until(lambda: plane._cosigning)
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"results")))
        until(lambda: len(looked) >= 2)
        is_there.set()
        until(lambda: operator.lease("job").state != "closed")
        assert operator.lease("job").paid_s == 2


def test_a_signer_that_hangs_delays_nothing_but_its_own_lease(tmp_path: Path) -> None:
    """Other leases are closed, settled and signed meanwhile; its own is settled once its last seconds are agreed to."""
    hangs = threading.Event()

    def cosigned(lease: Lease, body: on.Cosigned) -> on.Cosigned:
        assert lease.lease_id != "a-first-one" or hangs.wait(60)
        return body

    signer = SimpleNamespace(
        checked_kinds=frozenset(),
        require_rules=lambda _: None,
        cosigned=cosigned,
        keep_up=lambda *_: None,
        is_over=threading.Event(),
        verdicts={},
    )
    with in_thread(tmp_path, custody=signer) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        order, result = renter.put_blob(b"what to run"), b"results"
        for name in ("a-first-one", "other"):
            agent.post(on.Offered(offer=offer(name, time.time())))
            renter.post(opened(name, offer_id=name, order=order, delegate=plane.key.public, window_s=0))
            agent.post(on.Accepted(lease_id=name))
            agent.post(on.Beat(lease_id=name, index=0, running_s=1))
            agent.post(on.Finished(lease_id=name, result=agent.put_blob(result)))
        try:
            until(lambda: renter.lease("other").state == "final")
            assert renter.lease("other").paid_s == 1
            assert renter.lease("a-first-one").state == "closed"
        finally:
            hangs.set()
        until(lambda: renter.lease("a-first-one").state == "final")
        assert renter.lease("a-first-one").paid_s == 1


def test_a_beat_that_its_signer_signs_wrongly_does_not_hold_the_lease_for_ever(tmp_path: Path) -> None:
    """What the log refuses is not asked for again at once, and the lease is settled without those seconds."""
    asked: list[int] = []

    def cosigned(_: Lease, body: on.Cosigned) -> on.Cosigned:
        asked.append(body.index)
        return replace(body, voucher="0" * 130)  # the pool's money is in no contract: refused

    signer = SimpleNamespace(
        checked_kinds=frozenset(),
        require_rules=lambda _: None,
        cosigned=cosigned,
        keep_up=lambda *_: None,
        is_over=threading.Event(),
        verdicts={},
    )
    with in_thread(tmp_path, custody=signer) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"x"), delegate=plane.key.public, window_s=0))
        agent.post(on.Accepted(lease_id="job"))
        agent.post(on.Beat(lease_id="job", index=0, running_s=1))
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"results")))
        until(lambda: renter.lease("job").state == "final")
        assert renter.lease("job").paid_s == 0
        assert asked == [0]


def test_a_beat_that_its_signer_signs_rightly_later_is_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last beat of a lease has none after it: a signer that was wrong for a while is asked again."""
    monkeypatch.setattr(control_plane, "_REFUSED_S", 0.0, raising=False)
    vouchers = ["0" * 130]

    signer = SimpleNamespace(
        checked_kinds=frozenset(),
        require_rules=lambda _: None,
        cosigned=lambda _, body: replace(body, voucher=vouchers.pop() if vouchers else ""),
        keep_up=lambda *_: None,
        is_over=threading.Event(),
        verdicts={},
    )
    with in_thread(tmp_path, custody=signer) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(order=renter.put_blob(b"x"), delegate=plane.key.public, window_s=3600))
        agent.post(on.Accepted(lease_id="job"))
        agent.post(on.Beat(lease_id="job", index=0, running_s=1))
        until(lambda: not vouchers)
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"results")))
        until(lambda: renter.lease("job").paid_s == 1)


def test_money_is_not_moved_into_a_contract_later(tmp_path: Path) -> None:
    """A pool that keeps its money in its log says so, rather than go on as if nothing had been asked for."""
    key = own_key("control", tmp_path)
    ControlPlane(tmp_path, key, on.Founded(name="p")).log.close()
    asked = on.Founded(name="p", contract="eip155:1:0x" + "1" * 40)
    for _ in range(2):  # the log is free again
        with pytest.raises(BadRun, match="in its own log") as told:
            ControlPlane(tmp_path, key, asked)
        assert "--money-in-contract" in str(told.value.remedy)
    ControlPlane(tmp_path, key, on.Founded(name="another name")).log.close()


def test_a_disk_that_is_full_is_not_a_pool_that_is_away(tmp_path: Path) -> None:
    """Where a blob cannot be written that is said, and it is not asked for again and again."""
    with in_thread(tmp_path / "pool") as (_, operator):
        digest = joined(operator).put_blob(b"content")
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(DiskFailed, match="not a directory"):
            operator.get_blob(digest, tmp_path / "file" / "target")


@pytest.mark.parametrize("answer", [{}, [], {"seq": "x", "hash": 1, "signature": 2}, {"seq": 1e999}])
def test_an_answer_of_another_form_is_a_sentence(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Something else listens at the pool's port, or the pool is of another version."""
    client = PoolClient(f"http://127.0.0.1:9#{'a' * 64}", Key.made())
    monkeypatch.setattr(client, "_json", lambda *_, **__: answer)
    with pytest.raises(PlaceFailed, match="no receipt"):
        client.post(on.Accepted(lease_id="job"))
    with pytest.raises(PlaceFailed, match="no log"):
        client.events()


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    """In a signed event, by its name: it is neither taken nor an error of the pool's."""
    with in_thread(tmp_path, is_open=True) as (plane, operator):
        key = Key.made()
        with pytest.raises(Refused, match="lapses within 30 d"):
            PoolClient(operator.address, key).post(on.Offered(offer=offer(now_s=1e15)))
        draft = draft_of(on.Offered(offer=offer(now_s=time.time())), key, plane.key.public)
        for value in (10**400, -1, 2**60):
            body = {"offer": {**draft.body["offer"], "device": {"kind": "cpu", "count": value}}}
            unsigned = replace(draft, body=body, signature="")
            signed = replace(unsigned, signature=key.sign(unsigned.message()))
            status, document = raw(operator, canonical(to_json(signed)))
            assert (status, "count" in document["error"]) == (409, True)


def test_one_address_does_not_hold_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for news are open for a minute: of more than some the next one is refused at once."""
    monkeypatch.setattr(control_plane, "MOST_AT_ONCE", 2)
    with in_thread(tmp_path) as (plane, operator):
        waiting = [threading.Thread(target=operator.work, kwargs={"wait_s": 3.0}) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: sum(plane._at_once.values()) == 2)
        with pytest.raises(Refused, match="has 2 requests open"):
            operator.state("pool")
        for thread in waiting:
            thread.join(60)
        until(lambda: not plane._at_once)
        assert operator.state("pool")


def test_keys_that_do_not_replay_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an open pool anybody makes up keys and asks for work once."""
    with in_thread(tmp_path, is_open=True) as (plane, operator):
        PoolClient(operator.address, Key.made()).work(replays=False)
        until(lambda: plane.presence._not_replaying)
        monkeypatch.setattr(presence, "PRESENT_S", 0.0)
        until(lambda: not plane.presence._not_replaying)


def test_a_blob_that_stalls_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who announces much and sends nothing keeps nobody else's blobs from the disk."""
    monkeypatch.setattr(blobs, "STALLED_S", 0.05)
    store = BlobStore(tmp_path, BlobLimits(most_unnamed_bytes=100, least_free_bytes=0))

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(Refused, match="nothing came of the blob"):
        asyncio.run(asyncio.wait_for(store.write(sha256(b"xy"), stalled(), 100, "a", lambda _: False), 60))
    assert store._on_their_way.total() == 0
    assert not store.path(sha256(b"xy")).exists()


def test_keys_without_credits_keep_nobody_from_an_offer(tmp_path: Path) -> None:
    """In an open pool anybody makes up keys that wait, and those without a device come before those who have one."""
    with in_thread(tmp_path, is_open=True) as (plane, operator):
        agent, renter, stranger = joined(operator), joined(operator), PoolClient(operator.address, Key.made())
        for name in ("one", "two"):
            agent.post(on.Offered(offer=offer(name, time.time())))
        renter.post(opened("first", offer_id="one", order=renter.put_blob(b"x"), delegate=plane.key.public))
        with pytest.raises(Refused, match="without credits keeps no place"):
            stranger.post(on.Waiting(request_id="r", until_s=time.time() + 300))
        renter.post(opened("second", offer_id="two", order=renter.put_blob(b"x"), delegate=plane.key.public))
        joined(operator).post(on.Waiting(request_id="r", until_s=time.time() + 300))
        assert operator.state("pool")["num_waiting"] == 1


def test_states_of_a_dispute_are_supplied_to_the_arbiter_and_kept(tmp_path: Path) -> None:
    """Sides without credits may send them, both name one blob, no one else may, and the arbiter reads them."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter, verifier, arbiter, other = (joined(operator, credit=0) for _ in range(5))
        for client, credit in ((agent, 1), (renter, 10)):
            assert client.key is not None
            operator.post(on.Deposited(account=client.key.public, amount=credit * CREDIT))
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(verify_fraction=1.0, order=renter.put_blob(b"order")))
        agent.post(on.Accepted(lease_id="job"))
        head = ""
        for number, update in enumerate((4, 5)):
            committed = chain_head(head, update, sha256(b"end %d" % number))
            blob = agent.put_blob(b"block %d" % number)
            agent.post(
                on.Committed(lease_id="job", block=number, update=update, state=committed, blob=blob, previous=head)
            )
            head = committed
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"result")))
        keys = [client.key for client in (verifier, arbiter)]
        assert None not in keys
        verifier_key, arbiter_key = (key.public for key in keys if key is not None)
        with pytest.raises(Refused, match="blobs are sent by"):
            verifier.put_blob(b"before")
        draw = operator.key.sign(draw_message(plane.key.public, plane.state.leases["job"]))  # type: ignore[union-attr]
        operator.post(on.Challenged(lease_id="job", block=0, verifier=verifier_key, draw=draw))
        made = sha256(b"made")
        verifier.post(on.VerdictGiven(lease_id="job", block=0, verifier=verifier_key, equal=False, made=made))
        until(lambda: plane.state.leases["job"].state == "disputed")
        place: dict[str, Any] = {"lease_id": "job", "block": 0, "verifier": verifier_key}
        for client, states in ((agent, (b"1", b"2", b"3", b"end 0")), (verifier, (b"1", b"2", b"x", b"made"))):
            assert client.work()["searches"] == [place]
            client.post(on.Traced(**place, states=tuple(map(sha256, states))))
        assert other.work()["searches"] == arbiter.work()["searches"] == []
        before = sha256(b"before")
        with pytest.raises(Refused, match="is not here"):
            agent.post(on.Supplied(**place, before=before, after=sha256(b"after")))
        for client, after in ((agent, b"after"), (verifier, b"other")):
            assert client.work()["searches"] == [place]
            assert client.put_blob(b"before") == before
            client.post(on.Supplied(**place, before=before, after=client.put_blob(after)))
            assert client.work()["searches"] == []
        operator.post(
            on.Challenged(lease_id="job", block=0, verifier=arbiter_key, draw=draw, update=3, against=verifier_key)
        )
        arbiter.get_blob(before, tmp_path / "before")
        assert (tmp_path / "before").read_bytes() == b"before"
        with pytest.raises(Refused, match="is for those who have part"):
            other.get_blob(before, tmp_path / "stranger")
        assert plane.leases.needed() >= {before, sha256(b"after"), sha256(b"other")}
        assert plane.state.leases["job"].forwarded == ()
        [found] = plane.state.leases["job"].found_updates
        assert (found.update, found.agent_state, found.verifier_state) == (3, sha256(b"3"), sha256(b"x"))


@pytest.mark.parametrize(("resume", "begin"), [("", 0), (sha256(b"block"), 3)])
def test_the_first_block_begins_where_the_order_says(tmp_path: Path, resume: str, begin: int) -> None:
    """A verdict that states another update is refused, since the agent's states would be; the true one is taken."""
    order = PoolOrder(run="digits", tree="0" * 64, code="code/1", stoker="stoker/1", job_file="job.py")
    order = replace(order, resume=resume, resume_update=3)
    with in_thread(tmp_path) as (plane, operator):
        agent, renter, verifier = (joined(operator) for _ in range(3))
        agent.post(on.Offered(offer=offer(now_s=time.time())))
        renter.post(opened(verify_fraction=1.0, order=renter.put_blob(dumps(order).encode())))
        agent.post(on.Accepted(lease_id="job"))
        block: dict[str, Any] = {"lease_id": "job", "block": 0}
        agent.post(on.Committed(**block, update=9, state=sha256(b"end"), blob=agent.put_blob(b"block 0")))
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"result")))
        draw = operator.key.sign(draw_message(plane.key.public, plane.state.leases["job"]))  # type: ignore[union-attr]
        block["verifier"] = verifier.key.public  # type: ignore[union-attr]
        operator.post(on.Challenged(**block, draw=draw))
        verdict: dict[str, Any] = {**block, "equal": False, "made": sha256(b"made")}
        for begins in (begin + 1, 9, 3 - begin):
            why = f"begins after update {begin} by its order, and this verdict says {begins}"
            with pytest.raises(Refused, match=why):
                verifier.post(on.VerdictGiven(**verdict, begins=begins))
        with pytest.raises(Refused, match="has no open challenge"):
            verifier.post(on.VerdictGiven(**verdict, begins=9, against=verifier.key.public))  # type: ignore[union-attr]
        verifier.post(on.VerdictGiven(**verdict, begins=begin))
        search = plane.state.leases["job"].challenges[0].bisection
        assert search is not None
        assert search.begin == begin
