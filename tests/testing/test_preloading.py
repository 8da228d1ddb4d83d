from __future__ import annotations

import sys

from stoker.records import Layout
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks


def imported(world: World) -> set[str]:
    """What this member of a world has imported so far."""
    return set(sys.modules)


def test_members_of_a_world_start_with_what_a_step_imports() -> None:
    """Eight hundred modules that PyTorch would import in each of them, at the first step of its optimiser."""
    (found,) = on_ranks(Layout(), imported)
    assert {"stoker.stepping", "torch._dynamo"} <= found
