from __future__ import annotations

import ctypes
import signal
import sys

import pytest

from stoker.records import Layout
from stoker.stepping.world import World
from stoker.testing.ranks import RankFailed, on_ranks


def imported(world: World) -> set[str]:
    """What this member of a world has imported so far."""
    return set(sys.modules)


def test_members_of_a_world_start_with_what_a_step_imports() -> None:
    """Eight hundred modules that PyTorch would import in each of them, at the first step of its optimiser."""
    (found,) = on_ranks(Layout(), imported)
    assert {"stoker.stepping", "torch._dynamo"} <= found


def read_address_zero(_world: World) -> None:
    """What faulty native code does."""
    ctypes.string_at(0)


def test_a_process_that_a_signal_ends_says_which_and_where_it_was() -> None:
    """Without both, a crash once in thousands of tests cannot be explained."""
    with pytest.raises(RankFailed, match=rf"(?s)rank 0 died, exit code {-signal.SIGSEGV}.*in read_address_zero"):
        on_ranks(Layout(), read_address_zero)
