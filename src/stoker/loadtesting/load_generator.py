"""Sends requests when they are due and notes when answers come: one thread, non-blocking sockets, no framework.

In an open loop requests are due at times fixed beforehand, whatever the service does; a latency counts from when its
request was due. A service that stalls for a second so gets the blame of everyone who would have come in that second,
whom a loop that waits for answers would never have sent ("coordinated omission"). In a closed loop so many callers each
send their next request once the last was answered.

Source: G. Tene, "How NOT to Measure Latency", 2013; B. Schroeder, A. Wierman and M. Harchol-Balter, "Open Versus
Closed: A Cautionary Tale", NSDI 2006.

When requests are due: fixed before the first is sent, so that a slow service cannot slow down who asks it.
"""

from __future__ import annotations

import gc
import math
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, ClientConnection, HttpAnswer, closes

LOST, UNANSWERED = -1, 0
"""In place of an HTTP status: the connection broke, or no answer came before waiting ended."""

_LONGEST_WAIT_S: Final = 0.5


@dataclass(frozen=True)
class Payload:
    """An HTTP request ready to be sent, and how many samples it asks about."""

    request: bytes
    rows: int


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """When to stop: no answer is waited for longer than `patience_s` after the last request was due.

    With `within_s`, sending ends once more than `most_late` requests have taken longer than that, or failed.
    """

    patience_s: float = 10.0
    within_s: float | None = None
    most_late: int = 0


@dataclass
class LoadTrace:
    """What became of each request, in the order they were due; times are seconds since the first could be sent.

    `noticed` is when the generator came to a request, `done` when its answer was whole or it failed (NaN: never),
    `statuses` are those of HTTP, `LOST` or `UNANSWERED`. `ended` is when the last of them was done. `num_resent` counts
    requests sent twice, since the service closed the connection that they were sent on before it read them.
    """

    due: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    most_in_flight: int = 0
    waited_for_connection: int = 0
    num_resent: int = 0
    cpu_s: float = 0.0
    ended: float = 0.0
    was_cut: bool = False


def open_loop(
    address: Address,
    payloads: Sequence[Payload],
    due: NDArray[np.float64],
    *,
    connections: int,
    limits: LoadLimits,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadTrace:
    """Send a request at each of the times `due` [s], payloads in turn, over at most so many connections.

    Raises:
        ServiceError: nobody listens at the address.
    """
    return _Driver(address, payloads, due.tolist(), connections, limits, clock).run(until=0.0)


def closed_loop(
    address: Address,
    payloads: Sequence[Payload],
    *,
    connections: int,
    seconds: float,
    limits: LoadLimits,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadTrace:
    """So many callers, each sending its next request once the last is answered, for so many seconds.

    Raises:
        ServiceError: nobody listens at the address.
    """
    return _Driver(address, payloads, [0.0] * connections, connections, limits, clock).run(until=seconds)


class _Driver:
    """Requests are numbered in the order they are due; a connection works on one of them at a time."""

    def __init__(
        self,
        address: Address,
        payloads: Sequence[Payload],
        due: list[float],
        connections: int,
        limits: LoadLimits,
        clock: Callable[[], float],
    ) -> None:
        self._address, self._payloads, self._limits, self._clock = address, payloads, limits, clock
        self._due = due
        self._trace = LoadTrace(due=due)
        self._next = 0
        self._backlog: deque[int] = deque()
        self._selector = selectors.DefaultSelector()
        self._idle: deque[ClientConnection] = deque()
        self._busy: dict[ClientConnection, int] = {}
        self._missing = 0
        self._resent: set[int] = set()
        self._until = 0.0
        self._began = 0.0
        self._num_good = 0
        self._num_judged = 0
        self._open(connections)

    def run(self, *, until: float) -> LoadTrace:
        """Drive until every request due is answered or given up; before `until`, each answer makes another due."""
        self._until = until
        had_gc = gc.isenabled()
        gc.disable()  # a collection would be a stall of ours, in every latency of that moment
        cpu_s = time.thread_time()
        self._began = self._clock()
        try:
            while self._go_on():
                self._wait()
        finally:
            self._trace.cpu_s = time.thread_time() - cpu_s
            if had_gc:
                gc.enable()
            self._close()
        return self._finished()

    def _go_on(self) -> bool:
        """Begin what is due; False once there is nothing left to wait for."""
        now = self._now()
        while self._next < len(self._due) and self._due[self._next] <= now:
            self._come_to(self._next, now)
            self._next += 1
        while self._backlog and (self._idle or self._missing):
            self._begin(self._backlog.popleft())
        if self._is_hopeless(now):
            self._trace.was_cut = True
            return False
        if self._next < len(self._due):
            return True
        return bool(self._busy or self._backlog) and now < self._due[-1] + self._limits.patience_s

    def _come_to(self, number: int, now: float) -> None:
        trace = self._trace
        trace.noticed.append(now)
        trace.done.append(math.nan)
        trace.statuses.append(UNANSWERED)
        trace.rows.append(self._payloads[number % len(self._payloads)].rows)
        trace.waited_for_connection += not (self._idle or self._missing or self._backlog)
        self._backlog.append(number)

    def _wait(self) -> None:
        """Until something happens, or the next request is due: by `select`, whose timeout is in microseconds."""
        wake = self._due[self._next] if self._next < len(self._due) else self._due[-1] + self._limits.patience_s
        timeout = min(max(wake - self._now(), 0.0), _LONGEST_WAIT_S)
        if hasattr(
            self._selector, "fileno"
        ):  # epoll and kqueue round to milliseconds; their descriptor can be waited for
            select.select([self._selector.fileno()], [], [], timeout)
            timeout = 0.0
        for key, events in self._selector.select(timeout):
            connection = key.fileobj
            assert isinstance(connection, ClientConnection)
            self._serve(connection, events)

    def _serve(self, connection: ClientConnection, events: int) -> None:
        """Go on sending, or take what has come."""
        try:
            if events & selectors.EVENT_WRITE:
                connection.send()
                if not connection.wants_to_send:
                    self._selector.modify(connection, selectors.EVENT_READ)
            if events & selectors.EVENT_READ:
                answer = connection.receive()
                if answer is not None and connection in self._busy:
                    self._answered(connection, answer)
        except (OSError, ServiceError):
            self._lost(connection)

    def _answered(self, connection: ClientConnection, answer: HttpAnswer) -> None:
        now = self._now()
        number = self._busy.pop(connection)
        if closes(answer):
            self._drop(connection)
        else:
            self._idle.append(connection)
        self._note(number, answer.status, now)
        if now < self._until:
            self._due.append(now)

    def _note(self, number: int, status: int, now: float) -> None:
        self._trace.done[number], self._trace.statuses[number] = now, status
        within = self._limits.within_s
        if status == 200 and within is not None and now - self._due[number] <= within:
            self._num_good += 1

    def _begin(self, number: int) -> None:
        """Send a request on an idle connection, or on a new one where one was lost."""
        if self._idle:
            connection = self._idle.popleft()  # in turn, for services that share connections out among processes
        else:
            try:
                connection = ClientConnection(self._address)
            except OSError:
                self._until = 0.0  # nobody is there any more: callers of a closed loop would only spin
                self._note(number, LOST, self._now())
                return
            self._missing -= 1
            self._selector.register(connection, selectors.EVENT_READ)
        self._busy[connection] = number
        self._trace.most_in_flight = max(self._trace.most_in_flight, len(self._busy))
        try:
            connection.begin(self._payloads[number % len(self._payloads)].request)
            if connection.wants_to_send:
                self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except OSError:
            self._lost(connection)

    def _lost(self, connection: ClientConnection) -> None:
        """A connection is gone; a request that met an idle one's end is sent again, any other has failed."""
        number = self._busy.pop(connection, None)
        is_fresh = connection.is_fresh_loss
        self._drop(connection)
        if number is None:
            return
        if is_fresh and number not in self._resent:
            self._resent.add(number)
            self._backlog.appendleft(number)
            return
        now = self._now()
        self._note(number, LOST, now)
        if now < self._until:
            self._due.append(now)

    def _is_hopeless(self, now: float) -> bool:
        """Whether more requests are late for good than may be."""
        within = self._limits.within_s
        if within is None:
            return False
        while self._num_judged < self._next and self._due[self._num_judged] + within < now:
            self._num_judged += 1
        return self._num_judged - self._num_good > self._limits.most_late

    def _now(self) -> float:
        return self._clock() - self._began

    def _open(self, connections: int) -> None:
        try:
            for _ in range(connections):
                connection = ClientConnection(self._address)
                self._selector.register(connection, selectors.EVENT_READ)
                self._idle.append(connection)
        except OSError as error:
            self._close()
            raise ServiceError(
                f"connection {len(self._idle) + 1} of {connections} to {self._address.host}:{self._address.port} "
                f"cannot be opened: {error}",
                remedy="Is the server running there? `ulimit -n` bounds connections on both sides.",
            ) from error

    def _drop(self, connection: ClientConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._missing += 1
        if connection in self._idle:
            self._idle.remove(connection)

    def _close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._selector.close()

    def _finished(self) -> LoadTrace:
        trace = self._trace
        del trace.due[len(trace.noticed) :]  # those that were no longer sent
        trace.num_resent = len(self._resent)
        answered = [done for done in trace.done if not math.isnan(done)]
        trace.ended = self._now() if trace.was_cut else max([*trace.due[-1:], *answered], default=0.0)
        return trace


MOST_REQUESTS = 1_000_000
"""Of one measurement; every latency is kept."""


def poisson(rate: float, seconds: float, *, seed: int = 0) -> NDArray[np.float64]:
    """Times [s] of independent callers: gaps are exponential, `rate` arrivals a second on average.

    Given how many arrive, arrivals of a Poisson process are uniform; so exactly `rate × seconds` of them come, and two
    measurements of one length ask for the same.

    Raises:
        BadJob: there would be none, or more than a million.

    Source: S. M. Ross, Introduction to Probability Models, section 5.3 (conditional distribution of arrival times).
    """
    return np.sort(np.random.default_rng(seed).uniform(0.0, seconds, _count(rate, seconds)))


def constant(rate: float, seconds: float) -> NDArray[np.float64]:
    """Times [s] that are 1/`rate` apart: a metronome, kinder to a queue than callers are.

    Raises:
        BadJob: there would be none, or more than a million.
    """
    return np.arange(_count(rate, seconds), dtype=np.float64) / rate


def _count(rate: float, seconds: float) -> int:
    wanted = rate * seconds
    if not (math.isfinite(wanted) and rate > 0 and seconds > 0 and 1 <= round(wanted) <= MOST_REQUESTS):
        raise BadJob(
            f"{rate:g} requests/s for {seconds:g} s are {wanted:,.0f} requests: wanted 1 to {MOST_REQUESTS:,}",
            remedy="Choose another rate, or another time.",
        )
    return round(wanted)
