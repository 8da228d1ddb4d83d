"""Make a stretch of a run again that several processes made, in as many processes of this machine.

What: as `replay`, with a process for each rank of the run's layout. They meet on the loopback, and none goes on without
the others. Sums over ranks are in the order of the ranks, so that in one determinism class the checkpoint is equal, bit
for bit, to the one that the run itself saved.
Use when: a run of several devices of one machine is checked. Costs: the time of the stretch, and a start of all ranks
for each plan that the stretch was made under.
Does not do: runs that lost a rank and went on without it, which no launcher of fixed ranks lets happen; runs whose
replicas have updates of their own (`Job.sync`), whose messages hold times.

`python -m stoker.verifying.replay_ranks RUN_DIR JOB_FILE --ranks N --until UPDATES …` takes the options of
`stoker.verifying.replay`, and prints what that prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker.devices import attached_devices, resolve_place
from stoker.errors import BadRun
from stoker.jobs import Entry, Job
from stoker.planning.resolved_job import resolve_job
from stoker.profiling.ceilings import computing_threads
from stoker.records import CheckpointManifest, to_json
from stoker.records.codec import read_object
from stoker.records.plan_schedule import PlanSchedule
from stoker.stepping.world import leave
from stoker.store import CheckpointStore, RunDirectory
from stoker.training.elastic.worker import ElasticWorker
from stoker.training.plan_in_force import PlanInForce
from stoker.training.run import RunProcess
from stoker.training.signals import stop_on_signals
from stoker.verifying.replay import (
    NotTheRun,
    SavedStates,
    job_of,
    print_answer,
    require_at,
    require_same_run,
    updates_of,
)

_LOOPBACK = "127.0.0.1"


def stretches_of(schedule: PlanSchedule, begin: int, until: int) -> list[tuple[int, int]]:
    """First and last update of each part of a stretch that was made under one plan [updates].

    >>> from stoker.records import Plan
    >>> from stoker.records.plan_schedule import PlanSwitch
    >>> one = Plan(device="cpu", micro_batch=8)
    >>> switches = [PlanSwitch(update=n, samples=0, plan=one, kind="changed", why="") for n in (3, 5, 9)]
    >>> stretches_of(PlanSchedule(one, tuple(switches)), 3, 9)
    [(3, 5), (5, 9)]
    """
    cuts = [switch.update for switch in schedule.switches if begin < switch.update < until]
    return list(itertools.pairwise([begin, *cuts, until]))


def replay_in_ranks(
    directory: Path, words: Sequence[str], num_ranks: int, until: int, at: Collection[int] = ()
) -> dict[str, Any]:
    """Train the run in `directory` on to update `until` in `num_ranks` processes; what rank 0 answered.

    Args:
        directory: of a copy of the run.
        words: of the command line of a rank: directory, job file, settings.
        num_ranks: processes that the run was ordered with.
        until: number of updates after which the state is kept [updates].
        at: updates after which the digest of the state is answered as well [updates].

    Raises:
        NotTheRun: the run is further than `until`, or another number of processes made it.
        BadRun: it has no plan.
    """
    plans = PlanInForce.of(RunDirectory(directory))
    begin = CheckpointStore(RunDirectory(directory).checkpoints).newest_position().updates
    if begin >= until:
        raise NotTheRun(f"the run is at update {begin:,} and cannot be replayed to {until:,}")
    answer, states = dict[str, Any](), list[str]()
    for first, last in stretches_of(plans.schedule, begin, until):
        made_by = plans.schedule.at(first).layout.world_size
        if made_by != num_ranks:
            raise NotTheRun(f"updates from {first + 1:,} on have a plan for {made_by} processes, not {num_ranks}")
        part = [*words, "--begin", str(first), "--until", str(last), "--at", ",".join(map(str, at))]
        answer = _answer_of([sys.executable, "-m", "stoker.verifying.replay_ranks", *part], num_ranks)
        if "problem" in answer:
            return answer
        states += [state for update, state in answer["states"] if update in (*at, until)]
    return {**answer, "states": states}


def _answer_of(command: Sequence[str], num_ranks: int) -> dict[str, Any]:
    """The answer of rank 0, or the problem of the rank that had one, once all have ended."""
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        port = found.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    common |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    # All at once: a rank whose pipe is full waits, and others wait for it.
    with ThreadPoolExecutor(num_ranks) as threads:
        outputs = [*threads.map(lambda rank: rank.communicate()[0], ranks)]
    answers = [read_object(output.strip().rpartition(b"\n")[2]) for output in outputs]
    problems = [answer for answer in answers if "problem" in answer]
    problems.sort(key=lambda answer: answer.get("kind") != NotTheRun.__name__)
    failed = [process.returncode for process in ranks if process.returncode]
    if problems:
        return problems[0]
    if failed or "manifest" not in answers[0]:
        return {"problem": f"{len(failed)} of {num_ranks} ranks ended with {failed[:8]}", "kind": BadRun.__name__}
    return answers[0]


def replay_as_rank(
    job: Job, directory: RunDirectory, begin: int, until: int, *, entry: Entry | None = None, at: Collection[int] = ()
) -> tuple[CheckpointManifest, ...]:
    """This process's part of the stretch from update `begin` to `until`, which has one plan; rank 0's manifests.

    The state is saved after the updates `at`, and after `until`.

    Raises:
        NotTheRun: the run is of another job or another length.
        BadRun: it cannot be made on this machine.
        RunFailed: an update cannot be made, or another rank is gone.
    """
    prepared, member = resolve_job(job, entry), ElasticWorker.from_environment()
    assert member is not None, "started by `replay_in_ranks`"
    require_same_run(directory, prepared)
    plans = PlanInForce.of(directory)
    known = plans.schedule
    switches = (dataclasses.replace(switch, kind="changed", left_out=None) for switch in known.switches)
    plans.schedule = PlanSchedule(known.began, tuple(switch for switch in switches if switch.update <= begin))
    plans.take_over(plans.schedule.last)
    plan = plans.plan
    word = f"cuda:{member.worker}" if plan.device.startswith("cuda") else plan.device
    device = resolve_place(word, attached_devices())
    saved = SavedStates(CheckpointStore(directory.checkpoints, spec_digest=prepared.spec.digest()), {*at, until})
    process = RunProcess(prepared, directory, device, plans, [saved], member)
    with computing_threads(plan.intra_op_threads), stop_on_signals() as process.stop:
        session = process.begin(member.meet())
        session.loop.save_every_s = math.inf
        session.loop.saves_at, session.loop.until = frozenset(at), until
        reached = session.loop.run(session.position)
        leave()
    require_at(reached, until)
    return tuple(saved.manifests)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, as it runs in an isolation: nothing of it is for people."""
    parser = argparse.ArgumentParser(prog="python -m stoker.verifying.replay_ranks")
    parser.add_argument("directory", type=Path)
    parser.add_argument("job_file", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--begin", type=int, help="of a rank: where the stretch begins")
    parser.add_argument("--at", default="", help="updates after which the state is answered as well: 20,40")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args(arguments)
    directory, at = RunDirectory(options.directory), updates_of(options.at)

    def work() -> dict[str, Any]:
        if options.begin is None:
            words = [str(options.directory), str(options.job_file), "--ranks", str(options.ranks)]
            words += [word for setting in options.settings for word in ("--set", setting)]
            with directory.locked():
                return replay_in_ranks(options.directory, words, options.ranks, options.until, at)
        job, entry = job_of(options)
        manifests = replay_as_rank(job, directory, options.begin, options.until, entry=entry, at=at)
        answer = {"states": [[manifest.position.updates, manifest.state_digest()] for manifest in manifests]}
        return answer | ({"manifest": to_json(manifests[-1])} if manifests else {})

    return print_answer(work)


if __name__ == "__main__":
    sys.exit(main())
