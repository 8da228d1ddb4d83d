"""Worker processes of one machine: started, watched, organised in generations, and ended.

What: each worker runs the same command and has a channel to the supervisor, which decides who belongs to a generation.
A worker that dies, or stands still, is named, and the others meet again without it. It is started again, and comes
back in a later generation.
Use when: training with several processes on one machine (`--on 2xhere`). Over machines, a launcher such as torchrun.
Costs: a process that mostly sleeps, and a message each half second.
Does not see: a worker whose main thread hangs while nobody waits for it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import BadJob, DoesNotFit, RunFailed
from stoker.training.elastic.membership import (
    RENDEZVOUS_REQUESTED,
    Generation,
    GenerationFailure,
    Membership,
    MembershipState,
    TooFewWorkers,
)
from stoker.training.elastic.rendezvous_store import LOOPBACK_INTERFACE, listen, serve
from stoker.training.elastic.worker_pool import Message, OutputRelay, WorkerPool, in_words
from stoker.training.signals import forward_signals
from stoker.units import format_seconds

INTERRUPTED = 130
"""Exit code of a run that was asked to stop, and can be continued."""

FINAL_EXIT_CODES = frozenset({BadJob.exit_code, DoesNotFit.exit_code, RunFailed.exit_code, INTERRUPTED})
"""Exit codes of workers after which the run ends: another process would say the same."""

LEAVING_S = 30.0
"""Longest that workers may take to end by themselves once the run is over [s]."""

STARTING_S = 300.0
"""Longest silence of a worker that starts [s]: it imports, and may read data in one long call."""

NAMED_S = 5.0
"""A worker without a sign of life for so long [s] is named, and waited for until the patience with it is over."""

STEADY_S = 600.0
"""A worker that ran for so long [s] has not failed repeatedly: its returns are counted anew."""

MOST_CAUSELESS, CAUSELESS_S = 5, 30.0
"""So many generations in a row, each over within such a time [s] though nobody was missing, end the run."""

_TICK_S = 0.05
_ALL_AT_ONCE_S = 1.0
"""A worker that failed by itself is started again after so long [s], and only if not all of them failed."""


@dataclass(frozen=True, kw_only=True)
class WorkerLoss:
    """What happened to a worker: it had `rank` (-1: none) in the generation, and `why` it is lost."""

    worker: int
    rank: int
    why: str


class Supervisor:
    """The workers of one run.

    Args:
        command: program and arguments of every worker.
        workers: how many there are.
        least: the fewest that may train; with fewer, the run ends unless some that are started again come to help.
        usable: how many of so many the layout has use for; the others wait as spares.
        environment: variables for the workers, beside those of this process.
        on_line: called with each line that members send as events, in order.
        tell: called with what happens: "met" (generation, workers by rank, spares, why the one before was over,
            seconds since), "lost" (the fields of a Loss, and the generation), "restarted" and "left_out" (worker,
            returns so far, most_returns), "silent" (worker, rank, seconds, is_stopped, and patience_s, after which it
            counts as lost), "awake" (worker, rank and seconds).
        silence_s: a worker without a sign of life for so long is killed [s]: it is stopped, or some call does not let
            go of the interpreter. One that shows life again before is no loss.
        answer_s: likewise one that shows life, but does not heed for so long that others have lost the generation [s]:
            the longest that it may be busy without talking to them. None: as silence_s.
        most_returns: so often is a worker started again, if none of its processes lasts for STEADY_S.
        show: called with each line that workers print; None: to standard error.
    """

    def __init__(  # noqa: PLR0913 - what is started, whom it concerns, and how patient it is
        self,
        command: Sequence[str],
        *,
        workers: int,
        least: int = 1,
        usable: Callable[[int], int] = lambda number: number,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None],
        tell: Callable[[str, dict[str, Any]], None],
        silence_s: float = 5.0,
        answer_s: float | None = None,
        most_returns: int = 3,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._on_line, self._tell = on_line, tell
        self._least, self._most_returns = least, most_returns
        self._silence_s, self._answer_s = silence_s, silence_s if answer_s is None else answer_s
        self._roster = Membership(workers, least, usable)
        self._listener = listen()
        address: tuple[str, int] = self._listener.getsockname()[:2]
        self._speaker = OutputRelay(show)
        near = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
        self._crew = WorkerPool(command, {**(environment or {}), **near}, address, self._speaker)
        self._last_words: list[tuple[str, list[str]]] = []
        self._returns = [0] * workers
        self._failed: dict[int, tuple[float, int]] = {}
        """Workers to be started again, with when and with what they ended."""
        self._breakup = GenerationFailure()
        self._called: set[tuple[int, bool]] = set()
        self._silent: dict[int, float] = {}
        """Workers that were named for their silence, and how long it is [s]."""
        self._num_causeless, self._formed_at, self._first_formed_at = 0, 0.0, 0.0
        self._asked: list[int] = []
        self._code: int | None = None
        """What the run ends with, from when it is over."""
        self._over_at = 0.0
        self._failure: RunFailed | None = None

    def run(self) -> int:
        """Train to the end; the exit code: 0, or that of the first worker that failed for good.

        Raises:
            RunFailed: fewer workers than `least` are left, or they lose each other again and again.
        """
        try:
            with forward_signals(self.stop):
                for number in range(len(self._returns)):
                    self._crew.start(number)
                self._store = serve(self._listener)
                while self._crew.running or self._failed:
                    for worker, message in self._crew.look(_TICK_S, self._roster.leader):
                        self._on_message(worker, message)
                    self._advance()
        finally:
            self._crew.close()
            self._listener.close()
        for title, lines in self._last_words:  # rank 0 has said the same by now, or they say something else
            self._speaker.add(title, lines)
        if self._failure is not None:
            raise self._failure
        assert self._code is not None, "nobody runs, and nobody said how it ended"
        return self._code

    def stop(self, signal_number: int) -> None:
        """Ask the workers to stop after the update under way; asked again by Ctrl-C, end them at once.

        They get SIGTERM whatever was sent: Ctrl-C reaches them without us, and twice it would end them at once.
        """
        is_again = bool(self._asked)
        self._asked.append(signal_number)
        for worker in self._crew.running:
            if is_again and signal_number == signal.SIGINT:
                self._crew.kill(worker, "interrupted")
            else:
                self._crew.signal(worker, signal.SIGTERM)

    def _on_message(self, worker: int, message: Message) -> None:
        match message["kind"]:
            case "event":
                self._on_line(message["line"])
            case "meet":
                self._roster.came(worker)
            case "lost":
                self._roster.reported(worker, message["notes"])
                self._breakup.report(message["why"])
            case "finished":
                self._roster.finished(worker)
            case "ended":
                if message["lasted_s"] > STEADY_S:
                    self._returns[worker] = 0
                self._on_end(worker, message)
        if self._code is not None and self._roster.states[worker] is MembershipState.WAITING:
            self._crew.send(worker, "dismissed", code=self._code)

    def _on_end(self, worker: int, end: Message) -> None:
        """A process has ended: it had finished, or the run ends with it, or it is lost."""
        code: int = end["code"]
        if code == 0 or self._roster.states[worker] is MembershipState.FINISHED:
            self._roster.finished(worker)
            return
        last_words = (f"worker {worker} {in_words(code)}; its last words:", end["words"])
        if code not in FINAL_EXIT_CODES and self._code is None and not self._asked:
            self._speaker.add(*last_words)
            self._lose(worker, code, end["why"])
            return
        self._last_words.append(last_words)
        self._roster.died(worker, returns=False)
        if code in FINAL_EXIT_CODES and self._code in {None, INTERRUPTED}:
            self._end(code)

    def _lose(self, worker: int, code: int, why: str) -> None:
        """Name a worker that is lost, and see to its return."""
        loss = WorkerLoss(worker=worker, rank=self._rank_of(worker), why=why)
        self._tell("lost", {**asdict(loss), "generation": self._roster.generation.number})
        if loss.rank >= 0:
            self._breakup.explain(f"worker {worker} {why}")
        is_back = self._returns[worker] < self._most_returns
        self._roster.died(worker, returns=is_back)
        if is_back:
            self._failed[worker] = (time.monotonic() + (_ALL_AT_ONCE_S if code > 0 else 0.0), code)
        else:
            self._tell("left_out", self._returns_of(worker))

    def _returns_of(self, worker: int) -> dict[str, Any]:
        return {"worker": worker, "returns": self._returns[worker], "most_returns": self._most_returns}

    def _advance(self) -> None:
        """Do what follows from all that was heard."""
        self._look_for_silence()
        if self._asked and self._code is None:
            self._end(INTERRUPTED)
        if self._roster.is_done and self._code in {None, INTERRUPTED}:
            self._end(0)
        if self._code is None:
            self._start_again()
            self._regroup()
        elif self._code != INTERRUPTED and time.monotonic() - self._over_at > LEAVING_S:
            for worker in self._crew.running:
                self._crew.kill(worker, f"still there {format_seconds(LEAVING_S)} after the run was over")

    def _look_for_silence(self) -> None:
        """Name workers without a sign of life, and those that are back; kill whom the patience is over with."""
        silent = self._crew.silent(min(NAMED_S, self._silence_s))
        now_silent = {worker: silence_s for worker, silence_s, _ in silent}
        for worker in [worker for worker in self._silent if worker not in now_silent]:
            seconds = self._silent.pop(worker)
            if worker in self._crew.running:
                self._tell("awake", {"worker": worker, "rank": self._rank_of(worker), "seconds": seconds})
        for worker, silence_s, is_stopped in silent:
            patience_s = self._longest_silence_s(worker, is_stopped=is_stopped)
            if silence_s > patience_s:
                self._crew.kill(worker, f"silent for {silence_s:.1f} s" + (" (stopped)" if is_stopped else ""))
            elif self._roster.states[worker] is MembershipState.MEMBER:
                if worker not in self._silent:
                    self._tell("silent", {
                        "worker": worker, "rank": self._rank_of(worker), "seconds": silence_s,
                        "is_stopped": is_stopped, "patience_s": patience_s,
                    })  # fmt: skip
                self._silent[worker] = silence_s

    def _rank_of(self, worker: int) -> int:
        """A worker's rank in the present generation; -1: none."""
        rank = self._roster.rank_of(worker)
        return -1 if rank is None else rank

    def _longest_silence_s(self, worker: int, *, is_stopped: bool) -> float:
        """For how long a worker may show no sign of life [s]."""
        match self._roster.states[worker]:
            case MembershipState.FINISHED:
                return math.inf  # whoever has said its last may be silent; the process has its own time to end
            case _ if is_stopped:
                return self._silence_s
            case MembershipState.STARTING:
                return max(STARTING_S, self._silence_s)
            case _:
                return self._silence_s

    def _end(self, code: int, failure: RunFailed | None = None) -> None:
        """The run is over. Members that have nothing to say of it are dismissed when they lose the others."""
        self._code, self._failure, self._over_at = code, failure, time.monotonic()
        self._failed.clear()
        if self._roster.generation.number > 0:  # else what one has found, the others soon find as well
            for worker in self._roster.those(MembershipState.STARTING):
                self._crew.kill(worker, "the run is over")
        dismissed = self._roster.those(MembershipState.WAITING)
        if code not in {0, INTERRUPTED}:
            dismissed += self._roster.those(MembershipState.MEMBER)
        for worker in dismissed:
            self._crew.send(worker, "dismissed", code=code)

    def _start_again(self) -> None:
        """Start those that are due, unless all have failed by themselves: then so would they."""
        codes = [code for _, code in self._failed.values()]
        if codes and not self._crew.running and min(codes) > 0:
            self._end(codes[0])
        for worker, (due, _) in list(self._failed.items()):
            if time.monotonic() >= due:
                del self._failed[worker]
                self._returns[worker] += 1
                self._crew.start(worker)
                self._tell("restarted", self._returns_of(worker))

    def _regroup(self) -> None:
        """End a generation that is broken or too small, and announce the next when everybody is ready."""
        if self._breakup.heard_s() > self._answer_s:
            for worker in self._roster.missed:
                self._crew.kill(worker, f"hung: it did not notice for {format_seconds(self._answer_s)} that the "
                                "others had lost it")  # fmt: skip
        if self._roster.is_broken or self._roster.is_wanted:
            self._call()
        try:
            formed = self._roster.form()
        except TooFewWorkers as few:
            self._end(RunFailed.exit_code, RunFailed(
                f"{few.left} of {len(self._returns)} processes are left, and the run needs {self._least}",
                remedy="What was saved is intact: the same command continues it.",
            ))  # fmt: skip
            return
        if formed is not None:
            self._announce(formed)

    def _call(self) -> None:
        """Have members leave at the end of their update, and wait for nobody if the generation is broken."""
        is_broken = self._roster.is_broken
        if not is_broken:
            self._breakup.explain(RENDEZVOUS_REQUESTED)
        for worker in self._roster.those(MembershipState.MEMBER):
            if (worker, is_broken) not in self._called:
                self._called.add((worker, is_broken))
                self._crew.send(worker, "called", is_broken=is_broken)

    def _announce(self, formed: Generation) -> None:
        """Tell everybody of the generation, unless they would only lose each other again."""
        breakup, self._breakup = self._breakup, GenerationFailure()
        is_causeless = formed.number > 1 and not breakup.is_explained
        was_short = time.monotonic() - self._formed_at < CAUSELESS_S
        self._num_causeless = self._num_causeless + 1 if is_causeless and was_short else 0
        if self._num_causeless > MOST_CAUSELESS:
            self._end(RunFailed.exit_code, RunFailed(
                f"the processes lost each other {self._num_causeless} times in a row though nobody was missing; "
                f"the last time: {breakup.why}",
                remedy="The reason given is where to look; in one process (`--on here`) it may be plainer.",
            ))  # fmt: skip
            return
        self._formed_at = time.monotonic()
        self._first_formed_at = self._first_formed_at or self._formed_at
        self._called.clear()
        for rank, worker in enumerate(formed.workers):
            self._crew.send(
                worker, "meeting", number=formed.number, rank=rank, size=len(formed.workers), notes=formed.notes,
                num_veterans=formed.num_veterans, age_s=self._formed_at - self._first_formed_at,
            )  # fmt: skip
        self._tell("met", {
            "generation": formed.number, "workers": list(formed.workers),
            "spares": self._roster.those(MembershipState.WAITING), "why": breakup.why, "seconds": breakup.seconds(),
        })  # fmt: skip
