"""Where a run was executed elsewhere, how long it waited and what it cost, in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stoker.records import Event, Forecast, Launch
from stoker.units import format_money, format_seconds

SHORTEST_WAIT_S = 1.0
"""A shorter one is no wait to speak of [s]: such a place has no queue."""


def launch_words(launch: Launch, events: Iterable[Event], settled: Forecast | None = None) -> str:
    """Place, wait, restarts and cost on one line: `ssh:box · waited 15.7 s · $1.50, forecast $2.00`.

    `settled` is the forecast of the plan that the run settled on, for a run that had none when it was started.
    """
    queue_s, _ = launch_waits(launch, events)
    restarts = sum(state.phase in ("requeued", "preempted", "lost") for state in launch.states)
    parts = [launch.place]
    if queue_s is not None and queue_s >= SHORTEST_WAIT_S:
        parts.append(f"waited {format_seconds(queue_s)}")
    if restarts:
        parts.append(f"interrupted {restarts} {'time' if restarts == 1 else 'times'}")
    if launch.continued_here_at:
        parts.append("then here")
    if launch.commit:
        parts.append(f"commit {launch.commit[:12]}{' with changes' if launch.has_changes else ''}")
    if settled is not None and launch.forecast_s is None:
        launch = replace(launch, forecast_s=settled.total_s.value)
    if cost := spent_words(launch, launch.spent):
        parts.append(cost)
    return " · ".join(parts)


def launch_waits(launch: Launch, events: Iterable[Event]) -> tuple[float | None, float | None]:
    """Time from the submission to the start of the run's processes, and from there to training [s]; None: not seen.

    The place says when its processes began; where it does not, that is the first sign of them.
    """
    submitted_s = launch.submitted_s
    if submitted_s is None:
        return None, None
    moments = [event for event in events if event.at >= submitted_s]  # earlier ones are of an earlier launch
    signs = [state.at_s for state in launch.own_states if state.phase in ("starting", "running")]
    signs += [event.at for event in moments[:1]]
    starts = [state.began_s for state in launch.own_states if state.began_s is not None]
    starts = starts or [sign for sign in signs if sign is not None and sign >= submitted_s]
    if not starts:
        return None, None
    start = min(starts)
    training = next((event.at for event in moments if event.kind in ("started", "resumed")), None)
    return max(0.0, start - submitted_s), None if training is None else max(0.0, training - start)


def spent_words(launch: Launch, spent: float | None) -> str:
    """The cost of a run elsewhere, with its forecast and its limit; "" where nothing is charged or known.

    >>> launch = Launch(run="a", place="ssh:b", kind="ssh", handle={}, identity="", code_digest="",
    ...     environment_digest="", arguments=(), submitted_at="", price_per_h=2.0, max_cost=5.0, forecast_s=3600)
    >>> spent_words(launch, 1.5)
    '$1.50, forecast $2.00, at most $5.00'
    """
    if spent is None or not launch.price_per_h:
        return ""
    parts = [format_money(spent)]
    if launch.forecast_s is not None:
        parts.append(f"forecast {format_money(launch.price_per_h * launch.forecast_s / 3600)}")
    if launch.max_cost is not None:
        parts.append(f"at most {format_money(launch.max_cost)}")
    return ", ".join(parts)
