"""Runs that are executed elsewhere: where, what was sent, and in which state they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal

LaunchPhase = Literal[
    "queued",
    "starting",
    "running",
    "saving",
    "preempted",
    "requeued",
    "stopped",
    "lost",
    "finished",
    "failed",
    "unknown",
]
"""The state of a run elsewhere. `unknown`: the place did not answer; nothing is ever ended or restarted because of it.
"""

ENDED: frozenset[LaunchPhase] = frozenset({"stopped", "lost", "finished", "failed"})
"""Phases in which the place holds nothing for the run any more; the same command continues it, if it is not finished.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchState:
    """A phase, with its reason in words and the evidence: the line of the scheduler or the log that says so.

    Attributes:
        exit_code: of the run's process, if it ended and the place knows it.
        starts_in_s: estimated time until the run starts [s]; None: not known, or started.
        restarts: number of times that the place started the run again.
        at: when this was seen, or, of an end whose time the place knows, when that was; ISO 8601 in UTC.
        began_at: when the run's processes began, by the place's clock, ISO 8601 in UTC; "": they have not, or the place
            does not say.
    """

    schema: ClassVar[int] = 1

    phase: LaunchPhase
    why: str
    evidence: str = ""
    exit_code: int | None = None
    starts_in_s: float | None = None
    restarts: int = 0
    at: str = ""
    began_at: str = ""

    @property
    def began_s(self) -> float | None:
        """When the run's processes began [s since 1970]; None if that is not known."""
        return _seconds_of(self.began_at)

    @property
    def at_s(self) -> float | None:
        """When this was seen [s since 1970]; None if that is not known, or no time."""
        return _seconds_of(self.at)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`launch.json` of a run directory: the run is executed at `place`, under `handle`.

    Attributes:
        place: the word of `--on`.
        kind: of launcher: `ssh`, `slurm`, `k8s`, `ray`, `sky`.
        handle: what the launcher needs to find the run again; JSON.
        identity: SHA-256 of the job file's executed code and its settings: the same command finds the run by it.
        code_digest: SHA-256 of the files that were sent.
        environment_digest: SHA-256 of the lock of installed versions; "" where the place's own environment is used.
        arguments: of `stoker train` after the job file, at the place.
        submitted_at: ISO 8601 in UTC.
        commit, has_changes: of the job file's repository, where there is one.
        forecast_s: forecast total time of the run there [s], as forecast for places are made, before earlier runs
            correct it; low and high at 80 %. None: not forecast.
        device: what a forecast is for, as `stoker plan --on` names it, such as `4xa100-80g`; "": not known here.
        setting: SHA-256 of the environment and options there, on which the pace of the job may depend; "": not known.
        place_taken: kind and address where `place` leaves them open, as `slurm:gpu` for `slurm:`; "": as in `place`.
        submit_s: time from the command to the submission, with what was sent [s]; None: not measured.
        price_per_h, currency, price_source: of all devices together; None: unknown.
        secrets: names of the environment variables whose values were sent.
        sent_bytes: what had to be sent [bytes].
        spent: cost until the run ended, or was last followed, in `currency`; None: unknown.
        max_cost: the run is saved and stopped before its cost exceeds this; None: no limit.
        time_limit_s: the longest that it may hold devices from `submitted_at` on [s], as given; None: no limit was.
        continued_here_at: when the run went on on this machine, ISO 8601 in UTC, which the place knows nothing of; "":
            it did not.
    """

    schema: ClassVar[int] = 1

    run: str
    place: str
    kind: str
    handle: dict[str, Any]
    identity: str
    code_digest: str
    environment_digest: str
    arguments: tuple[str, ...]
    submitted_at: str
    commit: str = ""
    has_changes: bool = False
    forecast_s: float | None = None
    forecast_low_s: float | None = None
    forecast_high_s: float | None = None
    price_per_h: float | None = None
    currency: str = "USD"
    price_source: str = ""
    max_cost: float | None = None
    secrets: tuple[str, ...] = ()
    sent_bytes: int = 0
    spent: float | None = None
    states: tuple[LaunchState, ...] = field(default=())
    time_limit_s: float | None = None
    continued_here_at: str = ""
    device: str = ""
    submit_s: float | None = None
    setting: str = ""
    place_taken: str = ""

    @property
    def submitted_s(self) -> float | None:
        """When it was submitted [s since 1970]; None if that is no time."""
        return _seconds_of(self.submitted_at)

    @property
    def own_states(self) -> tuple[LaunchState, ...]:
        """The states since its submission, which is the first of them; those before are of earlier starts."""
        first = next((n for n, state in enumerate(self.states) if state.at == self.submitted_at), 0)
        return self.states[first:]

    @property
    def state(self) -> LaunchState:
        """The newest state that was seen."""
        return self.states[-1] if self.states else LaunchState(phase="unknown", why="not asked yet")

    @property
    def is_going_on(self) -> bool:
        """Whether the place may hold something for the run, as far as is known here."""
        return self.state.phase not in ENDED


def _seconds_of(moment: str) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
