"""Honest runs, replayed 10,000 times inside their determinism class: how often is one found unequal?

    python -m bench.pool.false_slashes

Runs: six kinds of model and update rule, each under the safe plan and under plans that the run tries, on one core and
on two, by agents of a pool on this machine in bubblewrap, under leases that commit several blocks a second. Of each run
the training process is killed (SIGKILL) twice, and of every third one the agent too: the run goes on in the same chain.
Then `check_block` makes every block again from the one before it, with the code that agents replay with, in a process
of its own each. Processes are forked from one that has PyTorch loaded, so that 10,000 take an hour rather than a night;
one of every 200 is also made as agents do it, in bubblewrap from a fresh Python. Blocks are replayed in turns with all
cores of this machine and pinned to one of them, since the number of cores is no part of the class. An honest agent is
slashed only where replays are unequal: the bar is that none of 10,000 is.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import stoker.verifying.replay
from bench.pool.local_pool import RESULTS, LocalPool, job_submission, local_pool, until
from stoker.errors import PlaceFailed
from stoker.pool.agent import blocks_of
from stoker.pool.blob_tree import TreeLimits
from stoker.pool.commitment import Block
from stoker.pool.isolation import Bubblewrap, Host, Limits, Program
from stoker.pool.job_box import JobBox, PoolOrder, read_order
from stoker.pool.leased_job import BlobCache
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.replay_check import check_block

KINDS = ("mlp", "cnn", "cnn_average", "lstm", "attention", "mlp_sgd")
LIMITS = Limits(memory_bytes=2 << 30, cores=2, processes=256, disk_bytes=1 << 30, time_s=300)
LIVE = ("funded", "running", "suspect", "reclaiming")


@dataclass(frozen=True)
class WarmHost(Host):
    """Runs a replay in a fork of this process, with the paths of the box; `cores`: that it may use."""

    cores: frozenset[int] = frozenset()

    def run(self, program: Program) -> tuple[int, bytes, bytes]:
        """Exit code, standard output and error."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if not pid:
                _replay(program, self.cores, out.fileno(), err.fileno())
            _, status = os.waitpid(pid, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _replay(program: Program, cores: frozenset[int], out: int, err: int) -> None:
    """In the fork: what the program would do in its box. Does not return."""
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.sched_setaffinity(0, cores)
        os.environ.update({**program.environment, "TMPDIR": os.environ.get("TMPDIR", tempfile.gettempdir()),
                           "STOKER_CACHE": tempfile.mkdtemp()})  # fmt: skip
        places = {**program.readable, **program.writable}

        def outside(word: str) -> str:
            inside = next((one for one in places if word == one or word.startswith(f"{one}/")), None)
            return word if inside is None else f"{places[inside]}{word.removeprefix(inside)}"

        os.chdir(outside(program.folder))
        sys.path.insert(0, outside(program.folder))
        code = stoker.verifying.replay.main([outside(word) for word in program.argv[3:]])
        if listing := os.environ.get("BENCH_MODULES"):
            Path(listing).write_text("\n".join(sys.modules))
    except BaseException:  # noqa: BLE001 - the parent reads it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def make_runs(pool: LocalPool, agent: str, runs: list[tuple[str, dict[str, Any], bool]], killed: Counter[str]) -> None:
    """Let an agent make honest runs, one after the other, and kill it and its jobs meanwhile."""
    for number, (name, settings, is_safe) in enumerate(runs):
        until(lambda: _is_free(pool, agent), 120, f"{agent} is not free", lambda: pool.text(agent))
        order = job_submission(name, settings, is_safe=is_safe, block="0.1s", offer=agent)
        handle = LAUNCHER.start(order, lambda _: None)
        lease_id = f"{handle['job']}.{handle['first']}"
        for share in (0.3, 0.6):
            _until_committed(pool, lease_id, share * settings["updates"], agent)
            if number % 3 == 2 and share > 0.5:
                pool.kill(agent)
                killed["agents"] += 1
                pool.lend(agent, price=0.1, cores=int(agent[-1]), beat_s=0.3, more=("--no-replay",))
            elif processes := pool.job_processes(agent):
                os.kill(processes[-1], 9)
                killed["jobs"] += 1
        until(lambda lease_id=lease_id: pool.renter.lease(lease_id)["result"], 600, f"{name} does not end",
              lambda: pool.text(agent), every_s=0.5)  # fmt: skip


def _is_free(pool: LocalPool, agent: str) -> bool:
    listed: Any = pool.renter.state("offers")
    return any(one["offer"]["offer_id"] == agent and one["is_free"] and one["is_present"] for one in listed)


def _until_committed(pool: LocalPool, lease_id: str, update: float, agent: str) -> None:
    def is_there() -> bool:
        lease = pool.renter.lease(lease_id)
        if lease["state"] not in LIVE and not lease["result"]:
            sys.exit(f"{lease_id} is {lease['state']}: {lease['reason']}\n{pool.text(agent)[-3000:]}")
        return bool(lease["result"]) or bool(lease["commitments"] and lease["commitments"][-1]["update"] >= update)

    until(is_there, 600, f"{lease_id} commits nothing", lambda: pool.text(agent), every_s=0.3)


@dataclass
class Checked:
    """A run that is replayed: its order, blocks, and box."""

    name: str
    order: PoolOrder
    blocks: list[Block]
    box: JobBox
    blobs: BlobCache

    def check(self, number: int, host: Host) -> Any:
        """The verdict on a block, and how long it took [s]."""
        started = time.perf_counter()
        before = self.blocks[number - 1] if number else None
        try:
            verdict = check_block(self.box, before, self.blocks[number], fetch=self.blobs.fetch, host=host,
                                  is_same_class=True)  # fmt: skip
            return {True: "equal", False: "unequal", None: "undecided"}[verdict.equal], verdict.why, started
        except PlaceFailed as problem:
            return "not made", problem.message, started


def runs_of(pool: LocalPool, folder: Path) -> Iterator[Checked]:
    """All runs of the pool's log, ready to be replayed."""
    for lease in pool.leases():
        blobs = BlobCache(pool.renter, folder / "blobs" / lease["lease_id"])
        order = read_order(blobs.whole(str(lease["order"]), 4 << 20))
        box = JobBox.make(folder / lease["lease_id"], order, blobs.fetch,
                          TreeLimits(num_bytes=LIMITS.disk_bytes, has_links=True))  # fmt: skip
        yield Checked(order.run, order, blocks_of(lease, order), box, blobs)


def load_modules(run: Checked, host: WarmHost, folder: Path) -> None:
    """Load in this process what a replay loads, so that its forks have it."""
    os.environ["BENCH_MODULES"] = str(folder / "modules")
    said = run.check(1, host)
    del os.environ["BENCH_MODULES"]
    if said[0] != "equal":
        sys.exit(f"the first replay: {said}")
    for name in (folder / "modules").read_text().split("\n"):
        with suppress(ImportError):  # of the job itself
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Make the runs, replay them, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--checks", type=int, default=10_000)
    options.add_argument("--updates", type=int, default=2000)
    options.add_argument("--kinds", nargs="*", default=KINDS)
    options.add_argument("--fresh-every", type=int, default=200)
    given = options.parse_args()
    began = time.time()
    names = [(f"{kind.replace('_', '-')}-{'safe' if is_safe else 'tried'}", {"kind": kind, "updates": given.updates,
              "seed": number}, is_safe)
             for number, (kind, is_safe) in enumerate(itertools.product(given.kinds, (True, False)))]  # fmt: skip
    killed, counts, by_run = Counter[str](), Counter[str](), dict[str, Counter[str]]()
    unequal: list[str] = []
    with local_pool() as pool:
        agents = ("cores-1", "cores-2")
        for agent in agents:
            pool.lend(agent, price=0.1, cores=int(agent[-1]), beat_s=0.3, more=("--no-replay",))
        makers = [threading.Thread(target=make_runs, args=(pool, agent, names[index::2], killed))
                  for index, agent in enumerate(agents)]  # fmt: skip
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        made_s = time.time() - began
        folder = pool.folder / "checks"
        runs = list(runs_of(pool, folder))
        print(f"{len(runs)} runs with {sum(len(run.blocks) for run in runs)} blocks in {made_s:.0f} s", flush=True)
        everywhere = frozenset(os.sched_getaffinity(0))
        warm = WarmHost(isolation=Bubblewrap(), limits=LIMITS, cores=everywhere)
        fresh = Host(isolation=Bubblewrap(), limits=LIMITS)
        load_modules(runs[0], warm, folder)
        took: dict[str, list[float]] = {"forked": [], "fresh": []}
        schedule = [(run, number) for run in runs for number in range(len(run.blocks))]
        done = 0
        for turn in itertools.count():
            pinned = replace(warm, cores=frozenset([min(everywhere)]))
            for run, number in schedule:
                hosts: list[tuple[str, Host]] = [("forked", pinned if turn % 2 else warm)]
                if done % given.fresh_every == 0:
                    hosts.append(("fresh", fresh))
                for kind, host in hosts:
                    verdict, why, started = run.check(number, host)
                    took[kind].append(time.perf_counter() - started)
                    counts[verdict] += 1
                    counts[f"{kind}, {verdict}"] += 1
                    by_run.setdefault(run.name, Counter())[verdict] += 1
                    if verdict != "equal":
                        unequal.append(f"{run.name} block {number} ({kind}): {why}")
                        print(unequal[-1], flush=True)
                done += 1
                if done % 250 == 0:
                    print(f"{done}: {dict(counts)}", flush=True)
                if done >= given.checks:
                    break
            if done >= given.checks:
                break
        updates = sorted(two.update - one.update for run in runs for one, two in itertools.pairwise(run.blocks))
    document = {
        "what": __doc__, "command": "python -m bench.pool.false_slashes " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(), "machine": platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__, "took_s": time.time() - began,
        "made_runs_s": made_s, "bar": {"unequal": 0, "checks": 10_000},
        "checks": sum(counts[one] for one in ("equal", "unequal", "undecided", "not made")), "verdicts": dict(counts),
        "is_held": counts["equal"] >= 10_000 and not counts["unequal"],
        "upper_bound_of_false_slashes_95": 3 / max(1, counts["equal"]) if not counts["unequal"] else None,
        "runs": {run.name: {"blocks": len(run.blocks), "updates": run.blocks[-1].update, **by_run.get(run.name, {})}
                 for run in runs},
        "distinct_blocks": len(schedule), "killed": dict(killed),
        "updates_of_a_block": {"least": updates[0], "median": updates[len(updates) // 2], "most": updates[-1]},
        "seconds_of_a_check": {kind: sum(each) / max(1, len(each)) for kind, each in took.items()},
        "not_equal": unequal[:50],
    }  # fmt: skip
    print(json.dumps({name: value for name, value in document.items() if name != "what"}, indent=1))
    path = RESULTS / f"pool_false_slashes_{document['date']}.json"
    if given.checks >= 10_000:
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
