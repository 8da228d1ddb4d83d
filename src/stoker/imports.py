"""Importing large packages without paying for Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block cyclic garbage is not looked for.

    Importing PyTorch and transformers makes a million objects that stay. The collector visits them again and again as
    they grow in number: 1.0 s of 7 (docs/log.md). What is there at the end counts as old, as if it had been visited.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)  # not gc.disable(): what is imported may call it, for good
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            is_worth_it = gc.get_count()[0] > before[0]  # new objects than a collection of them waits for
            if is_worth_it and gc.get_freeze_count() == 0:  # else somebody keeps objects from being visited for good
                gc.freeze()  # into a generation of their own, without visiting them,
                gc.unfreeze()  # and into the oldest
            gc.set_threshold(*before)
