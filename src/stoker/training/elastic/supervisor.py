"""The supervisor of a run's worker processes on one machine: starts, watches, regroups and ends them.

What: each worker runs the same command and has a channel to the supervisor, which forms the generations. A worker that
dies or hangs is named, and the others meet again without it. It is started again, and joins a later generation.
Use when: several processes on one machine (`--on 2xhere`). Over machines, a launcher such as torchrun.
Costs: a process that mostly sleeps, and a message each half second.
Does not see: a worker whose main thread hangs while no other worker waits for it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
from stoker.training.slices import SLICE_OVER_EXIT
from stoker.units import format_seconds

INTERRUPTED = 130
"""Exit code of a run that was asked to stop, and can be continued."""

FINAL_EXIT_CODES = frozenset(
    {BadJob.exit_code, DoesNotFit.exit_code, RunFailed.exit_code, INTERRUPTED, SLICE_OVER_EXIT}
)
"""Exit codes of workers that end the run: another process would end in the same way."""

LEFT_UNFINISHED = frozenset({None, INTERRUPTED, SLICE_OVER_EXIT})
"""Verdicts under which workers still end by themselves, and the first to report another end decides."""

LEAVING_S = 30.0
"""Longest time for workers to end by themselves once the run is over [s]."""

STARTING_S = 300.0
"""Longest silence of a starting worker [s]: it imports, and may read data in one long call."""

NAMED_S = 5.0
"""Silence after which a worker is named [s]; the others still wait for it, until the patience is over."""

STEADY_S = 600.0
"""Running time after which a worker's restarts are counted from 0 again [s]."""

MOST_CAUSELESS, CAUSELESS_S = 5, 30.0
"""Number of generations in a row that ended within a time [s] without a lost worker, after which the run ends."""

_TICK_S = 0.05
_ALL_AT_ONCE_S = 1.0
"""Delay before a worker that failed by itself is started again [s], and only if not all of them failed."""


class Supervisor:
    """The workers of one run.

    Args:
        command: program and arguments of every worker.
        workers: number of workers.
        least: fewest that may train; with fewer, the run ends unless restarted workers join.
        usable: how many of a number of workers the layout can use; the others wait as spares.
        environment: variables for the workers, in addition to those of this process.
        on_line: receives each line that members send as events, in order.
        tell: receives what happens: "met" (generation, workers by rank, spares, why the one before was over, seconds
            since), "lost" (worker, rank or -1, why, and the generation), "restarted" and "left_out" (worker, returns so
            far, most_returns), "silent" (worker, rank, seconds, is_stopped, and patience_s, after which it counts as
            lost), "awake" (worker, rank and seconds).
        silence_s: a worker without a sign of life for this time is killed [s]: it is stopped, or some call holds the
            interpreter lock. One that shows life again earlier is no loss.
        answer_s: likewise a worker that shows life, but has not noticed for this time that others have lost the
            generation [s]: the longest computation without communication. None: as silence_s.
        most_returns: number of restarts of a worker, if none of its processes lasts for STEADY_S.
        show: receives each line that workers print; None: standard error.
    """

    def __init__(  # noqa: PLR0913 - what is started, who hears of it, and how patient it is
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
        self._membership = Membership(workers, least, usable)
        self._listener = listen()
        address: tuple[str, int] = self._listener.getsockname()[:2]
        self._relay = OutputRelay(show)
        near = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
        self._pool = WorkerPool(command, {**(environment or {}), **near}, address, self._relay)
        self._last_words: list[tuple[str, list[str]]] = []
        self._returns = [0] * workers
        self._failed: dict[int, tuple[float, int]] = {}
        """Workers to be started again: the time to do it, and the exit code."""
        self._failure_of_generation = GenerationFailure()
        self._called: set[tuple[int, bool]] = set()
        self._silent: dict[int, float] = {}
        """Silent workers that were named, with the silence so far [s]."""
        self._num_causeless, self._formed_at, self._first_formed_at = 0, 0.0, 0.0
        self._asked: list[int] = []
        self._code: int | None = None
        """Exit code of the run, once it is over."""
        self._over_at = 0.0
        self._failure: RunFailed | None = None

    def run(self) -> int:
        """Train to the end; returns the exit code [0, or that of the first worker that failed for good].

        Raises:
            RunFailed: fewer workers than `least` are left, or they lose each other again and again.
        """
        try:
            with forward_signals(self.stop):
                for number in range(len(self._returns)):
                    self._pool.start(number)
                self._store = serve(self._listener)
                while self._pool.running or self._failed:
                    for worker, message in self._pool.look(_TICK_S, self._membership.leader):
                        self._on_message(worker, message)
                    self._advance()
        finally:
            self._pool.close()
            self._listener.close()
        for title, lines in self._last_words:  # shown unless rank 0 has printed the same by now
            self._relay.add(title, lines)
        if self._failure is not None:
            raise self._failure
        assert self._code is not None, "no worker runs, and none reported an end"
        return self._code

    def stop(self, signal_number: int) -> None:
        """Ask the workers to stop after the present update; with a second Ctrl-C, end them at once.

        They get SIGTERM in any case: Ctrl-C reaches them from the terminal, and twice it would end them at once.
        """
        is_again = bool(self._asked)
        self._asked.append(signal_number)
        for worker in self._pool.running:
            if is_again and signal_number == signal.SIGINT:
                self._pool.kill(worker, "interrupted")
            else:
                self._pool.signal(worker, signal.SIGTERM)

    def _on_message(self, worker: int, message: Message) -> None:
        match message["kind"]:
            case "event":
                self._on_line(message["line"])
            case "meet":
                self._membership.came(worker)
            case "lost":
                self._membership.reported(worker, message["notes"])
                self._failure_of_generation.report(message["why"])
            case "finished":
                self._membership.finished(worker)
            case "ended":
                if message["lasted_s"] > STEADY_S:
                    self._returns[worker] = 0
                self._on_end(worker, message)
        if self._code is not None and self._membership.states[worker] is MembershipState.WAITING:
            self._pool.send(worker, "dismissed", code=self._code)

    def _on_end(self, worker: int, end: Message) -> None:
        """A process has ended: it had finished, or it ends the run, or it is lost."""
        code: int = end["code"]
        if code == 0 or self._membership.states[worker] is MembershipState.FINISHED:
            self._membership.finished(worker)
            return
        last_words = (f"worker {worker} {in_words(code)}; its last words:", end["words"])
        if code not in FINAL_EXIT_CODES and self._code is None and not self._asked:
            self._relay.add(*last_words)
            self._lose(worker, code, end["why"])
            return
        self._last_words.append(last_words)
        self._membership.died(worker, returns=False)
        if code in FINAL_EXIT_CODES and self._code in LEFT_UNFINISHED:
            self._end(code)

    def _lose(self, worker: int, code: int, why: str) -> None:
        """Name a lost worker, and schedule its restart."""
        rank = self._rank_of(worker)
        generation = self._membership.generation.number
        self._tell("lost", {"worker": worker, "rank": rank, "why": why, "generation": generation})
        if rank >= 0:
            self._failure_of_generation.explain(f"worker {worker} {why}")
        is_back = self._returns[worker] < self._most_returns
        self._membership.died(worker, returns=is_back)
        if is_back:
            self._failed[worker] = (time.monotonic() + (_ALL_AT_ONCE_S if code > 0 else 0.0), code)
        else:
            self._tell("left_out", self._returns_of(worker))

    def _returns_of(self, worker: int) -> dict[str, Any]:
        return {"worker": worker, "returns": self._returns[worker], "most_returns": self._most_returns}

    def _advance(self) -> None:
        """Act on all messages so far."""
        self._look_for_silence()
        if self._asked and self._code is None:
            self._end(INTERRUPTED)
        if self._membership.is_done and self._code in LEFT_UNFINISHED:
            self._end(0)
        if self._code is None:
            self._restart()
            self._regroup()
        elif self._code not in LEFT_UNFINISHED and time.monotonic() - self._over_at > LEAVING_S:
            for worker in self._pool.running:
                self._pool.kill(worker, f"still there {format_seconds(LEAVING_S)} after the run was over")

    def _look_for_silence(self) -> None:
        """Name silent workers, and those that are back; kill those whose patience is over."""
        silent = self._pool.silent(min(NAMED_S, self._silence_s))
        now_silent = {worker: silence_s for worker, silence_s, _ in silent}
        for worker in [worker for worker in self._silent if worker not in now_silent]:
            seconds = self._silent.pop(worker)
            if worker in self._pool.running:
                self._tell("awake", {"worker": worker, "rank": self._rank_of(worker), "seconds": seconds})
        for worker, silence_s, is_stopped in silent:
            patience_s = self._longest_silence_s(worker, is_stopped=is_stopped)
            if silence_s > patience_s:
                self._pool.kill(worker, f"silent for {silence_s:.1f} s" + (" (stopped)" if is_stopped else ""))
            elif self._membership.states[worker] is MembershipState.MEMBER:
                if worker not in self._silent:
                    self._tell(
                        "silent",
                        {
                            "worker": worker,
                            "rank": self._rank_of(worker),
                            "seconds": silence_s,
                            "is_stopped": is_stopped,
                            "patience_s": patience_s,
                        },
                    )
                self._silent[worker] = silence_s

    def _rank_of(self, worker: int) -> int:
        """A worker's rank in the present generation [-1: none]."""
        rank = self._membership.rank_of(worker)
        return -1 if rank is None else rank

    def _longest_silence_s(self, worker: int, *, is_stopped: bool) -> float:
        """Longest silence of a worker in its present state [s]."""
        match self._membership.states[worker]:
            case MembershipState.FINISHED:
                return math.inf  # it sends nothing more; LEAVING_S limits its end
            case _ if is_stopped:
                return self._silence_s
            case MembershipState.STARTING:
                return max(STARTING_S, self._silence_s)
            case _:
                return self._silence_s

    def _end(self, code: int, failure: RunFailed | None = None) -> None:
        """End the run, and dismiss the workers that wait; members too, unless it ended as asked."""
        self._code, self._failure, self._over_at = code, failure, time.monotonic()
        self._failed.clear()
        if self._membership.generation.number > 0:  # before it, the others soon end in the same way
            for worker in self._membership.those(MembershipState.STARTING):
                self._pool.kill(worker, "the run is over")
        dismissed = self._membership.those(MembershipState.WAITING)
        if code != 0 and code not in LEFT_UNFINISHED:
            dismissed += self._membership.those(MembershipState.MEMBER)
        for worker in dismissed:
            self._pool.send(worker, "dismissed", code=code)

    def _restart(self) -> None:
        """Restart the workers that are due; end the run if all have failed by themselves."""
        codes = [code for _, code in self._failed.values()]
        if codes and not self._pool.running and min(codes) > 0:
            self._end(codes[0])
        for worker, (due, _) in list(self._failed.items()):
            if time.monotonic() >= due:
                del self._failed[worker]
                self._returns[worker] += 1
                self._pool.start(worker)
                self._tell("restarted", self._returns_of(worker))

    def _regroup(self) -> None:
        """End a generation that is broken or too small, and announce the next once all workers are ready."""
        if self._failure_of_generation.heard_s() > self._answer_s:
            for worker in self._membership.missed:
                self._pool.kill(
                    worker, f"hung: it did not notice for {format_seconds(self._answer_s)} that the others had lost it"
                )
        if self._membership.is_broken or self._membership.is_wanted:
            self._call_members()
        try:
            formed = self._membership.form()
        except TooFewWorkers as few:
            self._end(
                RunFailed.exit_code,
                RunFailed(
                    f"{few.left} of {len(self._returns)} processes are left, and the run needs {self._least}",
                    remedy="What was saved is intact: the same command continues it.",
                ),
            )
            return
        if formed is not None:
            self._announce(formed)

    def _call_members(self) -> None:
        """Ask members to leave after their update, or at once if the generation is broken."""
        is_broken = self._membership.is_broken
        if not is_broken:
            self._failure_of_generation.explain(RENDEZVOUS_REQUESTED)
        for worker in self._membership.those(MembershipState.MEMBER):
            if (worker, is_broken) not in self._called:
                self._called.add((worker, is_broken))
                self._pool.send(worker, "called", is_broken=is_broken)

    def _announce(self, formed: Generation) -> None:
        """Send each worker its place in the generation; end the run if generations keep failing without a cause."""
        end, self._failure_of_generation = self._failure_of_generation, GenerationFailure()
        is_causeless = formed.number > 1 and not end.is_explained
        was_short = time.monotonic() - self._formed_at < CAUSELESS_S
        self._num_causeless = self._num_causeless + 1 if is_causeless and was_short else 0
        if self._num_causeless > MOST_CAUSELESS:
            self._end(
                RunFailed.exit_code,
                RunFailed(
                    f"the processes lost each other {self._num_causeless} times in a row though none was missing; "
                    f"the last time: {end.why}",
                    remedy="The reason given is where to look; in one process (`--on here`) it may be plainer.",
                ),
            )
            return
        self._formed_at = time.monotonic()
        self._first_formed_at = self._first_formed_at or self._formed_at
        self._called.clear()
        for rank, worker in enumerate(formed.workers):
            self._pool.send(
                worker,
                "meeting",
                number=formed.number,
                rank=rank,
                size=len(formed.workers),
                notes=formed.notes,
                num_veterans=formed.num_veterans,
                age_s=self._formed_at - self._first_formed_at,
            )
        self._tell(
            "met",
            {
                "generation": formed.number,
                "workers": list(formed.workers),
                "spares": self._membership.those(MembershipState.WAITING),
                "why": end.why,
                "seconds": end.seconds(),
            },
        )
