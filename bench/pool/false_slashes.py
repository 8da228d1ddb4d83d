"""Honest runs, replayed 10,000 times inside their determinism class: how often is one found unequal?

    python -m bench.pool.false_slashes --folder /dev/shm/pool

Runs: six kinds of model and update rule, each under the safe plan and under plans that the run tries, on one core and
on two, by agents of a pool on this machine in bubblewrap, under leases that commit several blocks a second. Of each run
the training process is killed (SIGKILL), or of every third one its agent: the run goes on in the same chain.
Then `check_block`, with which agents replay, makes them again, in a process of its own each time. One in three replays
is of a single block from the state that was committed before it; the others are of stretches of up to 20 blocks, whose
state is compared after each block on the way: a check is a block whose state was compared. Processes
are forked from one that has PyTorch loaded, so that 10,000 checks take half an hour rather than a night; every 100th is
also made as agents do it, in bubblewrap from a fresh Python. Turns alternate between all cores of this machine and one
of them, since their number is no part of the class. An honest agent is slashed only where replays are unequal: the bar
is that none of 10,000 is.

`--folder` keeps runs and counts, and the same command goes on from there after `--most-s`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import stoker.verifying.replay
from bench.pool.local_pool import LocalPool, job_submission, local_pool, until
from bench.pool.result_file import write_result
from stoker.errors import PlaceFailed
from stoker.pool.answers import read_lease
from stoker.pool.blob_tree import TreeLimits, read_index, read_member
from stoker.pool.commitment import Block, chain_head
from stoker.pool.isolation import Bubblewrap, Host, Limits, Program
from stoker.pool.job_box import JobBox, read_order
from stoker.pool.lease_replay import blocks_of
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.replay_check import FetchBlob, Making, check_block
from stoker.store.checkpoint_store import MANIFEST, manifest_from

KINDS = ("mlp", "cnn", "cnn_average", "lstm", "attention", "mlp_sgd")
LIMITS = Limits(memory_bytes=2 << 30, cores=2, processes=256, disk_bytes=1 << 30, time_s=300)
AGENTS = ("cores-1", "cores-2")
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
        os.environ.update(
            {
                **program.environment,
                "TMPDIR": os.environ.get("TMPDIR", tempfile.gettempdir()),
                "STOKER_CACHE": tempfile.mkdtemp(),
            }
        )
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
        _until_committed(pool, lease_id, 0.4 * settings["updates"], agent)
        if number % 3 == 2:
            pool.kill(agent)
            killed["agents"] += 1
            pool.lend(agent, price=0.1, cores=int(agent[-1]), beat_s=0.3, more=("--no-replay",))
        elif processes := pool.job_processes(agent):
            os.kill(processes[-1], 9)
            killed["jobs"] += 1
        until(
            lambda lease_id=lease_id: pool.renter.lease(lease_id).result,
            600,
            f"{name} does not end",
            lambda: pool.text(agent),
            every_s=0.5,
        )


def _is_free(pool: LocalPool, agent: str) -> bool:
    listed: Any = pool.renter.state("offers")
    return any(one["offer"]["offer_id"] == agent and one["is_free"] and one["is_present"] for one in listed)


def _until_committed(pool: LocalPool, lease_id: str, update: float, agent: str) -> None:
    def is_there() -> bool:
        lease = pool.renter.lease(lease_id)
        if lease.state not in LIVE and not lease.result:
            sys.exit(f"{lease_id} is {lease.state}: {lease.reason}\n{pool.text(agent)[-3000:]}")
        return bool(lease.result) or bool(lease.commitments and lease.commitments[-1].update >= update)

    until(is_there, 600, f"{lease_id} commits nothing", lambda: pool.text(agent), every_s=0.3)


@dataclass
class Checked:
    """A run that is replayed: its blocks, the digests of their states, and its box."""

    name: str
    blocks: list[Block]
    box: JobBox
    fetch: FetchBlob

    @classmethod
    def of(cls, lease: dict[str, Any], blobs: Path, folder: Path) -> Checked:
        """The run of a lease, whose blobs lie in a folder."""

        def fetch(digest: str, **_: str) -> Path:  # of agents that exchange nothing directly
            return blobs / digest

        order = read_order(fetch(str(lease["order"])).read_bytes())
        box = JobBox.make(
            folder / lease["lease_id"], order, fetch, TreeLimits(num_bytes=LIMITS.disk_bytes, has_links=True)
        )
        return cls(order.run, blocks_of(read_lease(lease), order), box, fetch)

    def state_of(self, block: Block) -> str:
        """Digest of the state that was committed, without the chain."""
        limits = TreeLimits(num_bytes=LIMITS.disk_bytes)
        index = read_index(self.fetch(block.blob), limits)
        name = next(one.path for one in index.entries if one.path.endswith(f"/{MANIFEST}"))
        return manifest_from(read_member(self.fetch(block.blob), name, limits) or b"").state_digest()

    def check(self, number: int, length: int, host: Host) -> tuple[Counter[str], str]:
        """Replay `length` blocks from block `number` on; how many states were equal or not, and the first reason."""
        before = self.blocks[number - 1] if number else None
        stretch = self.blocks[number : number + length]
        last, counts = stretch[-1], Counter[str]()
        if length > 1:  # one block, as it would be with fewer commitments
            previous = "" if before is None else before.state
            state = chain_head(previous, last.update, self.state_of(last))
            last = replace(last, block=number, previous=previous, state=state)
        try:
            making = Making(box=self.box, before=before, block=last, fetch=self.fetch, host=host, is_same_class=True)
            at = [block.update for block in stretch[:-1]]
            verdict = check_block(making, at)
        except PlaceFailed as problem:
            return Counter({"not made": length}), problem.message
        counts[{True: "equal", False: "unequal", None: "undecided"}[verdict.equal]] += 1
        for index, block in enumerate(stretch[:-1]):
            is_equal = bool(verdict.trace) and verdict.trace[index] == self.state_of(block)
            counts["equal" if is_equal else "unequal"] += 1
        return counts, verdict.why


def load_modules(run: Checked, host: WarmHost, folder: Path) -> None:
    """Load in this process what a replay loads, so that its forks have it."""
    os.environ["BENCH_MODULES"] = str(folder / "modules")
    said = run.check(1, 1, host)
    del os.environ["BENCH_MODULES"]
    if not said[0]["equal"]:
        sys.exit(f"the first replay: {said}")
    for name in (folder / "modules").read_text().split("\n"):
        with suppress(ImportError):  # of the job itself
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def make_all(folder: Path, kinds: list[str], updates: int) -> dict[str, Any]:
    """Make the runs; what is kept of them."""
    began, killed = time.time(), Counter[str]()
    runs = [
        (
            f"{kind.replace('_', '-')}-{'safe' if is_safe else 'tried'}",
            {"kind": kind, "updates": updates, "seed": number, "rows": 512},
            is_safe,
        )
        for number, (kind, is_safe) in enumerate(itertools.product(kinds, (True, False)))
    ]
    with local_pool(folder / "pool") as pool:
        for agent in AGENTS:
            pool.lend(agent, price=0.1, cores=int(agent[-1]), beat_s=0.3, more=("--no-replay",))
        makers = [
            threading.Thread(target=make_runs, args=(pool, agent, runs[index :: len(AGENTS)], killed))
            for index, agent in enumerate(AGENTS)
        ]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        leases = [lease for lease in pool.leases() if lease["result"]]
    if len(leases) != len(runs):
        sys.exit(f"{len(leases)} of {len(runs)} runs ended")
    return {
        "leases": leases,
        "killed": dict(killed),
        "made_s": time.time() - began,
        "done": 0,
        "counts": {},
        "by_run": {},
        "not_equal": [],
        "seconds": {},
        "replays": {},
    }


def schedule_of(runs: list[Checked]) -> Iterator[tuple[Checked, int, int, int]]:
    """Run, first block, number of blocks, and turn of each replay, for ever: single blocks and stretches in turns."""
    for turn in itertools.count():
        draw = random.Random(turn)
        places = []
        for run in runs:
            number = 0
            while number < len(run.blocks):
                length = 1 if draw.random() < 1 / 3 else draw.randint(10, 20)
                places.append((run, number, min(length, len(run.blocks) - number), turn))
                number += places[-1][2]
        draw.shuffle(places)
        yield from places


def check_all(kept: dict[str, Any], runs: list[Checked], folder: Path, given: argparse.Namespace) -> None:
    """Replay until enough was compared, or the time is over."""
    until_s, everywhere = time.monotonic() + given.most_s, frozenset(os.sched_getaffinity(0))
    warm = WarmHost(isolation=Bubblewrap(), limits=LIMITS, cores=everywhere)
    pinned = replace(warm, cores=frozenset([min(everywhere)]))
    fresh = Host(isolation=Bubblewrap(), limits=LIMITS)
    load_modules(runs[0], warm, folder)
    counts, seconds, replays = (Counter(kept[name]) for name in ("counts", "seconds", "replays"))
    by_run = {name: Counter(each) for name, each in kept["by_run"].items()}
    for run, number, length, turn in itertools.islice(schedule_of(runs), kept["done"], None):
        if counts["equal"] + counts["unequal"] >= given.checks or time.monotonic() > until_s:
            break
        hosts: list[tuple[str, Host]] = [("forked", pinned if turn % 2 else warm)]
        if kept["done"] % given.fresh_every == 0:
            hosts.append(("fresh", fresh))
        for kind, host in hosts:
            started = time.perf_counter()
            found, why = run.check(number, length, host)
            seconds[kind] += time.perf_counter() - started
            replays[f"{kind}, {'one block' if length == 1 else 'stretch'}"] += 1
            counts += found
            by_run.setdefault(run.name, Counter()).update(found)
            if set(found) != {"equal"}:
                kept["not_equal"].append(f"{run.name} block {number}, {length} blocks ({kind}): {dict(found)}, {why}")
                print(kept["not_equal"][-1], flush=True)
        kept["done"] += 1
        if kept["done"] % 100 == 0:
            print(kept["done"], dict(counts), flush=True)
    kept |= {"counts": counts, "seconds": seconds, "replays": replays, "by_run": by_run}


def main() -> None:
    """Make the runs, replay them, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True, help="on a file system that is quick to sync")
    options.add_argument("--checks", type=int, default=10_000)
    options.add_argument("--updates", type=int, default=600)
    options.add_argument("--kinds", nargs="*", default=list(KINDS))
    options.add_argument("--fresh-every", type=int, default=100)
    options.add_argument("--most-s", type=float, default=1e9)
    given = options.parse_args()
    given.folder.mkdir(exist_ok=True)
    given.folder.chmod(0o755)
    path = given.folder / "kept.json"
    if not path.exists():
        path.write_text(json.dumps(make_all(given.folder, given.kinds, given.updates)))
        print("the runs are made", flush=True)
    kept = json.loads(path.read_text())
    tempfile.tempdir = str(given.folder)
    runs = [Checked.of(lease, given.folder / "pool/control/blobs", given.folder) for lease in kept["leases"]]
    check_all(kept, runs, given.folder, given)
    path.write_text(json.dumps(kept))
    counts = kept["counts"]
    print(dict(counts))
    if counts["equal"] + counts["unequal"] < given.checks:
        sys.exit("the same command goes on")
    updates = sorted(two.update - one.update for run in runs for one, two in itertools.pairwise(run.blocks))
    values = {
        "torch": torch.__version__,
        "bar": {"unequal": 0, "checks": 10_000},
        "verdicts": dict(counts),
        "is_held": counts["equal"] >= 10_000 and not counts["unequal"],
        "upper_bound_of_false_slashes_95": None if counts["unequal"] else 3 / counts["equal"],
        "replays": kept["replays"],
        "seconds_of_a_replay": {
            kind: total / sum(num for name, num in kept["replays"].items() if name.startswith(kind))
            for kind, total in kept["seconds"].items()
        },
        "runs": {
            run.name: {"blocks": len(run.blocks), "updates": run.blocks[-1].update, **kept["by_run"].get(run.name, {})}
            for run in runs
        },
        "distinct_blocks": sum(len(run.blocks) for run in runs),
        "killed": kept["killed"],
        "updates_of_a_block": {"least": updates[0], "median": updates[len(updates) // 2], "most": updates[-1]},
        "not_equal": kept["not_equal"][:50],
    }
    write_result("false_slashes", __doc__, values)


if __name__ == "__main__":
    main()
