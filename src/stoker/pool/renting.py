"""Places' functions for a pool: orders are sent, the first lease is opened, the run is followed and comes home.

What: the run is an order (`job_box.py`) that an agent takes under a lease; `rented_run.py` takes it through all of its
leases, on the terms that `--place-option` gives (`terms.py`).
Use when: machines of strangers will do. Costs: what the lease says; blocks take a checkpoint every `block`.
Does not do: several machines, secrets, images, jobs whose length is in seconds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.devices import attached_cpu
from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.launcher import Handle, LaunchTarget, Offer, Probe, Request, Submission, seen_now
from stoker.planning.slow_links import BYTES_EACH
from stoker.pool import events as on
from stoker.pool.agent import determinism_class
from stoker.pool.client import DiskFailed, PoolAddress, PoolClient
from stoker.pool.direct_exchange import joined_peer
from stoker.pool.escrow import credits_text, deterrence_text
from stoker.pool.events import NotNow, Refused
from stoker.pool.gang_run import GangMatch, GangRun, best_gang, forwarding_of, gang_text, links_for, site_names
from stoker.pool.job_box import PoolOrder, order_of, value_of
from stoker.pool.keys import own_key
from stoker.pool.lease import LIVE, MOST_BLOCK_S, MOST_COMMITMENTS
from stoker.pool.leased_job import BlobCache
from stoker.pool.matching import earlier_runs, forecast_word, listed_offers, offer_word
from stoker.pool.rented_run import MOST_LEASES, RentedRun, keep_place, leases_of, leave_place, run_name
from stoker.pool.shown_lease import ShownLease, wrong_agents
from stoker.pool.terms import EXCHANGES, FORECASTS, IDENTITY, Exchanges, Terms, ranked_offers
from stoker.records.launch import LaunchState
from stoker.store import cache_root
from stoker.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stoker.jobs import Entry, Job
    from stoker.pool.peer import Peer

SAVED_WITHIN = 0.9
"""Share of a block after which its checkpoint is written: what is left of it is for sending the checkpoint."""
_BUSY_STATUS = (429, 503)
_LEAST_BLOCKS = 4
"""Blocks that even the shortest run has, such as a probe of a minute."""
_QUEUE_LOOK_S = 3.0
"""Time between two tries of a run that waits in the queue [s]: a list of offers counts as ten requests."""
_TOUCH_S = 1200.0


def probe(target: LaunchTarget, options: Mapping[str, str]) -> Probe:
    """What is offered now."""
    terms = Terms.of(options)
    client = _client(terms)
    offers = ranked_offers(client, target, terms)
    num_free = len(offers)
    if not offers and terms.wait_s and _named(client, target) is None:
        offers = ranked_offers(client, target, terms, with_taken=True)
        if not offers:
            limit = format_seconds(terms.wait_s)
            return Probe(facts={"offers": f"none; the run waits in the pool's queue for one, {limit} at most"})
    if not offers:
        shape = f"{target.num_devices} × {target.device or 'any device'}" if target.num_devices > 1 else target.device
        wanted = " of ".join(filter(None, (target.address, shape))) or "one device"
        text = f"the pool has no free offer of {wanted} with isolation {terms.isolation} or stronger"
        text = f"{text}: `stoker pool offers` lists what there is"
        if other := _named(client, target):
            text = f"the offer {other.offer_id} has {other.device.count} devices: --on {offer_word(other)}"
        return Probe(facts={"offers": "none"}, missing=(text,))
    best = offers[0].listed.offer
    facts = {
        "offers": f"{num_free} free" + ("" if num_free else "; the run waits in the pool's queue"),
        "best": f"{best.offer_id}: {best.device.count} × {best.device.kind}, {best.price_per_hour / 1e6:g} credits an "
        "hour",
        "isolation": f"{best.isolation}: an owner with root reads the job and its data all the same",
    }
    device, cores = best.device.kind, best.measured.cores
    if device == "cpu" and best.determinism_class == _own_class():
        here = attached_cpu()
        device, cores = here.model, here.cores
    return Probe(facts=facts, device=device, cores=cores)


def _named(client: PoolClient, target: LaunchTarget) -> on.Offer | None:
    """The offer that a target names, if it is free and has another number of devices."""
    listed, _ = listed_offers(client.state("offers"))
    found = (one.offer for one in listed if one.offer.offer_id == target.address)
    return next((one for one in found if one.device.count != target.num_devices), None)


def offers(request: Request) -> tuple[Offer, ...]:
    """The offers that are free."""
    terms = Terms.of(request.options)
    client = _client(terms)
    found = ranked_offers(client, request.target, terms)
    if terms.agents > 1:
        links = links_for(client, terms.exchanges)
        gang = best_gang(found, terms.agents, terms.exchanges, terms.value_per_hour, links=links)
        return () if gang is None else (_offer_of(request.target, gang),)
    return tuple(
        Offer(
            text=request.target.text if number == 0 else offer_word(offer),
            num_nodes=1,
            devices_each=offer.device.count,
            device=offer.device.kind,
            starts_in_s=0.0,
            price_per_h=offer.price_per_hour / 1e6,
            price_source=f"the offer {offer.offer_id}",
            why=f"isolation {offer.isolation}, notice {offer.reclaim_s} s",
        )
        for number, offer in enumerate(one.listed.offer for one in found)
    )


def _offer_of(target: LaunchTarget, gang: GangMatch) -> Offer:
    """What all sites of a gang are offered for."""
    offers = [one.listed.offer for one in gang.matches]
    return Offer(
        text=target.text,
        num_nodes=1,
        devices_each=1,
        device=offers[0].device.kind,
        starts_in_s=0.0,
        price_per_h=sum(one.price_per_hour for one in offers) / 1e6,
        price_source=f"the offers {', '.join(one.offer_id for one in offers)}",
        why=f"{len(offers)} sites, an exchange in {gang.exchange_s:.1f} s",
    )


def with_forecasts(job: Job, entry: Entry, submission: Submission, tell: Callable[[str], None]) -> Submission:
    """The submission with the run's forecast on each kind of device that is offered.

    Raises:
        BadJob: blocks are to be replayed, and how many updates the job has depends on the machine, or what its replicas
            exchange on the time.
    """
    from stoker.launching.launch import identity_of  # noqa: PLC0415 - torch, which following does without
    from stoker.pool.forecasting import job_forecasts, leases_before  # noqa: PLC0415 - likewise

    terms, num_devices = Terms.of(submission.options), submission.target.num_devices
    exchanges = _exchanges_of(job, entry, terms, submission.target) if terms.agents > 1 else terms.exchanges
    if terms.verify and num_devices > 1 and job.sync is not None:
        raise BadJob(
            f"{num_devices} replicas with updates of their own exchange how long they worked, so that no replay comes "
            "to the same state",
            remedy="Train on one device, without sync; or --verify none.",
        )
    if terms.verify and job.until.unit == "seconds":
        raise BadJob(
            "the job's length is given in seconds, so that a replay would have another one",
            remedy="Give until=… in epochs, samples or updates; or --verify none.",
        )
    client = _client(terms)
    identity, leases = identity_of(entry), leases_before(client, entry)
    runs = earlier_runs(leases, identity, sites=terms.agents)
    standing = ranked_offers(client, submission.target, terms, with_taken=bool(terms.wait_s))
    words = sorted({forecast_word(one.listed, runs) for one in standing})
    if submission.time_limit_s is None and words:
        tell(f"forecasting for {', '.join(words)}")
    forecast_of = job_forecasts(job, entry, leases, sites=terms.agents)
    found = {word: one if isinstance(one := forecast_of(word), str) else asdict(one) for word in words}
    options = {**submission.options, FORECASTS: json.dumps(found), IDENTITY: identity}
    if terms.agents > 1:
        options[EXCHANGES] = json.dumps(asdict(exchanges))
    return replace(submission, options=options)


def _exchanges_of(job: Job, entry: Entry, terms: Terms, target: LaunchTarget) -> Exchanges:
    """What the sites of a job exchange.

    Raises:
        BadJob: several agents cannot train it.
    """
    from stoker.planning.resolved_job import resolve_job  # noqa: PLC0415 - torch, which following does without

    if job.sync is None:
        raise BadJob(
            f"--place-option agents={terms.agents}: the job's processes sum gradients in every update, and agents of a "
            "pool have no network for that",
            remedy="Let sites make updates of their own, which changes what is learned: "
            "Job(sync=stoker.DiLoCo(every=stoker.updates(50))); or take several devices of one machine: pool/2xcpu.",
        )
    if target.num_devices > 1 or target.address:
        raise BadJob(
            f"--place-option agents={terms.agents} with --on {target.text}: each site is one device, at any offer",
            remedy="Use --on pool, or a kind of device such as --on pool/cpu.",
        )
    if terms.wait_s:
        raise BadJob(
            f"--place-option wait with agents={terms.agents}: the pool's queue is for one offer",
            remedy="Leave it out, and start again when there are enough offers.",
        )
    if job.until.unit == "seconds":
        raise BadJob(
            "the job's length is given in seconds, which is another number of updates at each site",
            remedy="Give until=… in epochs, samples or updates.",
        )
    prepared = resolve_job(job, entry)
    job, trained = prepared.job, sum(one.numel() for one in prepared.model.parameters() if one.requires_grad)
    assert job.sync is not None
    num_updates = prepared.extent.updates_in(job.until)
    return Exchanges(
        num_bytes=trained * {**BYTES_EACH, "none": 4.0}[job.sync.compress],
        count=job.sync.exchanges(job.batch_size, num_updates) + 1,
        fragments=job.sync.fragments,
        overlap=job.sync.overlap,
        parameters=trained,
        interval=job.sync.interval(job.batch_size),
        num_updates=num_updates,
    )


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
    block_s = max(_saved_each_s(submission, terms), submission.time_limit_s / (MOST_COMMITMENTS - 10))
    if terms.agents > 1 and client.rules().contract:
        raise PlaceFailed(
            f"--place-option agents={terms.agents}: this pool's money is in a contract, which takes one lease at a "
            "time, so that the sites of a run could not be paid for together, or not at all",
            remedy="Train with one agent, or at a pool that keeps its money in its own log.",
        )
    chains = [leases_of(client, name) for name in (site_names(job, terms.agents) if terms.agents > 1 else [job])]
    before = chains[0]
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
        "num_devices": submission.target.num_devices,
        "options": dict(submission.options),
    }
    if terms.agents > 1:
        handle = {**handle, "sites": terms.agents, "firsts": [len(chain) for chain in chains]}
    if _is_stopped(client, job):
        client.post(on.RunStopped(run=run_name(handle), is_stopped=False), patience_s=20.0)
    if any(chain and chain[-1].state in LIVE for chain in chains):
        firsts = [_first_of(chain) for chain in chains]
        return {**handle, "first": firsts[0], "sent_bytes": 0, **({"firsts": firsts} if terms.agents > 1 else {})}
    if len(before) >= MOST_LEASES:
        raise PlaceFailed(
            f"the run {submission.run} has had {len(before)} leases, the most that one has",
            remedy="Give the run another name.",
        )
    blobs = _blobs(client, job, terms, tell)
    sent = sum(one.num_bytes for one in (*submission.data, submission.stoker, submission.code))
    tell(f"sending the order: {format_bytes(sent)} at most")
    order = order_of(submission, blobs.put, blobs.aside(), block_s=block_s)
    if terms.agents > 1:
        limit_s = _gang_opened(GangRun(client, handle, blobs), order, submission.time_limit_s, tell)
        return {**handle, "limit_s": limit_s, "sent_bytes": sent}
    run = RentedRun(client, handle, blobs)
    order = run.continued(order, before)
    lease_id = _opened(run, order, before, submission.time_limit_s, terms, tell)
    tell(f"opened the lease {lease_id}")
    with suppress(StokerError):  # it is open, whether or not the pool can tell more now
        lease = client.lease(lease_id)
        num_blocks = round(3600 * lease.forecast.hours / block_s)
        tell(
            f"deposit {credits_text(lease.deposit)}, bond {credits_text(lease.bond)}; "
            + deterrence_text(lease.forecast.credits, lease.bond, lease.check_fraction, num_blocks)
        )
    return {**handle, "sent_bytes": sent}


def _is_stopped(client: PoolClient, run: str) -> bool:
    """Whether no lease of a run is opened any more, be it with one agent or several."""
    assert client.key is not None
    return run in client.state("stopped", renter=client.key.public)


def _gang_opened(run: GangRun, order: PoolOrder, limit_s: float, tell: Callable[[str], None]) -> float:
    """Open the leases of all sites of a run, each to go on from its last block; the run's longest time [s].

    Raises:
        PlaceFailed: there are not enough offers, or a site has sent what its block does not make.
        BadJob, Refused: as `GangRun.open`.
    """
    if wrong := next((one for chain in run.leases() for one in chain if one.outcome), None):
        raise PlaceFailed(
            f"a block of {wrong.lease_id} is wrong, and the other sites have gone on from what it sent",
            remedy="Start another run: --new.",
        )
    terms = Terms.of_handle(run.handle)
    exchanges, rules = terms.exchanges, run.client.rules()
    found = run.match(limit_s)
    tell(gang_text(found, exchanges, forwarding_of(exchanges, run.handle["job"], rules, terms.most_forwarding)))
    limit_s += exchanges.count * found.exchange_s
    found = run.open(order, limit_s)
    tell(f"opened the leases of {len(found.matches)} sites; no meter runs before all agents have accepted")
    return limit_s


def _opened(
    run: RentedRun,
    order: PoolOrder,
    before: list[ShownLease],
    limit_s: float,
    terms: Terms,
    tell: Callable[[str], None],
) -> str:
    """Open the next lease, after waiting in the pool's queue where it may wait; its name.

    Raises:
        PlaceFailed: there is no offer.
        BadJob, Refused: as `RentedRun.open`.
    """
    job, until, said, touched_s = run.handle["job"], time.monotonic() + terms.wait_s, "", time.monotonic()
    try:
        while True:
            try:
                return run.open(order, len(before), wrong_agents(before), limit_s)
            except (PlaceFailed, Refused) as problem:
                may_end = isinstance(problem, NotNow | PlaceUnreachable) or type(problem) is PlaceFailed
                if not may_end or time.monotonic() >= until:
                    raise
                if problem.message != said:
                    said = problem.message
                    tell(f"waiting in the queue for {format_seconds(until - time.monotonic())} at most: {said}")
            keep_place(run.client, job, terms, run.handle["device"])
            if time.monotonic() - touched_s > _TOUCH_S:  # the pool deletes what no lease names
                touched_s = time.monotonic()
                with suppress(PlaceUnreachable, Refused):
                    run.client.has_blob(order.tree)
            time.sleep(_QUEUE_LOOK_S)
    finally:
        leave_place(run.client, job)


def _block_s(submission: Submission, terms: Terms) -> float:
    """Time between commitments [s]: a checkpoint is saved for each, so that it is that of `--checkpoint-every` as well.

    Raises:
        BadJob: that differs from `--place-option block`, or is longer than an agent works for without a commitment.
    """
    every = value_of(submission.arguments, "--checkpoint-every")
    block_s = terms.block_s if every is None else float(every)
    if every is None and "block" not in submission.options and submission.time_limit_s is not None:
        # What is not committed is neither paid nor kept, and two blocks at least show the job's pace.
        block_s = min(block_s, max(1.0, submission.time_limit_s / _LEAST_BLOCKS))
    if "block" in submission.options and block_s != terms.block_s:
        raise BadJob(
            f"--checkpoint-every {every} and --place-option block={submission.options['block']}: each "
            "checkpoint ends a block",
            remedy="Leave one of them out.",
        )
    if terms.verify and block_s > MOST_BLOCK_S:
        raise BadJob(
            f"a commitment each {format_seconds(block_s)}: an agent is not paid before it, and takes no blocks of more "
            f"than {MOST_BLOCK_S} s",
            remedy="Save more often, or --verify none.",
        )
    return block_s


def _saved_each_s(submission: Submission, terms: Terms) -> float:
    """Time between checkpoints [s]: a part of a block is left to send each of them, unless the time itself was given.

    A lost agent costs what was trained since its last commitment: with the time of sending one, a block at most.
    """
    is_given = value_of(submission.arguments, "--checkpoint-every") is not None
    return (1.0 if is_given else SAVED_WITHIN) * _block_s(submission, terms)


def state(handle: Handle) -> LaunchState:
    """What the log of the pool says; a run whose agent is gone is given to another one."""
    client = _client(Terms.of_handle(handle))
    try:
        with _patient():
            return _run_of(client, handle).state()
    except PlaceUnreachable as problem:
        return seen_now(phase="unknown", why="the pool does not answer", evidence=problem.message)
    except DiskFailed as problem:  # no lease is opened for a full disk of the renter's
        return seen_now(phase="unknown", why="this machine's disk fails", evidence=problem.message)


def events(handle: Handle, offset: int) -> bytes:
    """The run's log up to the last block that was committed, from `offset` on."""
    client = _client(Terms.of_handle(handle))
    try:
        with _patient():
            content = _run_of(client, handle).log()
    except DiskFailed as problem:  # asked again: who follows a run also opens its next lease
        raise PlaceUnreachable(problem.message, remedy=problem.remedy) from problem
    return content[offset : offset + (1 << 20)]


def stop(handle: Handle) -> None:
    """Let no machine open another lease, and close what is leased.

    The same command goes on from the last block.

    Raises:
        PlaceUnreachable: the pool does not answer, or is busy.
    """
    client = _client(Terms.of_handle(handle))
    with _patient():
        client.post(on.RunStopped(run=run_name(handle)), patience_s=20.0)  # first: none is opened after it
        _run(client, handle, BlobCache(client, cache_root() / "pool" / run_name(handle))).stop()


def fetch(handle: Handle, into: Path) -> None:
    """The results; before there are any, the last block that was committed."""
    client = _client(Terms.of_handle(handle))
    with _patient():
        _run_of(client, handle).fetch(into)


def _run_of(client: PoolClient, handle: Handle) -> RentedRun | GangRun:
    """The run of a handle."""
    return _run(client, handle, _blobs(client, handle["job"], Terms.of_handle(handle)))


def _run(client: PoolClient, handle: Handle, blobs: BlobCache) -> RentedRun | GangRun:
    return GangRun(client, handle, blobs) if handle.get("sites") else RentedRun(client, handle, blobs)


@contextmanager
def _patient() -> Iterator[None]:
    """A pool that has too much to do is one that does not answer: nothing is known, and nothing has ended."""
    try:
        yield
    except Refused as refused:
        if refused.http_status not in _BUSY_STATUS:
            raise
        raise PlaceUnreachable(f"the pool is busy: {refused.message}") from refused


def _first_of(leases: list[ShownLease]) -> int:
    """Number of the first lease of the present start: after the last one that finished or was stopped."""
    first = 0
    for number, lease in enumerate(leases[:-1]):
        if lease.result or lease.is_stopped or lease.reason.startswith("failed"):
            first = number + 1
    return first


def _client(terms: Terms) -> PoolClient:
    return PoolClient(PoolAddress.parse(terms.pool or None), own_key(terms.key))


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
