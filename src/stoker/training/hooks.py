"""Read-only hooks: a user's functions that see every event or update of a run, and cannot disturb it."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import BadJob, nearest
from stoker.records import Event, EventKind

UPDATED = "updated"
"""Kind of a hook that sees every update; the run's log has no such event."""

_KINDS = (*typing.get_args(EventKind), UPDATED)


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update, as numbers.

    `samples`, `updates` and `epoch` are the position after it; `batch` is its number of samples, `loss` their mean loss
    before it, `lr` the rate of the first parameter group, `grad_norm` the gradient's norm before clipping (None for a
    job's own step), `wall_s` the time of training so far, over all processes of the run [s].
    """

    samples: int
    updates: int
    epoch: int
    batch: int
    loss: float
    lr: float
    grad_norm: float | None
    wall_s: float


Hook = Callable[[Event], object]


@dataclass(frozen=True)
class Listening:
    """A hook for some kinds of events; see `on`."""

    kinds: frozenset[str]
    function: Callable[[Any], object]

    def __call__(self, event: Event) -> object:
        """Call the function."""
        return self.function(event)


def on(kind: str | Sequence[str], function: Callable[[Any], object]) -> Listening:
    """A hook for events of one kind, or of several: `stoker.train(job, hooks=[stoker.on("evaluated", print)])`.

    Args:
        kind: kinds of the run's events, such as "progress", "evaluated", "checkpointed" (docs/events.md); or "updated",
            after every single update.
        function: called with each such `Event`; of an update with an `Update`.

    Raises:
        BadJob: there is no such kind, or `function` cannot be called.
    """
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    for name in kinds:
        if name not in _KINDS:
            raise BadJob(
                f"there is no event {name!r}. {nearest(str(name), _KINDS)}", remedy=f"Kinds are {', '.join(_KINDS)}."
            )
    if not callable(function):
        raise BadJob(f"stoker.on({kind!r}, …) wants a function to call, got {function!r}")
    return Listening(frozenset(kinds), function)


class Hooks:
    """A sink that calls a user's functions with a copy of each event.

    A hook that raises is reported through `tell`, at once and again when the run ends, and is called no more.
    """

    def __init__(self, hooks: Sequence[Hook], tell: Callable[[str], None]) -> None:
        self._hooks, self._tell = list(hooks), tell
        self._failures: list[str] = []

    def __call__(self, event: Event) -> None:
        """Show the event to the hooks of its kind."""
        for hook in tuple(self._hooks):
            if not isinstance(hook, Listening) or event.kind in hook.kinds:
                self._show(hook, dataclasses.replace(event, fields=copy.deepcopy(event.fields)), event.kind)
        if event.kind in ("finished", "stopped"):
            for failure in self._failures:
                self._tell(f"{failure}, and saw nothing of the run after that")

    def updated(self, update: Update) -> None:
        """Show an update to the hooks that see updates."""
        for hook in tuple(self._hooks):
            if _sees_updates(hook):
                self._show(hook, update, UPDATED)

    @property
    def see_updates(self) -> bool:
        """Whether any hook sees updates."""
        return any(map(_sees_updates, self._hooks))

    def _show(self, hook: Callable[[Any], object], what: Event | Update, kind: str) -> None:
        try:
            hook(what)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._hooks.remove(hook)
            function = hook.function if isinstance(hook, Listening) else hook
            name = getattr(function, "__name__", type(function).__name__)
            self._failures.append(f"the hook {name} raised {type(error).__name__} ({error}) at {kind!r}")
            self._tell(f"{self._failures[-1]}, and is called no more")


def _sees_updates(hook: Hook) -> bool:
    return isinstance(hook, Listening) and UPDATED in hook.kinds
