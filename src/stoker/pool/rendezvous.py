"""The control plane as the place where peers find each other: it sees their addresses, and sends those of one lease.

What: agents and renters keep a connection to a UDP port of the pool open (`peer_link.py`). Over it they say which large
blobs they hold, ask who has one, and learn which key to expect: a peer serves no key that was not announced by the
pool. A second port shows whether a peer's NAT has one port for all destinations ("direct") or one for each
("symmetric"). Nothing of a blob passes here; where peers do not reach each other, its holder is asked to send it to the
pool.
Costs: a connection a peer, a few bytes a second. Everything here is in memory: peers say it again when they come back.
Bounds: keys cost nothing, so in an open pool those that have neither credits, nor a lease, nor the operator's admission
share few places, few of them from one network, and send little; a network begins few connections a second.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stoker.errors import StokerError
from stoker.pool.control_plane import ControlPlane
from stoker.pool.escrow import short
from stoker.pool.events import Refused
from stoker.pool.keys import Key, is_digest
from stoker.pool.lease import LIVE, Lease
from stoker.pool.pair_links import MOST_BYTES, LinkSchedule
from stoker.pool.peer_link import Body, Head, Incoming, PeerEndpoint
from stoker.pool.request_limits import network_of_host

_log = logging.getLogger(__name__)

_MOST_HELD = 4000
"""Blobs that one key holds at most."""
_MOST_PEERS, _MOST_SENDERS = 8, 16
_MOST_LOCAL = 4
_TELL_S, _MIRROR_S = 5.0, 1.0
MOST_CONNECTED, MOST_STRANGERS, MOST_OF_NETWORK = 20_000, 512, 32
"""Keys that are connected, unknown ones among them, and of these from one network."""
MOST_STRANGE_BYTES = 4 << 20
"""Most that an unknown key sends over its connections, looked at each `_LOOK_S` [bytes]."""
_LOOK_S = 1.0
_LOOK_LINKS_S = 1e-3
"""Time between two looks for links that are not known, for each agent: a look goes through all of them [s]."""
CONNECTION_COST = 10.0
"""What beginning a connection counts as, in requests of an address."""


@dataclass(frozen=True)
class _Held:
    num_bytes: int
    senders: frozenset[str]


class PeerRendezvous:
    """Where peers of a pool meet.

    Args:
        plane: whose leases decide who may have what.
        host: IP address to listen at.
        port: UDP; the next one is used as well. 0: any two.
    """

    def __init__(self, plane: ControlPlane, host: str, port: int) -> None:
        self.port = port
        self._plane, self._host = plane, f"[{host}]" if ":" in host else host
        plane.admission.held_elsewhere = self.senders
        self._links = LinkSchedule()
        plane.admission.asks_link = lambda agent, other: self._links.asks(agent, other, plane.state.links)
        self._endpoint = PeerEndpoint(plane.key, self._serve, self._admits, self._left, self._greets)
        self._mirror_key = Key.made()
        self._mirror = PeerEndpoint(self._mirror_key, self._serve, self._admits_to_mirror, greets=self._greets)
        self._mirror_port = 0
        self._looking: asyncio.Task[None] | None = None
        self._strangers: dict[str, str] = {}
        self._held: dict[str, dict[str, _Held]] = {}
        self._local: dict[str, list[str]] = {}
        self._hosts: dict[str, str] = {}
        self._looks_from_s = 0.0
        self._network: dict[str, str] = {}

    async def open(self) -> None:
        """Listen.

        Raises:
            PlaceFailed: a port is taken.
        """
        next_port = self.port + 1 if self.port else 0
        self.port = await self._endpoint.bind(f"{self._host}:{self.port}")
        self._mirror_port = await self._mirror.bind(f"{self._host}:{next_port}")
        self._looking = asyncio.create_task(self._look_at_strangers())

    async def close(self) -> None:
        """End all connections."""
        if self._looking is not None:
            self._looking.cancel()
        await self._mirror.close()
        await self._endpoint.close()

    def document(self) -> dict[str, Any]:
        """What peers need to know."""
        return {"port": self.port, "bulk_bytes": self._plane.admission.bulk_bytes}

    def network_of(self, key: str) -> str:
        """`direct`, `symmetric` (NAT: no direct path to most others), or "" of a key that is not connected."""
        return self._network.get(key, "")

    def senders(self, key: str, digest: str) -> frozenset[str]:
        """Who has sent a blob to a key that keeps it, by that key's word; empty: it does not keep it."""
        held = self._held.get(key, {}).get(digest)
        return frozenset() if held is None else held.senders | {key}

    def look_at_links(self, idle: Callable[[], Mapping[str, str]], now_s: float) -> list[str]:
        """Ask agents for links that are not known; who was asked now. With many agents not at each call.

        `idle`: determinism classes of those that are free for it, by key.
        """
        if now_s < self._looks_from_s:
            return []
        agents = {key: (name, self._hosts[key]) for key, name in idle().items() if key in self._hosts}
        self._looks_from_s = now_s + len(agents) * _LOOK_LINKS_S
        return self._links.look(agents, self._plane.state.links, now_s, lambda: secrets.token_hex(32))

    def asked_links(self, key: str) -> list[dict[str, Any]]:
        """What an agent is to measure now."""
        other, name, _ = self._links.asked.get(key, ("", "", 0.0))
        return [{"other": other, "name": name}] if self._links.asks(key, other, self._plane.state.links) else []

    def _asked_of(self, key: str, head: Head) -> tuple[list[str], Head]:
        """To whom a key is to measure its link, and what of that one may be announced."""
        name = _digest(head)
        return [self._links.begin(key, name)], {"digest": name, "num_bytes": MOST_BYTES}

    def held_bytes(self, lease: Lease, but: AbstractSet[str]) -> int:
        """Size of the blobs of a lease that its renter keeps [bytes], but for some of them."""
        known = self._held.get(lease.renter, {})
        return sum(known[digest].num_bytes for digest in (lease.blobs & known.keys()) - but)

    async def ask_to_forward(self, key: str, digest: str) -> str:
        """Ask who holds a blob that a key may read to send it to the pool; what comes of it, "" if no peer holds it.

        Raises:
            Refused: its renter does not pay for that, or it is over the pool's quota.
        """
        holders = self._holders(key, digest)
        for holder in holders:
            self._plane.admission.require_forwardable(digest, self._held[holder][digest].num_bytes, holder)
            if await self._tell(holder, {"op": "forward", "digest": digest}):
                return "is being sent to the pool by who holds it"
        return f"is held by {short(holders[0])}, who is not connected" if holders else ""

    # --------------------------------------------------------------------------------------------------------- requests

    def _greets(self, address: str) -> bool:
        try:
            self._plane.count_address(_host_of(address), CONNECTION_COST, way="UDP")
        except Refused:
            return False
        return True

    def _admits(self, key: str, address: str) -> str:
        """Why a key is not listened to; "": it is."""
        state = self._plane.state
        assert state.rules is not None
        if not state.rules.is_open and key not in state.members:
            return f"the key {short(key)} is not admitted to this pool"
        if self._endpoint.num_keys >= MOST_CONNECTED:
            return f"{MOST_CONNECTED:,} keys are connected, and no more are taken"
        if self._is_known(key):
            return ""
        network = network_of_host(_host_of(address))
        if self._no_place(key, network):  # some may be known by now
            self._strangers = {other: host for other, host in self._strangers.items() if not self._is_known(other)}
        if why := self._no_place(key, network):
            return why
        self._strangers[key] = network
        return ""

    def _no_place(self, key: str, network: str) -> str:
        """Why there is no place for one more unknown key; "": there is."""
        if len(self._strangers.keys() | {key}) > MOST_STRANGERS:
            return f"{MOST_STRANGERS} keys without credits or a lease are connected: try again, or get credits first"
        if sum(host == network for other, host in self._strangers.items() if other != key) >= MOST_OF_NETWORK:
            return f"{MOST_OF_NETWORK} keys without credits or a lease are connected from {network}: no more are taken"
        return ""

    def _admits_to_mirror(self, key: str, _: str) -> str:
        return "" if self._endpoint.connection(key) is not None else "the first port is to be asked before this one"

    def _is_known(self, key: str) -> bool:
        """Whether somebody answers for a key: the operator, money, or a lease."""
        plane = self._plane
        return (
            key in plane.state.members
            or plane.state.is_payer(key)
            or bool(plane.leases.of_key(key))
            or plane.leases.rents(key)
        )

    async def _look_at_strangers(self) -> None:
        """End connections over which more came than one that asks where others are has to say."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for key in list(self._strangers):
                if self._endpoint.received_bytes(key) > MOST_STRANGE_BYTES and not self._is_known(key):
                    self._endpoint.drop(
                        key, f"more than {MOST_STRANGE_BYTES:,} bytes of a key without credits or a lease"
                    )

    def _left(self, key: str) -> None:
        """A peer is gone; what it holds is still its."""
        self._network.pop(key, None)
        self._local.pop(key, None)
        self._hosts.pop(key, None)
        self._strangers.pop(key, None)
        self._mirror.drop(key)
        if not self._plane.leases.rents(key):
            self._held.pop(key, None)

    async def _serve(self, key: str, head: Head, _: Incoming) -> tuple[Head, Body]:
        try:
            self._plane.count_request(key)
            self._plane.count_address(_host_of(self._endpoint.address_of(key)), way="UDP")
            match head.get("op"):
                case "hello":
                    return self._hello(key, head), b""
                case "mirrored":
                    return await self._mirrored(key), b""
                case "held":
                    return self._note_held(key, head), b""
                case "find":
                    return {"peers": await self._introduce(key, self._holders(key, _digest(head)), head, "get")}, b""
                case "link":
                    return {"peers": await self._introduce(key, *self._asked_of(key, head), "link")}, b""
                case "reach":
                    return {"peers": await self._introduce(key, self._renters(key), head, "put")}, b""
                case _:
                    raise Refused("there is no such request")
        except StokerError as problem:
            return {"error": problem.message[:1000]}, b""

    def _hello(self, key: str, head: Head) -> Head:
        given = head.get("local")
        self._local[key] = [
            text for text in (given if isinstance(given, list) else [])[:_MOST_LOCAL] if _is_private(text)
        ]
        self._network.setdefault(key, "unknown")
        seen = self._endpoint.address_of(key)
        self._hosts[key] = _host_of(seen)
        return {
            "seen": seen,
            "mirror": {"key": self._mirror_key.public, "port": self._mirror_port},
        }

    async def _mirrored(self, key: str) -> Head:
        """Compare the ports that both sockets saw."""
        with suppress(TimeoutError):  # a firewall may be in front of the second one alone
            await self._mirror.arrival(key, _MIRROR_S)
        seen, other = self._endpoint.address_of(key), self._mirror.address_of(key)
        self._network[key] = "direct" if seen == other else "symmetric" if other else "unknown"
        self._mirror.drop(key)
        return {"network": self._network[key]}

    def _note_held(self, key: str, head: Head) -> Head:
        gone = head.get("gone", [])
        for digest in gone if isinstance(gone, list) else []:  # also after the lease
            self._held.get(key, {}).pop(str(digest), None)
        is_site = any(
            lease.agent == key and lease.gang and lease.state in LIVE for lease in self._plane.leases.of_key(key)
        )
        if not (is_site or self._plane.state.is_payer(key) or self._plane.leases.rents(key)):
            raise Refused("blobs are held by keys that have credits, or a lease")
        blobs, held = head.get("blobs"), self._held.setdefault(key, {})
        if not isinstance(blobs, dict) or len(held.keys() | blobs.keys()) > _MOST_HELD:
            raise Refused(f"at most {_MOST_HELD} blobs are held by one key")
        for digest, values in blobs.items():
            num_bytes, *senders = values if isinstance(values, list) and values else [None]
            if (
                not isinstance(num_bytes, int)
                or not 0 <= num_bytes < 1 << 50
                or len(senders) > _MOST_SENDERS
                or not all(is_digest(str(one)) for one in (digest, *senders))
            ):
                raise Refused("blobs are held by SHA-256, with size and senders")
            held[digest] = _Held(num_bytes, frozenset(map(str, senders)))
        return {"held": len(held)}

    def _holders(self, key: str, digest: str) -> list[str]:
        """Renters that hold a blob, of leases in which `key` has part and in which one who has it named it.

        An agent that commits to a hash out of the log opens nothing, as with blobs of the pool. Messages of a gang are
        held by the agents that sent them.
        """
        found = dict[str, None]()
        for lease in self._plane.leases.naming(digest):
            parties = self._plane.leases.parties(lease, digest)
            namer = lease.renter if digest in (lease.order, *lease.inputs) else lease.agent
            if key in parties and key != lease.renter and namer in self.senders(lease.renter, digest):
                found[lease.renter] = None
            is_held = lease.has_sent(digest) and digest in self._held.get(lease.agent, {})
            if is_held and key in parties and key != lease.agent:
                found[lease.agent] = None
        return list(found)[:_MOST_PEERS]

    def _renters(self, key: str) -> list[str]:
        """Whose job an agent has."""
        return [lease.renter for lease in self._plane.leases.of_key(key) if lease.agent == key and lease.state in LIVE]

    async def _introduce(self, key: str, others: list[str], head: Head, may: str) -> list[Head]:
        """Tell others to expect `key`, and `key` where they are: who did not answer is left out."""
        digest, num_bytes, found = _digest(head), head.get("num_bytes", 0), []
        for other in others:
            grant = {
                "op": "expect",
                "key": key,
                "addresses": self._addresses(key, other),
                "may": may,
                "digest": digest,
                "num_bytes": num_bytes if isinstance(num_bytes, int) else 0,
            }
            if await self._tell(other, grant):
                found.append({"key": other, "addresses": self._addresses(other, key)})
        return found

    def _addresses(self, key: str, other: str) -> list[str]:
        """Where `other` may reach a key: where it is seen, and in its own network if both are behind one address."""
        mine, theirs = self._endpoint.address_of(key), self._endpoint.address_of(other)
        is_near = _host_of(mine) == _host_of(theirs)
        return list(dict.fromkeys([mine, *(self._local.get(key, ()) if is_near else ())]))

    async def _tell(self, key: str, head: Head) -> bool:
        if (connection := self._endpoint.connection(key)) is None:
            return False
        try:
            answer, _ = await self._endpoint.request(connection, head, timeout_s=_TELL_S)
        except StokerError as problem:
            _log.debug("%s does not answer: %s", short(key), problem.message)
            return False
        return answer.get("ok") is True


def _host_of(address: str) -> str:
    """The host in `host:port`."""
    return address.rpartition(":")[0]


def _digest(head: Head) -> str:
    digest = head.get("digest")
    if not isinstance(digest, str) or not is_digest(digest):
        raise Refused("a blob is named by its SHA-256")
    return digest


def _is_private(text: object) -> bool:
    """Whether a text is `host:port` in a network that is not the internet."""
    host, _, port = str(text).rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")).is_private and 0 < int(port) < 1 << 16
    except ValueError:
        return False
