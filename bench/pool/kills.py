"""What is lost when providers are killed, and when the control plane is: 20 times each, with real training.

    for phase in providers plane judge; do python -m bench.pool.kills --folder /dev/shm/kills --phase $phase; done

Five jobs (`small_jobs.py`, under the safe plan) are rented through the launcher of `stoker train --on pool`, and again
and again the agent that runs one is taken away: SIGKILL, SIGSTOP (of its job too, as of a machine that sleeps), or a
cut network (what it sends reaches nobody, and the job goes on for nothing). After its lease was given up it comes back.
Measured of each kill: the time until the job trains again elsewhere (bar: 120 s), and where it goes: the lease is given
up, the next one opened and accepted, the job's process begins; the time between the moment that it is resumed from and
the kill, in times between its checkpoints (bar: one) and in the blocks that were asked for (bar: one); and the seconds
that the lost lease is paid beyond the kill (bar: the two of slack that the meter has against clocks). Then the same
orders run on agents that nobody kills, while the control plane is killed by SIGKILL 20 times at random moments and
started again: no job may be lost, no lease end, and an audit of the log must find every credit. Final weights of both
must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.pool.local_pool import LocalPool, job_submission, local_pool, until
from bench.pool.result_file import write_result
from stoker.errors import StokerError
from stoker.pool.blob_tree import TreeLimits, unpack
from stoker.pool.events import Refused
from stoker.pool.log import audit
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.state import State
from stoker.records import ENDED
from stoker.records.codec import to_json

LOOK_S = 2.0
WAYS = ("SIGKILL", "SIGSTOP", "network")
BLOCK = "10s"


class Follower(threading.Thread):
    """A renter that asks for the state of its run, as `stoker train` does, and so opens the next lease where it is due.

    Attributes:
        phase, why: of the run; `restarts`: how often it went on elsewhere.
    """

    def __init__(self, handle: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.handle, self.phase, self.why, self.restarts = handle, "", "", 0
        self.start()

    def run(self) -> None:
        """Ask until the run has ended."""
        while self.phase not in ENDED:
            try:
                found = LAUNCHER.state(self.handle)
                self.phase, self.why, self.restarts = found.phase, found.why, found.restarts
            except StokerError as problem:
                self.why = problem.message
            time.sleep(LOOK_S)


def take_away(pool: LocalPool, name: str, way: str) -> None:
    """Let an agent vanish."""
    if way == "network":
        pool.links[name].is_cut = True
    elif way == "SIGSTOP":
        for pid in (pool.processes[name].pid, *pool.job_processes(name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    else:
        pool.kill(name)


def bring_back(pool: LocalPool, name: str, way: str, cores: float) -> None:
    """Let it return, as its owner would."""
    if way == "network":
        pool.links[name].is_cut = False
    elif way == "SIGSTOP":
        for pid in (*pool.job_processes(name), pool.processes[name].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    else:
        pool.lend(name, price=0.1, cores=cores, more=("--no-replay",))


def leases_of(pool: LocalPool, handle: dict[str, Any]) -> list[dict[str, Any]]:
    """The leases of a run, in order."""
    found: list[dict[str, Any]] = []
    with suppress(Refused):
        while True:
            found.append(to_json(pool.renter.lease(f"{handle['job']}.{len(found)}")))
    return found


def events_of(pool: LocalPool, lease: dict[str, Any]) -> list[dict[str, Any]]:
    """The log of a lease's job, as it lies at its agent."""
    found = []
    for path in (pool.folder / str(lease["offer_id"]) / "leases" / str(lease["lease_id"])).glob("runs/*/events.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def last_of(events: list[dict[str, Any]], kind: str, since_s: float = 0.0) -> dict[str, Any] | None:
    """The newest event of a kind, not before a time."""
    return next((one for one in reversed(events) if one["kind"] == kind and one["at"] >= since_s), None)


def began_s_of(events: list[dict[str, Any]], since_s: float) -> float:
    """When the job's process began to write its log after a time [s since 1970]."""
    return min(one["at"] for one in events if one["at"] >= since_s)


def kill_again_and_again(
    pool: LocalPool, follower: Follower, kills: list[str], cores: float, draw: random.Random, rows: list[dict[str, Any]]
) -> None:
    """Take the agent of a run away in each of these ways, and measure what it costs the run."""
    for way in kills:
        lease: dict[str, Any] = {}

        def has_trained(lease: dict[str, Any] = lease) -> bool:
            lease.clear()
            lease.update(leases_of(pool, follower.handle)[-1])
            return follower.phase in ENDED or (lease["state"] == "running" and len(lease["commitments"]) >= 2)

        until(has_trained, 300, f"{follower.handle['job']} commits nothing: {follower.why}", every_s=0.5)
        if follower.phase in ENDED:
            return
        time.sleep(draw.uniform(0, float(BLOCK.removesuffix("s"))))
        lease.update(leases_of(pool, follower.handle)[-1])
        killed_s, name = time.time(), str(lease["offer_id"])
        before = events_of(pool, lease)
        take_away(pool, name, way)
        again: list[dict[str, Any]] = []

        def is_again(again: list[dict[str, Any]] = again, since_s: float = killed_s, old: Any = lease) -> bool:
            again[:] = leases_of(pool, follower.handle)
            return (
                again[-1]["lease_id"] != old["lease_id"]
                and last_of(events_of(pool, again[-1]), "resumed", since_s) is not None
            )

        until(is_again, 400, f"{follower.handle['job']} does not go on: {follower.why}", every_s=0.3)
        resumed = last_of(events_of(pool, again[-1]), "resumed", killed_s)
        assert resumed is not None
        lost = next(one for one in again if one["lease_id"] == lease["lease_id"])
        saved = [one for one in before if one["kind"] == "checkpointed"]
        at_s = next(
            (one["at"] for one in reversed(saved) if one["fields"]["samples"] == resumed["fields"]["samples"]), 0.0
        )
        gaps = [two["at"] - one["at"] for one, two in itertools.pairwise(saved)][-5:]
        bring_back(pool, name, way, cores)
        time.sleep(5)  # a beat of who comes back, which is refused
        after = to_json(pool.renter.lease(str(lease["lease_id"])))
        rows.append(
            {
                "run": follower.handle["job"],
                "way": way,
                "agent": name,
                "lease": lease["lease_id"],
                "reason": lost["reason"],
                "lost_after_s": lost["closed_s"] - killed_s,
                "resumed_after_s": resumed["at"] - killed_s,
                "leases_tried": len(again) - again.index(lost) - 1,
                "opened_after_s": again[-1]["opened_s"] - killed_s,
                "accepted_after_s": again[-1]["accepted_s"] - killed_s,
                "began_after_s": began_s_of(events_of(pool, again[-1]), killed_s) - killed_s,
                "work_lost_s": killed_s - at_s,
                "checkpoint_interval_s": statistics.median(gaps) if gaps else None,
                "paid_s": after["paid_s"],
                "ran_until_killed_s": killed_s - after["accepted_s"],
                "paid_beyond_s": after["paid_s"] - (killed_s - after["accepted_s"]),
                "paid_more_after_return_s": after["paid_s"] - lost["paid_s"],
            }
        )
        print(json.dumps(rows[-1]), flush=True)


def start_all(tag: str, given: argparse.Namespace) -> list[Follower]:
    """Rent for each of the jobs."""
    return [
        Follower(
            dict(
                LAUNCHER.start(
                    job_submission(
                        f"{kind.replace('_', '-')}-{tag}",
                        {"kind": kind, "updates": updates, "seed": 7},
                        is_safe=True,
                        block=BLOCK,
                    ),
                    lambda _: None,
                )
            )
        )
        for kind, updates in zip(given.kinds, given.updates, strict=True)
    ]


def kill_providers(pool: LocalPool, given: argparse.Namespace, draw: random.Random) -> list[dict[str, Any]]:
    """Kill agents under the jobs until each job has had its share; what that cost."""
    rows: list[dict[str, Any]] = []
    followers = start_all("killed", given)
    threads = [
        threading.Thread(
            target=kill_again_and_again,
            args=(
                pool,
                follower,
                [WAYS[(number + index) % len(WAYS)] for index in range(given.kills)],
                given.cores,
                random.Random(draw.random()),
                rows,
            ),
        )
        for number, follower in enumerate(followers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end(followers)
    return rows


def kill_control_plane(pool: LocalPool, given: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Kill the control plane while the same orders run; how it went."""
    followers = start_all("plane", given)
    until(lambda: all(one.phase == "running" for one in followers), 200, "the jobs do not start")
    waits = [draw.uniform(0.2, given.plane_wait) for _ in range(given.plane_kills)]
    for wait_s in waits:
        time.sleep(wait_s)
        pool.kill("control")
        pool.serve()
    live = sum(one.phase not in ENDED for one in followers)
    end(followers)
    leases = [len(leases_of(pool, one.handle)) for one in followers]
    return {"kills": len(waits), "seconds_between": waits, "jobs_live_after_the_last": live, "leases": leases}


def end(followers: list[Follower]) -> None:
    """Wait for the end of runs."""
    for follower in followers:
        until(
            lambda one=follower: one.phase in ENDED,
            900,
            f"the end of {follower.handle['job']}",
            lambda one=follower: f"{one.phase}, {one.why}",
            every_s=1,
        )


def weights_of(pool: LocalPool, tag: str, given: argparse.Namespace) -> dict[str, str]:
    """Phase, and SHA-256 of the final weights as they come home, of the runs of a tag."""
    found = {}
    for kind in given.kinds:
        (lease,) = [
            one for one in pool.leases() if f"-{kind.replace('_', '-')}-{tag}-" in one["lease_id"] and one["result"]
        ]
        folder = pool.folder / "home" / lease["lease_id"]
        folder.mkdir(parents=True)
        limits = TreeLimits(num_bytes=1 << 30)
        unpack(pool.folder / "control" / "blobs" / lease["result"], folder / "run", limits)
        found[kind] = hashlib.sha256((folder / "run" / "model.safetensors").read_bytes()).hexdigest()
    return found


def judge(kept: dict[str, Any], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Hold what was measured against the bars; those of the control plane where that was killed as well."""
    state, rows, plane, weights = State(), kept["rows"], kept.get("plane"), kept["weights"]
    found = audit(folder / "pool" / "control" / "log.db", state=state)
    balances = sum(state.accounts.balances.values())
    intervals = [row["work_lost_s"] / row["checkpoint_interval_s"] for row in rows]
    blocks = [row["work_lost_s"] / float(BLOCK.removesuffix("s")) for row in rows]
    resumed = [row["resumed_after_s"] for row in rows]
    return {
        "resumed_after_s": {"median": statistics.median(resumed), "worst": max(resumed)},
        "intervals_lost": {"median": statistics.median(intervals), "worst": max(intervals)},
        "blocks_lost": {"median": statistics.median(blocks), "worst": max(blocks)},
        "paid_beyond_the_kill_s": {"worst": max(row["paid_beyond_s"] for row in rows)},
        "events": found.num_events,
        "audit": found.problem,
        "deposited": state.accounts.deposited,
        "balances": balances,
        "bars": {
            "20 kills of providers": len(rows) >= 20,
            "resumed within 120 s": max(resumed) < 120,
            "at most one checkpoint interval lost": max(intervals) <= 1,
            "at most the block that was asked for lost": max(blocks) <= 1,
            "meter stopped": all(row["paid_beyond_s"] <= 2 and not row["paid_more_after_return_s"] for row in rows),
            "no job lost": all(len(each) == len(given.kinds) for each in weights.values()),
            "the log is right, and every credit is there": not found.problem and balances == state.accounts.deposited,
            **(
                {}
                if plane is None
                else {
                    "20 kills of the control plane": plane["kills"] >= 20,
                    "weights bit-equal": weights["killed"] == weights["plane"],
                    "no lease ended by a kill of the control plane": all(number == 1 for number in plane["leases"]),
                }
            ),
        },
    }


def main() -> None:
    """Kill, measure, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True, help="of the pool; the phases follow each other in it")
    options.add_argument("--phase", choices=["providers", "plane", "judge"], required=True)
    options.add_argument("--kinds", nargs="*", default=["mlp", "lstm", "attention", "cnn", "mlp_sgd"])
    options.add_argument("--updates", nargs="*", type=int, default=[60_000, 6_000, 6_000, 20_000, 60_000])
    options.add_argument("--kills", type=int, default=4, help="of providers, of each job")
    options.add_argument("--plane-kills", type=int, default=20)
    options.add_argument("--plane-wait", type=float, default=6.0, help="longest time between two of them [s]")
    options.add_argument("--cores", type=float, default=0.4)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    given.folder.mkdir(exist_ok=True)
    given.folder.chmod(0o755)
    path = given.folder / "kept.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": [], "weights": {}}
    if given.phase != "judge":
        with local_pool(given.folder / "pool") as pool:
            for number in range(len(given.kinds) + 2):
                pool.lend(f"box-{number}", price=0.1, cores=given.cores, more=("--no-replay",))
            if given.phase == "providers":
                kept["rows"] += kill_providers(pool, given, random.Random(given.seed))
                kept["weights"]["killed"] = weights_of(pool, "killed", given)
            else:
                kept["plane"] = kill_control_plane(pool, given, random.Random(given.seed))
                kept["weights"]["plane"] = weights_of(pool, "plane", given)
        path.write_text(json.dumps(kept))
        return
    values = {
        "block": BLOCK,
        "beat_s": 2.0,
        "share_of_a_core_each": given.cores,
        "jobs": dict(zip(given.kinds, given.updates, strict=True)),
        **judge(kept, given, given.folder),
        **kept,
    }
    words = f"--kinds {' '.join(given.kinds)} --updates {' '.join(map(str, given.updates))} --kills {given.kills}"
    phases = "providers; … plane; … judge" if "plane" in kept else "providers; … judge"
    write_result("kills", __doc__, values, arguments=f"--folder F {words} --phase {phases}")


if __name__ == "__main__":
    main()
