"""One control plane for 10,000 agents and 1,000 jobs an hour: a discrete-event simulation, and what it costs for real.

    python -m bench.pool.scale

Simulated: the clock, agents (offers made again before they lapse, beats, commitments, silence when a machine is lost),
renters (jobs arrive as a Poisson process, take the offer that `rank_offers` puts first, and go on elsewhere when an
agent was lost). Real: the pool's state with all its rules, what the control plane does by itself (`watch.due`), hashes
and canonical JSON. Signatures and the log on the disk are left out of the simulation and measured separately, on this
machine; together they give the share of one core that the control plane would need, and so what breaks first.
Assumed: lives of machines are exponential, with rates drawn from a Gamma distribution (shape 0.7, mean 48 h); jobs take
half an hour on the median on an H100.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import platform
import random
import resource
import statistics
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.pool.market import NOW_S, RESULTS, make_market, rates
from stoker.pool import events as on
from stoker.pool.events import CREDIT, Body, Draft, Event, canonical, draft_of, kind_of, sha256
from stoker.pool.keys import Key
from stoker.pool.log import EventLog
from stoker.pool.matching import Columns, Needs, RunForecast, rank_offers
from stoker.pool.rules import apply
from stoker.pool.state import ListedOffer, State
from stoker.pool.watch import due
from stoker.records.codec import to_json

OFFER_LASTS_S, BEAT_S, COMMIT_S = 120.0, 10.0, 60.0
UNSIGNED = "0" * 128


class Simulation:
    """A pool in virtual time. The heap holds (when, number, what to do)."""

    def __init__(self, num_agents: int, jobs_per_hour: float, seed: int) -> None:
        self.draw = random.Random(seed)
        self.key, self.now_s = Key.made(), NOW_S
        self.state, self.counts = State(), Counter[str]()
        self.apply_s, self.due_s, self.match_s = 0.0, 0.0, list[float]()
        self.market = make_market(num_agents, self.draw)
        self.jobs_per_hour = jobs_per_hour
        self.heap: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.number = itertools.count()
        self.dead: set[str] = set()
        self.work: dict[str, tuple[float, float, int]] = {}
        self.moved_after_s: list[float] = []
        self.started = self.finished = self.unplaced = 0
        self.log_bytes = 0
        self.renter = sha256(b"renter")
        self.post(self.key.public, on.Founded(name="scale", is_open=True))
        self.post(self.key.public, on.Deposited(account=self.renter, amount=10**14))
        for index, listed in enumerate(self.market.columns.offers):
            self.at(self.draw.uniform(0, 100), self.offer, index, listed)
            self.at(self.draw.expovariate(self.market.hazard[index]) * 3600, self.lose, listed.agent)
        self.at(100.0, self.arrive)
        self.at(1.0, self.tick)

    def at(self, in_s: float, what: Any, *arguments: Any) -> None:
        """Do something after a while."""
        heapq.heappush(self.heap, (self.now_s + in_s, next(self.number), what, arguments))

    def post(self, actor: str, body: Body) -> None:
        """One event, timed."""
        draft = Draft(
            pool=self.key.public,
            actor=actor,
            kind=kind_of(body),
            body=to_json(body),
            time_s=self.now_s,
            nonce=f"{next(self.number):032x}",
            signature=UNSIGNED,
        )
        started = time.perf_counter()
        event = Event(seq=self.state.seq + 1, previous=self.state.head, received_s=self.now_s, draft=draft)
        apply(self.state, event)
        self.apply_s += time.perf_counter() - started
        self.counts[draft.kind] += 1
        if not self.state.seq % 100:  # a sample, since it takes as long as the event itself
            self.log_bytes += 100 * len(canonical(event.document()))

    def offer(self, index: int, listed: ListedOffer) -> None:
        """Make an offer, and again before it lapses."""
        if listed.agent not in self.dead:
            offer = to_json(listed.offer) | {"expires_s": self.now_s + OFFER_LASTS_S, "max_s": 10**6}
            self.post(listed.agent, on.Offered(offer=on.from_json(offer, on.Offer)))  # type: ignore[type-var]
            self.at(OFFER_LASTS_S - 20, self.offer, index, listed)

    def lose(self, agent: str) -> None:
        """A machine goes, and comes back after ten minutes as a new one would."""
        self.dead.add(agent)
        self.at(600.0, self.dead.discard, agent)

    def arrive(self) -> None:
        """A job, and the next one."""
        self.at(self.draw.expovariate(self.jobs_per_hour / 3600), self.arrive)
        self.started += 1
        hours = 0.5 * math.exp(self.draw.gauss(0, 0.8))
        self.place(f"job-{self.started}", 0, hours * 3600 * 400e12, self.now_s)

    def place(self, job: str, number: int, flop: float, since_s: float) -> None:
        """Take the best free offer for a job."""
        free = [one for one in self.state.offers.values() if one.is_free(self.now_s)]
        columns = Columns.of(free, self.state.records, self.now_s)
        needs = Needs(value_per_hour=CREDIT, sent_bytes=1e8)
        started = time.perf_counter()
        ranking = rank_offers(columns, needs, lambda kind: self.forecast(kind, flop), most=5)
        self.match_s.append(time.perf_counter() - started)
        if ranking.best is None:
            self.unplaced += 1
            self.at(30.0, self.place, job, number, flop, since_s)
            return
        best = ranking.best
        name, price = f"{job}.{number}", best.listed.offer.price_per_hour
        credits_ = math.ceil(best.metered_hours * price * 1.5) + price
        self.post(
            self.renter,
            on.Opened(
                lease_id=name,
                offer_id=best.listed.offer.offer_id,
                order=sha256(job.encode()),
                rate_per_hour=price,
                deposit=credits_,
                window_s=600,
                forecast=on.Forecast(hours=best.metered_hours, credits=credits_),
                delegate=self.key.public,
            ),
        )
        if best.listed.agent not in self.dead:
            self.post(best.listed.agent, on.Accepted(lease_id=name))
            if number:
                self.moved_after_s.append(self.now_s - since_s)
            self.work[name] = (self.forecast(best.listed.offer.device.kind, flop).run_s, flop, 0)
            self.at(BEAT_S, self.beat, name, best.listed.agent, 0)
        else:
            self.at(75.0, self.after, name, job, number, flop, since_s)

    def forecast(self, kind: str, flop: float) -> RunForecast:
        """By the printed rate of the device alone."""
        return RunForecast(run_s=flop / (0.4 * rates(self.market.entries[kind])[0]), spread=0.0)

    def beat(self, name: str, agent: str, index: int) -> None:
        """A beat, a commitment each minute, the end; or silence."""
        lease, (run_s, flop, blocks) = self.state.leases[name], self.work[name]
        job, number = name.rpartition(".")[0], int(name.rpartition(".")[2])
        if agent in self.dead:
            left = flop * (1 - blocks * COMMIT_S / run_s)
            self.at(5.0, self.after, name, job, number, max(left, flop * 0.01), self.now_s)
            return
        ran_s = int(self.now_s - lease.accepted_s)
        self.post(agent, on.Beat(lease_id=name, index=index, running_s=ran_s))
        if ran_s // COMMIT_S > blocks:
            state = sha256(f"{name}/{blocks}".encode())
            previous = lease.commitments[-1].state if lease.commitments else ""
            self.post(
                agent,
                on.Committed(
                    lease_id=name, block=blocks, update=blocks + 1, state=state, blob=state, previous=previous
                ),
            )
            self.work[name] = (run_s, flop, blocks + 1)
        if ran_s >= run_s:
            self.post(agent, on.Finished(lease_id=name, result=sha256(name.encode())))
            self.finished += 1
            del self.work[name]
        else:
            self.at(BEAT_S, self.beat, name, agent, index + 1)

    def after(self, name: str, job: str, number: int, flop: float, since_s: float) -> None:
        """Wait for the pool to end a lease, then place the rest of the job."""
        if self.state.leases[name].state in ("closed", "final"):
            self.work.pop(name, None)
            self.place(job, number + 1, flop, since_s)
        else:
            self.at(5.0, self.after, name, job, number, flop, since_s)

    def tick(self) -> None:
        """What the control plane signs by itself, each second."""
        started = time.perf_counter()
        bodies = due(self.state, self.now_s, key=self.key, up_since_s=NOW_S, present={})
        self.due_s += time.perf_counter() - started
        for body in bodies:
            self.post(self.key.public, body)
        self.at(1.0, self.tick)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end_s = NOW_S + seconds
        while self.heap[0][0] < end_s:
            self.now_s, _, what, arguments = heapq.heappop(self.heap)
            what(*arguments)
        self.state.accounts.require_conserved(is_thorough=True)


def beside(folder: Path) -> dict[str, float]:
    """Seconds of what the simulation leaves out, for one event: a signature checked, one made, appends to the log."""
    key, num = Key.made(), 1000
    drafts = [draft_of(on.Beat(lease_id="job", index=index, running_s=index), key, key.public) for index in range(num)]
    found: dict[str, float] = {}
    started = time.perf_counter()
    assert all(draft.is_signed() for draft in drafts)
    found["check"] = (time.perf_counter() - started) / num
    started = time.perf_counter()
    for draft in drafts:
        key.sign(draft.message())
    found["sign"] = (time.perf_counter() - started) / num
    for kind, body in (("beat", on.Beat(lease_id="j", index=0, running_s=0)), ("money", on.Accepted(lease_id="j"))):
        log = EventLog(folder / f"{kind}.db")
        events = [
            Event(seq=number + 1, previous="0" * 64, received_s=1.0, draft=draft_of(body, key, key.public))
            for number in range(num)
        ]
        started = time.perf_counter()
        for event in events:
            log.append(event)
        found[f"append {kind}"] = (time.perf_counter() - started) / num
        log.close()
    return found


def main() -> None:
    """Simulate, measure, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--agents", type=int, default=10_000)
    options.add_argument("--jobs-per-hour", type=float, default=1000.0)
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--folder", type=Path, default=Path.cwd(), help="where the log is measured: a real disk")
    given = options.parse_args()
    simulation = Simulation(given.agents, given.jobs_per_hour, given.seed)
    started = time.perf_counter()
    simulation.run(60 * given.minutes)
    took_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        each = beside(Path(folder))
    seconds = 60 * given.minutes
    counts, total = simulation.counts, sum(simulation.counts.values())
    signed = sum(counts[kind] for kind in ("cosigned", "suspected", "lost", "closed", "final", "anchored"))
    cheap = counts["beat"] + counts["offered"]
    share = {
        "rules and hashes": simulation.apply_s / seconds,
        "own decisions": simulation.due_s / seconds,
        "checking signatures": total * each["check"] / seconds,
        "signing (own events and receipts)": (signed + total) * each["sign"] / seconds,
        "log, synced with money": (total - cheap) * each["append money"] / seconds
        + cheap * each["append beat"] / seconds,
    }
    offers = [{**to_json(one), "is_free": True} for one in simulation.state.offers.values()]
    started = time.perf_counter()
    size = len(orjson.dumps(offers))
    offers_s = time.perf_counter() - started
    moved = simulation.moved_after_s
    document = {
        "what": __doc__,
        "command": "python -m bench.pool.scale",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "agents": given.agents,
        "jobs_per_hour": given.jobs_per_hour,
        "virtual_minutes": given.minutes,
        "took_s": took_s,
        "events": dict(counts),
        "events_per_s": total / seconds,
        "seconds_per_event": each,
        "share_of_a_core": share,
        "share_of_a_core_in_all": sum(share.values()),
        "jobs": {
            "started": simulation.started,
            "finished": simulation.finished,
            "waited_for_an_offer": simulation.unplaced,
            "lost_leases": counts["lost"],
            "moved": len(moved),
            "live": len(simulation.work),
            "moved_after_s_median": statistics.median(moved) if moved else None,
            "moved_after_s_worst": max(moved, default=None),
        },
        "match_s": {"median": statistics.median(simulation.match_s), "worst": max(simulation.match_s)},
        "list_of_offers": {"bytes": size, "seconds": offers_s},
        "bytes_of_log_per_day": 86400 / seconds * simulation.log_bytes,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps({name: value for name, value in document.items() if name != "what"}, indent=1))
    path = RESULTS / f"pool_scale_{document['date']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
