"""Read-only hooks at every event of a run: a user's functions, which cannot hurt it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

from stoker.records import Event

Hook = Callable[[Event], object]


class Hooks:
    """A sink that calls a user's functions with a copy of each event.

    One that raises is told of once, by `tell` (a sentence), and called no more: a run does not end because of somebody
    who only looks on. What a hook changes in its copy nobody sees.
    """

    def __init__(self, hooks: Sequence[Hook], tell: Callable[[str], None]) -> None:
        self._hooks, self._tell = list(hooks), tell

    def __call__(self, event: Event) -> None:
        """Show the event to all of them."""
        for hook in tuple(self._hooks):
            try:
                hook(dataclasses.replace(event, fields=copy.deepcopy(event.fields)))
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises
                self._hooks.remove(hook)
                name = getattr(hook, "__name__", type(hook).__name__)
                self._tell(f"the hook {name} raised {type(error).__name__} ({error}) at {event.kind!r}, "
                           "and is called no more")  # fmt: skip
