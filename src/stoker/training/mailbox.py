"""How threads that write tell the first process that they are done, without a word in training's own channels.

A collective from a second thread would get in between those of the updates; a file cannot be written where the disk is
full. So they go through the store in which the processes met.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed import distributed_c10d as c10d

from stoker.records.codec import JSON

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.25


def meeting_store() -> Store:
    """The store in which the processes of this world met."""
    return c10d._get_default_store()  # noqa: SLF001 - PyTorch gives no other way to it


class Mailbox:
    """One letter of each process to the first one, about the subject `name`, which no other one has."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._size = PrefixStore(f"letters/{name}", store), size

    def post(self, rank: int, letter: JSON) -> None:
        """Send this process's letter."""
        self._store.set(str(rank), json.dumps(letter))

    def letters(self, is_enough: Callable[[], bool], is_last: Callable[[JSON], bool]) -> list[JSON] | None:
        """All letters, by rank, once they are there; after one that `is_last`, only those that are there.

        None once `is_enough`, before they are.
        """
        found: dict[int, JSON] = {}
        wait_s = _FIRST_WAIT_S
        while len(found) < self._size:
            new = [rank for rank in range(self._size) if rank not in found and self._store.check([str(rank)])]
            for rank in new:
                found[rank] = json.loads(self._store.get(str(rank)))
                self._store.delete_key(str(rank))
            if any(is_last(found[rank]) for rank in new):
                break
            if not new:
                if is_enough():
                    return None
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return [found[rank] for rank in sorted(found)]
