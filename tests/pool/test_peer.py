"""Direct transfers between renter and agent, on this machine's loopback; NATs are in `tests/places/test_nat.py`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("iroh", reason="stoker[p2p] is not installed")

from stoker.errors import BadJob, BadRun, PlaceUnreachable
from stoker.pool import client as pool_client
from stoker.pool import events as on
from stoker.pool import peer as pool_peer
from stoker.pool import peer_link
from stoker.pool import rendezvous as pool_rendezvous
from stoker.pool.blob_tree import TreeLimits, read_index
from stoker.pool.client import PoolClient, WrongBlob, is_passing
from stoker.pool.commitment import keep_block
from stoker.pool.control_plane import ControlPlane
from stoker.pool.direct_exchange import joined_peer
from stoker.pool.events import CREDIT, Refused, canonical, sha256
from stoker.pool.keys import Key, own_key
from stoker.pool.log import audit
from stoker.pool.pair_links import MOST_BYTES
from stoker.pool.peer import Peer
from stoker.pool.peer_link import Incoming, NotAdmitted, PeerEndpoint
from stoker.pool.rendezvous import PeerRendezvous
from stoker.pool.request_limits import TokenBuckets
from stoker.pool.sealing import unseal
from stoker.pool.state import State
from stoker.pool.transport import PoolAnswer
from stoker.store import CheckpointStore
from stoker.units import GIB
from tests.pool.book import offer, opened
from tests.pool.counting import save
from tests.pool.server import FAST, in_thread, until

TREE, CHECKPOINT = b"code and data" * 1000, b"a checkpoint" * 1000


class Pool:
    """A pool with a rendezvous, a renter that keeps `TREE`, and an agent that has accepted a lease which names it."""

    def __init__(self, folder: Path, plane: ControlPlane, operator: PoolClient, stack: ExitStack) -> None:
        self.folder, self.plane, self.operator, self._stack = folder, plane, operator, stack
        self.agent, self.renter = self.joined("agent"), self.joined("renter", keeps=True)

    def joined(self, name: str, *, keeps: bool = False) -> PoolClient:
        """A client with a new key, and its peer."""
        client = PoolClient(self.operator.address, Key.made())
        assert client.key is not None
        self.operator.post(on.Deposited(account=client.key.public, amount=10 * CREDIT))
        peer = Peer(client, self.folder / name, keeps=keeps)
        self._stack.callback(peer.close)
        assert peer.wait_ready(20)
        return client

    def open(self, **more: Any) -> str:
        """Open the lease; the blob of the tree."""
        self.agent.post(on.Offered(offer=offer(now_s=time.time())))
        tree = self.renter.put_blob(self.file("tree", TREE))
        order = self.renter.put_blob(b"what to run")
        self.renter.post(opened(order=order, inputs=(tree,), **more))
        self.agent.post(on.Accepted(lease_id="job"))
        return tree

    def file(self, name: str, content: bytes) -> Path:
        """A file with a content."""
        path = self.folder / name
        path.write_bytes(content)
        return path

    def is_in_pool(self, digest: str) -> bool:
        """Whether the control plane has a blob."""
        return self.plane.blobs.path(digest).is_file()


@contextmanager
def pool_of(folder: Path, **rules: Any) -> Iterator[Pool]:
    """See `Pool`."""
    with in_thread(folder / "pool", bulk_bytes=1000, **rules) as (plane, operator), ExitStack() as stack:
        yield Pool(folder, plane, operator, stack)


def committed(blob: str, block: int = 0) -> on.Committed:
    """A commitment of the lease."""
    previous = f"{block:064x}" if block else ""
    return on.Committed(
        lease_id="job", block=block, update=block + 1, state=f"{block + 1:064x}", blob=blob, previous=previous
    )


def no_path(*_: Any, **__: Any) -> Any:
    """Two symmetric NATs."""

    async def none() -> None:
        raise PlaceUnreachable("no direct path")

    return none()


def test_large_blobs_go_between_renter_and_agent(tmp_path: Path) -> None:
    """Code, checkpoints and what a later agent needs: the pool has names alone, and takes the commitment."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        pool.agent.get_blob(tree, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        checkpoint = pool.agent.put_blob(pool.file("checkpoint", CHECKPOINT))
        pool.agent.post(committed(checkpoint))
        pool.renter.get_blob(checkpoint, tmp_path / "home")
        assert (tmp_path / "home").read_bytes() == CHECKPOINT
        assert not pool.is_in_pool(tree)
        assert not pool.is_in_pool(checkpoint)
        assert pool.operator.lease("job").bulk["direct_bytes"] == len(TREE) + len(CHECKPOINT)
        other = pool.joined("other")
        with pytest.raises(Refused, match="there is no blob"):
            other.get_blob(checkpoint, tmp_path / "stolen")
        other.post(on.Offered(offer=offer("second", time.time())))
        pool.renter.post(opened("next", offer_id="second", order=pool.renter.put_blob(b"2"), inputs=(checkpoint,)))
        other.get_blob(checkpoint, tmp_path / "resumed")
        assert (tmp_path / "resumed").read_bytes() == CHECKPOINT


def test_a_renter_that_closes_before_the_commitment_cannot_read_the_block(tmp_path: Path) -> None:
    """Its disk has the checkpoint by then; the key went to the pool alone, which refused the commitment."""
    with pool_of(tmp_path) as pool:
        pool.open()
        store, limits = CheckpointStore(tmp_path / "run" / "checkpoints"), TreeLimits(num_bytes=1 << 20)
        save(store, bytes(32), 10)
        block = keep_block(
            tmp_path / "run",
            store.names()[-1],
            0,
            "",
            put=pool.agent.put_blob,
            limits=limits,
            aside=tmp_path,
            is_sealed=True,
        )
        kept = tmp_path / "renter" / block.blob
        assert kept.is_file()
        pool.renter.post(on.Closed(lease_id="job", reason="not paid"))
        with pytest.raises(Refused, match="closed"):
            pool.agent.post(on.Committed(lease_id="job", **vars(block)))
        with pytest.raises(BadRun, match="index"):
            read_index(kept, limits)
        assert block.seal not in canonical([one.document() for one in pool.operator.events()]).decode()
        unseal(kept, block.seal)
        assert read_index(kept, limits).entries


def of_class(name: str) -> on.Offered:
    """An offer of a determinism class that others have as well."""
    return on.Offered(offer=offer(name, time.time(), determinism_class="c" * 64))


def asked_link(client: PoolClient) -> dict[str, Any] | None:
    """The link that an idle agent is to measure now."""
    links = client.work()["links"]
    return links[0] if links else None


def test_agents_measure_the_link_between_them(tmp_path: Path) -> None:
    """Each in turn, when the pool asks; what it did not ask for is refused, and so is more than it announced."""
    with pool_of(tmp_path) as pool:
        ends = [pool.agent, pool.joined("other")]
        keys = [one.key.public for one in ends if one.key is not None]
        for name, one in zip("ab", ends, strict=True):
            one.post(of_class(name))
        until(lambda: any(asked_link(one) for one in ends))
        first = next(number for number, one in enumerate(ends) if asked_link(one))
        for number in (first, 1 - first):
            asking, other = ends[number], keys[1 - number]
            until(lambda client=asking: asked_link(client))
            link, peer = asked_link(asking), asking.peer
            assert link is not None
            assert peer is not None
            assert link["other"] == other
            assert pool.renter.state("links") == []
            measured = peer.measured_link(other, link["name"])
            assert measured.upload_bytes_per_s > 0
            assert measured.download_bytes_per_s > 0
            assert 0 < measured.delay_s < 10
            assert peer.sent_bytes >= MOST_BYTES // 2 * (1 + (number != first)), "for the limit of uploads"
            with pytest.raises(Refused, match="has not asked"):
                ends[1 - number].post(on.Linked(other=keys[number], upload_bytes_per_s=1.0))
            asking.post(on.Linked(other=other, upload_bytes_per_s=3e6, download_bytes_per_s=1e6 + number, delay_s=0.1))
        found = pool.renter.state("links")
        assert {(one["source"], one["target"]) for one in found} == {tuple(keys), tuple(keys[::-1])}
        assert {one["bytes_per_s"] for one in found} == {1e6, 1e6 + 1}
        assert not asked_link(asking)
        with pytest.raises(Refused, match="has not asked"):
            asking.post(on.Linked(other=other, upload_bytes_per_s=1e9))
        used = peer.measured_link(other, link["name"])  # the pool announces it once
        assert (used.upload_bytes_per_s, used.download_bytes_per_s) == (0.0, 0.0)


def gang_of(pool: Pool, **more: Any) -> PoolClient:
    """A gang of the pool's agent and another one, whose client it is."""
    other = pool.joined("other")
    for name, one in zip("ab", (pool.agent, other), strict=True):
        one.post(of_class(name))
    order = pool.renter.put_blob(b"what to run")
    leases = [
        opened(f"run-s{site}.0", offer_id="ab"[site], gang="run", site=site, sites=2, order=order, **more)
        for site in (0, 1)
    ]
    pool.renter.post(on.GangOpened(leases=tuple(leases)))
    for site, one in enumerate((pool.agent, other)):
        one.post(on.Accepted(lease_id=f"run-s{site}.0"))
    return other


def held(client: PoolClient, path: Path) -> str:
    """A message that an agent keeps for the others; its digest."""
    assert client.peer is not None
    digest = sha256(path.read_bytes())
    assert client.peer.hold(digest, path) is not None
    return digest


def test_messages_of_a_gang_go_directly_and_no_block_is_taken_before_the_pool_has_them(tmp_path: Path) -> None:
    """The other site fetches one from who sent it, and may send the pool what that one does not."""
    with pool_of(tmp_path) as pool:
        other = gang_of(pool)
        contents = [b"of site %d" % site * 1000 for site in (0, 1)]
        digests = [held(one, pool.file(f"of {site}", contents[site])) for site, one in enumerate((pool.agent, other))]
        for site, one in enumerate((pool.agent, other)):
            one.post(on.Sent(lease_id=f"run-s{site}.0", update=4, fragment=0, blob=digests[site]))
        other.get_blob(digests[0], tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == contents[0]
        assert not any(map(pool.is_in_pool, digests))
        stranger = pool.joined("stranger")
        with pytest.raises(Refused, match="there is no blob"):
            stranger.get_blob(digests[0], tmp_path / "stolen")
        block = replace(committed(other.put_blob(b"a block")), lease_id="run-s1.0", update=4)
        other.post(block)  # it was made before the exchange
        block = replace(block, block=1, update=5, state="2" * 64, previous=block.state)
        with pytest.raises(Refused, match="2 messages") as refused:
            other.post(block)
        assert is_passing(refused.value)
        other.put_blob(tmp_path / "of 1", through_pool=True)
        with pytest.raises(Refused, match="1 messages"):
            other.post(block)
        other.put_blob(tmp_path / "got", through_pool=True, message_of="run-s0.0")
        other.post(block)
        assert pool.agent.peer is not None
        pool.agent.peer.release(digests[0])
        pool.renter.get_blob(digests[0], tmp_path / "read")
        assert (tmp_path / "read").read_bytes() == contents[0]
        with pytest.raises(Refused, match="part in a lease"):
            stranger.get_blob(digests[0], tmp_path / "stolen")


def test_a_site_opens_no_blob_of_another_by_sending_its_name(tmp_path: Path) -> None:
    """One that says it holds what it has not gets it neither from the pool nor from the peer that has it."""
    with pool_of(tmp_path) as pool:
        other = gang_of(pool)
        secret = pool.file("secret", b"of another job" * 1000)
        digest = other.put_blob(secret, through_pool=True)
        assert pool.agent.peer is not None
        announced = pool.agent.peer._ask({"op": "held", "blobs": {digest: [len(secret.read_bytes())]}})
        pool.agent.peer._in_loop(announced, 10.0)
        pool.agent.post(on.Sent(lease_id="run-s0.0", update=4, fragment=0, blob=digest))
        with pytest.raises(Refused):
            pool.agent.get_blob(digest, tmp_path / "stolen")


def test_no_lease_is_charged_for_a_blob_that_its_agent_only_names(tmp_path: Path) -> None:
    """As a message that it says it holds; a renter pays for what came from its agent."""
    with pool_of(tmp_path, forward_price=CREDIT) as pool:
        other = gang_of(pool, most_forwarding=CREDIT)
        content = b"of another job" * 1000
        digest = other.put_blob(pool.file("foreign", content), through_pool=True)
        assert pool.agent.peer is not None
        pool.agent.peer._in_loop(pool.agent.peer._ask({"op": "held", "blobs": {digest: [len(content)]}}), 10.0)
        pool.agent.post(on.Sent(lease_id="run-s0.0", update=4, fragment=0, blob=digest))
        assert pool.operator.lease("run-s0.0").forwarded_credits == 0
        pool.agent.put_blob(tmp_path / "foreign", through_pool=True)
        assert until(lambda: pool.operator.lease("run-s0.0").forwarded_credits) > 0


def test_what_an_agent_kept_is_forgotten_after_its_lease_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the places of its key fill up, and other sites are sent to it for nothing."""
    with pool_of(tmp_path) as pool:
        gang_of(pool)
        digest = held(pool.agent, pool.file("message", b"of site 0" * 1000))
        rendezvous, peer = pool.plane.rendezvous, pool.agent.peer
        assert rendezvous is not None
        assert peer is not None
        assert pool.agent.key is not None
        assert rendezvous.senders(pool.agent.key.public, digest)
        old = tmp_path / "agent" / ("0" * 64)
        old.touch()
        os.utime(old, (0, 0))
        held(pool.agent, pool.file("next", b"of site 0 again" * 1000))
        assert not old.exists()
        pool.agent.post(on.Closed(lease_id="run-s0.0", reason="left"))
        monkeypatch.setattr(State, "is_payer", lambda *_: False)
        peer.release(digest)
        assert not rendezvous.senders(pool.agent.key.public, digest)


def test_a_peer_that_ends_leaves_nothing_under_way(tmp_path: Path) -> None:
    """A dial that the pool asked for ends with it; who waits for something hears that it has ended."""
    with pool_of(tmp_path) as pool:
        peer = pool.agent.peer
        assert peer is not None
        announced = {"op": "expect", "key": Key.made().public, "addresses": ["127.0.0.1:9"], "digest": "0" * 64}
        assert peer._in_loop(peer._serve_pool({**announced, "may": "get", "num_bytes": 1}), 10.0) == {"ok": True}
        said = list[str]()

        def wait() -> None:
            try:
                peer._in_loop(asyncio.sleep(3600.0), 3600.0)
            except PlaceUnreachable as problem:
                said.append(problem.message)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        until(lambda: len(asyncio.all_tasks(peer._loop)) > 3)
        peer.close()
        waiting.join(60)
        assert said == ["this peer has ended"]
        assert not asyncio.all_tasks(peer._loop)


def test_nobody_opens_a_blob_by_naming_it(tmp_path: Path) -> None:
    """An agent that commits to a hash of what its renter keeps for another, without having it, is refused."""
    with pool_of(tmp_path) as pool:
        pool.open()
        secret = pool.renter.put_blob(pool.file("secret", b"for another agent" * 100))
        with pytest.raises(Refused, match="has not sent"):
            pool.agent.post(committed(secret))
        with pytest.raises(Refused, match="there is no blob"):
            pool.agent.get_blob(secret, tmp_path / "stolen")
        assert pool.agent.put_blob(pool.file("same", b"for another agent" * 100)) == secret
        pool.agent.post(committed(secret))  # it has it


def test_a_peer_serves_those_whom_the_pool_announced(tmp_path: Path) -> None:
    """A key that knows the address gets no connection; one that was announced for a blob gets no other."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        secret = pool.renter.put_blob(pool.file("secret", b"s" * 2000))
        assert pool.renter.key is not None
        assert pool.plane.rendezvous is not None
        address = pool.plane.rendezvous._endpoint.address_of(pool.renter.key.public)

        async def knock() -> None:
            stranger = PeerEndpoint(Key.made(), no_path, lambda *_: "not expected")
            await stranger.bind("127.0.0.1:0")
            assert pool.renter.key is not None
            try:
                connection = await stranger.meet(pool.renter.key.public, [address], 5.0)
                await stranger.request(connection, {"method": "GET", "target": f"/v1/blobs/{tree}"})
            finally:
                await stranger.close()

        with pytest.raises(PlaceUnreachable):  # while it dials, or after a handshake, before which no key is known
            asyncio.run(knock())
        path = pool.agent.peer.route_to(tree) if pool.agent.peer else None
        assert path is not None
        for method, target in (
            ("GET", f"/v1/blobs/{secret}"),
            ("PUT", f"/v1/blobs/{tree}"),
            ("GET", "/v1/events"),
            ("GET", "/v1/blobs/../../secret"),
        ):
            assert path.exchange(method, target, {}, b"x" if method == "PUT" else None, 10.0).status == 404


def test_what_an_agent_sends_is_checked(tmp_path: Path) -> None:
    """Other content than its name says, more than was announced, or more than the quota: nothing is kept."""
    with pool_of(tmp_path) as pool:
        pool.open()
        digest = sha256(CHECKPOINT)
        assert pool.agent.peer is not None
        path = pool.agent.peer._paths({"op": "reach", "digest": digest, "num_bytes": len(CHECKPOINT)})[0]
        for content, why in (
            (b"x" * len(CHECKPOINT), b"or others than"),
            (CHECKPOINT[:-1], b"11,999 of 12,000"),
            (CHECKPOINT + b"x" * 4_000_000, b"more than the 12,000 bytes"),
        ):
            answer = path.exchange("PUT", f"/v1/blobs/{digest}", {}, content, 10.0)
            assert answer.status == 404
            assert why in answer.read(1000)
        assert [one.name for one in (tmp_path / "renter").glob("*") if one.is_file()] == [sha256(TREE)]


def test_the_quota_of_a_renter(tmp_path: Path) -> None:
    """What does not fit at the renter goes to the pool."""
    with pool_of(tmp_path) as pool:
        pool.open()
        assert pool.renter.peer is not None
        pool.renter.peer._most_kept_bytes = len(TREE) + len(CHECKPOINT) - 1
        checkpoint = pool.agent.put_blob(pool.file("checkpoint", CHECKPOINT))
        assert pool.is_in_pool(checkpoint)
        pool.agent.post(committed(checkpoint))


def test_without_a_path_the_pool_forwards_for_its_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder sends it to the pool when it is asked for; the renter pays once, within what it said and the quota."""
    price, quota = GIB // 10, len(TREE) + len(CHECKPOINT)  # a tenth of a micro-credit a byte
    with pool_of(tmp_path, forward_price=price, forward_quota_bytes=quota) as pool:
        assert pool.agent.peer is not None
        monkeypatch.setattr(pool.agent.peer._endpoint, "meet", no_path)
        monkeypatch.setattr(pool_client, "_RETRY_S", 0.05)
        tree = pool.open(most_forwarding=quota // 10 + 2)
        pool.agent.get_blob(tree, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        checkpoint = pool.agent.put_blob(pool.file("checkpoint", CHECKPOINT))
        pool.agent.post(committed(checkpoint))
        lease = until(lambda: (found := pool.operator.lease("job")).forwarded_bytes == quota and found)
        assert lease.forwarded_credits == len(TREE) // 10 + len(CHECKPOINT) // 10
        balances = pool.operator.state("balances")
        assert balances["balances"][pool.operator.address.key] == lease.forwarded_credits
        assert sum(balances["balances"].values()) == balances["deposited"]
        pool.agent.get_blob(tree, tmp_path / "again")
        more = pool.agent.put_blob(pool.file("more", b"more" * 1000))
        with pytest.raises(Refused, match="a lease at most"):
            pool.agent.post(committed(more, 1))
        assert pool.operator.lease("job").forwarded_credits == lease.forwarded_credits
    assert not audit(tmp_path / "pool" / "log.db").problem


def test_what_its_renter_does_not_pay_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the price, and what to say; a lease whose code is in the pool already is not opened."""
    with pool_of(tmp_path, forward_price=CREDIT) as pool:
        assert pool.agent.peer is not None
        monkeypatch.setattr(pool.agent.peer._endpoint, "meet", no_path)
        tree = pool.open()
        with pytest.raises(Refused, match=r"1.00 credits per GiB.*spends 0 credits"):
            pool.agent.get_blob(tree, tmp_path / "got")
        sent = pool.renter.put_blob(pool.file("other", b"o" * 2000), through_pool=True)
        pool.agent.post(on.Offered(offer=offer("second", time.time())))
        with pytest.raises(Refused, match="spends 0 credits"):
            pool.renter.post(opened("next", offer_id="second", inputs=(sent,)))


def test_a_peer_comes_back(tmp_path: Path) -> None:
    """After its line broke, and the pool forgot everything, it joins again and says what it holds."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        rendezvous = pool.plane.rendezvous
        assert rendezvous is not None
        assert pool.renter.key is not None
        rendezvous._held.clear()
        rendezvous._endpoint.drop(pool.renter.key.public)
        until(lambda: pool.renter.key.public in rendezvous.senders(pool.renter.key.public, tree))  # type: ignore[union-attr]
        pool.agent.get_blob(tree, tmp_path / "got")


def test_a_renter_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blob is on its way, for some time, and then not: the caller may ask again."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        assert pool.renter.peer is not None
        pool.renter.peer.close()
        monkeypatch.setattr(pool_client, "_RETRY_S", 0.1)
        with pytest.raises(Refused, match="who is not connected") as caught:
            pool.agent.get_blob(tree, tmp_path / "got", patience_s=0.5)
        assert pool_client.is_passing(caught.value)
        again = Peer(pool.renter, tmp_path / "renter", keeps=True)
        assert again.wait_ready(20)
        pool.agent.get_blob(tree, tmp_path / "got")
        again.close()


def test_garbage_at_the_rendezvous(tmp_path: Path) -> None:
    """Long heads, no JSON, wrong values: each is answered or dropped, and the pool goes on."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        peer = pool.agent.peer
        assert peer is not None
        key = pool.operator.address.key

        async def garbage() -> list[Any]:
            connection = peer._endpoint.connection(key)
            assert connection is not None
            for content in (b"\xff\xff\xff\xff", b"\0\0\0\4abcd", b"\0\0\0\2[]", b"\0\0"):
                stream = await connection.open_bi()
                await stream.send().write_all(content)
                await stream.send().finish()
            heads = (
                {},
                {"op": "held", "blobs": {"x": [1]}},
                {"op": "held", "blobs": {"0" * 64: ["1"]}},
                {"op": "held", "blobs": {f"{number:064x}": [1] for number in range(600)}},
                {"op": "find", "digest": "../x"},
                {"op": "reach"},
                {"op": ["find"]},
            )
            return [(await peer._endpoint.request(connection, head))[0] for head in heads]

        said = peer._in_loop(garbage(), 30.0)
        assert [bool(one.get("error")) for one in said] == [True, True, True, False, True, True, True]
        pool.agent.get_blob(tree, tmp_path / "got")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["a" * 64, "127.0.0.1:1", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a" * 64, "x"]), inner, max_size=3),
)
HEADS = st.dictionaries(st.sampled_from(["blobs", "digest", "num_bytes", "local", "key"]), JSON)


def test_any_request_is_answered(tmp_path: Path) -> None:
    """Whatever JSON a member sends to the rendezvous, it gets a document, and nothing else is raised."""
    plane = ControlPlane(tmp_path, own_key("control", tmp_path), rates=FAST)
    rendezvous, loop = PeerRendezvous(plane, "127.0.0.1", 0), asyncio.new_event_loop()

    @given(st.sampled_from(["hello", "held", "find", "reach", ["find"], None]), HEADS)
    def answered(op: Any, head: dict[str, Any]) -> None:
        answer, _ = loop.run_until_complete(rendezvous._serve(plane.key.public, {**head, "op": op}, Incoming(None)))  # type: ignore[arg-type]
        assert canonical(answer)

    answered()
    loop.close()
    plane.log.close()


class Breaking:
    """A peer whose line breaks after `given` bytes; then there is none."""

    def __init__(self, content: bytes, *given: int) -> None:
        self.name, self._content, self._given, self.starts = "a peer", content, list(given), list[int]()

    def route_to(self, _: str) -> Breaking | None:
        return self if self._given else None

    def exchange(self, _: str, __: str, headers: dict[str, str], ___: Any, ____: float) -> PoolAnswer:
        start = int(headers.get("Range", "bytes=0-")[6:-1])
        self.starts.append(start)
        parts = [self._content[start : start + self._given.pop(0)]]

        def read(_: int) -> bytes:
            if not parts:
                raise PlaceUnreachable("it broke off")
            return parts.pop()

        return PoolAnswer(206 if start else 200, len(self._content) - start, read, lambda: None)


def test_what_broke_off_goes_on_from_anybody(tmp_path: Path) -> None:
    """Two direct paths break; the third part comes from the pool, and nothing is sent twice."""
    with in_thread(tmp_path / "pool") as (_, operator):
        operator.post(on.Deposited(account=operator.address.key, amount=1))
        (tmp_path / "source").write_bytes(TREE)
        digest = operator.put_blob(tmp_path / "source")
        client = PoolClient(operator.address, operator.key)
        breaking = Breaking(TREE, 5000, 3000)
        client.peer = breaking  # type: ignore[assignment]
        client.get_blob(digest, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        assert breaking.starts == [0, 5000]


@pytest.mark.parametrize("num_bytes", [100, len(TREE)])
def test_a_peer_that_gives_other_bytes_keeps_nobody_from_the_blob(tmp_path: Path, num_bytes: int) -> None:
    """It comes from the pool then, from its beginning; a pool that gives other bytes as well is refused."""
    with in_thread(tmp_path / "pool") as (plane, operator):
        operator.post(on.Deposited(account=operator.address.key, amount=1))
        (tmp_path / "source").write_bytes(TREE)
        digest = operator.put_blob(tmp_path / "source")
        client = PoolClient(operator.address, operator.key)
        client.peer = lying = Breaking(b"x" * len(TREE), num_bytes, len(TREE))  # type: ignore[assignment]
        client.get_blob(digest, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        lying._given = [num_bytes]
        plane.blobs.path(digest).write_bytes(b"y" * len(TREE))
        with pytest.raises(WrongBlob, match="came with the hash"):
            client.get_blob(digest, tmp_path / "wrong")
        assert not (tmp_path / "wrong").exists()


def test_a_peer_that_gives_a_blob_byte_by_byte_is_left_for_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which goes on where it was; else a site that is given a message so would wait for ever."""
    monkeypatch.setattr(pool_client, "_SLOW_S", 0.0)
    monkeypatch.setattr(pool_client, "_LEAST_BYTES_PER_S", 1e15)
    with in_thread(tmp_path / "pool") as (_, operator):
        operator.post(on.Deposited(account=operator.address.key, amount=1))
        (tmp_path / "source").write_bytes(TREE)
        digest = operator.put_blob(tmp_path / "source")
        client = PoolClient(operator.address, operator.key)
        client.peer = slow = Breaking(TREE, 1, 1, 1)  # type: ignore[assignment]
        client.get_blob(digest, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        assert slow.starts == [0]


def test_without_iroh_all_goes_through_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, with the command that brings it; another version than the one that was tried is refused."""
    with pool_of(tmp_path) as pool:
        said: list[str] = []
        monkeypatch.setitem(sys.modules, "iroh", None)
        monkeypatch.delitem(sys.modules, "stoker.pool.peer_link")
        monkeypatch.delitem(sys.modules, "stoker.pool.peer")
        assert joined_peer(PoolClient(pool.operator.address, Key.made()), tmp_path / "x", tell=said.append) is None
        assert "stoker[p2p]" in said[0]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")
    with pytest.raises(BadJob, match=r"iroh 9\.9 is installed"):
        peer_link._patch()


def test_old_blobs_go(tmp_path: Path) -> None:
    """A peer that starts removes what was not used for longer than a result can be disputed."""
    with pool_of(tmp_path) as pool:
        pool.open()
        assert pool.renter.peer is not None
        pool.renter.peer.close()
        old = time.time() - pool_peer.KEPT_S - 10
        os.utime(tmp_path / "renter" / sha256(TREE), (old, old))
        Peer(pool.renter, tmp_path / "renter", keeps=True).close()
        assert not (tmp_path / "renter" / sha256(TREE)).exists()


def test_the_pool_gets_from_a_peer_what_it_keeps_alone(tmp_path: Path) -> None:
    """A path where a name should be is no blob: a pool that asks for it gets no file of the renter's."""
    with pool_of(tmp_path) as pool:
        pool.open()
        peer, secret = pool.renter.peer, pool.file("secret", b"s" * 2000)
        assert peer is not None
        for name in ("../secret", str(secret), f"senders/{sha256(TREE)}"):
            assert peer._in_loop(peer._serve_pool({"op": "forward", "digest": name}), 10.0) == {"ok": False}
        assert not peer._forwarding


def test_an_agent_does_not_spoil_what_its_renter_announces(tmp_path: Path) -> None:
    """What it sends again and again is announced once, and small files are for the pool: the renter comes back."""
    with pool_of(tmp_path) as pool:
        tree = pool.open()
        peer, rendezvous = pool.renter.peer, pool.plane.rendezvous
        assert peer is not None
        assert rendezvous is not None
        assert pool.renter.key is not None
        assert pool.agent.peer is not None
        assert not pool.agent.peer._paths({"op": "reach", "digest": sha256(b"x"), "num_bytes": 1})
        with (tmp_path / "renter" / "senders" / tree).open("a") as file:
            file.writelines(f"{number % 30:064x}\n" for number in range(90))
        rendezvous._held.clear()
        rendezvous._endpoint.drop(pool.renter.key.public)
        until(lambda: f"{29:064x}" in rendezvous.senders(pool.renter.key.public, tree))  # type: ignore[union-attr]


def test_a_key_without_credits_holds_nothing_at_the_pool(tmp_path: Path) -> None:
    """Keys cost nothing, and what they say that they hold is in the pool's memory."""
    plane = ControlPlane(tmp_path, own_key("control", tmp_path), on.Founded(name="p", is_open=True), rates=FAST)
    rendezvous = PeerRendezvous(plane, "127.0.0.1", 0)
    head = {"op": "held", "blobs": {"a" * 64: [1]}}
    answer, _ = asyncio.run(rendezvous._serve(Key.made().public, head, Incoming(None)))  # type: ignore[arg-type]
    assert "credits" in answer["error"]
    assert not rendezvous._held
    plane.log.close()


def test_a_lease_of_others_does_not_stop_a_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that names the same code neither stops it, if its renter pays nothing, nor is charged for it, if it would."""
    with pool_of(tmp_path, forward_price=CREDIT) as pool:
        assert pool.agent.peer is not None
        monkeypatch.setattr(pool.agent.peer._endpoint, "meet", no_path)
        monkeypatch.setattr(pool_client, "_RETRY_S", 0.05)
        tree = pool.open(most_forwarding=CREDIT)
        other = pool.joined("other")
        for name, most in (("unwilling", 0), ("willing", CREDIT)):
            pool.agent.post(on.Offered(offer=offer(name, time.time())))
            order = other.put_blob(b"order")
            other.post(opened(name, offer_id=name, order=order, inputs=(tree,), most_forwarding=most))
        pool.agent.get_blob(tree, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == TREE
        assert until(lambda: pool.operator.lease("job").forwarded_credits)
        assert pool.operator.lease("willing").forwarded == ()


async def asked(plane: ControlPlane, key: Key, stack: AsyncExitStack, flood_bytes: int = 0) -> dict[str, Any]:
    """What the rendezvous answers to a key that says hello, and stays connected; first it sends something else."""
    assert plane.rendezvous is not None
    endpoint = PeerEndpoint(key, no_path, lambda *_: "")
    stack.push_async_callback(endpoint.close)
    await endpoint.bind("127.0.0.1:0")
    connection = await endpoint.meet(plane.key.public, [f"127.0.0.1:{plane.rendezvous.port}"])
    if flood_bytes:
        stream = await connection.open_uni()
        with suppress(peer_link.iroh.IrohError):
            await stream.write_all(bytes(flood_bytes))
        await asyncio.wait_for(connection.closed(), 60)
    return (await endpoint.request(connection, {"op": "hello"}))[0]


def test_keys_that_anybody_makes_up_have_few_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an open pool, from one network and in all; each reads why, and a key with credits has a place all the same."""
    monkeypatch.setattr(pool_rendezvous, "MOST_STRANGERS", 3)
    monkeypatch.setattr(pool_rendezvous, "MOST_OF_NETWORK", 2)
    with in_thread(tmp_path, bulk_bytes=1000, is_open=True) as (plane, operator):
        rich = Key.made()
        operator.post(on.Deposited(account=rich.public, amount=1))

        async def many() -> None:
            async with AsyncExitStack() as stack:
                async with AsyncExitStack() as first:
                    assert "seen" in await asked(plane, Key.made(), first)
                    assert "seen" in await asked(plane, Key.made(), stack)
                    with pytest.raises(NotAdmitted, match=r"2 keys without credits .* from 127\.0\.0\.1"):
                        await asked(plane, Key.made(), stack)
                    assert "seen" in await asked(plane, rich, stack)
                await until_async(lambda: len(plane.rendezvous._strangers) == 1)  # type: ignore[union-attr]
                assert "seen" in await asked(plane, Key.made(), stack)
                monkeypatch.setattr(pool_rendezvous, "MOST_OF_NETWORK", 9)
                assert "seen" in await asked(plane, Key.made(), stack)
                with pytest.raises(NotAdmitted, match="3 keys without credits or a lease are connected: try again"):
                    await asked(plane, Key.made(), stack)

        asyncio.run(many())
        until(lambda: not plane.rendezvous._strangers)  # type: ignore[union-attr]


def test_a_stranger_is_taken_without_a_look_at_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may knock often: whether others are known by now matters only where there is no place."""
    with in_thread(tmp_path, bulk_bytes=1000, is_open=True) as (plane, _):
        rendezvous, looked = plane.rendezvous, list[str]()
        assert rendezvous is not None
        monkeypatch.setattr(plane.leases, "rents", lambda key: looked.append(key) or False)
        for number in range(3):
            assert not rendezvous._admits(f"{number}", f"192.0.2.{number}:1")
        assert looked == ["0", "1", "2"]
        monkeypatch.setattr(pool_rendezvous, "MOST_STRANGERS", 3)
        monkeypatch.setattr(plane.leases, "rents", lambda key: key == "0")
        assert not rendezvous._admits("3", "192.0.2.3:1")
        assert sorted(rendezvous._strangers) == ["1", "2", "3"]
        assert "are connected" in rendezvous._admits("4", "192.0.2.4:1")


def test_a_connection_that_ends_as_it_is_taken_gives_its_place_back() -> None:
    """Else strangers who hang up in that moment would leave no place for others."""
    left = list[str]()

    class Gone(peer_link.iroh.IrohError):
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "the connection is gone"

    async def ended() -> None:
        raise Gone

    def closed(_: int) -> None:
        raise Gone

    async def keep() -> None:
        endpoint = PeerEndpoint(Key.made(), no_path, lambda *_: "", left.append)
        connection: Any = SimpleNamespace(set_max_concurrent_bi_streams=closed, accept_bi=ended)
        with pytest.raises(peer_link.iroh.IrohError):
            endpoint._keep("a", connection)
        await until_async(lambda: left)
        assert not endpoint.num_keys

    asyncio.run(keep())


async def until_async(is_there: Callable[[], bool]) -> None:
    """Wait for a condition, in a loop."""
    await asyncio.to_thread(until, is_there)


def test_a_key_that_nobody_knows_sends_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sends is kept in memory until somebody reads it, which nobody does: its connection is ended."""
    monkeypatch.setattr(pool_rendezvous, "_LOOK_S", 0.05)
    monkeypatch.setattr(pool_rendezvous, "MOST_STRANGE_BYTES", 100_000)
    with in_thread(tmp_path, bulk_bytes=1000, is_open=True) as (plane, _):

        async def flood() -> None:
            async with AsyncExitStack() as stack:
                with pytest.raises(NotAdmitted, match="more than 100,000 bytes"):
                    await asked(plane, Key.made(), stack, flood_bytes=500_000)
                assert "seen" in await asked(plane, Key.made(), stack)

        asyncio.run(flood())


def test_a_network_begins_few_connections_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count against the rate of its address, before the handshake that costs most."""
    with in_thread(tmp_path, bulk_bytes=1000) as (plane, operator):
        monkeypatch.setattr(pool_rendezvous, "CONNECTION_COST", 1e9)
        member = Key.made()
        operator.post(on.Deposited(account=member.public, amount=0))

        async def knock() -> None:
            async with AsyncExitStack() as stack:
                await asked(plane, member, stack)

        with pytest.raises(PlaceUnreachable, match="no direct path"):
            asyncio.run(knock())
        monkeypatch.setattr(pool_rendezvous, "CONNECTION_COST", 7.0)
        counted: list[tuple[str, float, str]] = []
        monkeypatch.setattr(
            plane, "count_address", lambda host, cost=1.0, *, way="HTTP": counted.append((host, cost, way))
        )
        asyncio.run(knock())
        assert ("127.0.0.1", 7.0, "UDP") in counted


def test_connections_leave_the_requests_of_their_network_alone(tmp_path: Path) -> None:
    """Peers that knock again and again do not keep a neighbour behind the same NAT from the pool."""
    with in_thread(tmp_path, bulk_bytes=1000) as (plane, operator):
        plane._by_address = TokenBuckets(5.0, 100.0)
        for _ in range(10):
            plane.count_address("127.0.0.1", 9.9, way="UDP")
        with pytest.raises(Refused, match="requests a second"):
            plane.count_address("127.0.0.1", 99.0, way="UDP")
        assert operator.state("pool")["rendezvous"]


def test_who_is_refused_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose key the pool no longer takes reads the pool's reason, and sends large files through the pool."""
    pauses, sleep = list[float](), asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda s, *more: (pauses.append(s), sleep(s, *more))[1])
    with in_thread(tmp_path, bulk_bytes=1000) as (_, operator):
        said: list[str] = []
        client = PoolClient(operator.address, Key.made())
        peer = Peer(client, tmp_path / "x", tell=said.append)
        assert "is not admitted to this pool" in until(lambda: said)[0]
        assert not peer.wait_ready(0)
        until(lambda: any(60 <= pause_s <= 180 for pause_s in pauses))
        peer.close()


def test_a_blob_that_is_gone_stops_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    """At its end a renter's peer sends what no agent has fetched; the user may have emptied the cache."""
    with pool_of(tmp_path) as pool:
        tree, peer = pool.open(), pool.renter.peer
        assert peer is not None
        gone = pool.renter.put_blob(pool.file("gone", b"g" * 2000))
        (tmp_path / "renter" / gone).unlink()
        peer.leave()
        assert pool.is_in_pool(tree)
        assert pool.renter.peer is None


def test_what_the_next_agent_fetches_is_left_at_the_pool(tmp_path: Path) -> None:
    """The first agent has fetched the code: for the one that the run moved to it is there all the same."""
    with pool_of(tmp_path) as pool:
        tree, peer = pool.open(), pool.renter.peer
        assert peer is not None
        pool.agent.get_blob(tree, tmp_path / "fetched")
        until(lambda: not peer._unfetched)
        peer.note_unfetched(tree, "", "0" * 64)
        peer.leave()
        assert pool.is_in_pool(tree)
