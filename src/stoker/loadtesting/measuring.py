"""From a trace of requests to what is said of them: quantiles, goodput, and whether the numbers can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ServiceError
from stoker.loadtesting.arrivals import constant, poisson
from stoker.loadtesting.connection import Address, ask
from stoker.loadtesting.driving import LOST, UNANSWERED, Limits, Payload, Trace, closed_loop, open_loop
from stoker.loadtesting.quantiles import fails, holds, most_late, quantile_of
from stoker.records.loadtest import Held, LoadGenerator, LoadMeasurement, Objective
from stoker.units import format_seconds

QUANTILES = (0.5, 0.9, 0.99)
_WORDS = {LOST: "connection lost", UNANSWERED: "no answer"}
_LATE_SHARE = 0.1
_LATE_S = 0.001


@dataclass(frozen=True)
class Target:
    """What is asked: where, with which requests in turn, over at most how many connections.

    `cpu_s` tells the CPU time [s] that the service has used so far, where that can be known.
    """

    address: Address
    payloads: Sequence[Payload]
    connections: int = 128
    objective: Objective | None = None
    cpu_s: Callable[[], float] | None = None
    patience_s: float = 10.0

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Those that are measured, the objective's among them."""
        return tuple(sorted({*QUANTILES, *([] if self.objective is None else [self.objective.q])}))


def greet(target: Target) -> None:
    """Ask each payload once, which also warms the service up.

    Raises:
        ServiceError: one of them was not answered with 200; with what the service said.
    """
    for payload in {payload.request: payload for payload in target.payloads}.values():
        answer = ask(target.address, payload.request)
        if answer.status != 200:
            said = answer.body[:300].decode("utf-8", "replace")
            raise ServiceError(f"the service answered with status {answer.status}: {said}")


def at_rate(
    target: Target, rate: float, seconds: float, *, is_constant: bool = False, cuts: bool = False, seed: int = 0
) -> LoadMeasurement:
    """An open loop at `rate` requests a second for `seconds`; with `cuts` it ends once the objective cannot be held.

    Raises:
        BadJob: that is no request, or more than a million.
        ServiceError: nobody listens.
    """
    due = constant(rate, seconds) if is_constant else poisson(rate, seconds, seed=seed)
    limits, objective = Limits(patience_s=target.patience_s), target.objective
    if cuts and objective is not None:
        limits = Limits(
            patience_s=target.patience_s,
            within_s=objective.within_s,
            most_late=max(0, most_late(len(due), objective.q)),
        )
    before = target.cpu_s() if target.cpu_s else 0.0
    trace = open_loop(target.address, target.payloads, due, connections=target.connections, limits=limits)
    return measurement_of(trace, target, rate=rate, server_cpu_s=target.cpu_s() - before if target.cpu_s else None)


def with_callers(target: Target, callers: int, seconds: float) -> LoadMeasurement:
    """A closed loop of so many callers for `seconds`.

    Raises:
        ServiceError: nobody listens.
    """
    before = target.cpu_s() if target.cpu_s else 0.0
    trace = closed_loop(
        target.address, target.payloads, connections=callers, seconds=seconds,
        limits=Limits(patience_s=target.patience_s),
    )  # fmt: skip
    spent = target.cpu_s() - before if target.cpu_s else None
    return measurement_of(trace, target, rate=None, connections=callers, server_cpu_s=spent)


def measurement_of(
    trace: Trace, target: Target, *, rate: float | None, connections: int | None = None,
    server_cpu_s: float | None = None,
) -> LoadMeasurement:  # fmt: skip
    """What a trace says; `rate` is None for a closed loop."""
    statuses, due = np.array(trace.statuses), np.array(trace.due)
    latencies = np.where(statuses == 200, np.array(trace.done) - due, np.inf)
    is_answered, within = statuses == 200, np.inf if target.objective is None else target.objective.within_s
    answered = latencies[is_answered]
    late_s = np.array(trace.noticed) - due if len(due) else np.zeros(1)
    measured = LoadMeasurement(
        loop="closed" if rate is None else "open",
        rate=rate,
        connections=connections or target.connections,
        duration_s=trace.ended,
        requests=len(due),
        answered=len(answered),
        good=int((answered <= within).sum()),
        rows=int(np.array(trace.rows)[is_answered].sum()),
        mean_s=float(answered.mean()) if len(answered) else float("nan"),
        quantiles=tuple(quantile_of(latencies, q) for q in target.quantiles),
        failures=_failures(trace.statuses),
        held=None if target.objective is None else judged(latencies, target.objective, was_cut=trace.was_cut),
        generator=LoadGenerator(
            late_p99_s=float(np.quantile(late_s, 0.99)),
            cpu_s_per_request=trace.cpu_s / max(1, len(due)),
            most_in_flight=trace.most_in_flight,
        ),
        server_cpu_s=server_cpu_s,
        was_cut=trace.was_cut,
    )
    return _with_warnings(measured, trace)


def judged(latencies_s: NDArray[np.float64], objective: Objective, *, was_cut: bool = False) -> Held:
    """Whether these latencies show that an objective is held; a measurement that was cut has shown that it is not."""
    if was_cut or fails(latencies_s, objective.q, objective.within_s):
        return "missed"
    return "held" if holds(latencies_s, objective.q, objective.within_s) else "unclear"


def _failures(statuses: Sequence[int]) -> dict[str, int]:
    counts = Counter(_WORDS.get(status, f"HTTP {status}") for status in statuses if status != 200)
    return dict(counts.most_common())


def _with_warnings(measured: LoadMeasurement, trace: Trace) -> LoadMeasurement:
    return replace(measured, warnings=tuple(_warnings(measured, trace)))


def _warnings(measured: LoadMeasurement, trace: Trace) -> list[str]:
    found, generator = [], measured.generator
    p99_s = measured.quantile(0.99).seconds
    if measured.loop == "open" and generator.late_p99_s > max(_LATE_S, _LATE_SHARE * p99_s):
        found.append(
            f"the generator itself was late: 1 % of requests left {format_seconds(generator.late_p99_s)} or more after "
            "their time, so the latencies are partly its own; ask from another machine, or at a lower rate"
        )
    if trace.waited_for_connection:
        found.append(
            f"all {measured.connections} connections were busy {trace.waited_for_connection} times, and requests "
            "waited for one, which counts as latency; more connections would put that queue into the service"
        )
    if trace.num_resent:
        found.append(f"{trace.num_resent} requests were sent twice: the service had closed their idle connections")
    if measured.requests > 1 and generator.most_in_flight < 2:
        found.append("there was never more than one request under way: nothing of this is about batching")
    return found
