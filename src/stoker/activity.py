"""The activities of this process, for displays: one that takes over a second is shown with its step and a clock.

What is done says so, wherever it is done: `with doing("comparing samples"): …`. Activities may lie within each other.
Displays ask for `in_words()` from a thread of their own. An activity costs a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.units import format_seconds

SHOWN_AFTER_S = 1.0
"""Time from which an activity is shown [s]."""


@dataclass(eq=False)
class Activity:
    """Something done since `began_s` [s of `time.monotonic`]; `step` of `of` is under way, if it has steps.

    `is_long`: it may take minutes, and cannot say in between that it moves.
    """

    what: str
    of: int = 0
    step: int = 0
    is_long: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def in_words(self) -> str:
        """Such as `evaluating test, 3 of 40`."""
        return f"{self.what}, {self.step:,} of {self.of:,}" if self.step and self.of else self.what


_UNDER_WAY: list[Activity] = []
"""Activities of this process, the outermost first."""


@contextmanager
def doing(what: str, *, of: int = 0, step: int = 0, is_long: bool = False) -> Iterator[Activity]:
    """Within the block, this process is doing `what`: `step` (from 1) of `of`, if it has steps."""
    activity = Activity(what, of, step, is_long)
    _UNDER_WAY.append(activity)
    try:
        yield activity
    finally:
        _UNDER_WAY.remove(activity)


def outermost() -> Activity | None:
    """The activity that the others lie in; None if nothing is under way."""
    return next(iter(tuple(_UNDER_WAY)), None)


def is_long() -> bool:
    """Whether something is under way that may take minutes without a sign of life, such as compiling."""
    return any(activity.is_long for activity in tuple(_UNDER_WAY))


def in_words(clock: Callable[[], float] = time.monotonic) -> str | None:
    """Activities of more than a second, such as `planning: tracing an update (12 s)`; None if there are none."""
    under_way = tuple(_UNDER_WAY)  # another thread changes it
    elapsed_s = clock() - under_way[0].began_s if under_way else 0.0
    if elapsed_s < SHOWN_AFTER_S:
        return None
    clocked = f"{elapsed_s:.0f} s" if elapsed_s < 60 else format_seconds(elapsed_s)
    return f"{': '.join(activity.in_words() for activity in under_way)} ({clocked})"
