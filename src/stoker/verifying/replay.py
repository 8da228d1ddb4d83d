"""Make a stretch of a run again, from one of its checkpoints to a later update, and keep the state it comes to.

What: the run's own loop, under the run's own schedule of plans, from the newest checkpoint of its directory (or from
the beginning, where there is none) to update number `until`, where it saves. In one determinism class the checkpoint
is equal, bit for bit, to the one that the run itself saved there: times are all that may differ.
Use when: another party claims to have made these updates. Costs: the time of the stretch, and a start.
A site that exchanges messages through a folder is made again from those that it got; it writes its own there.
Does not do: several processes (`replay_ranks`); runs whose length is given in seconds, since no other machine can know
it.

`python -m stoker.verifying.replay RUN_DIR JOB_FILE --until UPDATES [--at UPDATES,…] [--set NAME=VALUE …]` prints one
JSON object: the manifest of the checkpoint, and digests of the states after the updates `--at`, and after the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from stoker.devices import attached_devices
from stoker.errors import BadJob, BadRun, StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.profiling.ceilings import computing_threads
from stoker.records import ONE_PROCESS, CheckpointManifest, Event, Position, to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.stepping.message_folder import BadMessage, MessageFolder, parse_site
from stoker.stepping.world import ALONE, World
from stoker.store import CheckpointStore, RunDirectory
from stoker.training.plan_in_force import PlanInForce, Replanned
from stoker.training.session import build_session
from stoker.training.signals import stop_on_signals
from stoker.training.threads import Machine, ThreadKeeper

_EVERY_CORE = 1 << 20
"""More cores than there are: a replay computes with the threads of the run, however few cores it has."""


class NotTheRun(BadRun):
    """The claim cannot come from the job, on any machine."""


def replay(
    job: Job,
    directory: RunDirectory,
    until: int,
    *,
    entry: Entry | None = None,
    at: Collection[int] = (),
    site: tuple[int, int] | None = None,
    messages: Path | None = None,
) -> tuple[CheckpointManifest, ...]:
    """Train the run in `directory` on to update `until`, and save there; the manifests after `at` and `until`.

    The directory is a copy: a checkpoint is added to it, and checkpoints before it go as in any run.

    Args:
        job: the run's job.
        directory: with its records and the checkpoint to begin at, if there is one.
        until: number of updates after which the state is kept [updates].
        entry: the job file.
        at: numbers of updates after which the state is saved as well [updates].
        site: which site of how many the run is, from 0, where it exchanged messages through a folder.
        messages: folder with the messages that it got; its own are written there.

    Raises:
        NotTheRun: the run is of another job or another length, has several processes, is further than `until`, or
            goes on from a message that is none.
        BadRun: it cannot be made on this machine.
        BadJob: the length of the job is not known elsewhere.
        RunFailed: an update cannot be made.
    """
    prepared = resolve_job(job, entry)
    plans = _schedule_of(directory, prepared, until)
    plan = plans.schedule.at(0)
    device = next((one for one in attached_devices() if one.torch_name == plan.device), None)
    if device is None:
        raise BadRun(f"the run was made on {plan.device}, which this machine does not have")
    saved = SavedStates(CheckpointStore(directory.checkpoints, spec_digest=prepared.spec.digest()), {*at, until})

    world = ALONE
    if site is not None and messages is not None:  # all that it waited for is there
        world = World(messages=MessageFolder(messages, *site, job=prepared.spec.digest(), patience_s=0.0))

    def refuse(change: Replanned) -> None:
        raise BadRun(f"the plan of the run does not hold here: {change.why}")

    with directory.locked(), computing_threads(plan.intra_op_threads), stop_on_signals() as stop:
        session = build_session(
            prepared, directory, device, plans=plans, sink=saved, stop=stop, replanned=refuse, world=world
        )
        if session.position.updates >= until:
            raise NotTheRun(f"the run is at update {session.position.updates:,} and cannot be replayed to {until:,}")
        session.loop.threads = ThreadKeeper(
            lambda: plans.plan,
            session.loop.telemetry.emit,
            usual_samples_per_s=0.0,
            is_free=False,
            machine=Machine(granted=lambda: _EVERY_CORE),
        )
        session.loop.save_every_s = math.inf
        session.loop.saves_at, session.loop.until = frozenset(at), until
        session.loop.on_update = lambda _: None  # updates are made one by one, so that each of `at` can be saved
        try:
            reached = session.loop.run(session.position)
        except BadMessage as problem:  # the folder is complete: no machine has gone on from there
            raise NotTheRun(problem.message) from problem
    require_at(reached, until)
    return tuple(saved.manifests)


class SavedStates:
    """A sink that notes the manifests of the checkpoints after some updates; the best so far is saved as well."""

    def __init__(self, store: CheckpointStore, updates: Collection[int]) -> None:
        self._store, self._updates = store, updates
        self.manifests: list[CheckpointManifest] = []

    def __call__(self, event: Event) -> None:
        """Note the manifest, if the event is of such a checkpoint."""
        if event.kind == "checkpointed":
            manifest = self._store.named(Path(str(event.fields["path"])).name)[1]
            if manifest.position.updates in self._updates:
                self.manifests.append(manifest)


def _schedule_of(directory: RunDirectory, prepared: ResolvedJob, until: int) -> PlanInForce:
    """The plans of the run up to update `until`, none of which is tried again: only what they were is repeated."""
    require_same_run(directory, prepared)
    plans = PlanInForce.of(directory)
    schedule = plans.schedule
    switches = tuple(
        dataclasses.replace(switch, kind="changed", left_out=None)
        for switch in schedule.switches
        if switch.update < until
    )
    plans.schedule = PlanSchedule(schedule.began, switches)
    if any(plan.layout != ONE_PROCESS for plan in (schedule.began, *(switch.plan for switch in switches))):
        raise NotTheRun("the run has several processes, and a replay has one")
    return plans


def require_same_run(directory: RunDirectory, prepared: ResolvedJob) -> None:
    """Refuse the records of another job, and a length that is not the job's: the schedule depends on it."""
    run, decision, job = directory.read_run(), directory.read_decision(), prepared.job
    if run.spec_digest != prepared.spec.digest():
        differences = "; ".join(directory.read_spec().differences(prepared.spec)[:4])
        raise NotTheRun(f"the run is of another job: {differences or run.spec_digest[:12]}")
    if job.until.unit == "seconds":
        raise BadJob(
            "the job's length is given in seconds, and how many updates these are depends on the machine",
            remedy="Give until=… in epochs, samples or updates.",
        )
    expected = prepared.extent.updates_in(job.until)
    stated = 0 if decision is None else decision.chosen.forecast.total_updates
    if stated != expected:
        raise NotTheRun(f"the run is planned for {stated:,} updates, and the job has {expected:,}")


def require_at(reached: Position, until: int) -> None:
    """Refuse a replay that ended elsewhere than at update `until`."""
    if reached.updates != until:
        raise NotTheRun(f"the replay ended at update {reached.updates:,}, and {until:,} were claimed")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, as it runs in an isolation: nothing of it is for people."""
    parser = argparse.ArgumentParser(prog="python -m stoker.verifying.replay")
    parser.add_argument("directory", type=Path)
    parser.add_argument("job_file", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--at", default="")
    parser.add_argument("--site", default="")
    parser.add_argument("--exchange", type=Path)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args(arguments)

    def work() -> dict[str, Any]:
        job, entry = job_of(options)
        site = parse_site(options.site) if options.site else None
        run, at = RunDirectory(options.directory), updates_of(options.at)
        manifests = replay(job, run, options.until, entry=entry, at=at, site=site, messages=options.exchange)
        return {
            "manifest": to_json(manifests[-1]),
            "states": [manifest.state_digest() for manifest in manifests],
        }

    return print_answer(work)


def job_of(options: argparse.Namespace) -> tuple[Job, Entry]:
    """The job of a command line; raises as `load_job`."""
    settings = {name: value for name, _, value in (word.partition("=") for word in options.settings)}
    return load_job(options.job_file, settings)


def updates_of(text: str) -> frozenset[int]:
    """Numbers of updates, as in `20,40` [updates]."""
    return frozenset(map(int, filter(None, text.split(","))))


def print_answer(work: Callable[[], dict[str, Any]]) -> int:
    """Print the answer of `work` as JSON, or the problem that it had; the exit code [0, or the problem's]."""
    try:
        answer = work()
        code = BadRun.exit_code if "problem" in answer else 0
    except StokerError as error:
        answer, code = {"problem": error.message, "kind": type(error).__name__}, error.exit_code
    print(json.dumps(answer))  # noqa: T201 - the answer
    return code


if __name__ == "__main__":
    sys.exit(main())
