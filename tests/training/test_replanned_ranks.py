"""Where a change of plan takes effect in processes of a launcher, which all start again from the last checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import RunFailed
from stoker.records import Plan, Position
from stoker.training.plan_in_force import Replanned
from stoker.training.recovery import ReplanAllRanks
from stoker.training.run import RunProcess


@pytest.mark.parametrize(("can_reform", "position"), [(True, Position(samples=80, updates=5)), (False, None)])
def test_a_change_of_plan_is_stored_where_the_run_goes_on(can_reform: bool, position: Position | None) -> None:
    """Survivors go on from the update that failed, a launcher's ranks from the last checkpoint: replays rest on it."""
    old, new = Plan(device="cpu", micro_batch=8), Plan(device="cpu", micro_batch=4)
    change = Replanned(old=old, new=new, why="memory ran out", position=Position(samples=80, updates=5))
    proposed: list[Replanned] = []
    process: Any = RunProcess.__new__(RunProcess)
    process.member = SimpleNamespace(can_reform=can_reform)
    process.plans = SimpleNamespace(plan=old, propose=proposed.append)
    process._carried = None
    if can_reform:
        process.recover(ReplanAllRanks(change), None)
    else:
        with pytest.raises(RunFailed, match="memory ran out"):
            process.recover(ReplanAllRanks(change), None)
    assert [one.position for one in proposed] == [position]
