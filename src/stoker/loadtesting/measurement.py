"""One measurement of a service: drive load, then compute quantiles with intervals, goodput and warnings from the trace.

The interval of a quantile q contains every latency x for which a binomial test at 95 % confidence cannot reject that a
share 1 - q of all requests takes longer; it assumes nothing about the shape of the tail. Latencies of a queue are
correlated, so n of them carry less information than n independent ones: n is divided by the ratio of the variance of
the share of slow requests between 20 stretches of the measurement to that of independent samples.

Source: H. A. David and H. N. Nagaraja, Order Statistics (3rd ed., 2003), section 7.1; P. Heidelberger and
P. A. W. Lewis, "Quantile Estimation in Dependent Sequences", Operations Research 32(1), 1984. Ours uses batch means of
the indicator, which is simpler than their spectral estimate.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ServiceError
from stoker.loadtesting.http_connection import Address, ask
from stoker.loadtesting.load_generator import (
    LOST,
    UNANSWERED,
    LoadLimits,
    LoadTrace,
    Payload,
    closed_loop,
    constant,
    open_loop,
    poisson,
)
from stoker.records.service import Held, LoadGenerator, LoadMeasurement, Objective, Quantile
from stoker.units import format_seconds

QUANTILES = (0.5, 0.9, 0.99)
_WORDS = {LOST: "connection lost", UNANSWERED: "no answer"}
_LATE_SHARE = 0.1
_LATE_S = 0.001


@dataclass(frozen=True)
class LoadTarget:
    """The service to measure: its address, requests in turn, and the most connections.

    `is_constant`: requests are sent at equal distances instead of at random times. `cpu_s` gives the CPU time [s] that
    the service has used so far, if that can be read.
    """

    address: Address
    payloads: Sequence[Payload]
    connections: int = 128
    is_constant: bool = False
    objective: Objective | None = None
    cpu_s: Callable[[], float] | None = None
    patience_s: float = 10.0

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Quantiles that are measured, including the objective's."""
        return tuple(sorted({*QUANTILES, *([] if self.objective is None else [self.objective.q])}))


def greet(target: LoadTarget) -> None:
    """Send each payload once, which also warms the service up.

    Raises:
        ServiceError: an answer is not 200; with the service's text.
    """
    for payload in {payload.request: payload for payload in target.payloads}.values():
        answer = ask(target.address, payload.request)
        if answer.status != 200:
            text = answer.body[:300].decode("utf-8", "replace")
            raise ServiceError(f"the service answered with status {answer.status}: {text}")


def at_rate(target: LoadTarget, rate: float, seconds: float, *, cuts: bool = False, seed: int = 0) -> LoadMeasurement:
    """An open loop at `rate` requests/s for `seconds`; with `cuts` it ends once the objective cannot be held.

    Raises:
        BadJob: there would be no request, or more than a million.
        ServiceError: a connection cannot be opened.
    """
    due = constant(rate, seconds) if target.is_constant else poisson(rate, seconds, seed=seed)
    limits, objective = LoadLimits(patience_s=target.patience_s), target.objective
    if cuts and objective is not None:
        limits = replace(limits, within_s=objective.within_s, most_late=max(0, most_late(len(due), objective.q)))
    before = target.cpu_s() if target.cpu_s else 0.0
    trace = open_loop(target.address, target.payloads, due, connections=target.connections, limits=limits)
    return measurement_of(trace, target, rate=rate, server_cpu_s=target.cpu_s() - before if target.cpu_s else None)


def with_callers(target: LoadTarget, callers: int, seconds: float) -> LoadMeasurement:
    """A closed loop of `callers` callers for `seconds`.

    Raises:
        ServiceError: a connection cannot be opened.
    """
    before = target.cpu_s() if target.cpu_s else 0.0
    limits = LoadLimits(patience_s=target.patience_s)
    trace = closed_loop(target.address, target.payloads, connections=callers, seconds=seconds, limits=limits)
    spent = target.cpu_s() - before if target.cpu_s else None
    return measurement_of(trace, target, rate=None, connections=callers, server_cpu_s=spent)


def measurement_of(
    trace: LoadTrace,
    target: LoadTarget,
    *,
    rate: float | None,
    connections: int | None = None,
    server_cpu_s: float | None = None,
) -> LoadMeasurement:
    """The figures of a trace; `rate` is None for a closed loop."""
    statuses, due = np.array(trace.statuses), np.array(trace.due)
    latencies = np.where(statuses == 200, np.array(trace.done) - due, np.inf)
    is_answered, within = statuses == 200, np.inf if target.objective is None else target.objective.within_s
    answered = latencies[is_answered]
    late_s = np.array(trace.noticed) - due if len(due) else np.zeros(1)
    failures = Counter(_WORDS.get(status, f"HTTP {status}") for status in trace.statuses if status != 200)
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
        failures=dict(failures.most_common()),
        held=None if target.objective is None else judged(latencies, target.objective, was_cut=trace.was_cut),
        generator=LoadGenerator(
            late_p99_s=float(np.quantile(late_s, 0.99)),
            cpu_s_per_request=trace.cpu_s / max(1, len(due)),
            most_in_flight=trace.most_in_flight,
        ),
        server_cpu_s=server_cpu_s,
        was_cut=trace.was_cut,
    )
    return replace(measured, warnings=tuple(_warnings(measured, trace)))


def judged(latencies_s: NDArray[np.float64], objective: Objective, *, was_cut: bool = False) -> Held:
    """Whether these latencies show that an objective is held; a measurement is cut only if it is missed."""
    if was_cut or fails(latencies_s, objective.q, objective.within_s):
        return "missed"
    return "held" if holds(latencies_s, objective.q, objective.within_s) else "unclear"


def _warnings(measured: LoadMeasurement, trace: LoadTrace) -> list[str]:
    warnings, generator = [], measured.generator
    p99_s = measured.quantile(0.99).seconds
    if measured.loop == "open" and generator.late_p99_s > max(_LATE_S, _LATE_SHARE * p99_s):
        warnings.append(
            f"the generator itself was late: 1 % of requests left {format_seconds(generator.late_p99_s)} or more after "
            "their time, so the latencies are partly its own; ask from another machine, or at a lower rate"
        )
    if trace.waited_for_connection:
        warnings.append(
            f"all {measured.connections} connections were busy {trace.waited_for_connection} times, and requests "
            "waited for one, which counts as latency; more connections would put that queue into the service"
        )
    if trace.num_resent:
        warnings.append(f"{trace.num_resent} requests were sent twice: the service had closed their idle connections")
    if measured.requests > 1 and generator.most_in_flight < 2:
        warnings.append("there was never more than one request under way: nothing of this is about batching")
    return warnings


CONFIDENCE = 0.95
_STRETCHES = 20
_LEAST_OF_A_STRETCH = 10
_BY_CHANCE = 2.0
"""Independent samples give a larger factor less than once in a hundred times (chi-squared of 19 degrees, over 19)."""
_MOST_EXACT = 20_000


def quantile_of(latencies_s: NDArray[np.float64], q: float) -> Quantile:
    """The quantile `q` of latencies [s], given in the order of their requests; infinite for those never answered.

    The smallest latency that at least a share `q` of the requests did not exceed. NaN without requests.
    """
    n = len(latencies_s)
    if n == 0:
        return Quantile(q=q, seconds=math.nan, low=0.0, high=math.inf)
    ordered = np.append(np.sort(latencies_s), math.inf)
    low = _first(n - 1, lambda k: not fails(latencies_s, q, float(ordered[k])))
    high = _first(n, lambda k: holds(latencies_s, q, float(ordered[k])))
    return Quantile(
        q=q,
        seconds=float(ordered[max(0, math.ceil(q * n - 1e-9) - 1)]),
        low=float(ordered[low]),
        high=float(ordered[high]),
    )


def holds(latencies_s: NDArray[np.float64], q: float, within_s: float) -> bool:
    """Whether at least a share `q` of all requests takes at most `within_s`, with 95 % confidence."""
    num_late, n = _effective(latencies_s, within_s)
    return num_late <= n - ranks(n, q)[1]


def fails(latencies_s: NDArray[np.float64], q: float, within_s: float) -> bool:
    """Whether less than a share `q` of all requests takes at most `within_s`, with 95 % confidence."""
    num_late, n = _effective(latencies_s, within_s)
    return num_late > n - ranks(n, q)[0]


def most_late(n: int, q: float) -> int:
    """Number of `n` requests [requests] that may exceed a latency while the interval of quantile `q` stays below it.

    -1 if `n` requests cannot bound the quantile; for independent requests, the most favourable case.

    >>> most_late(1000, 0.99), most_late(300, 0.99)
    (3, -1)
    """
    return n - ranks(n, q)[1]


def least_requests(q: float) -> int:
    """Number of requests [requests] needed to bound the quantile `q` from above if none is late.

    >>> least_requests(0.99), least_requests(0.5)
    (368, 6)
    """
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(q))


@lru_cache(maxsize=4096)
def ranks(n: int, q: float) -> tuple[int, int]:
    """The order statistics (from 1) of `n` samples that enclose the quantile `q` with 95 % confidence.

    The lower is 0, or the upper `n` + 1, if there are too few samples for a bound.
    """
    tail = (1 - CONFIDENCE) / 2
    if n > _MOST_EXACT:  # the normal approximation, continuity corrected; exact to a rank at this size
        middle, spread = n * q, 1.959964 * math.sqrt(n * q * (1 - q))
        return max(0, math.floor(middle - spread)), min(n + 1, math.ceil(middle + spread) + 1)
    k = np.arange(n + 1)
    log_choose = np.concatenate(([0.0], np.cumsum(np.log((n - k[:-1]) / (k[:-1] + 1)))))
    below = np.cumsum(np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q)))  # P(at most k are below)
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1 - tail, side="left")) + 1
    return low, high


def _effective(latencies_s: NDArray[np.float64], within_s: float) -> tuple[float, int]:
    """Effective number of late requests, and of all requests."""
    is_late = latencies_s > within_s
    factor = dependence(is_late)
    return float(is_late.sum()) / factor, max(1, round(len(is_late) / factor))


def _first(end: int, is_so: Callable[[int], bool]) -> int:
    """The first index before `end` for which `is_so` is true, and stays true; `end` if there is none."""
    return bisect.bisect_left(range(end), x=True, key=is_so)


def dependence(is_slow: NDArray[np.bool_]) -> float:
    """Dependent samples per independent one [1], at least 1, by batch means of an indicator."""
    size = len(is_slow) // _STRETCHES
    share = float(is_slow.mean())
    if size < _LEAST_OF_A_STRETCH or share in {0.0, 1.0}:
        return 1.0
    means = is_slow[: size * _STRETCHES].reshape(_STRETCHES, size).mean(axis=1)
    factor = size * float(means.var(ddof=1)) / (share * (1 - share))
    return factor if factor > _BY_CHANCE else 1.0
