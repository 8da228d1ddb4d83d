"""Serving settings of a model, and measurements of its service under load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

MOST_DELAY_S, MOST_DEADLINE_S = 3600.0, 86_400.0
MOST_LISTED, MOST_NUMBER = 1000, 10**9 - 1
_MOST = {
    "instances": 1024,
    "threads": 1024,
    "max_batch_rows": 65_536,
    "max_queue_rows": 10**9,
    "max_queue_bytes": 2**50,
}
"""Upper limits of settings: larger numbers are a mistake, or an attack."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How one model of a repository is served; stored next to its versions as `service.json`.

    None leaves a choice to the server. `instances` run batches at the same time, each with `threads` threads.
    A batch has at most `max_batch_rows` samples; a request waits for others at most `max_delay_s` while an instance is
    idle, and not where it is alone. What waits has at most `max_queue_rows` and `max_queue_bytes`. `deadline_s` is for
    requests that state none. One caller with an API key may hold `max_caller_share` of that, so that it cannot fill the
    queue alone.
    `buckets` are the sizes that varying dimensions are padded to; empty: to the largest in the batch.
    `versions` are those to serve; empty: the newest. With `allow_nan` inputs may have NaN and infinities; None: only if
    those that the model was checked with do.
    """

    schema: ClassVar[int] = 1
    instances: int | None = None
    threads: int | None = None
    max_batch_rows: int = 32
    max_delay_s: float = 0.0
    max_queue_rows: int = 1024
    max_queue_bytes: int = 256 * 1024 * 1024
    max_caller_share: float = 1.0
    deadline_s: float | None = None
    buckets: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    allow_nan: bool | None = None
    basis: str = ""
    """Where these were measured, in words; empty where they were not measured."""

    def __post_init__(self) -> None:
        """Refuse numbers no server can follow."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most:,}, got {value:,}")
        if not 0 <= self.max_delay_s <= MOST_DELAY_S:
            raise ValueError(f"max_delay_s must be from 0 to {MOST_DELAY_S:g}, got {self.max_delay_s}")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MOST_DEADLINE_S:
            raise ValueError(f"deadline_s must be above 0 and at most {MOST_DEADLINE_S:g}, got {self.deadline_s}")
        if not 0 < self.max_caller_share <= 1:
            raise ValueError(f"max_caller_share must be above 0 and at most 1, got {self.max_caller_share}")
        for name in ("buckets", "versions"):
            values = getattr(self, name)
            if len(values) > MOST_LISTED:
                raise ValueError(f"{name} has {len(values):,} numbers, at most {MOST_LISTED} are taken")
            if any(not 1 <= value <= MOST_NUMBER for value in values):
                raise ValueError(f"{name} must each be from 1 to {MOST_NUMBER:,}, got {str(list(values))[:80]}")


Held = Literal["held", "missed", "unclear"]
"""Whether an objective is met, by the requests measured."""


@dataclass(frozen=True, kw_only=True)
class Quantile:
    """The latency [s] that a share `q` of the requests is below, and its 95 % interval.

    `high` is infinite, and `low` zero, if there were too few requests to bound it.
    """

    q: float
    seconds: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A share `q` of all requests is to be answered within `within_s` seconds."""

    q: float
    within_s: float

    def __str__(self) -> str:
        """As it is written: `p99=20ms`."""
        return f"p{self.q * 100:g}={self.within_s * 1e3:g}ms"


@dataclass(frozen=True, kw_only=True)
class LoadGenerator:
    """What the measuring side was itself: numbers are about the service only while this one kept up.

    `late_p99_s` is how much later than scheduled it came to a request, `cpu_s_per_request` what one cost it in seconds
    of a CPU, `most_in_flight` how many requests were under way at once.
    """

    late_p99_s: float
    cpu_s_per_request: float
    most_in_flight: int


@dataclass(frozen=True, kw_only=True)
class LoadMeasurement:
    """Requests of one model at one rate, or of so many callers that each wait for their answer.

    `rate` [requests/s] is what was asked for in an open loop, None in a closed one; `duration_s` is from the first
    scheduled request to the last answer or the end of waiting. An answer counts as good within the objective, and all
    answered ones do where there is none. Requests that failed have no latency, and count as over every objective:
    `failures` says how many went wrong in which way. `held` says whether the objective is surely held, surely not, or
    neither, with 95 % confidence. `was_cut` says that measuring ended early because the objective
    could no longer be held. `server_cpu_s` is the service's CPU time during the measurement, where it is known.
    """

    schema: ClassVar[int] = 1
    loop: Literal["open", "closed"]
    rate: float | None
    connections: int
    duration_s: float
    requests: int
    answered: int
    good: int
    rows: int
    mean_s: float
    quantiles: tuple[Quantile, ...]
    failures: dict[str, int] = field(default_factory=dict)
    held: Held | None = None
    generator: LoadGenerator
    server_cpu_s: float | None = None
    was_cut: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def throughput(self) -> float:
        """Rate of answers [requests/s]."""
        return self.answered / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def goodput(self) -> float:
        """Rate of answers within the objective [requests/s]."""
        return self.good / self.duration_s if self.duration_s > 0 else 0.0

    def quantile(self, q: float) -> Quantile:
        """The quantile of a share `q`, one of those measured."""
        return next(quantile for quantile in self.quantiles if quantile.q == q)


@dataclass(frozen=True, kw_only=True)
class SettingsTrial:
    """The highest rate [requests/s] that a service with these settings was seen to hold within the objective.

    0 where it held none of those tried. `settings` are None of a server that was running already. `why` says what ended
    the trial.
    """

    settings: ServiceSettings | None
    rate: float
    why: str
    tried: tuple[LoadMeasurement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServingLimit:
    """The rate that a model's service sustains on this machine, and the settings for it.

    `default` is the trial of the settings that a service has by default, `trials` has all in their order and
    `chosen` the best. `levels` are fresh measurements of the chosen settings at shares of the rate (0.5, 0.8 and 1).
    `is_complete` says that the search ended by itself and not with its time, `others_cores` how many cores other
    programs kept busy, on average.
    """

    schema: ClassVar[int] = 1
    model: str
    objective: Objective
    machine: str
    default: SettingsTrial
    chosen: SettingsTrial
    trials: tuple[SettingsTrial, ...]
    levels: tuple[LoadMeasurement, ...]
    took_s: float
    is_complete: bool
    others_cores: float = 0.0
    written_to: str = ""
