"""What a service did under load: measured at one rate, and the most it holds within an objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.service import ServiceSettings

Held = Literal["held", "missed", "unclear"]
"""Whether an objective is met, as far as the requests measured can tell."""


@dataclass(frozen=True, kw_only=True)
class Quantile:
    """The latency [s] that a share `q` of the requests stays below, and an interval of 95 % about it.

    `high` is infinite, and `low` zero, where there were too few requests to bound it.
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
    `failures` says how many went wrong in which way. `held` tells whether the objective is surely held, surely not, or
    neither, with 95 % confidence. `was_cut` tells that measuring ended early because the objective
    could no longer be held. `server_cpu_s` is the CPU time of the service meanwhile, where it is known.
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
        """Answers a second."""
        return self.answered / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def goodput(self) -> float:
        """Answers within the objective a second."""
        return self.good / self.duration_s if self.duration_s > 0 else 0.0

    def quantile(self, q: float) -> Quantile:
        """That of a share `q`, one of those measured."""
        return next(one for one in self.quantiles if one.q == q)


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
    """What a model's service holds on this machine, and the settings that hold it.

    `default` is the trial of the settings that a service has without being told, `trials` has all in their order and
    `chosen` the best. `levels` are fresh measurements of the chosen settings at shares of the rate (0.5, 0.8 and 1).
    `is_complete` tells that the search ended by itself and not with its time, `others_cores` how many cores others kept
    busy meanwhile, on average.
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
