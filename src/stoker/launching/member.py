"""A process of a run as it sees itself: which generation it belongs to, and what becomes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from stoker.launching.agreement import PATIENCE_S, require_same
from stoker.launching.connections import Connections
from stoker.launching.launched import Launched
from stoker.launching.meeting import Meeting
from stoker.launching.supervised import Supervised
from stoker.launching.worker import MEMBER_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs


class Link(Protocol):
    """How a member reaches those that organise it; what each call does is said at Member."""

    worker: int
    can_reform: bool
    patience_s: float | None

    @property
    def store(self) -> Store:
        """See Member, as for all that follows."""
        ...

    def meet(self) -> Meeting:
        """Wait for the first generation."""
        ...

    def lost(self, why: str, notes: dict[str, Any]) -> Meeting:
        """Give the generation up, and wait for the next."""
        ...

    def is_called(self) -> bool:
        """Whether the generation is to end."""
        ...

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Have something done when the generation breaks."""
        ...

    def event(self, line: str) -> None:
        """Send a line."""
        ...

    def finished(self) -> None:
        """Say that all is done."""
        ...


class Member:
    """This process, as a member of a run over several.

    Its calls are made in the thread that trains; `is_called` and `event` may be made in any.

    Attributes:
        worker: number of the process on its machine, which stays when ranks change: which device it takes.
        can_reform: whether there is another generation after one is lost, and somebody who hears events.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.worker, self.can_reform = link.worker, link.can_reform
        self._meeting: Meeting | None = None

    @classmethod
    def from_environment(cls) -> Member | None:
        """The member that this process was started as, by a Supervisor or a launcher such as torchrun; None: neither.

        To be called early and once: from then on the supervisor hears that the process lives. What the supervisor said
        is taken out of the environment, so that children of this process do not take themselves for it.

        Raises:
            BadJob: a launcher's variables make no sense.
        """
        about = os.environ.pop(MEMBER_VARIABLE, None)
        link: Link | None = Launched.from_environment() if about is None else Supervised.from_environment(about)
        return None if link is None else cls(link)

    @property
    def store(self) -> Store:
        """Where the members of a generation find each other, under its name."""
        return self._link.store

    def meet(self) -> Meeting:
        """Wait for the generation that this process belongs to.

        Raises:
            RunFailed: somebody did not come; in one of the processes.
            Dismissed: likewise, in the others; or the run ended without this process.
        """
        self._meeting = self._link.meet()
        return self._meeting

    def lost(self, why: str, notes: dict[str, Any] | None = None) -> Meeting:
        """Say that the generation is over for this member, which has parted from it, and wait for the next.

        Args:
            why: a sentence; "called" where `is_called` was the reason.
            notes: what the next generation is to know, for JSON.

        Raises:
            Dismissed: this process is not in it any more.
            RunFailed: there is none, as `can_reform` says.
        """
        self._meeting = self._link.lost(why, notes or {})
        return self._meeting

    def is_called(self) -> bool:
        """Whether this generation is to end: at the next boundary of updates, `lost("called")`. Costs nothing."""
        return self._link.is_called()

    def on_broken(self, act: Callable[[], None] | None) -> None:
        """Have something done, in another thread, as soon as another member is known to be lost, or the run is over.

        For what does not notice by itself: NCCL waits for a dead peer until its patience is over, unless its group is
        aborted. It is done before the next generation is announced. None: nothing is done any more.
        """
        self._link.on_broken(act)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within the block a process group is made, whose connections are cut as soon as the generation is broken.

        So every member notices at once, also one that does not talk to the lost process itself. Takes the place of
        what `on_broken` was told before.
        """
        _ = self.store  # connected before the block: it is not to be cut
        with Connections() as connections:
            yield
        self._link.on_broken(connections.cut)

    def event(self, line: str) -> None:
        """Send a line to the supervisor, which gets them in order. Without a supervisor there is nobody to get it."""
        self._link.event(line)

    def finished(self) -> None:
        """Say that all is done here; of rank 0, that the run is."""
        self._link.finished()

    def require_same(self, facts: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
        """Compare facts, such as versions and the job's digest, with those of all members of this generation.

        Every member calls it after each meeting, before anything else is done together.

        Args:
            facts: of this member, by name.
            patience_s: longest that they wait for each other's [s], where nobody stated how long for this meeting.

        Raises:
            BadJob: they differ; on rank 0.
            RunFailed: somebody did not tell its own; on rank 0.
            Dismissed: either, on the other ranks.
            RuntimeError: the generation broke meanwhile, as a collective call would say it: see `lost`.
        """
        assert self._meeting is not None, "meet first"
        stated_s = self._link.patience_s
        require_same(self.store, self._meeting, facts, patience_s=patience_s if stated_s is None else stated_s)
