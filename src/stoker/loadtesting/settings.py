"""Which settings of a service hold the most: one coordinate after the other, each candidate against the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from stoker.records import ServiceSettings
from stoker.records.loadtest import Objective, SettingsTrial

Try = Callable[[ServiceSettings, float], SettingsTrial]
"""Serves with these settings, and finds the highest rate held, if it is at least so high [requests/s]."""

Axis = Callable[[ServiceSettings], Iterator[ServiceSettings]]
"""Settings that differ from given ones in one coordinate, the likeliest to be better first."""

LEAST_GAIN = 1.05
"""A candidate has to hold so many times the best rate so far; less could be chance."""

_LARGEST_BATCH = 256


def instances_and_threads(cores: int) -> Axis:
    """Ways to share the cores out: as many instances as divide them evenly, and one instance with one thread."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        shares = [(count, cores // count) for count in range(1, cores + 1) if cores % count == 0]
        for instances, threads in dict.fromkeys((*shares, (1, 1))):
            yield replace(settings, instances=instances, threads=threads)

    return others


def batch_rows(settings: ServiceSettings) -> Iterator[ServiceSettings]:
    """Twice, half, four times and a quarter of the rows."""
    for rows in (settings.max_batch_rows * 2, settings.max_batch_rows // 2, settings.max_batch_rows * 4,
                 settings.max_batch_rows // 4):  # fmt: skip
        if 1 <= rows <= _LARGEST_BATCH:
            yield replace(settings, max_batch_rows=rows)


def delays(objective: Objective) -> Axis:
    """Waiting for company: not at all, or small shares of the time that an answer may take."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        for share in (0.0, 0.05, 0.2):
            yield replace(settings, max_delay_s=share * objective.within_s)

    return others


def search(
    default: SettingsTrial, axes: tuple[Axis, ...], attempt: Try, *, has_time: Callable[[], bool]
) -> tuple[tuple[SettingsTrial, ...], bool]:
    """Try settings along the axes, in rounds, until a round improves nothing or time is over.

    Returns:
        All trials after the default's, the best being whichever held the highest rate; and whether it ended by itself.
    """
    assert default.settings is not None
    best, best_settings, seen = default, default.settings, {default.settings}
    trials: list[SettingsTrial] = []
    is_improving = True
    while is_improving:
        is_improving = False
        for axis in axes:
            for candidate in axis(best_settings):
                if candidate in seen:
                    continue
                if not has_time():
                    return tuple(trials), False
                seen.add(candidate)
                trial = attempt(candidate, best.rate * LEAST_GAIN)
                trials.append(trial)
                if trial.rate > best.rate:
                    best, best_settings, is_improving = trial, candidate, True
    return tuple(trials), True
