"""What holds when processes save together and something goes wrong with one of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records import Layout, Plan, Position
from stoker.stepping.world import World
from stoker.store import CheckpointStore
from stoker.store.files import Disk, installed
from stoker.testing import FaultyDisk
from stoker.testing.ranks import RankFailed, on_ranks
from stoker.training import rank_messages
from stoker.training.checkpoints import Checkpointer, newest_together
from stoker.training.rank_messages import require_visible_to_all_ranks
from tests.training.legs import made, save

TWO = Layout(replicas=2)
PLAN = Plan(device="cpu", micro_batch=16, layout=TWO)


def checkpointer_of(folder: Path) -> Checkpointer:
    """A fresh one."""
    return Checkpointer(CheckpointStore(folder), spec_digest="s", version="0")


def at(updates: int) -> Position:
    """After so many updates."""
    return Position(samples=16 * updates, updates=updates)


class Fatal(Disk):
    """A disk at which the process is killed as soon as something has to be durable."""

    def sync(self, descriptor: int) -> None:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)


def die_while_saving(world: World, folder: Path) -> None:
    """Save once; save again, in which process 1 is killed."""
    step = made(world, "momentum", PLAN)
    save(step, folder, at(1))
    with installed(Fatal() if world.rank == 1 else Disk()):
        save(step, folder, at(2))


def save_once(world: World, folder: Path) -> None:
    """Save at the third update."""
    save(made(world, "momentum", PLAN), folder, at(3))


@pytest.mark.slow
def test_a_process_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """What the others wrote is never taken for a checkpoint, and is cleared when the next one is written."""
    with pytest.raises(RankFailed):
        on_ranks(TWO, die_while_saving, tmp_path)
    store = CheckpointStore(tmp_path)
    assert store.names() == ("000000000016",)
    found = store.newest()
    assert found is not None
    assert found[1].position == at(1)
    assert store.problems == []
    on_ranks(TWO, save_once, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000016", "000000000048"]


class Held(Disk):
    """A disk that keeps writers waiting."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def sync(self, descriptor: int) -> None:
        """Wait until let go, then do it."""
        self.let_go.wait()
        super().sync(descriptor)


def everything_that_is_late(world: World, folder: Path) -> dict[str, Any]:
    """What a process saw of a slow checkpoint, of a disk that was full in process 1, and of one that was given up."""
    step, seen = made(world, "momentum", PLAN), {}
    checkpointer, slow = checkpointer_of(folder), Held()
    with installed(slow):
        checkpointer.save(step, at(1), {}, best=True)
        seen["while it is written"] = (checkpointer.is_writing, checkpointer.collect(), CheckpointStore(folder).names())
        slow.let_go.set()
        written = checkpointer.save(step, at(2), {}, best=False)
    seen["written"] = [(one.position, one.best, one.num_bytes > 0) for one in written]
    checkpointer.collect(wait=True)

    full = FaultyDisk.full(folder, after_bytes=100 if world.rank == 1 else 10**9)
    with full:
        checkpointer.save(step, at(3), {}, best=False)
        while checkpointer.is_writing:
            time.sleep(0.01)
        seen["told at once"] = checkpointer.collect()
        try:
            checkpointer.close()
        except StokerError as error:
            seen["full disk"] = (type(error), error.message, error.remedy)

    checkpointer, slow = checkpointer_of(folder), Held()
    with installed(slow if world.rank == 1 else Disk()):
        checkpointer.save(step, at(4), {}, best=False)
        if world.rank == 0:
            seen["given up"] = checkpointer.abandon(0.1)
            seen["left"] = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        slow.let_go.set()
    save(step, folder, at(5))
    return seen


def test_saving_goes_on_beside_training_and_fails_everywhere_alike(tmp_path: Path) -> None:
    """Nothing is waited for; all report a full disk of one in the same words; without the others all is given up.

    In one test, for its processes take long to start.
    """
    first, second = on_ranks(TWO, everything_that_is_late, tmp_path)
    for one in (first, second):
        assert one["while it is written"] == (True, [], ())
        assert one["told at once"] == []
    assert first["written"] == [(at(1), True, True)]
    assert second["written"] == []
    assert first["full disk"] == second["full disk"]
    kind, message, remedy = first["full disk"]
    assert kind is RunFailed
    assert message.startswith("Cannot write checkpoint 000000000048")
    assert "the disk is full" in message
    assert message.endswith("(process 1)")
    assert "Free some space" in remedy
    assert first["given up"] == []
    assert first["left"] == ["000000000016", "000000000032", "best.json"]
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert found[1].position == at(5)


def look_elsewhere(world: World, folder: Path) -> list[str]:
    """What is said where process 1 has a directory of its own under the same path."""
    mine = folder / str(world.rank)
    mine.mkdir()
    rank_messages.APPEARS_S = 0.2
    said = []
    for look in (
        lambda: require_visible_to_all_ranks(world, mine),
        lambda: checkpointer_of(mine).save(made(world, "momentum", PLAN), at(1), {}, best=False),
    ):
        try:
            look()
        except BadRun as error:
            said.append(error.message.replace(str(mine), "D").replace(str(folder / "0"), "D"))
    require_visible_to_all_ranks(world, folder)
    return [*said, *(path.name for path in mine.iterdir())]


def look_together(world: World, folder: Path) -> list[Any]:
    """What processes find that look for a checkpoint together: none, one, and a damaged one."""
    seen: list[Any] = [newest_together(world, CheckpointStore(folder))]
    save(made(world, "momentum", PLAN), folder, at(1))
    seen.append(newest_together(world, CheckpointStore(folder)))
    if world.is_first:
        next(folder.glob("*/model.1-of-2.safetensors")).unlink()
    try:
        newest_together(world, CheckpointStore(folder))
    except BadRun as error:
        seen.append(error.message)
    return seen


def test_a_directory_that_one_process_does_not_see_is_told_by_all(tmp_path: Path) -> None:
    """Before anything is spent, or with the first checkpoint: which processes do not see it, and nothing is left."""
    first, second = on_ranks(TWO, look_elsewhere, tmp_path)
    told = "D is not one directory for all 2 processes: what process 0 writes there, process 1 does not find."
    assert first == [told, told]
    assert second == [told, told]


def test_the_checkpoint_to_go_on_from_is_looked_for_once(tmp_path: Path) -> None:
    """All processes get the same one, or the same error."""
    first, second = on_ranks(TWO, look_together, tmp_path)
    assert first == second
    nothing, found, damaged = first
    assert nothing is None
    assert found[1].position == at(1)
    assert "model.1-of-2.safetensors is missing" in damaged
