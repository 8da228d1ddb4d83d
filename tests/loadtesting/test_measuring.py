from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from stoker.errors import ServiceError
from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.load_generator import LOST, UNANSWERED, LoadTrace, Payload
from stoker.loadtesting.measurement import LoadTarget, at_rate, greet, judged, measurement_of, with_callers
from stoker.records.service import Objective
from tests.loadtesting.servers import OK, PAYLOAD, REQUEST, served, single_server

NOWHERE = LoadTarget(Address("127.0.0.1", 1), [PAYLOAD], connections=4, objective=Objective(q=0.99, within_s=0.05))


def trace(*latencies: float, **fields: object) -> LoadTrace:
    """Requests every millisecond, each answered after its latency; infinite: never."""
    due = [n / 1000 for n in range(len(latencies))]
    made = LoadTrace(due=due, noticed=list(due), rows=[2] * len(due), ended=1.0, most_in_flight=3)
    made.done = [math.nan if math.isinf(one) else at + one for at, one in zip(due, latencies, strict=True)]
    made.statuses = [UNANSWERED if math.isinf(one) else 200 for one in latencies]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_counts_add_up() -> None:
    """Answered, good, failed and rows are each counted once; rates are by the whole time."""
    found = measurement_of(trace(0.01, 0.02, 0.2, math.inf), NOWHERE, rate=1000.0)
    assert (found.requests, found.answered, found.good, found.rows) == (4, 3, 2, 6)
    assert found.failures == {"no answer": 1}
    assert (found.throughput, found.goodput) == (3.0, 2.0)
    assert found.quantile(0.5).seconds == pytest.approx(0.02)
    assert found.quantile(0.99).seconds == math.inf
    assert found.mean_s == pytest.approx(0.23 / 3)


@pytest.mark.parametrize(
    ("num_late", "held"), [(0, "held"), (3, "held"), (10, "unclear"), (40, "missed"), (1000, "missed")]
)
def test_an_objective_is_held_missed_or_unclear(num_late: int, held: str) -> None:
    """Of 1000 requests, p99: up to 3 late ones, it is surely held; about 10, it is undecided; many more, it is not."""
    latencies = np.full(1000, 0.01)
    latencies[np.random.default_rng(0).permutation(1000)[:num_late]] = 1.0
    assert judged(latencies, Objective(q=0.99, within_s=0.05)) == held


def test_a_measurement_that_was_cut_has_missed() -> None:
    """However good the answers looked that had come by then."""
    assert judged(np.full(1000, 0.01), Objective(q=0.99, within_s=0.05), was_cut=True) == "missed"


def test_a_late_generator_is_named() -> None:
    """When requests left 20 ms after their time, the numbers are about the generator, and it says so."""
    late = trace(*[0.03] * 200)
    late.noticed = [at + 0.02 for at in late.due]
    found = measurement_of(late, NOWHERE, rate=1000.0)
    assert any("generator itself was late" in one for one in found.warnings)
    assert found.generator.late_p99_s == pytest.approx(0.02)
    assert not measurement_of(trace(*[0.03] * 200), NOWHERE, rate=1000.0).warnings


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"most_in_flight": 1}, "more than one request"),
        ({"waited_for_connection": 7}, "busy 7 times"),
        ({"num_resent": 2}, "sent twice"),
    ],
)
def test_what_makes_numbers_doubtful_is_named(fields: dict[str, int], word: str) -> None:
    """No concurrent request, no free connection, connections closed: each has its warning."""
    found = measurement_of(trace(*[0.01] * 100, **fields), NOWHERE, rate=1000.0)
    assert any(word in one for one in found.warnings)


def test_kinds_of_failure_are_told_apart() -> None:
    """A refusal by its status, a broken connection and silence in words; the most frequent first."""
    failing = trace(*[0.01] * 6)
    failing.statuses = [200, 503, 503, 503, LOST, UNANSWERED]
    assert next(iter(measurement_of(failing, NOWHERE, rate=1.0).failures.items())) == ("HTTP 503", 3)
    assert measurement_of(failing, NOWHERE, rate=1.0).failures.keys() == {"HTTP 503", "connection lost", "no answer"}


def test_goodput_over_a_socket_is_what_the_server_refused_not() -> None:
    """A server that refuses every second request: half of them are good, and none is lost."""
    numbers = iter(range(10_000))

    async def refusing(body: bytes) -> bytes:
        return OK if next(numbers) % 2 == 0 else b"HTTP/1.1 429 Full\r\nContent-Length: 0\r\n\r\n"

    with served(refusing) as address:
        found = at_rate(LoadTarget(address, [PAYLOAD], objective=Objective(q=0.99, within_s=5.0)), 400, 0.5)
    assert (found.answered, found.failures) == (100, {"HTTP 429": 100})
    assert found.held == "missed"


def test_an_overloaded_server_is_given_up_early() -> None:
    """At ten times its capacity the measurement is cut, instead of waiting for a queue to drain."""
    objective = Objective(q=0.99, within_s=0.05)
    with served(single_server(0.02)) as address:
        found = at_rate(LoadTarget(address, [PAYLOAD], objective=objective, patience_s=1.0), 500, 8.0, cuts=True)
    assert (found.was_cut, found.held) == (True, "missed")
    assert found.requests < 4000


def test_callers_get_what_one_server_gives() -> None:
    """Three callers of a server of 10 ms: no more than 100 answers a second, however they are asked."""
    with served(single_server(0.01)) as address:
        found = with_callers(LoadTarget(address, [PAYLOAD]), 3, 0.5)
    assert found.connections == 3
    assert found.throughput <= 105
    assert found.rate is None


def test_a_refusal_is_told_before_anything_is_measured() -> None:
    """With the status and what the server said."""

    async def refuse(body: bytes) -> bytes:
        await asyncio.sleep(0)
        return b'HTTP/1.1 400 Bad\r\nContent-Length: 16\r\n\r\n{"error": "shape"'[:-1] + b"}"

    with served(refuse) as address, pytest.raises(ServiceError, match=r"400.*shape"):
        greet(LoadTarget(address, [Payload(REQUEST, 1)]))
