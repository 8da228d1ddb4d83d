"""What beats, hashes and the log take of a job's time: the same job alone in its box, and under a lease, in turns.

    python -m bench.pool.overhead

Both run `small_jobs.py` in bubblewrap on one core with a checkpoint each 18 s (three times as often as usual). Alone,
nobody looks at it. Under a lease an agent beats each 10 s, and hashes, packs and sends each checkpoint to a control
plane on the same machine, which checks, co-signs, stores and logs. Counted from the first checkpoint to the end of a
turn: CPU time of the agent, with its watch of the isolation, and of the control plane, as shares of a core; and the
time of an update by the job's own log, with and without. The bar is 1 % of a step's time, for what the agent does on
the owner's machine, at a checkpoint each 54 s; a second job, whose checkpoints are larger, tells what a byte costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.pool.local_pool import LocalPool, job_submission, local_pool, until
from bench.pool.result_file import write_result
from stoker.pool.blob_tree import TreeLimits
from stoker.pool.isolation import Bubblewrap, Host, IsolatedProcess, Limits
from stoker.pool.job_box import JobBox, read_order
from stoker.pool.leased_job import BlobCache
from stoker.pool.pool_launcher import LAUNCHER

CASES = {"small": {"kind": "cnn", "width": 64}, "large": {"kind": "mlp", "width": 65_536, "batch": 256}}
LIMITS = Limits(memory_bytes=3 << 30, cores=1, processes=512, disk_bytes=3 << 30, time_s=600)
MANY, BLOCK_S = 10**7, 20
USUAL_S = (54, 60)
"""Time between checkpoints without `--place-option block`, and before a tenth of it was left for sending [s]."""


def cpu_s(pid: int) -> float:
    """CPU time of one process, its children left out [s]."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def job_cpu_s(pids: list[int]) -> float:
    """CPU time of the processes of a job [s]."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += cpu_s(pid)
    return total


def events_below(folder: Path) -> list[dict[str, Any]]:
    """The log of the run in a folder."""
    found = []
    for path in folder.glob("**/events.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def steps_of(folder: Path, since_s: float, until_s: float) -> tuple[float, list[dict[str, Any]]]:
    """Time of an update between two moments by the job's own log [s], and the checkpoints between them."""
    events = [one for one in events_below(folder) if since_s <= one["at"] <= until_s]
    progress = [one for one in events if one["kind"] == "progress"]
    first, last = progress[0], progress[-1]
    step_s = (last["at"] - first["at"]) / (last["fields"]["updates"] - first["fields"]["updates"])
    return step_s, [one for one in events if one["kind"] == "checkpointed"]


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(word) for word in path.read_text().split()]
    return found


def turn(pool: LocalPool, case: str, number: int, seconds: float, *, is_leased: bool) -> dict[str, Any]:
    """Let a job run for a while; what it and its agent took."""
    settings = {"updates": MANY, "seed": number, **CASES[case]}
    submission = job_submission(f"{case}-{number}", settings, is_safe=True, block=f"{BLOCK_S}s", offer="box")
    handle = LAUNCHER.start(submission, lambda _: None)
    lease_id, agent = f"{handle['job']}.{handle['first']}", pool.processes["box"].pid
    alone: IsolatedProcess | None = None
    if is_leased:
        folder = pool.folder / "box" / "leases" / lease_id
    else:
        LAUNCHER.stop(handle)
        folder = pool.folder / f"alone-{case}-{number}"
        blobs = BlobCache(pool.renter, folder / "blobs")
        order = read_order(blobs.whole(pool.renter.lease(lease_id).order, 4 << 20))
        limits = TreeLimits(num_bytes=LIMITS.disk_bytes, has_links=True)
        box = JobBox.make(folder, order, blobs.fetch, limits)
        alone = Bubblewrap().start(box.training(Host(isolation=Bubblewrap(), limits=LIMITS)))
    until(lambda: any(one["kind"] == "checkpointed" for one in events_below(folder)), 120, "the first checkpoint")
    pids = descendants(agent)[1:] if alone is None else descendants(alone.pid)
    control = pool.processes["control"].pid
    began_s, before = time.time(), (job_cpu_s(pids), cpu_s(agent), cpu_s(control))
    time.sleep(seconds)
    ended_s, after = time.time(), (job_cpu_s(pids), cpu_s(agent), cpu_s(control))
    step_s, checkpoints = steps_of(folder, began_s, ended_s)
    job_s, agent_s, control_s = (two - one for one, two in zip(before, after, strict=True))
    row = {
        "case": case,
        "is_leased": is_leased,
        "seconds": ended_s - began_s,
        "step_s": step_s,
        "job_cpu_s": job_s,
        "agent_cpu_s": agent_s,
        "control_cpu_s": control_s,
        "checkpoints": len(checkpoints),
        "checkpoint_bytes": max((one["fields"]["bytes"] for one in checkpoints), default=0),
    }
    if alone is not None:
        alone.kill()
        alone.wait(30)
    else:
        LAUNCHER.stop(handle)
        until(lambda: not pool.job_processes("box"), 60, "the end of the job", lambda: pool.text("box"))
    print(json.dumps(row), flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of one core next to the job, and the ratio of step times."""
    leased, alone = ([row for row in rows if row["is_leased"] is kind] for kind in (True, False))
    seconds = sum(row["seconds"] for row in leased)
    share = {name: sum(row[f"{name}_cpu_s"] for row in leased) / seconds for name in ("agent", "control")}
    num = sum(row["checkpoints"] for row in leased)
    return {
        "checkpoint_bytes": max(row["checkpoint_bytes"] for row in rows),
        "checkpoints": num,
        "seconds_of_a_checkpoint": seconds / max(1, num),
        "step_ms_alone": 1e3 * statistics.median(row["step_s"] for row in alone),
        "step_ms_leased": 1e3 * statistics.median(row["step_s"] for row in leased),
        "step_time_ratio": statistics.median(row["step_s"] for row in leased)
        / statistics.median(row["step_s"] for row in alone),
        "job_cpu_share": sum(row["job_cpu_s"] for row in leased) / seconds,
        "agent_cpu_share": share["agent"],
        "control_cpu_share": share["control"],
    }


def main() -> None:
    """Run the turns, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--cases", nargs="*", default=list(CASES))
    options.add_argument("--turns", type=int, default=2, help="of each kind, of each job")
    options.add_argument("--seconds", type=float, default=41.0, help="of each turn")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    began = time.time()
    with local_pool() as pool:
        pool.lend("box", price=0.1, cores=1, beat_s=10.0, memory="3GiB", disk="3GiB", more=("--no-replay",))
        rows = [
            turn(pool, case, number, given.seconds, is_leased=number % 2 == 1)
            for case in given.cases
            for number in range(2 * given.turns)
        ]
    found = {case: summary([row for row in rows if row["case"] == case]) for case in given.cases}
    if len(found) == 2:  # two sizes of checkpoints tell what a second costs, and what a byte does
        small, large = found["small"], found["large"]
        per_byte = (
            (large["agent_cpu_share"] - small["agent_cpu_share"])
            * large["seconds_of_a_checkpoint"]
            / (large["checkpoint_bytes"] - small["checkpoint_bytes"])
        )
        for each in found.values():
            for every_s in USUAL_S:
                share = small["agent_cpu_share"] + per_byte * each["checkpoint_bytes"] / every_s
                each[f"agent_cpu_share_at_{every_s}_s"] = share
    values = {
        "took_s": time.time() - began,
        "bar": 0.01,
        "beat_s": 10.0,
        "block_s": BLOCK_S,
        "cases": found,
        "rows": rows,
    }
    write_result("overhead", __doc__, values, path=given.out)


if __name__ == "__main__":
    main()
