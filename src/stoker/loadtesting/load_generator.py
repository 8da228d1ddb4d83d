"""Load generator: sends requests when they are due and records when answers arrive; one thread, non-blocking sockets.

In an open loop the times are fixed beforehand, and a latency counts from the time its request was due. A stall of the
service for a second is so charged to every request due in that second; a loop that waits for answers would never have
sent them ("coordinated omission"). In a closed loop each caller sends its next request once the last was answered.

Source: G. Tene, "How NOT to Measure Latency", 2013; B. Schroeder, A. Wierman and M. Harchol-Balter, "Open Versus
Closed: A Cautionary Tale", NSDI 2006.
"""

from __future__ import annotations

import gc
import math
import select
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, ClientConnection, closes

LOST, UNANSWERED = -1, 0
"""Instead of an HTTP status: the connection broke, or no answer came in time."""

_LONGEST_WAIT_S: Final = 0.5


@dataclass(frozen=True)
class Payload:
    """An encoded HTTP request, and its number of samples."""

    request: bytes
    rows: int


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """When to stop: `patience_s` after the last request was due.

    With `within_s`, sending ends once more than `most_late` requests took longer than that, or failed.
    """

    patience_s: float = 10.0
    within_s: float | None = None
    most_late: int = 0


@dataclass
class LoadTrace:
    """Outcome of each request, in the order they were due; times are seconds since the start.

    `noticed` is when the generator reached a request, `done` when its answer was complete or it failed (NaN: never),
    `statuses` are HTTP's, `LOST` or `UNANSWERED`. `ended` is when the last request was done. `num_resent` counts
    requests sent twice because the service closed their connection before it read them.
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
    address: Address, payloads: Sequence[Payload], due: NDArray[np.float64], *, connections: int, limits: LoadLimits
) -> LoadTrace:
    """Send a request at each of the times `due` [s], payloads in turn, over at most `connections` connections.

    Raises:
        ServiceError: a connection cannot be opened.
    """
    return _Driver(address, payloads, due.tolist(), connections, limits).run(until=0.0)


def closed_loop(
    address: Address, payloads: Sequence[Payload], *, connections: int, seconds: float, limits: LoadLimits
) -> LoadTrace:
    """`connections` callers, each sending its next request once the last is answered, for `seconds`.

    Raises:
        ServiceError: a connection cannot be opened.
    """
    return _Driver(address, payloads, [0.0] * connections, connections, limits).run(until=seconds)


class _Driver:
    """The loop. Requests are numbered in the order they are due; a connection serves one of them at a time."""

    def __init__(
        self, address: Address, payloads: Sequence[Payload], due: list[float], connections: int, limits: LoadLimits
    ) -> None:
        self._address, self._payloads, self._limits = address, payloads, limits
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
        try:
            for _ in range(connections):
                connection = ClientConnection(address)
                self._selector.register(connection, selectors.EVENT_READ)
                self._idle.append(connection)
        except OSError as error:
            self._close()
            raise ServiceError(
                f"connection {len(self._idle) + 1} of {connections} to {address.host}:{address.port} "
                f"cannot be opened: {error}",
                remedy="Is the server running there? `ulimit -n` bounds connections on both sides.",
            ) from error

    def run(self, *, until: float) -> LoadTrace:
        """Run until every due request is answered or given up; before `until`, each answer makes another due."""
        self._until = until
        had_gc = gc.isenabled()
        gc.disable()  # a collection would stall this thread and add to every latency of that moment
        cpu_s = time.thread_time()
        self._began = time.perf_counter()
        try:
            while self._go_on():
                self._wait()
        finally:
            self._trace.cpu_s = time.thread_time() - cpu_s
            if had_gc:
                gc.enable()
            self._close()
        trace = self._trace
        del trace.due[len(trace.noticed) :]  # those that were not sent
        trace.num_resent = len(self._resent)
        answered = [done for done in trace.done if not math.isnan(done)]
        trace.ended = self._now() if trace.was_cut else max([*trace.due[-1:], *answered], default=0.0)
        return trace

    def _go_on(self) -> bool:
        """Begin what is due; False once there is nothing left to wait for."""
        now, trace = self._now(), self._trace
        while self._next < len(self._due) and self._due[self._next] <= now:
            trace.noticed.append(now)
            trace.done.append(math.nan)
            trace.statuses.append(UNANSWERED)
            trace.rows.append(self._payloads[self._next % len(self._payloads)].rows)
            trace.waited_for_connection += not (self._idle or self._missing or self._backlog)
            self._backlog.append(self._next)
            self._next += 1
        while self._backlog and (self._idle or self._missing):
            self._begin(self._backlog.popleft())
        within_s = self._limits.within_s
        if within_s is not None:
            while self._num_judged < self._next and self._due[self._num_judged] + within_s < now:
                self._num_judged += 1
            if self._num_judged - self._num_good > self._limits.most_late:
                trace.was_cut = True
                return False
        if self._next < len(self._due):
            return True
        return bool(self._busy or self._backlog) and now < self._due[-1] + self._limits.patience_s

    def _wait(self) -> None:
        """Wait until a socket is ready or the next request is due, by `select`, whose timeout is in microseconds."""
        wake = self._due[self._next] if self._next < len(self._due) else self._due[-1] + self._limits.patience_s
        timeout = min(max(wake - self._now(), 0.0), _LONGEST_WAIT_S)
        if hasattr(self._selector, "fileno"):  # epoll and kqueue round to milliseconds: wait for their descriptor
            select.select([self._selector.fileno()], [], [], timeout)
            timeout = 0.0
        for key, events in self._selector.select(timeout):
            connection = key.fileobj
            assert isinstance(connection, ClientConnection)
            self._serve(connection, events)

    def _serve(self, connection: ClientConnection, events: int) -> None:
        """Send more of the request, or receive more of the answer."""
        answer = None
        try:
            if events & selectors.EVENT_WRITE:
                connection.send()
                if not connection.wants_to_send:
                    self._selector.modify(connection, selectors.EVENT_READ)
            if events & selectors.EVENT_READ:
                answer = connection.receive()
        except (OSError, ServiceError):
            self._lost(connection)
        if answer is None or connection not in self._busy:
            return
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
        """Send a request on an idle connection, or on a new one in place of a lost one."""
        if self._idle:
            connection = self._idle.popleft()  # in turn, for services that spread connections over processes
        else:
            try:
                connection = ClientConnection(self._address)
            except OSError:
                self._until = 0.0  # the service is gone: callers of a closed loop would only spin
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
        """Drop a lost connection. A request sent just as an idle one was closed is sent again; any other has failed."""
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

    def _now(self) -> float:
        return time.perf_counter() - self._began

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


MOST_REQUESTS = 1_000_000
"""Limit of one measurement; every latency is kept."""


def poisson(rate: float, seconds: float, *, seed: int = 0) -> NDArray[np.float64]:
    """Times [s] of independent callers: exponential gaps, `rate` arrivals per second on average.

    Given their number, arrivals of a Poisson process are uniform; so there are exactly `rate × seconds` of them, and
    two measurements of one length send equally many.

    Raises:
        BadJob: there would be none, or more than a million.

    Source: S. M. Ross, Introduction to Probability Models, section 5.3 (conditional distribution of arrival times).
    """
    return np.sort(np.random.default_rng(seed).uniform(0.0, seconds, _count(rate, seconds)))


def constant(rate: float, seconds: float) -> NDArray[np.float64]:
    """Times [s] at equal distances of 1/`rate`; kinder to a queue than independent callers.

    Raises:
        BadJob: there would be none, or more than a million.
    """
    return np.arange(_count(rate, seconds), dtype=np.float64) / rate


def _count(rate: float, seconds: float) -> int:
    count = rate * seconds
    if not (math.isfinite(count) and rate > 0 and seconds > 0 and 1 <= round(count) <= MOST_REQUESTS):
        raise BadJob(
            f"{rate:g} requests/s for {seconds:g} s are {count:,.0f} requests: wanted 1 to {MOST_REQUESTS:,}",
            remedy="Choose another rate, or another time.",
        )
    return round(count)
