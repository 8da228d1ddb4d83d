"""The program that runs at a place: it starts this host's ranks of a run, watches and restarts them, and keeps records.

`launch/` in the run's directory is all that it reads and writes:

```
order.json        LaunchOrder: what to run
host-0.json       HostState of host 0: its process, phase with reason and evidence, last sign of life; one for each host
output-0.log      standard error of its ranks: what the job prints, and errors
stop              there once the run was asked to stop, or its limit is over: nothing is restarted after that
```

`python -m stoker.launching.at_place COMMAND DIR`:

- `run`: start the ranks and wait for their end; the exit code is theirs. Secrets come as a JSON object, in a file
  named by `STOKER_SECRETS_FILE` that is deleted when it is read, or with `--secrets` on standard input.
- `start`: the same in the background, cut off from the line; prints the process's number.
- `state`: print a LaunchState.
- `stop`: ask the run to save and leave.

Only the standard library is needed, and torch is not imported: a place answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from stoker.errors import PlaceFailed, StokerError
from stoker.launching import launcher_of
from stoker.launching.launcher import HostRanks, Submission, notice_s, seen_now, utc_now
from stoker.launching.meter import held_in_log, save_time_s
from stoker.launching.reachable_ports import port_of, silent_hosts
from stoker.records.codec import dumps, loads, read_object, to_json
from stoker.records.launch import ENDED, LaunchPhase, LaunchState
from stoker.units import format_bytes, format_seconds

FINISHED, SLICE_OVER, STOPPED, RUN_FAILED = 0, 75, 130, 4
"""Exit codes of `stoker train`."""

LIMIT_OVER = 124
"""Exit code after the run has held devices for as long as it may: no scheduler starts it again."""

MOST_WITHOUT_PROGRESS = 3
"""After so many starts in a row without a sample more than before, the run is not started again."""

MOST_TAKEN_AWAY = 10
"""The same where the scheduler took the last of them away, which is no fault of the run's: it may not have begun."""

HEARTBEAT_S = 5.0
STALE_S = 60.0
"""A process without a sign of life for so long, on a host that cannot be asked, is taken for lost [s]."""

SECRETS_FILE_VARIABLE = "STOKER_SECRETS_FILE"
LAUNCHED_VARIABLE = "STOKER_LAUNCHED"
"""Set to the kind of launcher for every process that Stoker's own script started."""

_LOOPBACK = "127.0.0.1"
_LAUNCH, _ORDER, _STOP = "launch", "order.json", "stop"
_POSITIONS = ("progress", "checkpointed", "evaluated")
_BEGUN_WITHIN_S = 10.0
_OTHERS_NOTICE_S = 3.0
"""Before ranks of several hosts start again: those that are left of the last start have to end first [s]."""

_FULL_BYTES = 1 << 20
_TAIL_BYTES = 64 * 1024
_END_WITH_PARENT = f"""
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})
except (OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit({STOPPED})
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""The program that becomes a rank: the kernel is to send it SIGTERM when the watching process (argument 1) ends, so
that the rank saves. Not between fork and exec: the watching process may have threads, as where it repeats the log.
Source: prctl(2), PR_SET_PDEATHSIG, which is 1 and stays through execve(2)."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """An order to run at a place.

    Attributes:
        run: name.
        kind: of launcher.
        code: folder to run in, absolute.
        job_file: relative to `code`.
        arguments: of `stoker train` after the job file.
        device: `here`, or `cpu`.
        num_hosts, ranks_each: shape.
        are_ranks_fixed: ranks of one host are as those of several are: no rank goes on without the others, and after a
            loss all go on from the last checkpoint. Otherwise `stoker train --on 4xhere` has the ranks of one host.
        variables: environment variables of the ranks.
        pythonpath: folder of this Stoker.
        is_requeued: the scheduler starts the run again after exit code 75 (a slice is over, ranks were lost) and after
            a preemption; else `run` itself does after 75, and after lost ranks.
        submitted_at: distinguishes orders: restarts are counted from here on. ISO 8601 in UTC.
        owner: machine and directory of the run where it was sent from.
        most_held_s: devices may be held this long [s], over all starts of this order; None: no limit.
        save_s: forecast time of a save [s]; the run's own log may say more.
    """

    schema: ClassVar[int] = 1

    run: str
    kind: str
    code: str
    job_file: str
    arguments: tuple[str, ...] = ()
    device: str = "here"
    num_hosts: int = 1
    ranks_each: int = 1
    are_ranks_fixed: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    pythonpath: str = ""
    is_requeued: bool = False
    submitted_at: str = ""
    owner: str = ""
    most_held_s: float | None = None
    save_s: float = 30.0

    def starts_ranks(self, num_hosts: int) -> bool:
        """Whether each process that is started is one rank: they find each other by their variables."""
        return num_hosts > 1 or (self.are_ranks_fixed and self.ranks_each > 1)

    @classmethod
    def of(
        cls, submission: Submission, code: str, pythonpath: str, *, is_requeued: bool = False, submitted_at: str = ""
    ) -> LaunchOrder:
        """The order of a submission whose code and Stoker are in these folders there."""
        target = submission.target
        return cls(
            run=submission.run,
            kind=target.kind,
            code=code,
            job_file=submission.job_file,
            arguments=submission.arguments,
            device="cpu" if target.device == "cpu" else "here",
            num_hosts=target.num_nodes,
            ranks_each=target.devices_each,
            variables=dict(submission.variables),
            pythonpath=pythonpath,
            is_requeued=is_requeued,
            submitted_at=submitted_at,
            owner=submission.owner,
            most_held_s=submission.most_held_s,
            save_s=submission.save_s,
        )


@dataclass(frozen=True, kw_only=True)
class HostState:
    """How the ranks of one host are, and the process that watches them.

    Attributes:
        host: number.
        hostname, pid, began, boot: the watching process: `began` is its start in clock ticks since the boot.
        began_at: when it began, ISO 8601 in UTC.
        at: last sign of life, ISO 8601 in UTC.
        samples: newest position in the run's log [samples].
        best_samples: the furthest of all starts before the present one [samples].
        restarts: starts after the first, of this order.
        without_progress: the last starts in a row that came no further than `best_samples`.
        submitted_at: of the order.
        held_s: time in which devices were held [s], over all starts of the order.
    """

    schema: ClassVar[int] = 1

    host: int
    hostname: str
    pid: int
    began: int
    boot: str
    phase: LaunchPhase
    why: str
    evidence: str = ""
    exit_code: int | None = None
    at: str = ""
    samples: int = 0
    best_samples: int = 0
    restarts: int = 0
    without_progress: int = 0
    submitted_at: str = ""
    held_s: float = 0.0
    began_at: str = ""


def read_order(directory: Path) -> LaunchOrder:
    """The order in a run's directory.

    Raises:
        PlaceFailed: there is none, or it is of another version.
    """
    path = directory / _LAUNCH / _ORDER
    try:
        return loads(path.read_bytes(), LaunchOrder)
    except (OSError, ValueError) as error:
        raise PlaceFailed(f"{path} cannot be read: {error}") from error


def rank_environments(
    order: LaunchOrder, ranks: HostRanks, base: Mapping[str, str], secrets: Mapping[str, str]
) -> list[dict[str, str]]:
    """Environment variables of each process to start on this host.

    One host with several devices has one process: `stoker train --on 4xhere` starts the ranks, and restarts a lost one
    without ending the others; unless the order wants fixed ranks.
    """
    common = {name: value for name, value in base.items() if name != SECRETS_FILE_VARIABLE}
    common |= {**order.variables, **secrets, LAUNCHED_VARIABLE: order.kind}
    common["PYTHONPATH"] = order.pythonpath
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        common.pop(name, None)
    if not order.starts_ranks(ranks.num_hosts):
        return [common]
    if ranks.num_hosts == 1:
        ranks = replace(ranks, master=_LOOPBACK, port=_free_port())
    first, size = ranks.host * order.ranks_each, ranks.num_hosts * order.ranks_each
    return [
        {
            **common,
            "RANK": str(first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(order.ranks_each),
            "MASTER_ADDR": ranks.master,
            "MASTER_PORT": str(ranks.port),
        }
        for local in range(order.ranks_each)
    ]


def rank_command(order: LaunchOrder, directory: Path, num_hosts: int) -> list[str]:
    """The command of each process of this host."""
    several = order.ranks_each > 1 and not order.starts_ranks(num_hosts)
    place = f"{order.ranks_each}x{order.device}" if several else order.device
    command = [sys.executable, "-m", "stoker", "train", order.job_file, *order.arguments]
    return [*command, "--on", place, "--run-dir", str(directory), "--json"]


@dataclass(frozen=True)
class RankOutcome:
    """The consequence of how the ranks ended: a phase, and whether they are started again here."""

    phase: LaunchPhase
    why: str
    exit_code: int
    is_again: bool = False


def _free_port() -> int:
    """A port of the loopback in which ranks of this machine meet."""
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        return int(found.getsockname()[1])


def judge(
    codes: Sequence[int], *, is_stopped: bool, is_signalled: bool, order: LaunchOrder, num_hosts: int
) -> RankOutcome:
    """The consequence of the exit codes of a host's ranks; a negative one is the signal that ended the rank.

    Args:
        codes: exit codes.
        is_stopped: the user asked the run to stop.
        is_signalled: this host's watching process was asked to end, as before a preemption or a shutdown.
        order: says whether a scheduler starts the run again.
        num_hosts: of the run.
    """
    here, are_ranks = not order.is_requeued, order.starts_ranks(num_hosts)

    def lost(why: str) -> RankOutcome:
        """Ranks that died by no fault of their own: the run goes on unless it was to stop."""
        if order.is_requeued and not is_stopped:
            return RankOutcome("requeued", why, SLICE_OVER)
        return RankOutcome("lost", why, RUN_FAILED, is_again=not is_stopped)

    killed = [-code for code in codes if code < 0]
    asked = {signal.SIGTERM, signal.SIGINT} if is_stopped or is_signalled else set()
    wrong = [code for code in codes if code not in {FINISHED, STOPPED, SLICE_OVER} and -code not in asked]
    # A rank that fails takes the others with it, which say only that.
    worst = next((code for code in wrong if code != RUN_FAILED), wrong[0] if wrong else max(codes, default=0))
    if all(code == FINISHED for code in codes):
        return RankOutcome("finished", "trained to its end", FINISHED)
    killed = [number for number in killed if number not in asked]  # before the rank could catch it: nothing to save
    leaving = {FINISHED, SLICE_OVER, STOPPED, *([RUN_FAILED] if are_ranks else [])}  # one leaves before the others
    if is_stopped and all(code in leaving or -code in asked for code in codes):
        return RankOutcome("stopped", "saved and left, as asked", STOPPED)
    if killed:
        name = signal.Signals(killed[0]).name if killed[0] in set(signal.Signals) else f"signal {killed[0]}"
        return lost(f"a rank was ended by {name}")
    if all(code in {FINISHED, SLICE_OVER} for code in codes):
        return RankOutcome("requeued", "a slice is over", SLICE_OVER, is_again=here)
    if all(code in {FINISHED, SLICE_OVER, STOPPED} or -code in asked for code in codes):
        if is_signalled and order.is_requeued:
            return RankOutcome("preempted", "saved and left, as the scheduler asked", STOPPED)
        return RankOutcome("stopped", "saved and left after a signal", STOPPED)
    if worst == RUN_FAILED and are_ranks:
        # Ranks that lose others end with this code; so do errors of the job, which repeat.
        return lost("the ranks of this host lost the others, or failed")
    return RankOutcome("failed", f"a rank ended with exit code {worst}", worst)


class HostSupervisor:
    """Runs this host's ranks of the run in `directory` until they need not be started again.

    `parent`: the process that started this one, without which the run saves and leaves; None: it outlives that one.
    """

    def __init__(
        self, directory: Path, ranks: HostRanks, secrets: Mapping[str, str], parent: int | None = None
    ) -> None:
        self._directory, self._ranks, self._secrets, self._parent = directory, ranks, secrets, parent
        self._order = read_order(directory)
        self._folder = directory / _LAUNCH
        self._path = self._folder / f"host-{ranks.host}.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_signalled, self._was_taken_away, self._over = False, False, ""
        self._log_bytes_before, self._save_s = 0, self._order.save_s
        self._began_at, self._began_s = time.time(), time.monotonic()
        self._state = self._first_state()
        self._held_before_s = self._state.held_s

    def run(self) -> int:
        """Start the ranks, and restart them where that is right; returns this program's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        if _is_finished(self._directory):  # `stoker train` would begin another run
            return self._end(RankOutcome("finished", "was trained to its end before this start", FINISHED))
        if self._state.without_progress >= (MOST_TAKEN_AWAY if self._was_taken_away else MOST_WITHOUT_PROGRESS):
            return self._end(self._given_up("the scheduler started it again"))
        if self._held_before_s and self._is_used_up(by_a_start=True):
            return self._end(self._limit_over())
        if (why := self._unreachable()) and not self._must_leave():
            return self._end(RankOutcome("failed", why, PlaceFailed.exit_code))
        while True:
            verdict = self._run_once()
            goes_on = verdict.is_again or verdict.phase in {"preempted", "requeued"}
            if (self._over and verdict.phase in {"stopped", "lost"}) or (goes_on and self._is_used_up(by_a_start=True)):
                return self._end(self._limit_over())
            if not verdict.is_again or self._must_leave():
                return self._end(verdict)
            self._state = _next_start(self._state, newest_samples(self._directory / "events.jsonl"))
            if self._state.without_progress >= MOST_WITHOUT_PROGRESS:
                return self._end(self._given_up(verdict.why))
            self._set("requeued", verdict.why, evidence=self._last_output(), exit_code=verdict.exit_code)
            # The state is overwritten; what started the run again stays in this process's own log.
            print(f"{utc_now()} restart {self._state.restarts}: {verdict.why}", file=sys.stderr, flush=True)  # noqa: T201
            self._pause(5.0 * self._state.without_progress + (_OTHERS_NOTICE_S if self._ranks.num_hosts > 1 else 0.0))
            if self._must_leave():
                return self._end(RankOutcome("stopped", "asked to stop before it was started again", STOPPED))

    def _unreachable(self) -> str:
        """Why ranks here could not talk to those of other hosts that a scheduler has chosen; "" where they could."""
        ranks = self._ranks
        if not 1 < ranks.num_hosts == len(ranks.addresses):
            return ""
        self._set("starting", "looks whether the hosts of the run reach each other")
        if not (silent := silent_hosts(ranks.addresses, ranks.host, ranks.port)):
            return ""
        named = [
            f"{ranks.addresses[host]} on TCP port {port_of(ranks.port, host)} ({why})"
            for host, why in sorted(silent.items())
        ]
        return (
            f"{platform.node()} cannot reach {', '.join(named)}: the hosts of a run have to reach each other on "
            "the ports from 15000 on"
        )

    def _run_once(self) -> RankOutcome:
        order, self._log_bytes_before = self._order, self._log_bytes()
        command = rank_command(order, self._directory, self._ranks.num_hosts)
        environments = rank_environments(order, self._ranks, os.environ, self._secrets)
        self._set(
            "starting",
            f"{len(environments)} of {order.num_hosts * order.ranks_each} ranks start here"
            if order.num_hosts > 1
            else "the run starts",
        )
        with (self._folder / f"output-{self._ranks.host}.log").open("ab") as output:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *command],
                    cwd=order.code,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                )
                for environment in environments
            ]
            if self._is_signalled:  # it came between the starts
                self._forward(signal.SIGTERM)
            codes = self._wait()
        return judge(
            codes,
            is_stopped=self._is_stopped(),
            is_signalled=self._is_signalled,
            order=order,
            num_hosts=self._ranks.num_hosts,
        )

    def _wait(self) -> list[int]:
        """Wait for the ranks and return their exit codes; a heartbeat is written until then."""
        beat_at = 0.0
        while running := [process for process in self._processes if process.poll() is None]:
            if not self._over and self._is_used_up():
                self._over = "saved and left"
                with suppress(OSError):  # for the other hosts
                    (self._folder / _STOP).touch()
            elif self._over and self._left_s() <= 0:
                self._over = "it was killed, since it had not left before"
                self._forward(signal.SIGKILL)
            if not self._is_signalled and (self._over or self._must_leave()):
                self._on_signal(signal.SIGTERM, None)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + HEARTBEAT_S
                self._beat()
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(0.2)  # at once where it has ended since
        return [int(process.returncode) for process in self._processes]

    def _beat(self) -> None:
        log = self._directory / "events.jsonl"
        samples = newest_samples(log)
        self._save_s = max(self._save_s, longest_save_s(log))
        phase: LaunchPhase = self._state.phase
        if phase == "starting" and self._log_bytes() > self._log_bytes_before:
            phase = "running"
            if self._order.most_held_s is not None and not self._held_before_s:  # the machine before took its disk away
                self._held_before_s = held_in_log(log, self._order.submitted_at, self._began_at)
        if self._must_leave():
            phase = "saving"
        why = {"running": "training", "saving": "asked to save and leave"}.get(phase, self._state.why)
        self._write(replace(self._state, phase=phase, why=why, samples=samples))

    def _left_s(self) -> float:
        """Time for which devices may still be held [s]."""
        most_s = self._order.most_held_s
        return float("inf") if most_s is None else most_s - self._held_s()

    def _held_s(self) -> float:
        return self._held_before_s + time.monotonic() - self._began_s

    def _is_used_up(self, *, by_a_start: bool = False) -> bool:
        """Whether the time that is left is that of a save; or too little for another start to train in."""
        most_s = self._order.most_held_s
        if most_s is None:
            return False
        needed_s = notice_s(self._save_s, most_s)
        return self._left_s() < needed_s + (min(needed_s, most_s / 4) if by_a_start else 0)

    def _limit_over(self) -> RankOutcome:
        most_s = self._order.most_held_s or 0.0
        why = f"devices were held for {format_seconds(self._held_s())} of {format_seconds(most_s)}, the limit"
        return RankOutcome("stopped", f"{why}: {self._over or 'saved and left'}", LIMIT_OVER)

    def _log_bytes(self) -> int:
        with suppress(OSError):
            return (self._directory / "events.jsonl").stat().st_size
        return 0

    def _given_up(self, why: str) -> RankOutcome:
        count = self._state.without_progress
        return RankOutcome("failed", f"{count} starts in a row made no progress; the last: {why}", RUN_FAILED)

    def _end(self, verdict: RankOutcome) -> int:
        evidence = self._last_output() if verdict.phase in {"failed", "lost", "requeued"} else ""
        if verdict.phase == "failed" and self._ranks.num_hosts > 1:
            with suppress(OSError):  # the other hosts would wait for this one, and start again in vain
                (self._folder / _STOP).touch()
        self._set(verdict.phase, verdict.why, evidence=evidence, exit_code=verdict.exit_code)
        return verdict.exit_code

    def _pause(self, duration_s: float) -> None:
        until = time.monotonic() + duration_s
        while time.monotonic() < until and not self._is_signalled:
            time.sleep(0.2)

    def _must_leave(self) -> bool:
        """Whether the user asked the run to stop, or this process was asked to end, or has lost its parent."""
        is_orphan = self._parent is not None and os.getppid() != self._parent
        return self._is_signalled or self._is_stopped() or is_orphan

    def _is_stopped(self) -> bool:
        return (self._folder / _STOP).exists()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        self._forward(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def _first_state(self) -> HostState:
        """This process's state, with the restarts that a scheduler made of the same order."""
        samples = newest_samples(self._directory / "events.jsonl")
        state = HostState(
            host=self._ranks.host,
            hostname=platform.node(),
            pid=os.getpid(),
            began=_began(os.getpid()),
            boot=_boot(),
            phase="starting",
            why="the run starts",
            samples=samples,
            best_samples=samples,
            submitted_at=self._order.submitted_at,
            began_at=utc_now("milliseconds"),
        )
        before = read_host_state(self._path)
        if before is None or before.submitted_at != self._order.submitted_at:
            return state
        counted, self._was_taken_away = _next_start(before, samples), before.phase == "preempted"
        return replace(
            state,
            restarts=counted.restarts,
            best_samples=counted.best_samples,
            without_progress=counted.without_progress,
            held_s=before.held_s,
        )

    def _last_output(self) -> str:
        return last_error(self._folder / f"output-{self._ranks.host}.log")

    def _set(self, phase: LaunchPhase, why: str, *, evidence: str = "", exit_code: int | None = None) -> None:
        samples = newest_samples(self._directory / "events.jsonl")
        self._write(replace(self._state, phase=phase, why=why, evidence=evidence, exit_code=exit_code, samples=samples))

    def _write(self, state: HostState) -> None:
        """Replace this host's state; a full disk does not end training."""
        self._state = replace(state, at=utc_now(), held_s=self._held_s())
        aside = self._path.with_name(f".writing-{self._path.name}-{os.getpid()}")
        with suppress(OSError):
            aside.write_text(dumps(self._state))
            aside.replace(self._path)


def _next_start(state: HostState, samples: int) -> HostState:
    """The state's counts before another start, where the last one came to `samples` [samples]."""
    return replace(
        state,
        restarts=state.restarts + 1,
        best_samples=max(samples, state.best_samples),
        without_progress=0 if samples > state.best_samples else state.without_progress + 1,
    )


def _is_finished(directory: Path) -> bool:
    """Whether the record of a run says that it is: who started it may have died before that was seen."""
    with suppress(OSError):
        return bool(read_object((directory / "run.json").read_bytes()).get("status") == "finished")
    return False


def newest_samples(events: Path) -> int:
    """The newest position in the end of a run's log [samples]; 0 where there is none."""
    found = (event["fields"].get("samples") for event in newest_events(events, *_POSITIONS))
    return next((samples for samples in found if isinstance(samples, int)), 0)


def longest_save_s(events: Path) -> float:
    """The longest save, by the forecasts and measurements in the end of a run's log [s]; 0 where there are none."""
    longest_s = 0.0
    for event in newest_events(events, "planned", "checkpointed"):
        with suppress(ValueError):  # another version's
            longest_s = max(longest_s, save_time_s(event["kind"], event["fields"]))
    return longest_s


def newest_events(events: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Events of these kinds in the end of a run's log, the newest first, as JSON objects with `at` and `fields`."""
    for line in reversed(_tail(events)):
        with suppress(ValueError):  # torn
            event = json.loads(line)
            if isinstance(event, dict) and event.get("kind") in kinds and isinstance(event.get("fields"), dict):
                yield event


def last_error(output: Path) -> str:
    """The line of a log that says why the run ended: the last that begins with `error:`, else the last."""
    lines = [line.strip() for line in _tail(output) if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1].removeprefix("error:").strip()


def _tail(path: Path) -> list[str]:
    """The last lines of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").split("\n")
    except OSError:
        return []


def read_host_state(path: Path) -> HostState | None:
    """The state of a host; None if there is none, or it is being made."""
    try:
        return loads(path.read_bytes(), HostState)
    except (OSError, ValueError):
        return None


def state_of(directory: Path) -> LaunchState:
    """The state of the run in `directory`, as this machine can tell.

    A watching process of this machine that is gone without having said how it ended is `lost`; so is one of another
    machine that gave no sign of life for `STALE_S`, and a run of which no host said anything for so long.
    """
    state = _state_of(directory)
    with suppress(OSError):
        return noting_full_disk(state, directory, shutil.disk_usage(directory).free)
    return state


def _state_of(directory: Path) -> LaunchState:
    order, folder = read_order(directory), directory / _LAUNCH
    now_s = _disk_time(folder)
    states = []
    for path in sorted(folder.glob("host-*.json")):
        state = read_host_state(path)
        if state is not None and state.submitted_at == order.submitted_at:
            with suppress(OSError):
                states.append(_with_evidence(state, now_s - path.stat().st_mtime))
    if not states:
        silent_s = now_s - (folder / _ORDER).stat().st_mtime
        if silent_s > STALE_S:
            return seen_now("lost", "it was sent, and no host ever started it", f"no word of it for {silent_s:.0f} s")
        return seen_now("starting", "no host has said anything yet")
    return combined(states)


def _disk_time(folder: Path) -> float:
    """The time of the disk [s since 1970]: clocks of machines that share it may differ."""
    mark = folder / f".now-{platform.node()}-{os.getpid()}"
    try:
        mark.touch()
        now_s = mark.stat().st_mtime
        mark.unlink()
    except OSError:  # full, or read-only
        return time.time()
    return now_s


def combined(states: Sequence[HostState]) -> LaunchState:
    """One state of several hosts: what goes on while one of them goes on, else what is wrong.

    The run is finished when host 0 says so. A host that is lost does not end the run while another one waits for it.
    """
    first = min(states, key=lambda state: state.host)
    going = [state for state in states if state.phase not in ENDED and state.phase != "preempted"]
    wrong = [state for phase in ("failed", "lost") for state in states if state.phase == phase]
    shown = first if first.phase == "finished" else (going or wrong or [first])[0]
    is_named = len(states) > 1 and shown.phase != "finished"
    missed = [
        f"{state.hostname} is {state.phase}: {state.evidence or state.why}" for state in wrong if state is not shown
    ]
    return LaunchState(
        phase=shown.phase,
        why=f"{shown.hostname}: {shown.why}" if is_named else shown.why,
        evidence="; ".join(filter(None, (shown.evidence, *missed))),
        exit_code=shown.exit_code,
        restarts=max(state.restarts for state in states),
        at=shown.at,
        began_at=max(state.began_at for state in states),
    )


def _with_evidence(state: HostState, silent_s: float) -> HostState:
    """The state, or `lost` if its process is gone without a word; the last one came `silent_s` ago [s]."""
    if state.phase in ENDED or state.phase == "preempted":
        return state
    if state.boot and state.boot == _boot():
        if _began(state.pid) == state.began:
            return state
        evidence = f"process {state.pid} on {state.hostname} is gone"
    elif silent_s > STALE_S:
        was = "was restarted, or" if state.hostname == platform.node() else "is away, or"
        evidence = f"{state.hostname} {was} its process is gone: no sign of life for {silent_s:.0f} s"
    else:
        return state
    return replace(
        state, phase="lost", why=f"was {state.phase} and is gone", evidence=f"{evidence}; last sign of life {state.at}"
    )


def noting_full_disk(state: LaunchState, directory: Path | str, free_bytes: int) -> LaunchState:
    """The state; where a run failed or is lost, with its full disk, on which nothing that says why could be written."""
    if state.phase not in {"failed", "lost"} or free_bytes >= _FULL_BYTES:
        return state
    full = f"the disk of {directory} has {format_bytes(free_bytes)} free"
    return replace(state, evidence=f"{state.evidence}; {full}" if state.evidence else full)


def ask_to_stop(directory: Path) -> None:
    """Ask the run to save and leave: nothing is restarted from now on, and this machine's watching processes know."""
    folder = directory / _LAUNCH
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _STOP).touch()
    for path in sorted(folder.glob("host-*.json")):
        state = read_host_state(path)
        if state is not None and state.hostname == platform.node() and _began(state.pid) == state.began:
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)


def read_secrets(environ: Mapping[str, str], *, from_input: bool) -> dict[str, str]:
    """Secrets from standard input, or from the file that the environment names, which is deleted.

    Raises:
        PlaceFailed: the file is not there, or is none.
    """
    try:
        if from_input:
            return _texts(json.loads(sys.stdin.buffer.read() or b"{}"))
        if name := environ.get(SECRETS_FILE_VARIABLE):
            path = Path(name)
            try:
                return _texts(json.loads(path.read_bytes()))
            finally:
                path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise PlaceFailed(f"the secrets cannot be read: {error}") from error
    return {}


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("not an object of texts")
    return {str(name): item for name, item in value.items()}


def start_in_background(directory: Path, ranks: HostRanks, secrets: Mapping[str, str]) -> int:
    """Run the host's ranks in a session of its own, which outlives the line; the process's number.

    Raises:
        PlaceFailed: the process ended before it had begun to watch.
    """
    supervisor_log = directory / _LAUNCH / f"supervisor-{ranks.host}.log"
    pid = os.fork()
    if pid:
        path, until = directory / _LAUNCH / f"host-{ranks.host}.json", time.monotonic() + _BEGUN_WITHIN_S
        while time.monotonic() < until:
            has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)  # before the look: a short run may end in between
            state = read_host_state(path)
            if state is not None and state.pid == pid:
                break
            if has_ended:
                raise PlaceFailed(f"the run could not be started: {last_error(supervisor_log) or 'no word why'}")
            time.sleep(0.02)
        return pid
    code = RUN_FAILED
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, descriptor in ((0, null), (1, log), (2, log)):
            os.dup2(descriptor, number)
        code = HostSupervisor(directory, ranks, secrets).run()
    except BaseException as error:  # noqa: BLE001 - the last message of a process that no one waits for
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _began(pid: int) -> int:
    """When a process of this machine was started [clock ticks since the boot]; -1 if there is none, or it has ended.

    Source: proc(5), /proc/pid/stat: fields 3 (a zombie is an ended process without a `wait`) and 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return -1


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line at the place."""
    parser = argparse.ArgumentParser(prog="python -m stoker.launching.at_place")
    parser.add_argument("command", choices=("run", "start", "state", "stop"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--secrets", action="store_true", help="a JSON object of secrets comes on standard input")
    parser.add_argument("--parent", type=int, help="run: save and leave when this process, which started it, is gone")
    options = parser.parse_args(arguments)
    directory: Path = options.directory.absolute()
    try:
        if options.command == "state":
            print(json.dumps(to_json(state_of(directory))))  # noqa: T201 - the answer to the other end of the line
        elif options.command == "stop":
            ask_to_stop(directory)
        else:
            secrets = read_secrets(os.environ, from_input=options.secrets)
            ranks = launcher_of(read_order(directory).kind).ranks(os.environ)
            if options.command == "run":
                return HostSupervisor(directory, ranks, secrets, options.parent).run()
            print(start_in_background(directory, ranks, secrets))  # noqa: T201 - likewise
    except StokerError as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - likewise
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
