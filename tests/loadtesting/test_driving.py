"""Against servers whose behaviour is known; no test relies on how fast this machine is."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from stoker.errors import ServiceError
from stoker.loadtesting.load_generator import (
    LOST,
    UNANSWERED,
    LoadLimits,
    Payload,
    closed_loop,
    constant,
    open_loop,
    poisson,
)
from tests.loadtesting.servers import OK, PAYLOAD, REQUEST, served, single_server


async def at_once(body: bytes) -> bytes:
    """Answers without delay."""
    return OK


def test_every_request_is_sent_and_answered_once() -> None:
    """An open loop over few connections loses none and doubles none."""
    seen: list[bytes] = []

    async def count(body: bytes) -> bytes:
        seen.append(body)
        return OK

    payloads = [Payload(REQUEST[:-4] + f"{n:04d}".encode(), rows=n) for n in range(7)]
    with served(count) as address:
        trace = open_loop(address, payloads, poisson(2000, 0.2), connections=3, limits=LoadLimits())
    assert len(seen) == 400
    assert trace.statuses == [200] * 400
    assert trace.rows == [n % 7 for n in range(400)]
    assert sorted(seen) == sorted(f"{n % 7:04d}".encode() for n in range(400))
    assert trace.most_in_flight <= 3


def test_a_stall_is_counted_for_everyone_who_would_have_come() -> None:
    """One stall of half a second in two seconds: a quarter of the schedule is late, not one request of a hundred."""
    stalls = iter([0.0] * 50 + [0.5])
    queue = asyncio.Lock()

    async def stalling(body: bytes) -> bytes:
        async with queue:
            await asyncio.sleep(next(stalls, 0.0))
        return OK

    with served(stalling) as address:
        trace = open_loop(address, [PAYLOAD], constant(100, 2.0), connections=4, limits=LoadLimits())
    latencies = np.array(trace.done) - np.array(trace.due)
    assert latencies.max() >= 0.5
    assert (latencies > 0.1).sum() >= 40  # those due in the first 0.4 s of the stall
    assert trace.statuses == [200] * 200


def test_the_mean_wait_is_at_least_that_of_the_queue() -> None:
    """M/D/1 at a load of 0.6: mean time = s + rho s / 2(1 - rho); this machine can only add to it.

    Source: L. Kleinrock, Queueing Systems I, section 5.6 (Pollaczek-Khinchine).
    """
    service_s, load = 0.004, 0.6
    with served(single_server(service_s)) as address:
        trace = open_loop(
            address, [PAYLOAD], poisson(load / service_s, 1.5, seed=5), connections=64, limits=LoadLimits()
        )
    theory = service_s + load * service_s / (2 * (1 - load))
    due = np.array(trace.due)
    free, exact = 0.0, []  # the same arrivals through an ideal server
    for at in due:
        free = max(free, at) + service_s
        exact.append(free - at)
    assert np.mean(exact) == pytest.approx(theory, rel=0.3)
    measured = np.array(trace.done) - due
    assert (measured >= np.array(exact) - 0.002).all()


def test_callers_of_a_closed_loop_wait_for_their_answers() -> None:
    """With four callers and one server there are never more than four requests, and each waits for four services."""
    with served(single_server(0.01)) as address:
        trace = closed_loop(address, [PAYLOAD], connections=4, seconds=0.5, limits=LoadLimits())
    assert trace.most_in_flight == 4
    assert 4 <= len(trace.due) <= 54
    assert set(trace.statuses) == {200}
    assert (np.array(trace.done) - np.array(trace.due))[4:].mean() >= 0.03


def test_sending_ends_once_the_objective_is_lost() -> None:
    """A server far too slow: with five late ones allowed, the schedule of ten seconds ends early and says so."""
    limits = LoadLimits(within_s=0.02, most_late=5)
    with served(single_server(0.05)) as address:
        trace = open_loop(address, [PAYLOAD], constant(100, 10.0), connections=64, limits=limits)
    assert trace.was_cut
    assert len(trace.due) == len(trace.statuses) < 1000
    assert trace.ended < 10


def test_answers_that_never_come_are_given_up() -> None:
    """After the patience they stand as unanswered, with no time."""

    async def never(body: bytes) -> bytes:
        await asyncio.sleep(600)
        return OK

    with served(never) as address:
        trace = open_loop(address, [PAYLOAD], constant(100, 0.05), connections=8, limits=LoadLimits(patience_s=0.2))
    assert trace.statuses == [UNANSWERED] * 5
    assert all(math.isnan(done) for done in trace.done)


def test_connections_that_break_fail_their_request_alone() -> None:
    """Every third request loses its connection; the others are answered over new ones."""
    numbers = iter(range(1000))

    async def breaking(body: bytes) -> bytes | None:
        return None if next(numbers) % 3 == 0 else OK

    with served(breaking) as address:
        trace = open_loop(address, [PAYLOAD], constant(300, 0.2), connections=2, limits=LoadLimits())
    assert len(trace.statuses) == 60
    assert 200 in trace.statuses
    assert set(trace.statuses) <= {200, LOST}
    assert trace.num_resent > 0  # those that met the end of a connection which had answered before


def test_large_requests_go_out_in_parts() -> None:
    """A body larger than any socket buffer arrives whole."""
    size = 8 * 2**20
    request = REQUEST[: REQUEST.index(b"Content")] + f"Content-Length: {size}\r\n\r\n".encode() + b"x" * size

    async def length(body: bytes) -> bytes:
        return OK if len(body) == size else b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n"

    with served(length) as address:
        trace = open_loop(address, [Payload(request, 1)], constant(20, 0.2), connections=2, limits=LoadLimits())
    assert trace.statuses == [200] * 4


def test_nobody_there_is_told() -> None:
    """An address without a server is an error that names it; one whose server goes away gives failures."""
    with served(at_once) as address:
        pass
    with pytest.raises(ServiceError, match=str(address.port)):
        open_loop(address, [PAYLOAD], constant(10, 0.1), connections=1, limits=LoadLimits())


def test_callers_whose_connections_are_closed_come_again() -> None:
    """A closed loop goes on over new connections until its time is over, with a failure for each it lost."""
    answers = iter([OK] * 20)

    async def few(body: bytes) -> bytes | None:
        return next(answers, None)

    with served(few) as address:
        trace = closed_loop(address, [PAYLOAD], connections=2, seconds=0.3, limits=LoadLimits())
    assert trace.statuses.count(200) == 20
    assert LOST in trace.statuses
