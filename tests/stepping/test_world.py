"""A second rendezvous: what PyTorch keeps of one meeting must not reach into the next."""

from __future__ import annotations

import math
import os
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed.fsdp import fully_shard

from stoker.errors import RunFailed
from stoker.records import Layout
from stoker.stepping.world import World, broadcast_json, gather_bytes, gather_json, is_broken, join, leave
from stoker.testing.ranks import PATIENCE_S, on_ranks

TWO = Layout(shards=2)


def places(world: World, folder: Path) -> list[tuple[Any, ...]]:
    """This process's rank, and where its parts of a weight and of the state of an optimiser say they lie.

    In each of two meetings, before the second of which the ranks are swapped.
    """
    found = []
    for number, rank in enumerate((world.rank, 1 - world.rank)):
        if number:
            dist.barrier()
            leave()
            store = FileStore(str(folder / "again"), 2)
            store.set_timeout(timedelta(seconds=PATIENCE_S))
            world = join(TWO, rank, store, device=torch.device("cpu"), name="again", patience_s=PATIENCE_S)
        layer = torch.nn.Linear(4, 7)
        fully_shard(layer, mesh=world.mesh["shards"])  # type: ignore[index]  # there are two
        state = torch.zeros_like(layer.weight)
        meshes = [one.device_mesh for one in (layer.weight, state)]  # type: ignore[attr-defined]  # DTensors
        found.append((rank, *(tuple(mesh.get_coordinate()) for mesh in meshes)))
    return found


def test_a_process_of_another_rank_than_before_holds_other_parts(tmp_path: Path) -> None:
    """Else checkpoints would have swapped parts, unnoticed: meshes of both meetings are equal."""
    for meetings in on_ranks(TWO, places, tmp_path):
        for rank, weight, state in meetings:
            assert weight == state == (rank,)


class Payload:
    """Unpickled, it makes a folder: the code of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "code-of-a-stranger-ran"),)


def visited(world: World, folder: Path, exchange: str) -> str:
    """What process 0 makes of another one that sends a pickle, as PyTorch's own object collectives would."""
    try:
        if world.rank == 1 and exchange == "gather":
            gather_bytes(pickle.dumps(Payload(folder)), world.device)
        elif world.rank == 1:
            dist.broadcast_object_list([Payload(folder)], src=1)
        elif exchange == "gather":
            gather_json({"a": 1}, world.device)
        else:
            broadcast_json(None, 1, world.device)
    except RunFailed as problem:
        return problem.message
    return "taken"


@pytest.mark.parametrize("exchange", ["gather", "broadcast"])
def test_the_code_of_a_stranger_does_not_run(tmp_path: Path, exchange: str) -> None:
    """What other processes send is read as JSON: a pickle with `__reduce__` is refused as none."""
    victim, _ = on_ranks(Layout(replicas=2), visited, tmp_path, exchange)
    assert re.match(r"process 1 sent [0-9]+ bytes that are no JSON", victim)
    assert list(tmp_path.iterdir()) == []


def exchanged(world: World) -> tuple[Any, Any, str]:
    """Values of both processes, what the second one says to all, and what becomes of one that is too long."""
    mine = {
        "rank": world.rank,
        "loss": float("nan") if world.rank else 0.1 + 0.2,
        "text": "Ä" * world.rank,
        "none": None,
    }
    try:
        gather_bytes(bytes(9 * world.rank), world.device, most_bytes=8)
        problem = ""
    except RunFailed as error:
        problem = error.message
    return gather_json(mine, world.device), broadcast_json(["a", {"b": world.rank}], 1, world.device), problem


def test_json_goes_between_processes_as_it_is() -> None:
    """Floats to the last bit, empty values, text; the same in every process, and refused by all if it is too long."""
    for everyone, told, problem in on_ranks(Layout(replicas=2), exchanged):
        assert everyone[0] == {"rank": 0, "loss": 0.1 + 0.2, "text": "", "none": None}
        assert math.isnan(everyone[1]["loss"])
        assert (everyone[1]["text"], told) == ("Ä", ["a", {"b": 1}])
        assert problem == "process 1 announced a message of 9 bytes; at most 8 are taken"


def error_of_a_collective(world: World) -> RuntimeError:
    """What gloo raises where another process is gone."""
    if world.rank == 1:
        leave()
        return RuntimeError("of nobody")
    try:
        while True:
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as problem:
        return RuntimeError(str(problem))


def test_a_lost_process_is_known_by_what_raised() -> None:
    """Gloo names the place in its source, wrapped or not; words of a user's own error are none, whatever they are."""
    lost, _ = on_ranks(Layout(replicas=2), error_of_a_collective)
    wrapped = ValueError("in a metric")
    wrapped.__cause__ = lost
    assert is_broken(lost)
    assert is_broken(wrapped)
    assert is_broken(dist.DistNetworkError("the connection was closed"))
    for text in (
        "GET s3://bucket/shard-7: read timed out",
        "Socket operation in my metric failed",
        "Read error",
        "Broken pipe",
        "Connection reset by peer",
        "NCCL_DEBUG is not set",
        "Gloo",
    ):
        own = RuntimeError(text)
        wrapped.__cause__ = own
        assert not is_broken(own)
        assert not is_broken(wrapped)
