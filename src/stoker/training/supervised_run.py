"""A run whose processes this one starts: `stoker train --on 2xhere`, without a launcher such as torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from stoker import records
from stoker.errors import BadJob, BadRun, DoesNotFit, NoDevice, RunFailed, StokerError
from stoker.jobs import Entry
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import Decision, Event
from stoker.store import RunDirectory
from stoker.training.elastic.membership import RENDEZVOUS_REQUESTED
from stoker.training.elastic.supervisor import INTERRUPTED, Supervisor
from stoker.training.run_handle import Run
from stoker.training.session import slowest_s
from stoker.training.slices import SLICE_OVER, SLICE_OVER_EXIT, Slice
from stoker.training.telemetry import Sink, emit_event
from stoker.training.watchdog import PATIENCE_VARIABLE, WatchdogPatience
from stoker.units import format_seconds


def train_supervised(
    prepared: ResolvedJob,
    directory: RunDirectory,
    decision: Decision,
    sinks: Sequence[Sink],
    slice_: Slice | None = None,
) -> Run:
    """Train the run in `directory`, whose lock is held, in processes of their own, one for each device of its plan.

    The job's file is what they start from. Their events are in the run's log already when they come here.

    Args:
        prepared: the job made ready.
        directory: the run's.
        decision: what it begins under.
        sinks: receive every event, the run's own log first.
        slice_: the time that this process and its workers may take.

    Raises:
        BadJob: the job has no file.
        RunFailed: training could not go on; what was saved is intact.
    """
    plan = decision.chosen.plan
    entry = require_file(prepared.entry, plan.layout.world_size)
    command = [sys.executable, "-m", "stoker", "take-part", str(directory.path), str(entry.path), *entry.setting_words]
    if slice_ is not None:
        command += ["--slice", str(slice_.for_workers())]

    listener, output = WorkerListener(sinks), _HeldOutput()
    patience = WatchdogPatience.of(slowest_s(prepared.job, decision))
    code = Supervisor(
        command,
        workers=plan.layout.world_size,
        usable=plan.layout.usable,
        environment={"OMP_NUM_THREADS": str(plan.threads)},
        on_line=listener.on_line,
        tell=listener.on_loss,
        show=output.show,
        silence_s=patience.others_s,
        answer_s=patience.answer_s,
    ).run()
    if code not in (0, INTERRUPTED, SLICE_OVER_EXIT):
        raise output.as_error(code)
    output.release()
    return Run(directory, prepared.job, stopped_by=SLICE_OVER if code == SLICE_OVER_EXIT else listener.stopped_by)


def require_file(entry: Entry | None, count: int) -> Entry:
    """The file that `count` processes make their job from.

    Raises:
        BadJob: there is none.
    """
    if entry is None:
        raise BadJob(
            f"{count} processes need the job in a file, from which each of them makes its own",
            remedy="Put it into a file with a function `job` and use `stoker train FILE --on 2xhere`; or start this "
            "program with torchrun.",
        )
    return entry


class WorkerListener:
    """Passes on the events of the processes, and reports those that are lost or come back."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._log, self._shown = sinks[:1], sinks[1:]
        self._samples = 0
        self.stopped_by: str | None = None

    def on_line(self, line: str) -> None:
        """An event that a process has written into the log already."""
        event = records.loads(line, Event)
        self._samples = event.fields.get("samples", self._samples)
        if event.kind == "stopped":
            self.stopped_by = str(event.fields.get("reason"))
        for sink in self._shown:
            sink(event)

    def on_loss(self, what: str, fields: dict[str, Any]) -> None:
        """News of the processes from the supervisor."""
        sinks, message = [*self._log, *self._shown], ""
        who = f"process {fields['worker']}" if "worker" in fields else ""
        if fields.get("rank", -1) >= 0:
            who += f" (rank {fields['rank']})"
        match what:
            case "lost":
                message = f"{who} is lost: {fields['why']}"
            case "silent":
                state = "is stopped" if fields["is_stopped"] else "shows no sign of life"
                message = (
                    f"{who} {state} since {format_seconds(fields['seconds'])}; the others wait for it, "
                    f"{format_seconds(fields['patience_s'])} at most ({PATIENCE_VARIABLE}=SECONDS sets that)"
                )
            case "awake":
                message = f"{who} is back after {format_seconds(fields['seconds'])}, and nothing is lost"
            case "restarted":
                message = f"{who} is started again"
            case "left_out":
                message = f"{who} failed {fields['returns'] + 1} times and is left out"
            case "met" if fields["generation"] > 1:
                count = len(fields["workers"])
                emit_event(
                    sinks,
                    "recovered",
                    samples=self._samples,
                    what="one process goes on" if count == 1 else f"{count} processes go on",
                    why="another one is back" if fields["why"] == RENDEZVOUS_REQUESTED else fields["why"],
                    took_s=fields["seconds"],
                )
        if message:
            emit_event(sinks, "warned", message=message)


class _HeldOutput:
    """The output of the processes: shown as it comes, except for the error that the run ends with."""

    def __init__(self) -> None:
        self._error: list[str] = []

    def show(self, line: str) -> None:
        """A line of one of them."""
        if line.startswith("error: ") or self._error:
            self._error.append(line)
        else:
            _print(line)

    def release(self) -> None:
        """Show what looked like the beginning of an error, and was the job's own."""
        for line in self._error:
            _print(line)

    def as_error(self, code: int) -> StokerError:
        """The error that they ended with, in its own words."""
        lines = [line.removeprefix("error: ") for line in self._error if not line.startswith("try: ")]
        remedy = next((line.removeprefix("try: ").strip() for line in self._error if line.startswith("try: ")), None)
        kind = next((one for one in (BadJob, DoesNotFit, NoDevice, BadRun) if one.exit_code == code), RunFailed)
        return kind("\n".join(lines) or f"a process ended with exit code {code}", remedy=remedy)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what a job prints is the user's own
