"""The control plane: one process that takes signed events, keeps the log and the blobs, and answers over HTTP.

An event is checked against the state, written to the log, and only then counts: killed at any moment, the process is
rebuilt from the log with nothing lost, and a request whose answer was lost is answered again when it is repeated. The
state changes in one place, one event at a time.

Source: SQLite's WAL (`log.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from stoker.errors import BadRun, StokerError, first_line
from stoker.pool import events as on
from stoker.pool.admission import Admission, named_by
from stoker.pool.blobs import BlobLimits, BlobStore
from stoker.pool.client import Missing, OnItsWay, receipt_message, request_message
from stoker.pool.escrow import short
from stoker.pool.events import CLOCK_WINDOW_S, MOST_BYTES, Body, Draft, Event, Refused, draft_of, read_draft
from stoker.pool.forwarding import forwarding_fee, forwarding_text
from stoker.pool.keys import Key, is_signed
from stoker.pool.lease import LIVE, Lease, run_of
from stoker.pool.lease_index import LeaseIndex
from stoker.pool.log import EventLog
from stoker.pool.pair_links import direct_link, direct_links
from stoker.pool.presence import Presence, UptimeClock
from stoker.pool.probing import ANSWER_S, ProbeChannel, Prober, read_answer
from stoker.pool.request_limits import HEAD_S, MOST_AT_ONCE, RequestRates, TokenBuckets, TooMany, network_of_host
from stoker.pool.rules import decide
from stoker.pool.state import Change, ListedOffer
from stoker.pool.watch import due
from stoker.records.codec import to_json

if TYPE_CHECKING:
    from stoker.pool.contract.custody import Custody
    from stoker.pool.rendezvous import PeerRendezvous

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_CLEAN_S = 300.0
_CHAIN_S = 15.0
_REFUSED_S = 60.0
"""So long after what a signer signed was refused it is asked for that beat again [s]."""
_MOST_LOOKED_UP = 8
"""Events that are held against the chain at a time."""
_MOST_SIGNED = 8
"""Beats that a signer elsewhere is asked about at a time."""
_MOST_WAIT_S = 60.0
_MOST_COMES_BYTES = 1024
"""What an agent that has come may say before the first question [bytes]."""
_AWAY_S = 5.0
"""Time between two looks after which this process was away: stopped, on a machine that slept, or its disk hung [s]."""
_MOST_JUMP_S = 3600.0
_LIST_COST = 10.0
"""What a list counts as, in requests."""
_ANSWER_BYTES, _EVENT_BYTES = 1 << 16, 1 << 11
"""An answer counts as one more request for each so many bytes, and an event as one more event [bytes]."""
_MOST_LISTED = 1000
"""Leases of one answer: the newest ones."""
_NOT_LISTED = ("commitments", "challenges", "unsigned", "messages")
_LOG = "log"
"""What readers of the log wait for; agents wait for their own key."""


class _Unsigned(Refused):
    """A request that needs a key has none, or not a right signature."""

    http_status = 401


class _Forbidden(Refused):
    """The key may not do that."""

    http_status = 403


def steady_clock(
    wall: Callable[[], float] = time.time, elapsed: Callable[[], float] | None = None
) -> Callable[[], float]:
    """The machine's clock; jumps forward of more than an hour are not followed, since the log never goes back.

    Args:
        wall: the machine's clock [s since 1970].
        elapsed: time that has passed, sleep of the machine included [s].
    """
    since = elapsed or (lambda: time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))
    offset = wall() - since()

    def now() -> float:
        nonlocal offset
        seen_s, expected_s = wall(), since() + offset
        if seen_s - expected_s > _MOST_JUMP_S:
            return expected_s
        offset += seen_s - expected_s
        return seen_s

    return now


class ControlPlane:
    """A pool's server. `application` is what uvicorn runs.

    Args:
        folder: of the log and the blobs.
        key: the pool's.
        rules: of the pool, if it is founded now; later ones are ignored, but for a contract that was to have its money.
        rates: of requests.
        blob_limits: sizes.
        now: the clock [s since 1970].
        custody: the contract that has the pool's roots and, if its rules say so, its money.
        probe_every_s: time between probes of idle devices at one moment (`joint_probe`) [s]; None: there are none.

    Raises:
        BadRun: the log is damaged, in use, or of another pool, or its money is elsewhere than was asked for.
    """

    def __init__(
        self,
        folder: Path,
        key: Key,
        rules: on.Founded | None = None,
        *,
        rates: RequestRates | None = None,
        blob_limits: BlobLimits | None = None,
        now: Callable[[], float] | None = None,
        custody: Custody | None = None,
        probe_every_s: float | None = None,
    ) -> None:
        now = now or steady_clock()
        self.key, self._now, self.custody = key, now, custody
        self.log = EventLog(folder / "log.db")
        self.blobs = BlobStore(folder / "blobs", blob_limits, now)
        self.state = self.log.replay()
        self._up_since_s = self._looked_s = now()
        self.leases = LeaseIndex(self.state, self.blobs)
        self.admission = Admission(self.state, self.blobs, self.leases, now)
        self._at_once = Counter[str]()
        self.uptime = UptimeClock()
        self.presence = Presence(self.uptime)
        self.prober = (
            None
            if probe_every_s is None
            else Prober(self.state, self._submit_own, every_s=probe_every_s, paused_s=lambda: self.uptime.paused_s)
        )
        self.rendezvous: PeerRendezvous | None = None
        self._turn = asyncio.Lock()
        # Threads of their own: where a node does not answer, the log is written all the same.
        self._chain_threads = ThreadPoolExecutor(_MOST_LOOKED_UP, thread_name_prefix="chain")
        self._signer_threads = ThreadPoolExecutor(_MOST_SIGNED, thread_name_prefix="signer")
        self._cosigning: dict[str, asyncio.Task[None]] = {}
        self._refused_beats: dict[str, tuple[int, float]] = {}
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._documents: dict[str, tuple[object, dict[str, Any]]] = {}
        rates = rates or RequestRates()
        self._by_address = TokenBuckets(rates.per_address, rates.per_address * rates.burst_s)
        self._by_key = TokenBuckets(rates.per_key, rates.per_key * rates.burst_s)
        if self.state.rules is None:
            event, change = self._checked(self._own(rules or on.Founded(name="pool")))
            assert change is not None
            self.log.append(event)
            self.state.take(event, change)
        elif self.state.operator != key.public:
            self.log.close()
            raise Refused(
                f"the log in {folder} is of the pool {short(self.state.operator)}, the key is {short(key.public)}",
                remedy="Use the key that the pool was founded with, or another folder.",
            )
        try:
            self._require_custody(self._rules, rules)
        except BaseException:
            self.log.close()
            raise

    def _require_custody(self, rules: on.Founded, asked: on.Founded | None) -> None:
        if asked is not None and asked.contract and not rules.contract:
            raise BadRun(
                f"the money of this pool is in its own log, and cannot be moved into the contract {asked.contract}",
                remedy="Leave out --money-in-contract, so that the contract gets the roots alone; or found another "
                "pool: --folder DIR.",
            )
        if self.custody is not None:
            self.custody.require_rules(rules)
        elif rules.contract:
            raise BadRun(
                f"the money of this pool is in the contract {rules.contract}, without which it is not served",
                remedy="Name it: --chain URL --contract ADDRESS --chain-key FILE.",
            )

    @property
    def up_since_s(self) -> float:
        """Since when this process has been up [s since 1970]: now, where it has not noted that for a while."""
        now_s = self._now()
        return now_s if now_s - self._looked_s > _AWAY_S else self._up_since_s

    def application(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route("/v1/events", self._limited(self._take), methods=["POST"]),
                Route("/v1/events", self._limited(self._events)),
                Route("/v1/state/{what}", self._limited(self._state, cost=_LIST_COST)),
                Route("/v1/leases/{lease_id}", self._limited(self._lease)),
                Route("/v1/work", self._limited(self._work)),
                Route("/v1/probes/{probe_id}", self._limited(self._probe), methods=["PUT"]),
                Route("/v1/blobs/{digest}", self._limited(self._put_blob), methods=["PUT"]),
                Route("/v1/blobs/{digest}", self._limited(self._get_blob)),
            ],
            lifespan=self._lifespan,
            exception_handlers={StokerError: _failure, HTTPException: _failure, Exception: _failure},
        )

    # ---------------------------------------------------------------------------------------------------------- events

    async def submit(self, draft: Draft) -> Event:
        """Put a draft, whose signature was checked, into the log, once; the event that it is there.

        Raises:
            Refused: it is illegal.
            BadRun: the log cannot be written.
        """
        # Shielded: the sender may be gone before it is written, and state and log change together.
        return await asyncio.shield(asyncio.create_task(self._submit(draft)))

    async def _submit(self, draft: Draft) -> Event:
        if self.custody is not None and draft.kind in self.custody.checked_kinds:
            async with self._turn:  # what is refused anyway is not looked up, and what is looked up is of this state
                _, change = self._checked(draft)
                check = None if change is None else self.custody.check_of(self.state, draft)
            if check is not None:
                await asyncio.get_running_loop().run_in_executor(self._chain_threads, check)
        async with self._turn:
            event, leases = await self._entered(draft)
            for lease in leases:
                named = named_by(draft.read_body(), lease.lease_id)
                if draft.kind == "sent":  # its agent may hold it elsewhere, or name a blob that others have sent
                    named = [digest for digest in named if draft.actor in self.leases.readers(digest)]
                await self._charge(lease, named)
        return event

    async def _entered(self, draft: Draft) -> tuple[Event, list[Lease]]:
        """Put a draft into the log, in its turn; the event, and the leases that it changed."""
        event, change = self._checked(draft)
        if change is None:
            return event, []
        await asyncio.to_thread(self.log.append, event)
        self.state.take(event, change)
        self._wake(_LOG)
        for lease in change.leases:
            for key in self.leases.note(lease):
                self._wake(key)
        return event, change.leases

    async def _charge(self, lease: Lease, digests: Iterable[str]) -> None:
        """Charge large blobs of a lease that are here: once each, and where the pool has a price or a quota."""
        for digest, num_bytes in self.admission.unpaid(lease, digests):
            fee = forwarding_fee(num_bytes, self._rules.forward_price)
            body = on.Forwarded(lease_id=lease.lease_id, blob=digest, num_bytes=num_bytes, amount=fee)
            try:
                await self._entered(self._own(body))
            except Refused as problem:  # what was refused before it came is not to be lost for that
                _log.warning("forwarding was not paid: %s", problem.message)
            lease = self.state.leases[lease.lease_id]

    @property
    def _rules(self) -> on.Founded:
        assert self.state.rules is not None
        return self.state.rules

    def _checked(self, draft: Draft) -> tuple[Event, Change | None]:
        """The event for a draft and what it changes; None: the log has it already."""
        if (known := self.log.find(draft.actor, draft.nonce)) is not None:
            if (known.draft.kind, known.draft.body) != (draft.kind, draft.body):
                raise Refused("another event with this nonce is in the log: a nonce is used once")
            return known, None
        self.admission.require(draft)
        event = Event(
            seq=self.state.seq + 1,
            previous=self.state.head,
            draft=draft,
            received_s=max(round(self._now(), 3), self.state.received_s),
        )
        return event, decide(self.state, event)

    def _own(self, body: Body) -> Draft:
        if self.custody is not None and isinstance(body, on.Cosigned):
            body = self.custody.cosigned(self.state.leases[body.lease_id], body)
        return draft_of(body, self.key, self.key.public, time_s=self._now())

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self.rendezvous is not None:
            await self.rendezvous.open()
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        if self.custody is not None:
            tasks.append(asyncio.create_task(self._keep_up(self.custody)))
        try:
            yield
        finally:
            if self.custody is not None:
                self.custody.is_over.set()
            if self.rendezvous is not None:
                await self.rendezvous.close()
            if self.prober is not None:
                self.prober.close()
            for task in [*tasks, *self._cosigning.values()]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for threads in (self._chain_threads, self._signer_threads):
                threads.shutdown(wait=False, cancel_futures=True)
            async with self._turn:  # what is being written is written first
                self.log.close()

    async def _listen(self) -> None:
        """Note each second that this process is up: also while blobs are deleted, or much else is due."""
        while True:
            async with self._turn:  # what came while the log could not be written is not taken yet
                self.uptime.tick()
            self._note_absence()
            await asyncio.sleep(_TICK_S)

    async def _watch(self) -> None:
        """Sign what is due, again and again."""
        cleaned_s = time.monotonic()
        while True:
            try:
                bodies = due(
                    self.state,
                    self._now(),
                    key=self.key,
                    up_since_s=self.up_since_s,
                    present=self.verifiers(),
                    listening=self.presence.keys(),
                )
                for body in bodies:
                    if isinstance(body, on.Cosigned):
                        self._begin_cosigning(body)
                        continue
                    if isinstance(body, on.Final | on.Disputed) and body.lease_id in self._cosigning:
                        continue  # its last seconds are agreed to first, once the signer is there again
                    try:
                        await self._submit_own(body)
                    except StokerError as problem:  # a full disk, or it became illegal in between: tried again
                        _log.warning("%s", first_line(problem))
                if self.prober is not None:
                    self.prober.look(self._idle_offers, self._wake)
                if self.rendezvous is not None:
                    for agent in self.rendezvous.look_at_links(self._idle_classes, self._now()):
                        self._wake(agent)
                if time.monotonic() - cleaned_s > _CLEAN_S:
                    cleaned_s = time.monotonic()
                    self._documents.clear()
                    gone = await asyncio.to_thread(self.blobs.delete_unneeded, self.leases.needed())
                    self.leases.forget(gone)
            except Exception:  # noqa: BLE001 - else no lease would end any more; the fault is logged
                _log.exception("a decision of the control plane failed")
            await asyncio.sleep(_TICK_S)

    def _note_absence(self) -> None:
        """Let silence count from here where no agent could be heard since the last look."""
        now_s = self._now()
        if now_s - self._looked_s > _AWAY_S:
            self._up_since_s = now_s
            _log.warning("this pool was away for %.0f s, or its clock jumped", now_s - self._looked_s)
        self._looked_s = now_s

    async def _submit_own(self, body: Body) -> None:
        await self.submit(await asyncio.to_thread(self._own, body))

    def _idle_offers(self) -> list[ListedOffer]:
        """Offers whose agent is there, answers probes, and has neither a job nor a replay."""
        return self._idle_of(self.presence.probed)

    def _idle_classes(self) -> dict[str, str]:
        """Determinism classes of known agents that are there, with a free offer, and have neither job nor replay."""
        idle = self._idle_of(self.presence.here())
        return {one.agent: one.offer.determinism_class for one in idle if self._is_known(one.agent)}

    def _idle_of(self, agents: set[str]) -> list[ListedOffer]:
        """Free offers of those of some agents that are there, and have neither a job nor a replay."""
        now_s = self._now()
        idle = {agent for agent in agents & self.presence.here() if not self.leases.is_at_work(agent)}
        return [one for one in self.state.offers.values() if one.agent in idle and one.is_free(now_s)]

    def _is_known(self, agent: str) -> bool:
        """Whether an agent was admitted, or in an open pool has passed a check: keys cost nothing there."""
        return not self._rules.is_open or agent in self.state.members or self.state.record_of(agent).passed > 0

    def _begin_cosigning(self, body: on.Cosigned) -> None:
        """Let a beat be co-signed while all else goes on: a signer elsewhere may take minutes, or not answer at all."""
        index, refused_s = self._refused_beats.get(body.lease_id, (-1, 0.0))
        is_refused = index == body.index and time.monotonic() - refused_s < _REFUSED_S
        if body.lease_id not in self._cosigning and not is_refused:
            self._cosigning[body.lease_id] = asyncio.create_task(self._cosign(body))

    async def _cosign(self, body: on.Cosigned) -> None:
        try:
            draft = await asyncio.get_running_loop().run_in_executor(self._signer_threads, self._own, body)
            await self.submit(draft)
        except Refused as problem:  # what it signed is not taken: such as by another key than the lease's
            self._refused_beats = {
                name: refused for name, refused in self._refused_beats.items() if name in self.state.unsettled
            } | {body.lease_id: (body.index, time.monotonic())}
            _log.warning("%s", first_line(problem))
        except StokerError as problem:
            _log.warning("%s", first_line(problem))
        except Exception:  # noqa: BLE001 - as in `_watch`
            _log.exception("a beat of lease %s was not co-signed", body.lease_id)
        finally:
            del self._cosigning[body.lease_id]

    async def _keep_up(self, custody: Custody) -> None:
        """Bring roots and verdicts to the contract, again and again."""
        while True:
            settled = [lease for lease in self.state.leases.values() if lease.contract and lease.state == "final"]
            try:
                await asyncio.to_thread(custody.keep_up, list(self.state.roots), settled)
            except Exception:  # noqa: BLE001 - as above
                _log.exception("the contract was not kept up")
            await asyncio.sleep(_CHAIN_S)

    def verifiers(self) -> dict[str, str]:
        """The present agents that replay blocks, with their determinism class.

        They have an offer; in an open pool they are also known.
        """
        now_s, replaying = self._now(), self.presence.replaying()
        standing = [one for one in self.state.offers.values() if now_s < one.offer.expires_s and one.agent in replaying]
        return {one.agent: one.offer.determinism_class for one in standing if self._is_known(one.agent)}

    # ------------------------------------------------------------------------------------------------------------ HTTP

    def _limited(
        self, answer: Callable[[Request], Awaitable[Response]], cost: float = 1.0
    ) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            host = "" if request.client is None else request.client.host
            self.count_address(host, cost)
            network = network_of_host(host)
            if self._at_once[network] >= MOST_AT_ONCE:
                raise TooMany(f"the address {network} has {MOST_AT_ONCE} requests open", remedy="Wait for answers.")
            self._at_once[network] += 1
            try:
                response = await answer(request)
                self._by_address.charge(f"HTTP {network}", len(getattr(response, "body", b"")) / _ANSWER_BYTES)
                return response
            finally:
                self._at_once[network] -= 1
                if not self._at_once[network]:
                    del self._at_once[network]

        return route

    async def _take(self, request: Request) -> Response:
        try:
            content = await _body(request, MOST_BYTES, HEAD_S)
        except TimeoutError:
            raise Refused(f"this event did not come within {HEAD_S:.0f} s", remedy="Send it again.") from None
        draft = read_draft(bytes(content))
        if not draft.is_signed():  # before it counts against the key, which another client may have written there
            raise _Unsigned(f"the signature is not of the key {short(draft.actor)} over this event in this pool")
        self._by_key.take(draft.actor, f"the key {short(draft.actor)}", 1.0 + len(content) // _EVENT_BYTES)
        event = await self.submit(draft)
        signature = self.key.sign(receipt_message(self.key.public, event.seq, event.hash))
        return _json({"seq": event.seq, "hash": event.hash, "signature": signature})

    async def _events(self, request: Request) -> Response:
        after = int(_number(request, "after"))
        await self._until(_LOG, lambda: self.state.seq > after, _number(request, "wait_s"))
        texts = await asyncio.to_thread(self.log.documents, after)
        return Response(b'{"events":[' + ",".join(texts).encode() + b"]}", media_type="application/json")

    async def _state(self, request: Request) -> Response:
        state, now_s = self.state, self._now()
        match request.path_params["what"]:
            case "pool":
                return _json(
                    {
                        "key": self.key.public,
                        "rules": to_json(state.rules),
                        "seq": state.seq,
                        "head": state.head,
                        "now_s": now_s,
                        "up_since_s": self.up_since_s,
                        "deposited": state.accounts.deposited,
                        "num_waiting": sum(now_s < one.request.until_s for one in state.waiting.values()),
                        "rendezvous": None if self.rendezvous is None else self.rendezvous.document(),
                        "forwarding": forwarding_text(self._rules),
                    }
                )
            case "offers":
                here = self.presence.here()
                return _json(
                    [
                        {
                            **self._document(f"offer/{name}", listed),
                            "is_present": listed.agent in here,
                            "is_free": state.is_free(listed, now_s),
                            "clashes_with": ""
                            if (other := state.blocked_by(listed, now_s)) is None
                            else other.offer.offer_id,
                            "network": "" if self.rendezvous is None else self.rendezvous.network_of(listed.agent),
                            "record": self._document(f"record/{listed.agent}", state.record_of(listed.agent)),
                        }
                        for name, listed in state.offers.items()
                    ]
                )
            case "leases":
                query = request.query_params
                names = sorted(state.unsettled) if query.get("unsettled") else state.leases
                found = [
                    lease
                    for lease in map(state.leases.__getitem__, names)
                    if lease.lease_id.startswith(query.get("prefix", ""))
                    and query.get("renter", lease.renter) == lease.renter
                    and query.get("agent", lease.agent) == lease.agent
                ]
                found = heapq.nlargest(_MOST_LISTED, found, key=lambda lease: lease.opened_s)
                return _json([self._listed_document(lease) for lease in found])
            case "links":
                agents = {one.agent for one in state.offers.values() if state.is_free(one, now_s)}
                return _json(
                    [
                        {"source": source, "target": target, **to_json(link)}
                        for (source, target), link in direct_links(state.links, now_s, agents).items()
                    ]
                )
            case "balances":
                return _json({"deposited": state.accounts.deposited, "balances": state.accounts.balances})
            case "stopped":
                renter = request.query_params.get("renter", "")
                return _json(sorted(run for key, run in state.stopped if key == renter))
            case "records":
                return _json({agent: to_json(record) for agent, record in state.records.items()})
            case what:
                raise Missing(
                    f"{what[:80]!r} is not shown", remedy="pool, offers, links, leases, stopped, balances or records."
                )

    async def _lease(self, request: Request) -> Response:
        name = request.path_params["lease_id"]
        if name not in self.state.leases:
            raise Missing(f"there is no lease {name[:80]!r} in this pool")
        return _json(self._lease_document(self.state.leases[name]))

    def _lease_document(self, lease: Lease) -> dict[str, Any]:
        escrow, bond = self.state.held(lease.lease_id)
        verdict = b"" if self.custody is None else self.custody.verdicts.get(lease.lease_id, b"")
        here = self.blobs.sizes_of(lease.blobs)
        direct = 0 if self.rendezvous is None else self.rendezvous.held_bytes(lease, here.keys())
        return {
            **self._document(f"lease/{lease.lease_id}", lease),
            "escrow": escrow,
            "bond_held": bond,
            "verdict": verdict.hex(),
            "is_agent_away": self.presence.is_away(lease.agent),
            "is_run_stopped": (lease.renter, run_of(lease.lease_id, lease.gang)) in self.state.stopped,
            "bulk": {"direct_bytes": direct, "pool_bytes": sum(here.values())},
            **self._gang_document(lease),
        }

    def _gang_document(self, lease: Lease) -> dict[str, Any]:
        """Of a site's lease, those of all sites, the oldest first, and whether all have been accepted."""
        if (gang := self.state.gangs.get(lease.gang)) is None:
            return {}
        others = {self.state.leases[of_site[-1]].agent for of_site in gang.leases if of_site} - {lease.agent}
        links, begun_s = self.state.links, gang.begun_s  # links are not measured while a lease goes on
        return {
            "gang_leases": [list(of_site) for of_site in gang.leases],
            "is_gang_begun": gang.is_begun,
            "direct": sorted(one for one in others if direct_link(links, lease.agent, one, begun_s) is not None),
        }

    def _listed_document(self, lease: Lease) -> dict[str, Any]:
        """A lease without its blocks and replays, of which there may be thousands: `/v1/leases/ID` has them."""
        escrow, bond = self.state.held(lease.lease_id)
        document = self._document(f"listed/{lease.lease_id}", lease, _without_blocks)
        return {**document, "escrow": escrow, "bond_held": bond}

    def _document(self, name: str, record: Any, made: Callable[[Any], Any] = to_json) -> dict[str, Any]:
        """The JSON of a record, made once until the record is replaced by another."""
        known = self._documents.get(name)
        if known is None or known[0] is not record:
            known = self._documents[name] = record, made(record)
        return known[1]

    async def _work(self, request: Request) -> Response:
        key = self._signed_by(request)
        if request.query_params.get("agent", key) != key:
            raise _Forbidden("work is for the key that signs")
        wait_s = min(_number(request, "wait_s"), _MOST_WAIT_S)
        probes = request.query_params.get("probes", "0") == "1" and self.prober is not None
        self.presence.ask(key, wait_s=wait_s, replays=request.query_params.get("replays", "1") == "1", probes=probes)
        if probes and self.prober is not None and request.client is not None:
            self.prober.networks[key] = network_of_host(request.client.host)
        await self._until(
            key, lambda: any(self._work_of(key)) or bool(self._probes_of(key) or self._links_of(key)), wait_s
        )
        self.presence.answered(key)
        waiting, challenges, searches = self._work_of(key)
        mine = [one for one in self.leases.of_key(key) if one.agent == key and one.state in LIVE]
        leaving = {one.lease_id: one.reclaim_by_s for one in mine if one.state == "reclaiming"}
        return _json(
            {
                "leases": waiting,
                "challenges": challenges,
                "searches": searches,
                "live": [one.lease_id for one in mine],
                "leaving": leaving,
                "probes": self._probes_of(key),
                "links": self._links_of(key),
            }
        )

    def _links_of(self, key: str) -> list[dict[str, Any]]:
        """The link that an agent is asked to measure now."""
        return [] if self.rendezvous is None else self.rendezvous.asked_links(key)

    def _probes_of(self, key: str) -> list[dict[str, Any]]:
        """Devices of an agent that are to answer a probe now."""
        return [] if self.prober is None or key not in self.presence.probed else self.prober.asked(key)

    async def _probe(self, request: Request) -> Response:
        """Take an answer of a probed device, and give it the next question."""
        key, query = self._signed_by(request), request.query_params
        if self.prober is None:
            raise Refused("this pool makes no probes")
        place = (str(request.path_params["probe_id"]), query.get("offer", ""), int(_number(request, "device")))
        channel, step = self.prober.channel(*place, key), int(_number(request, "step"))
        if not channel.has_asked(step):
            raise Refused(f"question {step} of this probe was not asked")
        # Of an answer that is here, whose reply was lost, the body is not read again.
        answer = await self._probe_answer(request, channel, step) if step == 0 or channel.awaits(step) else {}
        return _json(await channel.exchange(step, answer))

    async def _probe_answer(self, request: Request, channel: ProbeChannel, step: int) -> dict[str, Any]:
        """The body of an answer: one at a time for each device, so that what is kept of them stays small."""
        if channel.is_taking:
            raise TooMany("an answer of this device is being sent already", remedy="Wait until it is here.")
        most = _MOST_COMES_BYTES if step == 0 else channel.most_bytes
        channel.is_taking = True
        try:
            content = await _body(request, most, ANSWER_S)
            if len(content) > most:
                raise Refused(f"this answer of a probe has {most:,} bytes at most")
            if hashlib.sha256(content).hexdigest() != request.query_params.get("sha256"):
                raise Refused("an answer of a probe is not what its signature is for")
        except TimeoutError:
            raise Refused(f"an answer of a probe took longer than {ANSWER_S:.0f} s") from None
        finally:
            channel.is_taking = False
        return read_answer(content)

    def _work_of(self, key: str) -> tuple[list[Any], list[Any], list[Any]]:
        """Leases that wait for an agent's accept, challenges for it, and searches that wait for its states."""
        unsettled = self.leases.of_key(key)
        waiting = [self._lease_document(one) for one in unsettled if one.agent == key and one.state == "funded"]
        challenges = [
            {**to_json(challenge), "lease_id": one.lease_id}
            for one in unsettled
            if one.state in ("closed", "disputed")
            for challenge in one.open_challenges
            if challenge.verifier == key
        ]
        searches = [
            {"lease_id": one.lease_id, "block": verdict.block, "verifier": verdict.verifier}
            for one in unsettled
            if one.state == "disputed"
            for verdict in one.challenges
            if verdict.judges is False and verdict.bisection is not None
            if (party := one.party(key, verdict)) is not None and verdict.bisection.waits_for(party)
        ]
        return waiting, challenges, searches

    def count_request(self, key: str) -> None:
        """Count a request of a key against its rate.

        Raises:
            Refused: it sends too many.
        """
        self._by_key.take(key, f"the key {short(key)}")

    def count_address(self, host: str, cost: float = 1.0, *, way: str = "HTTP") -> None:
        """Count a request that comes from a host against its network's rate, one for each way (`HTTP`, `UDP`).

        Raises:
            Refused: it sends too many.
        """
        network = network_of_host(host)
        self._by_address.take(f"{way} {network}", f"the address {network}", cost)

    async def _until(self, name: str, is_there: Callable[[], bool], wait_s: float) -> None:
        """Wait until something is there, `wait_s` at most; looked at again when `name` is woken."""
        news = asyncio.Event()
        self._waiting[name].add(news)
        try:
            async with asyncio.timeout(min(wait_s, _MOST_WAIT_S)):
                while not is_there():
                    await news.wait()
                    news.clear()
        except TimeoutError:
            return
        finally:
            self._waiting[name].discard(news)
            if not self._waiting[name]:
                del self._waiting[name]

    def _wake(self, name: str) -> None:
        for news in self._waiting.get(name, ()):
            news.set()

    def _signed_by(self, request: Request) -> str:
        """The key that signed a request which is no event."""
        headers = request.headers
        key, signature = headers.get("x-stoker-key", ""), headers.get("x-stoker-signature", "")
        try:
            time_s = float(headers.get("x-stoker-time", ""))
        except ValueError:
            time_s = math.nan
        if not abs(time_s - self._now()) <= CLOCK_WINDOW_S:
            raise _Unsigned(
                f"the request is not signed, or dated more than {CLOCK_WINDOW_S:.0f} s from the pool's clock",
                remedy="Set this machine's clock (timedatectl).",
            )
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if not is_signed(key, request_message(self.key.public, key, request.method, target, time_s), signature):
            raise _Unsigned("the request's signature is not of the key that it names")
        if not self._rules.is_open and key not in self.state.members:
            raise _Forbidden(
                f"the key {short(key)} is not admitted to this pool",
                remedy=f"Its operator admits it: stoker pool wallet --grant {key}=0.",
            )
        return key

    async def _put_blob(self, request: Request) -> Response:
        key, digest = self._signed_by(request), request.path_params["digest"]
        is_agent = any(one.agent == key and one.state in LIVE for one in self.leases.of_key(key))
        if not (is_agent or self.state.is_payer(key) or self._work_of(key)[2]):
            raise _Forbidden("blobs are sent by keys that have credits, and by agents whose lease runs or is disputed")
        size = request.headers.get("content-length", "")
        if not (size.isdecimal() and len(size) < 20):  # `isdigit` is true of "²"
            raise Refused("a blob comes with its Content-Length")
        self.admission.require_forwardable(digest, int(size), key)
        await self.blobs.write(
            digest, request.stream(), int(size), key, lambda name: self.leases.is_named_by(name, key)
        )
        if self.rendezvous is not None:
            for sender in self.rendezvous.senders(key, digest):
                self.blobs.note_sender(digest, sender)
        # What one site sends of another that it got it from directly, and says so.
        site = self.state.leases.get(request.query_params.get("message_of", ""))
        if site is not None and site.has_sent(digest) and key in self.leases.parties(site, digest):
            self.blobs.note_sender(digest, site.agent)
        await asyncio.shield(asyncio.create_task(self._charge_all(digest, key)))  # as with `submit`
        return _json({"sha256": digest})

    async def _charge_all(self, digest: str, key: str) -> None:
        """Charge leases of a key, and of no other, for a blob that it sent."""
        async with self._turn:
            for lease in self.leases.own_naming(digest, key):
                await self._charge(lease, [digest])

    async def _get_blob(self, request: Request) -> Response:
        key, digest = self._signed_by(request), request.path_params["digest"]
        path = self.blobs.path(digest)
        if not path.is_file():
            asked = self.rendezvous if request.method == "GET" else None
            if asked is not None and (way := await asked.ask_to_forward(key, digest)):
                raise OnItsWay(f"the blob {digest[:12]}… {way}")
            if asked is not None and asked.senders(key, digest):
                raise Missing(
                    f"the blob {digest[:12]}… is kept by the machine that this key's run was started on alone"
                )
            raise Missing(f"there is no blob {digest[:12]}… here")
        if key != self.key.public and key not in self.leases.readers(digest):
            if request.method == "HEAD":  # a key that has the content sends it, and is then known to have it
                raise Missing(f"the blob {digest[:12]}… is not known to be this key's")
            raise _Forbidden(f"the blob {digest[:12]}… is for those who have part in a lease that names it")
        path.touch()
        return FileResponse(path, media_type="application/octet-stream")


async def _body(request: Request, most_bytes: int, within_s: float) -> bytearray:
    """The body of a request; of one that is longer than `most_bytes`, its beginning, which is longer as well.

    Raises:
        TimeoutError: it does not come in time.
    """
    content = bytearray()
    async with asyncio.timeout(within_s):
        async for part in request.stream():
            content += part
            if len(content) > most_bytes:
                break
    return content


def _number(request: Request, name: str) -> float:
    text = request.query_params.get(name) or "0"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 <= value <= 2**53):
        raise Refused(f"{name} {text[:80]!r}: wanted a number, 0 or more")
    return value


def _without_blocks(lease: Lease) -> dict[str, Any]:
    """The JSON of a lease with the numbers of its blocks and replays in their place."""
    whole = to_json(replace(lease, commitments=(), challenges=(), unsigned=(), messages=()))
    counts = {
        "num_blocks": len(lease.commitments),
        "replays": {
            "equal": sum(one.judges is True for one in lease.challenges),
            "unequal": sum(one.judges is False for one in lease.challenges),
            "open": len(lease.open_challenges),
        },
    }
    return {field: value for field, value in whole.items() if field not in _NOT_LISTED} | counts


def _json(document: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


async def _failure(_: Request, problem: Exception) -> Response:
    """What is wrong, and what to do, as a document."""
    if isinstance(problem, StokerError):
        return _json({"error": problem.message[:2000], "remedy": problem.remedy or ""}, problem.http_status)
    if isinstance(problem, HTTPException):
        return _json({"error": problem.detail, "remedy": ""}, problem.status_code)
    return _json({"error": type(problem).__name__, "remedy": ""}, 500)
