"""Meeting anew: what PyTorch keeps of one meeting must not reach into the next."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed.fsdp import fully_shard

from stoker.records import Layout
from stoker.stepping.world import World, join, leave
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
    """Else checkpoints would have swapped parts, and nobody would be told: meshes of both meetings are equal."""
    for meetings in on_ranks(TWO, places, tmp_path):
        for rank, weight, state in meetings:
            assert weight == state == (rank,)
