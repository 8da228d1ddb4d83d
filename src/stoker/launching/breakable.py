"""A store in which nobody waits for somebody who will not come.

What: PyTorch's store, whose waits end as soon as the generation is known to be broken. Process groups are made through
it: without it, who is about to meet a process that has just died waits for all of the group's patience.
Use when: processes are organised in generations. Costs: a wait asks every few milliseconds.
Does not see: a process that died after it told the others where to connect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # missing from the stubs

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class Breakable(Store):
    """`store`, in which waits end with DistStoreError once `is_broken`.

    What is there already is read all the same. The methods are those of PyTorch's store, which calls them.
    """

    def __init__(self, store: Store, is_broken: Callable[[], bool]) -> None:
        super().__init__()
        self._store: Any = store  # the stubs lack some of its methods
        self._is_broken = is_broken

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: the generation is broken and they are not there, or the time is over.
        """
        patience = self._store.timeout if timeout is None else timeout
        until, pause_s = time.monotonic() + patience.total_seconds(), _SHORTEST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() > until:
                raise DistStoreError(f"timed out after {patience.total_seconds():g} s waiting for {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def get(self, key: str) -> bytes:
        """The value of a key, for which it waits."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys, for which it waits."""
        self.wait(keys)
        values: list[bytes] = self._store.multi_get(list(keys))
        return values

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; its new value."""
        return int(self._store.add(key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the value expected; the value it then has."""
        value: bytes = self._store.compare_set(key, expected_value, desired_value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set.

        Raises:
            DistStoreError: they are not, and the generation is broken: who would set them may be gone.
        """
        is_there = bool(self._store.check(list(keys)))
        if not is_there and self._is_broken():
            raise DistStoreError(f"another process was lost while this one waited for {', '.join(keys)}")
        return is_there

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._store.num_keys())

    def clone(self) -> Store:
        """The store behind this one, over a connection of its own: for threads that do not wait on anybody."""
        return cast("Store", self._store.clone())

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as PyTorch's C++ calls them
