"""A run at a pool through all of its leases: what state it is in, its next lease, a better offer, its results.

Where an agent is lost, or its owner takes the machine back, the next lease goes on from the last block that was
committed; where a replay finds one wrong, from the block before it, and never again at that agent. A run counts as
finished once its results are there and the blocks that were drawn have been replayed.

Leases of one run are `JOB.0`, `JOB.1`, …, with the renter's key in the name, which no other key can open:
everything is found again from the job's name and the pool's log.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import BadJob, BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.launcher import Handle, LaunchTarget, seen_now
from stoker.pool import events as on
from stoker.pool.blob_tree import TreeLimits, read_index, read_member, same_files, unpack
from stoker.pool.client import DiskFailed, Missing, PoolClient, is_passing
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import credits_text, least_deposit, pay_for, required_deposit
from stoker.pool.events import Refused
from stoker.pool.job_box import MOST_ORDER_BYTES, PoolOrder, read_order
from stoker.pool.lease import ACCEPT_S, LIVE, SAVES_NOTHING, SENT_OTHERWISE, Commitment
from stoker.pool.leased_job import BlobCache
from stoker.pool.matching import Match, Needs, RunForecast, best_move, earlier_runs, listed_offers, rest_of_run
from stoker.pool.rules.market import MOST_WAIT_S
from stoker.pool.shown_lease import (
    AWAY,
    ShownLease,
    checks_described,
    recently_lost,
    resting_offers,
    wrong_agents,
    wrong_blocks,
)
from stoker.pool.terms import Terms, ranked_offers
from stoker.records.codec import dumps, from_json, parsed
from stoker.records.launch import LaunchPhase, LaunchState
from stoker.store.checkpoint_store import MANIFEST, manifest_from
from stoker.store.disk_errors import disk_errors
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.records import CheckpointManifest

_MOST_HOME_BYTES = 1 << 40
_LOG, _MOST_LOG_BYTES = "events.jsonl", 1 << 30
MOST_LEASES = 100
"""Leases of one run at most."""
MOST_MOVES = 3
"""Times that a run moves to a better offer, over all of its starts: each is a bet on what an offer says of itself."""
LOOK_S = 300.0
"""Time between two looks for a better offer, since a pool may have thousands [s]."""
STOPPED = "stopped: the renter asked"
"""Reason of a lease that its renter closed for good."""
_MOVED = "moved: "
"""How the reason of a lease begins that its renter closed for a better offer."""
_SPARE_S = 300
"""What a lease may still cost while it is closed, as running time [s]."""
_MOST_ASKED = 8
"""Offers that are asked for one lease at most."""
_MOST_KEPT_BYTES = 4 << 20

_CLOCKS_S = 60.0
"""What this machine's clock may be ahead of the pool's in a request that waits [s]."""
_waited_s: dict[str, float] = {}
"""When this process posted last that a run waits [s], by job."""
_looked_s: dict[str, float] = {}
"""When this process looked for a better offer last [s], by job."""


@dataclass
class RentedRun:
    """A run at a pool, through all of its leases."""

    client: PoolClient
    handle: Handle
    blobs: BlobCache

    @cached_property
    def terms(self) -> Terms:
        """What its renter asked for."""
        return Terms.of_handle(self.handle)

    def leases(self) -> list[ShownLease]:
        """Its leases as the pool has them now, the oldest first; see `leases_of`."""
        return leases_of(self.client, self.handle["job"])

    def _of_start(self, leases: list[ShownLease]) -> list[ShownLease]:
        """Leases of this start of the run."""
        return leases[int(self.handle["first"]) :]

    def state(self) -> LaunchState:
        """The state; opens the next lease where one is due."""
        leases = self.leases()
        if not leases:
            return seen_now(phase="failed", why="the pool knows no lease of this run")
        if leases[-1].is_run_stopped and leases[-1].state in LIVE:  # who stopped it has not closed it
            self.stop()
            leases = self.leases()
        poisoned = wrong_blocks(leases, self._resumes_from)
        if leases[-1].state in _LIVE_WORDS:
            return self._live(leases, poisoned)
        return self._ended(leases, poisoned)

    def _restarts(self, leases: list[ShownLease]) -> int:
        """Leases of this start after its first one."""
        return len(self._of_start(leases)) - 1

    def _ended(self, leases: list[ShownLease], poisoned: AbstractSet[str]) -> LaunchState:
        last, reason = leases[-1], leases[-1].reason

        def seen(phase: LaunchPhase, why: str, lease: ShownLease = last, exit_code: int | None = None) -> LaunchState:
            return seen_now(phase, why, lease.in_words(), exit_code=exit_code, restarts=self._restarts(leases))

        if self._resumes_from(last) in poisoned:
            return self._next(leases, "an earlier block was wrong")
        if any(one.judges is False for one in last.challenges) and not last.is_judged:
            return seen("saving", "a replay found a block unequal; it is being settled")
        if last.is_wrong:
            return self._next(leases, f"a block of {last.lease_id} is wrong")
        if last.result:
            if waiting := [lease for lease in leases if lease.waits_for_replays]:
                return seen("saving", "the results are there; blocks are being replayed", waiting[0])
            if problem := self._result_problem(last):
                return self._next(leases, problem)
            return seen("finished", checks_described(leases), exit_code=0)
        if last.is_stopped:
            return seen("stopped", "stopped as asked; what was committed is kept")
        if reason.startswith("failed"):
            return seen("failed", reason.removeprefix("failed: "))
        return self._next(leases, reason or "the agent did not accept")

    def _live(self, leases: list[ShownLease], poisoned: AbstractSet[str]) -> LaunchState:
        last = leases[-1]
        if self._resumes_from(last) in poisoned:
            reason = "restarted: it went on from a wrong block"
            self.client.post(on.Closed(lease_id=last.lease_id, reason=reason))
            return self._next(self.leases(), "an earlier block was wrong")
        if last.is_left_alone:  # the pool itself waits longer
            close_lease(self.client, last, AWAY)
            leases = self.leases()
            if (last := leases[-1]).state not in LIVE:
                return self._next(leases, AWAY)
        if last.state == "running" and (moved := self._moved(leases)) is not None:
            return moved
        phase, why = _LIVE_WORDS[last.state]
        why += self._shortfall(leases)
        return seen_now(phase=phase, why=why, evidence=last.in_words(), restarts=self._restarts(leases))

    def _shortfall(self, leases: list[ShownLease]) -> str:
        """That the time of the run ends before its last update at the pace of its blocks, as words; "": it does not."""
        last = leases[-1]
        forecasts = self.terms.forecasts.values()
        total = max((one.total_updates for one in forecasts if isinstance(one, RunForecast)), default=0)
        rest = rest_of_run(last, total) if total else None
        if rest is None:
            return ""
        block = last.commitments[-1]
        left_s = max(0.0, self.left_s(leases) + last.running_s - block.running_s)
        if rest.run_s <= left_s:
            return ""
        updates = block.update + (total - block.update) * left_s / rest.run_s
        return (
            f"; at its pace the {format_seconds(float(self.handle['limit_s']))} of the run end at about "
            f"{5 * math.floor(20 * updates / total)} % of its updates, and the same command goes on from there"
        )

    def _moved(self, leases: list[ShownLease]) -> LaunchState | None:
        """Move a run that goes well to another offer, where its rest costs so much less; None: it stays."""
        terms, last = self.terms, leases[-1]
        num_moves = sum(one.reason.startswith(_MOVED) for one in leases)
        is_bound = not terms.may_move or self.handle["address"] not in ("", "best")
        is_over = bool(self.handle["until_s"]) and time.time() > self.handle["until_s"]
        is_spent = num_moves >= MOST_MOVES or len(leases) >= MOST_LEASES or self.left_s(leases) < ACCEPT_S
        if is_bound or is_over or is_spent or len(last.commitments) < 3:
            return None
        if time.monotonic() - _looked_s.get(self.handle["job"], -math.inf) < LOOK_S:
            return None
        _looked_s[self.handle["job"]] = time.monotonic()
        try:
            found = self._better_offer(leases, terms)
            if found is None or not self._can_move(found[1], last, self.left_s(leases), terms):
                return None
        except (StokerError, ValueError, ArithmeticError, LookupError, TypeError):
            return None  # whatever agents say of themselves and of the run, it goes on where it is
        stay, go = found
        with suppress(Refused):  # it has just ended here
            name = go.listed.offer.offer_id
            why = (
                f"{_MOVED}the rest is expected to cost {credits_text(go.credits)} in {format_seconds(go.hours * 3600)} "
                f"at {name}, {credits_text(stay.credits)} in {format_seconds(stay.hours * 3600)} at "
                f"{last.offer_id}"
            )
            self.client.post(on.Closed(lease_id=last.lease_id, reason=why), patience_s=20.0)
            return self._next(self.leases(), why, preferred=name)
        return None

    def _can_move(self, go: Match, last: ShownLease, left_s: float, terms: Terms) -> bool:
        """Whether the lease at the better offer can be paid for as soon as this one is closed, with a little to spare.

        Not where money is in a contract, which keeps the old deposit until the time to dispute is over; nor while
        others wait, who may come first.

        Raises:
            BadJob: --max-cost does not suffice.
        """
        pool = self.client.state("pool")
        if pool["rules"]["contract"] or int(pool.get("num_waiting", 0)):
            return False
        forwarding = most_forwarding(from_json(pool["rules"], on.Founded), terms)
        rate = last.rate_per_hour
        spare = required_deposit(pay_for(_SPARE_S, rate), last.check_fraction)
        _, paid_s = self._affordable([go], left_s, terms, spare + forwarding)
        if paid_s < go.metered_hours * 3600:
            return False
        offer = go.listed.offer
        stays = required_deposit(pay_for(last.running_s, rate), last.check_fraction) + spare
        deposit = max(
            required_deposit(pay_for(math.floor(paid_s), offer.price_per_hour), terms.most_checked),
            least_deposit(offer.min_s, offer.price_per_hour),
        )
        assert self.client.key is not None
        has = int(self.client.state("balances")["balances"].get(self.client.key.public, 0))
        return has + max(0, last.escrow - stays) >= deposit + forwarding

    def _better_offer(self, leases: list[ShownLease], terms: Terms) -> tuple[Match, Match] | None:
        """The rest of a run where it is, and at the offer that it should move to; None: it stays.

        Raises:
            StokerError, ValueError, ArithmeticError, LookupError, TypeError: what there is cannot be read.
        """
        last = leases[-1]
        listed, records = listed_offers(
            [  # the one that it runs on is taken
                {**one, "is_free": one["is_free"] or one["offer"]["offer_id"] == last.offer_id}
                for one in self.client.state("offers")
            ]
        )
        avoided = wrong_agents(leases) | resting_offers(leases[:-1], time.time()) | recently_lost(leases)
        here = next((one for one in listed if one.offer.offer_id == last.offer_id), None)
        others = [one for one in listed if one is not here and not {one.agent, one.offer.offer_id} & avoided]
        if here is None or not others:
            return None
        blob = self._file_of(last.commitments[-1])
        limits = TreeLimits(num_bytes=_MOST_HOME_BYTES)
        names = [one.path for one in read_index(blob, limits).entries if one.path.endswith(f"/{MANIFEST}")]
        if any(_ended_early(manifest_from(read_member(blob, name, limits) or b"")) for name in names):
            return None  # its results are on their way
        total = _total_updates(blob)
        runs = earlier_runs(leases, last.forecast.job)
        setups = [run.setup_s for each in runs.values() for run in each if run.setup_s is not None]
        fetch_s = max(0.0, last.heard_s - last.accepted_s - last.running_s)
        needs = replace(
            terms.needs,
            setup_s=max([*setups, Needs.setup_s]) + fetch_s,
            deadline_s=self.handle["until_s"] - time.time() if self.handle["until_s"] else None,
        )
        return best_move(
            replace(here, offer=replace(here.offer, price_per_hour=last.rate_per_hour)),
            others,
            records,
            lease=last,
            total_updates=total,
            needs=needs,
            runs=runs,
            now_s=time.time(),
        )

    def stop(self) -> None:
        """Close the newest lease, if it goes on, and open no other until the run is started again."""
        if (leases := self.leases()) and leases[-1].state in LIVE:
            close_lease(self.client, leases[-1], STOPPED, patience_s=20.0)

    def left_s(self, leases: list[ShownLease]) -> float:
        """Time of the run that no lease has used [s]."""
        used_s = sum(lease.counted_s for lease in self._of_start(leases) if not lease.outcome)
        return float(self.handle["limit_s"]) - used_s

    def _next(self, leases: list[ShownLease], why: str, preferred: str = "") -> LaunchState:
        """Open the next lease; at the offer `preferred`, if it is still free."""
        restarts = self._restarts(leases)
        if leases[-1].is_run_stopped:
            return seen_now(phase="stopped", why=f"stopped as asked, while it had no lease: {why}", restarts=restarts)
        if len(leases) >= MOST_LEASES:
            return seen_now(phase="failed", why=f"{len(leases)} leases ended without a result; the last: {why}")
        mine = self._of_start(leases)
        stuck = [lease.reason.startswith(SAVES_NOTHING) and not lease.commitments for lease in mine[-2:]]
        if len(stuck) == 2 and all(stuck):
            return seen_now(
                phase="failed",
                why=f"two agents in a row left: {why}; what takes so long without a checkpoint, such as an evaluation, "
                "cannot be checked: evaluate on fewer samples, or give --verify none",
            )
        if sum(lease.reason.startswith(SENT_OTHERWISE) for lease in mine[-2:]) == 2:
            return seen_now(
                phase="failed",
                why=f"two agents in a row make another message than the site has sent, from which the others have gone "
                f"on: {why}; start the run again with --new",
            )
        left_s = self.left_s(leases)
        if left_s < 1:  # leases are paid for whole seconds: what is left of a fraction pays for none
            limit = format_seconds(float(self.handle["limit_s"]))
            update = self.continued(self.order(leases[0]), leases).resume_update
            done = f"goes on after update {update:,}" if update else "begins again"
            return seen_now(
                phase="failed",
                why=f"the {limit} of the run are over: {why}; the same command {done}, for as long as its forecast or "
                "--time-limit says",
            )
        if self.handle["until_s"] and time.time() > self.handle["until_s"]:
            return seen_now(phase="failed", why=f"the deadline is over: {why}")
        poisoned = wrong_blocks(leases, self._resumes_from)
        avoided = wrong_agents(leases) | resting_offers(leases, time.time())
        avoided |= {
            lease.agent for lease in mine if lease.result and self._resumes_from(lease) not in poisoned
        }  # these were no results
        order = self.continued(self.order(leases[0]), leases)
        try:
            lease_id = self.open(order, len(leases), avoided, left_s, recently_lost(leases), preferred)
        except BadJob as problem:
            return seen_now(phase="failed", why=f"{why}; {problem.message}", restarts=restarts)
        except DiskFailed:
            raise  # of this machine: no other offer mends it
        except (PlaceFailed, Refused) as problem:
            keep_place(self.client, self.handle["job"], self.terms, self.handle["device"])
            return seen_now(
                phase="queued", why=f"{why}; waiting for another offer: {problem.message}", restarts=restarts
            )
        done = f" from update {order.resume_update:,}" if order.resume else " from the beginning"
        return seen_now(
            phase="requeued", why=f"{why}; goes on{done}", evidence=f"lease {lease_id}", restarts=restarts + 1
        )

    def order(self, lease: ShownLease) -> PoolOrder:
        """The order of a lease."""
        return read_order(self.blobs.whole(lease.order, MOST_ORDER_BYTES))

    def _resumes_from(self, lease: ShownLease) -> str:
        return self.order(lease).resume

    def continued(self, order: PoolOrder, leases: list[ShownLease]) -> PoolOrder:
        """The order, to go on from the last block of the same code that nothing speaks against."""
        poisoned = wrong_blocks(leases, self._resumes_from)
        fresh = replace(order, resume="", resume_seal="", resume_head="", resume_block=0, resume_update=0)
        for lease in reversed(leases):
            earlier = self.order(lease)
            if (earlier.tree, earlier.arguments) != (order.tree, order.arguments):
                break
            good = [one for one in lease.commitments if one.blob not in poisoned]
            if good:
                last = good[-1]
                return replace(
                    order,
                    resume=last.blob,
                    resume_seal=last.seal,
                    resume_head=last.state,
                    resume_block=last.block,
                    resume_update=last.update,
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
        terms = self.terms
        target = LaunchTarget(
            text="pool",
            kind="pool",
            address=self.handle["address"],
            device=self.handle["device"],
            devices_each=terms.num_devices,
        )
        offers = ranked_offers(self.client, target, terms, run_s=limit_s, avoided=avoided)
        if self.handle.get("gang"):  # its sites are of one class
            before = self.client.lease(f"{self.handle['job']}.{number - 1}").determinism_class
            offers = [one for one in offers if one.listed.offer.determinism_class == before]
        # Stable: otherwise as they were ranked.
        offers.sort(key=lambda one: (one.listed.agent in lost, one.listed.offer.offer_id != preferred))
        if not offers:
            raise PlaceFailed(
                "the pool has no free offer but those that failed, or are tried again later",
                remedy="`stoker pool offers` lists what there is.",
            )
        rules = self.client.rules()
        forwarding = most_forwarding(rules, terms)
        match, paid_s = self._affordable(offers, limit_s, terms, forwarding)
        if rules.contract:
            return self._open_at(match, paid_s, order, number, rules)
        refusals = list[Refused]()
        while True:
            try:
                return self._open_at(match, paid_s, order, number, rules)
            except Refused as refused:  # the deposit is not covered, it is the turn of others, or it is taken
                refusals.append(refused)
                offers = offers[offers.index(match) + 1 :]
                if is_passing(refused) or not offers or len(refusals) == _MOST_ASKED:
                    raise refusals[0] from None
            try:
                match, paid_s = self._affordable(offers, limit_s, terms, forwarding)
            except BadJob:
                raise refusals[0] from None

    def _open_at(
        self,
        match: Match,
        limit_s: float,
        order: PoolOrder,
        number: int,
        rules: on.Founded,
    ) -> str:
        """Open lease number `number` at an offer, for so long; its name."""
        offer, body = match.listed.offer, self.opening(match, limit_s, order, number)
        if self.client.peer is not None:
            self.client.peer.note_unfetched(order.tree, order.resume)
        if rules.contract:
            from stoker.pool.contract.custody import Custody  # noqa: PLC0415 - an extra of its own

            Custody.of_member(rules, self.client.address.key).open(self.client, body, offer)
        else:
            self.client.post(body, patience_s=20.0)
        return body.lease_id

    def opening(self, match: Match, limit_s: float, order: PoolOrder, number: int) -> on.Opened:
        """Lease number `number` at an offer, for so long, once its order is sent."""
        offer, lease_id, terms = match.listed.offer, f"{self.handle['job']}.{number}", self.terms
        rate, order = offer.price_per_hour, replace(order, num_devices=offer.device.count)
        raw_hours = 0.0 if order.resume else terms.raw_hours_of(match.listed)
        content = dumps(order, indent=None).encode()
        digest = self.blobs.put(content)
        credits_ = pay_for(math.floor(limit_s), rate)
        deposit = max(required_deposit(credits_, terms.most_checked), least_deposit(offer.min_s, rate))
        expected_s = limit_s
        if isinstance(forecast := terms.forecast_of(match.listed), RunForecast):
            expected_s = min(match.metered_hours * 3600 - forecast.done_s(order.resume_update), limit_s)
        return on.Opened(
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
            gang=str(self.handle.get("gang", "")),
            site=order.site,
            sites=order.sites,
        )

    def _affordable(self, offers: list[Match], limit_s: float, terms: Terms, spare: int = 0) -> tuple[Match, float]:
        """The best offer whose deposit is within what is left of the money, and the time that it pays for [s].

        `spare` micro-credits of it are not touched.

        Raises:
            BadJob: there is none on which the run would end.
        """
        most = self.handle["max_credits"]
        if most is None:
            return offers[0], min(limit_s, float(offers[0].listed.offer.max_s))
        mine = self._of_start(self.leases())
        left = max(0, int(most) - sum(lease.most_spent for lease in mine) - spare)
        for match in offers:
            listed = match.listed
            rate = max(1, listed.offer.price_per_hour)
            paid_s = left / (rate * (1 + terms.most_checked)) * 3600
            forecast = terms.forecast_of(listed)
            needed_s = 0.0 if forecast is None or isinstance(forecast, str) else forecast.run_s
            if paid_s >= max(1.0, min(needed_s, limit_s), float(listed.offer.min_s)):
                return match, min(limit_s, paid_s, float(listed.offer.max_s))
        raise short_of_credits(
            left, int(most), "no free offer finishes the run for that", most_forwarding(self.client.rules(), terms)
        )

    def _result_problem(self, lease: ShownLease) -> str:
        """Why the results of a lease cannot be relied on; "" if they hold the last state that was committed."""
        if not lease.check_fraction:
            return ""
        order, limits = self.order(lease), TreeLimits(num_bytes=_MOST_HOME_BYTES)
        commitments = lease.commitments
        if not commitments and not order.resume:
            return f"{lease.lease_id} committed to nothing"
        try:
            path = self.blobs.fetch(lease.result)
            index = read_index(path, limits)
            kept = read_index(self._resumed_file(order), limits).digests() if not commitments else {}
            for name in (one.path for one in index.entries if one.path.endswith(f"/{MANIFEST}")):
                manifest = manifest_from(read_member(path, name, limits) or b"")
                files = {file.name: file.sha256 for file in manifest.files}
                if same_files(index, files, name.removesuffix(f"/{MANIFEST}")):
                    continue
                if not commitments and kept.get(name) == index.digests()[name]:
                    return self._shortage(lease, manifest)  # all updates were made before this lease
                previous = commitments[-2].state if len(commitments) > 1 else order.resume_head
                head = chain_head(str(previous), manifest.position.updates, manifest.state_digest())
                if commitments and head == commitments[-1].state:
                    return self._shortage(lease, manifest)
        except (ValueError, TypeError, LookupError, ArithmeticError, BadRun) as problem:
            return f"the results of {lease.lease_id} cannot be read: {problem}"
        return f"the results of {lease.lease_id} are not what it committed to"

    def _shortage(self, lease: ShownLease, manifest: CheckpointManifest) -> str:
        """How many updates a last state lacks, as words; "" if none, or if the run was ended early.

        The job's length stands in the plan of each block, where replays hold it against the job: that of a block which
        was replayed is taken, if there is one. An early end is part of the state that was committed.
        """
        equal = [one.block for one in lease.challenges if one.judges is True]
        if blocks := lease.commitments:
            blob = self._file_of(blocks[max((block for block in equal if block < len(blocks)), default=-1)])
        else:
            blob = self._resumed_file(self.order(lease))
        total, updates = _total_updates(blob), manifest.position.updates
        if updates >= total or _ended_early(manifest):
            return ""
        return f"{lease.lease_id} ended at update {updates:,} of {total:,}"

    def _file_of(self, block: Commitment) -> Path:
        """The file with the checkpoint of a block, as a lease has it."""
        return self.blobs.fetch(block.blob, seal=block.seal)

    def _resumed_file(self, order: PoolOrder) -> Path:
        """The file with the checkpoint that an order goes on from."""
        return self.blobs.fetch(order.resume, seal=order.resume_seal)

    def _newest(self) -> Path | None:
        """The file with the newest state of the run: results, else the last block that nothing speaks against."""
        leases = self.leases()
        poisoned = wrong_blocks(leases, self._resumes_from)
        for lease in reversed(leases):
            blocks = [one for one in lease.commitments if one.blob not in poisoned]
            is_whole = len(blocks) == len(lease.commitments)
            if lease.result and is_whole and not lease.is_wrong and self._resumes_from(lease) not in poisoned:
                return self.blobs.fetch(lease.result)
            if blocks:
                return self._file_of(blocks[-1])
        return None

    def log(self) -> bytes:
        """The run's log, as far as it was committed."""
        path, limits = self._newest(), TreeLimits(num_bytes=_MOST_HOME_BYTES)
        if path is None:
            return b""
        with suppress(FileNotFoundError):  # another process that follows the run removes them as well
            for other in path.parent.iterdir():  # checkpoints of earlier calls; orders are small, and read each time
                if other != path and other.stat().st_size > _MOST_KEPT_BYTES:
                    other.unlink(missing_ok=True)
        return read_member(path, _LOG, limits, _MOST_LOG_BYTES) or b""

    def fetch(self, into: Path) -> None:
        """Write the newest state into `into`; each file is checked, and replaced at once."""
        newest = self._newest()
        if newest is None:
            return
        with disk_errors(into, "the results", error=DiskFailed):
            into.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=into))
            try:
                index = unpack(newest, aside / "run", TreeLimits(num_bytes=_MOST_HOME_BYTES))
                for entry in index.entries:
                    target = into / entry.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (aside / "run" / entry.path).replace(target)
            finally:
                shutil.rmtree(aside, ignore_errors=True)


def keep_place(client: PoolClient, job: str, terms: Terms, device: str) -> None:
    """Keep the run's place in the pool's queue, if it waits there; posted again before it lapses.

    A pool that does not take it, or does not answer, leaves the run waiting without a place.
    """
    if not terms.wait_s or time.monotonic() - _waited_s.get(job, -math.inf) < MOST_WAIT_S / 2:
        return
    body = on.Waiting(request_id=job, kinds=(device,) if device else (), until_s=time.time() + MOST_WAIT_S - _CLOCKS_S)
    with suppress(Refused, PlaceUnreachable):
        client.post(body)
        _waited_s[job] = time.monotonic()


def leave_place(client: PoolClient, job: str) -> None:
    """Give up the run's place, if this process keeps one."""
    if _waited_s.pop(job, None) is not None:
        with suppress(Refused, PlaceUnreachable):
            client.post(on.Waiting(request_id=job, until_s=time.time()))


_LIVE_WORDS: dict[str, tuple[LaunchPhase, str]] = {
    "funded": ("queued", "waiting for the agent to accept"),
    "running": ("running", "training"),
    "suspect": ("running", "the agent has been silent for a while"),
    "reclaiming": ("saving", "the owner takes the machine back: the run saves"),
}


def close_lease(client: PoolClient, lease: ShownLease, reason: str, patience_s: float = 0.0) -> None:
    """End a lease, unless it has just ended.

    Raises:
        PlaceUnreachable, Refused: the pool does not answer, or is busy: it may go on, and is paid for.
    """
    try:
        client.post(on.Closed(lease_id=lease.lease_id, reason=reason), patience_s=patience_s)
    except Refused as refused:
        if is_passing(refused):
            raise


def run_name(handle: Handle) -> str:
    """The name of a run as its renter stops it: that of its gang, for a site."""
    return str(handle.get("gang") or handle["job"])


def short_of_credits(left: int, most: int, why: str, forwarding: int) -> BadJob:
    """The error where --max-cost does not suffice.

    Args:
        left: what may still be spent on training [micro-credits].
        most: --max-cost [micro-credits].
        why: what does not fit into that.
        forwarding: of `most`, what is kept for the way of large files through the pool [micro-credits].
    """
    kept = f", since {forwarding / 1e6:g} are kept for forwarding large files" if forwarding else ""
    less = ", or --place-option forwarding" if forwarding else ""
    return BadJob(
        f"{left / 1e6:g} of {most / 1e6:g} credits are left{kept}, and {why}",
        remedy=f"Raise --max-cost, or lower --verify{less}: replays are paid as well.",
    )


def most_forwarding(rules: on.Founded, terms: Terms) -> int:
    """What large files of a lease may cost on the way through the pool, besides its deposit [micro-credits]."""
    return terms.most_forwarding if rules.forward_price else 0


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


def leases_of(client: PoolClient, job: str) -> list[ShownLease]:
    """The leases of a run, in order.

    Raises:
        PlaceFailed: one of them has another owner.
    """
    assert client.key is not None
    found: list[ShownLease] = []
    while len(found) < MOST_LEASES:
        try:
            lease = client.lease(f"{job}.{len(found)}")
        except Missing:
            break
        except Refused as refused:
            raise PlaceUnreachable(f"the pool does not show the leases of {job}: {refused.message}") from refused
        if lease.renter != client.key.public:
            raise PlaceFailed(
                f"the lease {lease.lease_id} is of another renter, {lease.renter[:12]}…",
                remedy="Give the run another name.",
            )
        found.append(lease)
    return found
