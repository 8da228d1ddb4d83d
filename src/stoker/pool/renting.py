"""What a renter does at a pool: orders, leases one after the other, and what comes home.

What: the run is an order (`job_box.py`) that an agent takes under a lease. Where an agent is lost, or its owner takes
the machine back, the next lease goes on from the last block that was committed; where a replay finds one wrong, from
the block before it, and never again at that agent. A run counts as finished once its results are there and the blocks
that were drawn have been replayed.
Use when: machines of strangers will do. Costs: what the lease says; blocks take a checkpoint every `block`.
Does not do: several devices, secrets, images, jobs whose length is in seconds.

The pool is `$STOKER_POOL`, or `--place-option pool=ADDRESS`. Further options: `verify=5%`, `bond=1usd`, `block=60s`,
`window=1h`, `value=1usd` (an hour of waiting), `key=NAME`, `isolation=gvisor` (no weaker one), `forwarding=1usd`
(spent at most on large files that go through the pool, each lease), `p2p=no` (all of them do), `move=no` (a run that
goes well stays where it is).

Leases of one run are `JOB.0`, `JOB.1`, …, with the renter's key in the name, which no other key can open:
everything is found again from the job's name and the pool's log.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.devices import attached_cpu
from stoker.errors import BadJob, BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.launcher import Handle, LaunchTarget, Offer, Probe, Request, Submission
from stoker.pool import events as on
from stoker.pool.agent import determinism_class
from stoker.pool.blob_tree import TreeLimits, read_index, read_member, same_files, unpack
from stoker.pool.client import DiskFailed, PoolAddress, PoolClient, is_passing, joined_peer
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import credits_text, least_deposit, pay_for, required_deposit
from stoker.pool.events import Isolation, Refused
from stoker.pool.job_box import MOST_ORDER_BYTES, PoolOrder, order_of, read_order, value_of
from stoker.pool.keys import own_key
from stoker.pool.lease import ACCEPT_S, MOST_COMMITMENTS, SAVES_NOTHING, UNCOMMITTED_S
from stoker.pool.lease_documents import (
    checks_described,
    described,
    is_judged,
    is_stopped,
    is_wrong,
    most_spent,
    recently_lost,
    resting_offers,
    waits_for_replays,
    wrong_agents,
    wrong_blocks,
)
from stoker.pool.leased_job import BlobCache
from stoker.pool.matching import (
    ISOLATIONS,
    Columns,
    Match,
    Needs,
    RunForecast,
    best_move,
    earlier_runs,
    forecast_word,
    listed_offers,
    rank_offers,
)
from stoker.pool.state import ListedOffer
from stoker.records.codec import dumps, parsed
from stoker.records.launch import LaunchPhase, LaunchState
from stoker.store import cache_root
from stoker.store.checkpoint_store import MANIFEST, manifest_from
from stoker.units import format_bytes, format_seconds, parse_duration, parse_money

if TYPE_CHECKING:
    from stoker.jobs import Entry, Job
    from stoker.pool.peer import Peer
    from stoker.records import CheckpointManifest

_MOST_HOME_BYTES = 1 << 40
_LOG, _MOST_LOG_BYTES = "events.jsonl", 1 << 30
_FORECASTS, _IDENTITY = "forecasts", "identity"
"""Options that `with_forecasts` adds."""
_MOST_LEASES = 100
MOST_MOVES = 3
"""Times that a run moves to a better offer, over all of its starts: each is a bet on what an offer says of itself."""
LOOK_S = 300.0
"""Time between two looks for a better offer, since a pool may have thousands [s]."""
_MOVED = "moved: "
"""How the reason of a lease begins that its renter closed for a better offer."""
_SPARE_S = 300
"""What a lease may still cost while it is closed, as running time [s]."""
_MOST_ASKED = 8
"""Offers that are asked for one lease at most."""
_NO_SUCH_LEASE, _BUSY_STATUS = 404, (429, 503)
_MOST_KEPT_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a renter asks for besides the run itself.

    Attributes:
        pool: address with the key of the control plane.
        key: name of the renter's key.
        verify: share of blocks that are replayed [0 to 1].
        bond: what the agent has to put up [micro-credits]; None: the price of the lease.
        block_s: time between commitments [s].
        window_s: time to dispute [s].
        isolation: the weakest kind that will do.
        value_per_hour: what an hour of waiting is worth [micro-credits].
        deadline_s: the longest that the run may take, moves included [s]; None: no limit.
        most_forwarding: spent at most on large files that go through the pool, each lease [micro-credits].
        is_p2p: whether large files go directly where they can.
        may_move: whether a run that goes well moves to a better offer.
        forecasts: of the run by kind of device, or why it cannot run there, where they were made.
        identity: of the job, by which later forecasts learn from this run.
    """

    pool: str = ""
    key: str = "default"
    verify: float = 0.05
    bond: int | None = None
    block_s: float = 60.0
    window_s: int = 3600
    isolation: Isolation = "bubblewrap"
    value_per_hour: int = 1_000_000
    deadline_s: float | None = None
    most_forwarding: int = 0
    is_p2p: bool = True
    may_move: bool = True
    forecasts: Mapping[str, RunForecast | str] = field(default_factory=dict)
    identity: str = ""

    @property
    def known_offers(self) -> set[str]:
        """Offers where the job has run: they have a forecast of their own."""
        return {word.partition("@")[2] for word in self.forecasts} - {""}

    def forecast_of(self, listed: ListedOffer) -> RunForecast | str | None:
        """The forecast of the run at an offer, or why it cannot run there; None: none was made."""
        return self.forecasts.get(forecast_word(listed, self.known_offers))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Terms:
        """The terms in `--place-option`.

        Raises:
            BadJob: an option has another form.
        """
        isolation = options.get("isolation", "bubblewrap")
        if isolation not in ISOLATIONS:
            raise BadJob(f"--place-option isolation={isolation}: wanted {', '.join(ISOLATIONS)}")
        return cls(
            pool=options.get("pool", ""),
            key=options.get("key", "default"),
            verify=_share(options.get("verify", "5%")),
            bond=round(parse_money(options["bond"]) * 1e6) if "bond" in options else None,
            block_s=parse_duration(options.get("block", "60s"), "--place-option block"),
            window_s=round(parse_duration(options.get("window", "1h"), "--place-option window")),
            isolation=isolation,
            value_per_hour=round(parse_money(options["value"]) * 1e6) if "value" in options else cls.value_per_hour,
            deadline_s=parse_duration(options["deadline"]) if "deadline" in options else None,
            most_forwarding=round(parse_money(options["forwarding"]) * 1e6) if "forwarding" in options else 0,
            is_p2p=options.get("p2p", "yes") != "no",
            may_move=options.get("move", "yes") != "no",
            forecasts=_forecasts_in(options.get(_FORECASTS, "{}")),
            identity=options.get(_IDENTITY, ""),
        )


def _forecasts_in(text: str) -> dict[str, RunForecast | str]:
    """Forecasts by kind of device, as `with_forecasts` wrote them."""
    found = json.loads(text)
    if not found:
        return {}

    return {word: one if isinstance(one, str) else RunForecast(**one) for word, one in found.items()}


def _share(text: str) -> float:
    """A share of blocks.

    >>> _share("5%"), _share("0.5"), _share("none")
    (0.05, 0.5, 0.0)
    """
    if text == "none":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 <= share <= 1:
        raise BadJob(f"--verify {text}: wanted a share of the blocks, such as 5%")
    return share


def probe(target: LaunchTarget, options: Mapping[str, str]) -> Probe:
    """What is offered now."""
    terms = Terms.of(options)
    client = _client(terms)
    offers = _ranked_offers(client, target, terms)
    if not offers:
        wanted = target.address or target.device or "any device"
        text = f"the pool has no free offer of {wanted} with isolation {terms.isolation} or stronger"
        return Probe(facts={"offers": "none"}, missing=(f"{text}: `stoker pool offers` lists what there is",))
    best = offers[0].listed.offer
    facts = {
        "offers": f"{len(offers)} free",
        "best": f"{best.offer_id}: {best.device.kind}, {best.price_per_hour / 1e6:g} credits an hour",
        "isolation": f"{best.isolation}: an owner with root reads the job and its data all the same",
    }
    device, cores = best.device.kind, best.measured.cores
    if device == "cpu" and best.determinism_class == _own_class():
        here = attached_cpu()
        device, cores = here.model, here.cores
    return Probe(facts=facts, device=device, cores=cores)


def offers(request: Request) -> tuple[Offer, ...]:
    """The offers that are free."""
    terms = Terms.of(request.options)
    found = _ranked_offers(_client(terms), request.target, terms)
    return tuple(
        Offer(
            text=request.target.text if number == 0 else f"pool:{offer.offer_id}",
            num_nodes=1,
            devices_each=1,
            device=offer.device.kind,
            starts_in_s=0.0,
            price_per_h=offer.price_per_hour / 1e6,
            price_source=f"the offer {offer.offer_id}",
            why=f"isolation {offer.isolation}, notice {offer.reclaim_s} s",
        )
        for number, offer in enumerate(one.listed.offer for one in found)
    )


def with_forecasts(job: Job, entry: Entry, submission: Submission, tell: Callable[[str], None]) -> Submission:
    """The submission with the run's forecast on each kind of device that is offered.

    Raises:
        BadJob: blocks are to be replayed, and how many updates the job has depends on the machine.
    """
    from stoker.launching.launch import identity_of  # noqa: PLC0415 - torch, which following does without
    from stoker.pool.forecasting import job_forecasts, leases_before  # noqa: PLC0415 - likewise

    terms = Terms.of(submission.options)
    if terms.verify and job.until.unit == "seconds":
        raise BadJob(
            "the job's length is given in seconds, so that a replay would have another one",
            remedy="Give until=… in epochs, samples or updates; or --verify none.",
        )
    client = _client(terms)
    identity, leases = identity_of(entry), leases_before(client, entry)
    runs = earlier_runs(leases, identity)
    words = sorted({forecast_word(one.listed, runs) for one in _ranked_offers(client, submission.target, terms)})
    if submission.time_limit_s is None and words:
        tell(f"forecasting for {', '.join(words)}")
    forecast_of = job_forecasts(job, entry, leases)
    found = {word: one if isinstance(one := forecast_of(word), str) else asdict(one) for word in words}
    options = {**submission.options, _FORECASTS: json.dumps(found), _IDENTITY: identity}
    return replace(submission, options=options)


def script(submission: Submission) -> str:
    """The order, and the terms of the lease."""
    terms = Terms.of(submission.options)
    bundles = (*submission.data, submission.stoker, submission.code)
    lines = [f"# {submission.run} at {submission.target.text}"]
    lines += [f"# {one.folder}: {one.name}, {len(one.files)} files, {format_bytes(one.num_bytes)}" for one in bundles]
    lines += [f"# needs {requirement}" for requirement in getattr(submission.environment, "requirements", ())]
    block = format_seconds(_block_s(submission, terms))
    lines.append(
        f"# blocks of {block}, {terms.verify:.0%} of them replayed by others; isolation {terms.isolation} or stronger"
    )
    if submission.secrets:
        lines.append(f"# refused: secrets {', '.join(submission.secrets)} would be readable by the owner")
    lines.append(" ".join(["stoker train", submission.job_file, *submission.arguments]))
    return "\n".join(lines) + "\n"


def start(submission: Submission, tell: Callable[[str], None]) -> Handle:
    """Send the order and open the first lease."""
    terms = Terms.of(submission.options)
    client = _client(terms)
    if submission.time_limit_s is None:
        raise PlaceFailed(
            "how long the run takes is not known, so nothing can be deposited for it", remedy="Say it: --time-limit 2h."
        )
    assert client.key is not None
    name = f"{client.key.public} {submission.owner} {submission.run}"
    job = f"{client.key.public[:16]}-{submission.run[:29]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
    block_s = max(_block_s(submission, terms), submission.time_limit_s / (MOST_COMMITMENTS - 10))
    before = _leases(client, job)
    if terms.deadline_s is not None and submission.time_limit_s > terms.deadline_s:
        raise PlaceFailed(
            f"the run may take {format_seconds(submission.time_limit_s)} by its forecast, and the "
            f"deadline is in {format_seconds(terms.deadline_s)}",
            remedy="Give more time, or make the job smaller. Nothing was sent.",
        )
    handle: Handle = {
        "pool": str(client.address),
        "key": terms.key,
        "job": job,
        "first": len(before),
        "until_s": 0.0 if terms.deadline_s is None else time.time() + terms.deadline_s,
        "max_credits": None if submission.max_cost is None else round(submission.max_cost * 1e6),
        "limit_s": submission.time_limit_s,
        "address": submission.target.address,
        "device": submission.target.device,
        "options": dict(submission.options),
    }
    if before and before[-1]["state"] in ("funded", "running", "suspect", "reclaiming"):
        return {**handle, "first": _first_of(before), "sent_bytes": 0}
    if len(before) >= _MOST_LEASES:
        raise PlaceFailed(
            f"the run {submission.run} has had {len(before)} leases, the most that one has",
            remedy="Give the run another name.",
        )
    blobs = _blobs(client, job, terms, tell)
    sent = sum(one.num_bytes for one in (*submission.data, submission.stoker, submission.code))
    tell(f"sending the order: {format_bytes(sent)} at most")
    order = order_of(submission, blobs.put, blobs.aside(), block_s=block_s)
    run = _PoolRun(client, handle, blobs)
    order = run.continued(order, before)
    lease_id = run.open(order, len(before), wrong_agents(before), submission.time_limit_s)
    tell(f"opened the lease {lease_id}")
    return {**handle, "sent_bytes": sent}


def _block_s(submission: Submission, terms: Terms) -> float:
    """Time between commitments [s]: a checkpoint is saved for each, so that it is that of `--checkpoint-every` as well.

    Raises:
        BadJob: that differs from `--place-option block`, or is longer than an agent works for without a commitment.
    """
    every = value_of(submission.arguments, "--checkpoint-every")
    block_s = terms.block_s if every is None else float(every)
    if "block" in submission.options and block_s != terms.block_s:
        raise BadJob(
            f"--checkpoint-every {every} and --place-option block={submission.options['block']}: each "
            "checkpoint ends a block",
            remedy="Leave one of them out.",
        )
    if terms.verify and block_s > UNCOMMITTED_S:
        raise BadJob(
            f"a commitment each {format_seconds(block_s)}: an agent is paid for {UNCOMMITTED_S} s after its "
            "last one, and takes no longer blocks",
            remedy="Save more often, or --verify none.",
        )
    return block_s


def state(handle: Handle) -> LaunchState:
    """What the log of the pool says; a run whose agent is gone is given to another one."""
    client = _client(_terms_of(handle))
    try:
        with _patient():
            return _PoolRun(client, handle, _blobs(client, handle["job"], _terms_of(handle))).state()
    except PlaceUnreachable as problem:
        return LaunchState(phase="unknown", why="the pool does not answer", evidence=problem.message, at=_now())
    except DiskFailed as problem:  # no lease is opened for a full disk of the renter's
        return LaunchState(phase="unknown", why="this machine's disk fails", evidence=problem.message, at=_now())


def events(handle: Handle, offset: int) -> bytes:
    """The run's log up to the last block that was committed, from `offset` on."""
    client = _client(_terms_of(handle))
    try:
        with _patient():
            content = _PoolRun(client, handle, _blobs(client, handle["job"], _terms_of(handle))).log()
    except DiskFailed as problem:  # asked again: who follows a run also opens its next lease
        raise PlaceUnreachable(problem.message, remedy=problem.remedy) from problem
    return content[offset : offset + (1 << 20)]


def stop(handle: Handle) -> None:
    """Close the lease: what was committed stays, and the same command goes on from there."""
    client = _client(_terms_of(handle))
    leases = _leases(client, handle["job"])
    if leases and leases[-1]["state"] in ("funded", "running", "suspect", "reclaiming"):
        client.post(
            on.Closed(lease_id=str(leases[-1]["lease_id"]), reason="stopped: the renter asked"), patience_s=20.0
        )


def fetch(handle: Handle, into: Path) -> None:
    """The results; before there are any, the last block that was committed."""
    client = _client(_terms_of(handle))
    with _patient():
        _PoolRun(client, handle, _blobs(client, handle["job"], _terms_of(handle))).fetch(into)


@dataclass
class _PoolRun:
    """A run at a pool, through all of its leases."""

    client: PoolClient
    handle: Handle
    blobs: BlobCache

    def state(self) -> LaunchState:
        """The state; opens the next lease where one is due."""
        leases = _leases(self.client, self.handle["job"])
        if not leases:
            return LaunchState(phase="failed", why="the pool knows no lease of this run", at=_now())
        last, restarts = leases[-1], len(leases) - 1 - int(self.handle["first"])
        state, reason = str(last["state"]), str(last["reason"])
        poisoned = wrong_blocks(leases, self.order)
        if state in _LIVE_WORDS:
            return self._live(last, leases, restarts, poisoned)
        if self._resumes_from(last) in poisoned:
            return self._next(leases, restarts, "an earlier block was wrong")
        if any(one["equal"] is False for one in last["challenges"]) and not is_judged(last):
            return LaunchState(
                phase="saving",
                why="a replay found a block unequal; it is being settled",
                evidence=described(last),
                restarts=restarts,
                at=_now(),
            )
        if is_wrong(last):
            return self._next(leases, restarts, f"a block of {last['lease_id']} is wrong")
        if last["result"]:
            waiting = [lease for lease in leases if waits_for_replays(lease)]
            if waiting:
                return LaunchState(
                    phase="saving",
                    why="the results are there; blocks are being replayed",
                    evidence=described(waiting[0]),
                    restarts=restarts,
                    at=_now(),
                )
            if problem := self._result_problem(last):
                return self._next(leases, restarts, problem)
            return LaunchState(
                phase="finished",
                why=checks_described(leases),
                evidence=described(last),
                exit_code=0,
                restarts=restarts,
                at=_now(),
            )
        if is_stopped(last):
            return LaunchState(
                phase="stopped",
                why="stopped as asked; what was committed is kept",
                evidence=described(last),
                restarts=restarts,
                at=_now(),
            )
        if reason.startswith("failed"):
            return LaunchState(phase="failed", why=reason, evidence=described(last), restarts=restarts, at=_now())
        return self._next(leases, restarts, reason or "the agent did not accept")

    def _live(
        self, last: dict[str, Any], leases: list[dict[str, Any]], restarts: int, poisoned: AbstractSet[str]
    ) -> LaunchState:
        if self._resumes_from(last) in poisoned:
            return self._restart(last, leases, restarts)
        if last["state"] == "running" and (moved := self._moved(last, leases, restarts)) is not None:
            return moved
        phase, why = _LIVE_WORDS[str(last["state"])]
        return LaunchState(phase=phase, why=why, evidence=described(last), restarts=restarts, at=_now())

    def _restart(self, last: dict[str, Any], leases: list[dict[str, Any]], restarts: int) -> LaunchState:

        self.client.post(on.Closed(lease_id=str(last["lease_id"]), reason="restarted: it went on from a wrong block"))
        return self._next(_leases(self.client, self.handle["job"]), restarts, "an earlier block was wrong")

    def _moved(self, last: dict[str, Any], leases: list[dict[str, Any]], restarts: int) -> LaunchState | None:
        """Move a run that goes well to another offer, where its rest costs so much less; None: it stays."""
        terms, blocks = _terms_of(self.handle), last["commitments"]
        num_moves = sum(str(one["reason"]).startswith(_MOVED) for one in leases)
        is_bound = not terms.may_move or self.handle["address"] not in ("", "best")
        is_over = bool(self.handle["until_s"]) and time.time() > self.handle["until_s"]
        is_spent = num_moves >= MOST_MOVES or len(leases) >= _MOST_LEASES or self._left_s(leases) < ACCEPT_S
        if is_bound or is_over or is_spent or len(blocks) < 3:
            return None
        if time.monotonic() - _looked_s.get(self.handle["job"], -math.inf) < LOOK_S:
            return None
        _looked_s[self.handle["job"]] = time.monotonic()
        try:
            found = self._better_offer(last, leases, terms)
            if found is None or not self._can_move(found[1], last, self._left_s(leases), terms):
                return None
        except (StokerError, ValueError, ArithmeticError, LookupError, TypeError):
            return None  # whatever agents say of themselves and of the run, it goes on where it is
        stay, go = found
        with suppress(Refused):  # it has just ended here
            name = go.listed.offer.offer_id
            why = (
                f"{_MOVED}the rest is expected to cost {credits_text(go.credits)} in {format_seconds(go.hours * 3600)} "
                f"at {name}, {credits_text(stay.credits)} in {format_seconds(stay.hours * 3600)} at "
                f"{last['offer_id']}"
            )
            self.client.post(on.Closed(lease_id=str(last["lease_id"]), reason=why), patience_s=20.0)
            return self._next(_leases(self.client, self.handle["job"]), restarts, why, preferred=name)
        return None

    def _can_move(self, go: Match, last: dict[str, Any], left_s: float, terms: Terms) -> bool:
        """Whether the lease at the better offer can be paid for as soon as this one is closed, with a little to spare.

        Not where money is in a contract, which keeps the old deposit until the time to dispute is over; nor while
        others wait, who may come first.

        Raises:
            BadJob: --max-cost does not suffice.
        """
        pool = self.client.state("pool")
        if pool["rules"]["contract"] or int(pool.get("num_waiting", 0)):
            return False
        rate, checked = int(last["rate_per_hour"]), 1.0 if terms.verify else 0.0
        spare = required_deposit(pay_for(_SPARE_S, rate), float(last["check_fraction"]))
        _, paid_s = self._affordable([go], left_s, checked, terms, spare)
        if paid_s < go.metered_hours * 3600:
            return False
        offer = go.listed.offer
        stays = required_deposit(pay_for(int(last["running_s"]), rate), float(last["check_fraction"])) + spare
        deposit = max(
            required_deposit(pay_for(math.floor(paid_s), offer.price_per_hour), checked),
            least_deposit(offer.min_s, offer.price_per_hour),
        )
        assert self.client.key is not None
        has = int(self.client.state("balances")["balances"].get(self.client.key.public, 0))
        return has + max(0, int(last["escrow"]) - stays) >= deposit

    def _better_offer(
        self, last: dict[str, Any], leases: list[dict[str, Any]], terms: Terms
    ) -> tuple[Match, Match] | None:
        """The rest of a run where it is, and at the offer that it should move to; None: it stays.

        Raises:
            StokerError, ValueError, ArithmeticError, LookupError, TypeError: what there is cannot be read.
        """
        listed, records = listed_offers(
            [  # the one that it runs on is taken
                {**one, "is_free": one["is_free"] or one["offer"]["offer_id"] == last["offer_id"]}
                for one in self.client.state("offers")
            ]
        )
        avoided = wrong_agents(leases) | resting_offers(leases[:-1], time.time()) | recently_lost(leases)
        here = next((one for one in listed if one.offer.offer_id == last["offer_id"]), None)
        others = [one for one in listed if one is not here and not {one.agent, one.offer.offer_id} & avoided]
        if here is None or not others:
            return None
        blob = self.blobs.fetch(str(last["commitments"][-1]["blob"]))
        limits = TreeLimits(num_bytes=_MOST_HOME_BYTES)
        names = [one.path for one in read_index(blob, limits).entries if one.path.endswith(f"/{MANIFEST}")]
        if any(_ended_early(manifest_from(read_member(blob, name, limits) or b"")) for name in names):
            return None  # its results are on their way
        total = _total_updates(blob)
        runs = earlier_runs(leases, str(last["forecast"].get("job", "")))
        setups = [run.setup_s for each in runs.values() for run in each if run.setup_s is not None]
        fetch_s = max(0.0, float(last["heard_s"]) - float(last["accepted_s"]) - float(last["running_s"]))
        needs = replace(
            _needs(terms),
            setup_s=max([*setups, Needs.setup_s]) + fetch_s,
            deadline_s=self.handle["until_s"] - time.time() if self.handle["until_s"] else None,
        )
        return best_move(
            replace(here, offer=replace(here.offer, price_per_hour=int(last["rate_per_hour"]))),
            others,
            records,
            lease=last,
            total_updates=total,
            needs=needs,
            runs=runs,
            now_s=time.time(),
        )

    def _left_s(self, leases: list[dict[str, Any]]) -> float:
        """Time of the run that no lease has used [s]."""
        mine = leases[int(self.handle["first"]) :]
        return float(self.handle["limit_s"]) - sum(int(lease["running_s"]) for lease in mine if not lease["outcome"])

    def _next(self, leases: list[dict[str, Any]], restarts: int, why: str, preferred: str = "") -> LaunchState:
        """Open the next lease; at the offer `preferred`, if it is still free."""
        if len(leases) >= _MOST_LEASES:
            return LaunchState(
                phase="failed", why=f"{len(leases)} leases ended without a result; the last: {why}", at=_now()
            )
        mine = leases[int(self.handle["first"]) :]
        stuck = [lease["reason"].startswith(SAVES_NOTHING) and not lease["commitments"] for lease in mine[-2:]]
        if len(stuck) == 2 and all(stuck):
            return LaunchState(
                phase="failed",
                why=f"two agents in a row left: {why}; what takes so long without a checkpoint, such as an evaluation, "
                "cannot be checked: evaluate on fewer samples, or give --verify none",
                at=_now(),
            )
        left_s = self._left_s(leases)
        if left_s < 1:  # leases are paid for whole seconds: what is left of a fraction pays for none
            limit = format_seconds(float(self.handle["limit_s"]))
            return LaunchState(phase="failed", why=f"the {limit} of the run are over: {why}", at=_now())
        if self.handle["until_s"] and time.time() > self.handle["until_s"]:
            return LaunchState(phase="failed", why=f"the deadline is over: {why}", at=_now())
        poisoned = wrong_blocks(leases, self.order)
        avoided = wrong_agents(leases) | resting_offers(leases, time.time())
        avoided |= {
            str(lease["agent"]) for lease in mine if lease["result"] and self._resumes_from(lease) not in poisoned
        }  # these were no results
        order = self.continued(self.order(leases[0]), leases)
        try:
            lease_id = self.open(order, len(leases), avoided, left_s, recently_lost(leases), preferred)
        except BadJob as problem:
            return LaunchState(phase="failed", why=f"{why}; {problem.message}", restarts=restarts, at=_now())
        except (PlaceFailed, Refused) as problem:
            return LaunchState(
                phase="queued", why=f"{why}; waiting for another offer: {problem.message}", restarts=restarts, at=_now()
            )
        done = f" from update {order.resume_update:,}" if order.resume else " from the beginning"
        return LaunchState(
            phase="requeued",
            why=f"{why}; goes on{done}",
            evidence=f"lease {lease_id}",
            restarts=restarts + 1,
            at=_now(),
        )

    def order(self, lease: dict[str, Any]) -> PoolOrder:
        """The order of a lease."""
        return read_order(self.blobs.whole(str(lease["order"]), MOST_ORDER_BYTES))

    def _resumes_from(self, lease: dict[str, Any]) -> str:
        return self.order(lease).resume

    def continued(self, order: PoolOrder, leases: list[dict[str, Any]]) -> PoolOrder:
        """The order, to go on from the last block of the same code that nothing speaks against."""
        poisoned = wrong_blocks(leases, self.order)
        fresh = replace(order, resume="", resume_head="", resume_block=0, resume_update=0)
        for lease in reversed(leases):
            earlier = self.order(lease)
            if (earlier.tree, earlier.arguments) != (order.tree, order.arguments):
                break
            good = [one for one in lease["commitments"] if one["blob"] not in poisoned]
            if good:
                last = good[-1]
                return replace(
                    order,
                    resume=str(last["blob"]),
                    resume_head=str(last["state"]),
                    resume_block=int(last["block"]),
                    resume_update=int(last["update"]),
                )
        return fresh

    def open(
        self,
        order: PoolOrder,
        number: int,
        avoided: AbstractSet[str],
        limit_s: float,
        lost: AbstractSet[str] = frozenset(),
        preferred: str = "",
    ) -> str:
        """Open lease number `number` with the offer `preferred`, or the best free one; its name.

        An offer of an agent in `lost` is taken only if there is no other.

        Raises:
            PlaceFailed: there is none.
            BadJob: none is within what may be spent.
            Refused: the deposit is not covered, or another renter was faster.
        """
        terms = _terms_of(self.handle)
        target = LaunchTarget(text="pool", kind="pool", address=self.handle["address"], device=self.handle["device"])
        offers = _ranked_offers(self.client, target, terms, run_s=limit_s, avoided=avoided)
        # Stable: otherwise as they were ranked.
        offers.sort(key=lambda one: (one.listed.agent in lost, one.listed.offer.offer_id != preferred))
        if not offers:
            raise PlaceFailed(
                "the pool has no free offer but those that failed, or are tried again later",
                remedy="`stoker pool offers` lists what there is.",
            )
        checked = 1.0 if terms.verify else 0.0  # a provider without a record is checked whole
        match, paid_s = self._affordable(offers, limit_s, checked, terms)
        if (rules := self.client.rules()).contract:
            return self._open_at(match, paid_s, order, number, checked, terms, rules)
        refusals = list[Refused]()
        while True:
            try:
                return self._open_at(match, paid_s, order, number, checked, terms, rules)
            except Refused as refused:  # the deposit is not covered, it is the turn of others, or it is taken
                refusals.append(refused)
                offers = offers[offers.index(match) + 1 :]
                if is_passing(refused) or not offers or len(refusals) == _MOST_ASKED:
                    raise refusals[0] from None
            try:
                match, paid_s = self._affordable(offers, limit_s, checked, terms)
            except BadJob:
                raise refusals[0] from None

    def _open_at(
        self,
        match: Match,
        limit_s: float,
        order: PoolOrder,
        number: int,
        checked: float,
        terms: Terms,
        rules: on.Founded,
    ) -> str:
        """Open lease number `number` at an offer, for so long; its name."""
        offer, lease_id = match.listed.offer, f"{self.handle['job']}.{number}"
        rate = offer.price_per_hour
        raw_hours = 0.0 if order.resume else _raw_hours(terms.forecast_of(match.listed))
        content = dumps(order, indent=None).encode()
        digest = self.blobs.put(content)
        credits_ = pay_for(math.floor(limit_s), rate)
        deposit = max(required_deposit(credits_, checked), least_deposit(offer.min_s, rate))
        expected_s = min(match.metered_hours * 3600, limit_s) if raw_hours else limit_s  # of a rest nothing is known
        body = on.Opened(
            lease_id=lease_id,
            offer_id=offer.offer_id,
            order=digest,
            rate_per_hour=rate,
            deposit=deposit,
            bond=credits_ if terms.bond is None else terms.bond,
            window_s=terms.window_s,
            verify_fraction=terms.verify,
            forecast=on.Forecast(
                hours=expected_s / 3600,
                credits=pay_for(math.floor(expected_s), rate),
                raw_hours=raw_hours,
                job=terms.identity,
            ),
            delegate=self.client.address.key,
            inputs=tuple(filter(None, (order.tree, order.resume))),
            most_forwarding=terms.most_forwarding,
        )
        if self.client.peer is not None:
            self.client.peer.note_unfetched(order.tree, order.resume)
        if rules.contract:
            from stoker.pool.contract.custody import Custody  # noqa: PLC0415 - an extra of its own

            Custody.of_member(rules, self.client.address.key).open(self.client, body, offer)
        else:
            self.client.post(body, patience_s=20.0)
        return lease_id

    def _affordable(
        self, offers: list[Match], limit_s: float, checked: float, terms: Terms, spare: int = 0
    ) -> tuple[Match, float]:
        """The best offer whose deposit is within what is left of the money, and the time that it pays for [s].

        `spare` micro-credits of it are not touched.

        Raises:
            BadJob: there is none on which the run would end.
        """
        most = self.handle["max_credits"]
        if most is None:
            return offers[0], min(limit_s, float(offers[0].listed.offer.max_s))
        mine = _leases(self.client, self.handle["job"])[int(self.handle["first"]) :]
        left = max(0, int(most) - sum(map(most_spent, mine)) - spare)
        for match in offers:
            listed = match.listed
            rate = max(1, listed.offer.price_per_hour)
            paid_s = left / (rate * (1 + checked)) * 3600
            forecast = terms.forecast_of(listed)
            needed_s = 0.0 if forecast is None or isinstance(forecast, str) else forecast.run_s
            if paid_s >= max(1.0, min(needed_s, limit_s), float(listed.offer.min_s)):
                return match, min(limit_s, paid_s, float(listed.offer.max_s))
        raise BadJob(
            f"{left / 1e6:g} of {most / 1e6:g} credits are left, and no free offer finishes the run for that",
            remedy="Raise --max-cost, or lower --verify: replays are paid as well.",
        )

    def _result_problem(self, lease: dict[str, Any]) -> str:
        """Why the results of a lease cannot be relied on; "" if they hold the last state that was committed."""
        if not float(lease["check_fraction"]):
            return ""
        order, limits = self.order(lease), TreeLimits(num_bytes=_MOST_HOME_BYTES)
        commitments = lease["commitments"]
        if not commitments and not order.resume:
            return f"{lease['lease_id']} committed to nothing"
        try:
            path = self.blobs.fetch(str(lease["result"]))
            index = read_index(path, limits)
            kept = read_index(self.blobs.fetch(order.resume), limits).digests() if not commitments else {}
            for name in (one.path for one in index.entries if one.path.endswith(f"/{MANIFEST}")):
                manifest = manifest_from(read_member(path, name, limits) or b"")
                files = {file.name: file.sha256 for file in manifest.files}
                if same_files(index, files, name.removesuffix(f"/{MANIFEST}")):
                    continue
                if not commitments and kept.get(name) == index.digests()[name]:
                    return self._shortage(lease, manifest)  # all updates were made before this lease
                previous = commitments[-2]["state"] if len(commitments) > 1 else order.resume_head
                head = chain_head(str(previous), manifest.position.updates, manifest.state_digest())
                if commitments and head == commitments[-1]["state"]:
                    return self._shortage(lease, manifest)
        except (ValueError, TypeError, LookupError, ArithmeticError, BadRun) as problem:
            return f"the results of {lease['lease_id']} cannot be read: {problem}"
        return f"the results of {lease['lease_id']} are not what it committed to"

    def _shortage(self, lease: dict[str, Any], manifest: CheckpointManifest) -> str:
        """How many updates a last state lacks, as words; "" if none, or if the run was ended early.

        The job's length stands in the plan of each block, where replays hold it against the job: that of a block which
        was replayed is taken, if there is one. An early end is part of the state that was committed.
        """
        equal = [int(one["block"]) for one in lease["challenges"] if one["equal"] is True]
        blobs = [str(one["blob"]) for one in lease["commitments"]] or [self.order(lease).resume]
        blob = self.blobs.fetch(blobs[max((block for block in equal if block < len(blobs)), default=-1)])
        total, updates = _total_updates(blob), manifest.position.updates
        if updates >= total or _ended_early(manifest):
            return ""
        return f"{lease['lease_id']} ended at update {updates:,} of {total:,}"

    def _newest(self) -> str:
        """The index with the newest state of the run: results, else the last block that nothing speaks against."""
        leases = _leases(self.client, self.handle["job"])
        poisoned = wrong_blocks(leases, self.order)
        for lease in reversed(leases):
            blobs = [str(one["blob"]) for one in lease["commitments"] if one["blob"] not in poisoned]
            is_whole = len(blobs) == len(lease["commitments"])
            if lease["result"] and is_whole and not is_wrong(lease) and self._resumes_from(lease) not in poisoned:
                return str(lease["result"])
            if blobs:
                return blobs[-1]
        return ""

    def log(self) -> bytes:
        """The run's log, as far as it was committed."""
        digest = self._newest()
        limits = TreeLimits(num_bytes=_MOST_HOME_BYTES)
        if not digest:
            return b""
        path = self.blobs.fetch(digest)
        for other in path.parent.iterdir():  # checkpoints of earlier calls; orders are small, and read each time
            if other != path and other.stat().st_size > _MOST_KEPT_BYTES:
                other.unlink(missing_ok=True)
        return read_member(path, _LOG, limits, _MOST_LOG_BYTES) or b""

    def fetch(self, into: Path) -> None:
        """Write the newest state into `into`; each file is checked, and replaced at once."""
        digest = self._newest()
        if not digest:
            return
        into.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=into))
        try:
            index = unpack(self.blobs.fetch(digest), aside / "run", TreeLimits(num_bytes=_MOST_HOME_BYTES))
            for entry in index.entries:
                target = into / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                (aside / "run" / entry.path).replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


_LIVE_WORDS: dict[str, tuple[LaunchPhase, str]] = {
    "funded": ("queued", "waiting for the agent to accept"),
    "running": ("running", "training"),
    "suspect": ("running", "the agent has been silent for a while"),
    "reclaiming": ("saving", "the owner takes the machine back: the run saves"),
}


def _total_updates(blob: Path) -> int:
    """Updates of the whole run, by the plan in a block.

    Raises:
        BadRun, ValueError, TypeError, LookupError, ArithmeticError: it has no such plan.
    """
    plan: Any = parsed(read_member(blob, "plan.json", TreeLimits(num_bytes=_MOST_HOME_BYTES)) or b"{}")
    total = int(plan["candidates"][0]["forecast"]["total_updates"])
    if total > 1 << 53:  # else no float holds it
        raise BadRun(f"its plan has {len(str(total))} digits of updates")
    return total


def _member(packed: Any, name: str) -> Any:
    """What a dictionary has under a name, as a checkpoint's manifest keeps it; None: nothing."""
    return dict(packed["of"]).get(name) if packed is not None else None


def _ended_early(manifest: CheckpointManifest) -> bool:
    """Whether a run ended at a checkpoint by its own rule."""
    return _member(_member(manifest.skeleton.get("progress"), "course"), "verdict") is not None


def _ranked_offers(
    client: PoolClient,
    target: LaunchTarget,
    terms: Terms,
    *,
    run_s: float = 3600.0,
    avoided: AbstractSet[str] = frozenset(),
) -> list[Match]:
    """Free offers that will do, by expected money and hours until the run is done; `avoided`: agents and offers.

    Where no forecast for a kind was made, `run_s` is taken for a device like the cheapest one, and scaled by what the
    others were measured at.
    """
    listed, records = listed_offers(client.state("offers"))
    usable = [
        one
        for one in listed
        if target.address in ("", "best", one.offer.offer_id)
        and target.device in ("", one.offer.device.kind)
        and not {one.agent, one.offer.offer_id} & avoided
    ]
    if not usable:
        return []
    usable.sort(key=lambda one: (one.offer.price_per_hour, one.offer.offer_id))
    flat = RunForecast(run_s=run_s, reference_flop_per_s=usable[0].offer.measured.fp32_flop_per_s)
    columns = Columns.of(usable, records, time.time(), terms.known_offers)
    ranking = rank_offers(columns, _needs(terms), lambda word: terms.forecasts.get(word, flat), most=len(usable))
    return list(ranking.matches)


def _needs(terms: Terms) -> Needs:
    """What a run needs wherever it is."""
    return Needs(
        value_per_hour=terms.value_per_hour,
        least_isolation=terms.isolation,
        verify_fraction=terms.verify,
        checkpoint_blocked_s=0.1,
    )


def _raw_hours(forecast: RunForecast | str | None) -> float:
    """Hours of a forecast before earlier runs corrected it; 0 where there is none."""
    return 0.0 if forecast is None or isinstance(forecast, str) else (forecast.raw_s or forecast.run_s) / 3600


@contextmanager
def _patient() -> Iterator[None]:
    """A pool that has too much to do is one that does not answer: nothing is known, and nothing has ended."""
    try:
        yield
    except Refused as refused:
        if refused.http_status not in _BUSY_STATUS:
            raise
        raise PlaceUnreachable(f"the pool is busy: {refused.message}") from refused


def _leases(client: PoolClient, job: str) -> list[dict[str, Any]]:
    """The leases of a run, in order.

    Raises:
        PlaceFailed: one of them has another owner.
    """
    assert client.key is not None
    found: list[dict[str, Any]] = []
    while len(found) < _MOST_LEASES:
        try:
            lease = client.lease(f"{job}.{len(found)}")
        except Refused as refused:
            if refused.http_status == _NO_SUCH_LEASE:
                break
            raise PlaceUnreachable(f"the pool does not show the leases of {job}: {refused.message}") from refused
        if lease["renter"] != client.key.public:
            raise PlaceFailed(
                f"the lease {lease['lease_id']} is of another renter, {lease['renter'][:12]}…",
                remedy="Give the run another name.",
            )
        found.append(lease)
    return found


def _first_of(leases: list[dict[str, Any]]) -> int:
    """Number of the first lease of the present start: after the last one that finished or was stopped."""
    first = 0
    for number, lease in enumerate(leases[:-1]):
        if lease["result"] or is_stopped(lease) or str(lease["reason"]).startswith("failed"):
            first = number + 1
    return first


def _terms_of(handle: Handle) -> Terms:
    return replace(Terms.of(handle["options"]), pool=str(handle["pool"]), key=str(handle["key"]))


def _client(terms: Terms) -> PoolClient:

    return PoolClient(PoolAddress.parse(terms.pool or None), own_key(terms.key))


_looked_s: dict[str, float] = {}
"""When this process looked for a better offer last [s], by job."""
_peers: dict[tuple[str, str], Peer | None] = {}
"""Peers of this process, by pool and key; None: the pool has no rendezvous."""


def _blobs(client: PoolClient, job: str, terms: Terms, tell: Callable[[str], None] = lambda _: None) -> BlobCache:
    """Blobs of a run; large ones go directly where the pool has a rendezvous, as long as this process runs."""
    assert client.key is not None
    name = str(client.address), client.key.public
    if terms.is_p2p and name not in _peers:
        with suppress(PlaceUnreachable):  # the next call asks again
            _peers[name] = joined_peer(client, keeps=True, tell=tell)
    client.peer = _peers.get(name) if terms.is_p2p else None
    return BlobCache(client, cache_root() / "pool" / job)


def _own_class() -> str:

    with suppress(StokerError):
        return determinism_class(attached_cpu())
    return ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
