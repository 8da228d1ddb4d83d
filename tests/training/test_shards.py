"""Which part of the state each process holds and writes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.errors import RunFailed
from stoker.records import Layout
from stoker.stepping.distributed_tensors import _runs
from stoker.stepping.world import World
from stoker.training.sharded_tensors import _holders, shard_of, shards_to_write


class Mesh:
    """Ranks in a grid, as a device mesh has them."""

    def __init__(self, ranks: Any) -> None:
        self.mesh = torch.as_tensor(ranks)

    def size(self, dim: int) -> int:
        """Of one dimension."""
        return self.mesh.shape[dim]

    def coordinates(self) -> list[tuple[int, ...]]:
        """Of all processes."""
        return list(itertools.product(*map(range, self.mesh.shape)))


def indices(runs: tuple[tuple[int, int], ...]) -> list[int]:
    """All indices of some runs."""
    return [index for start, stop in runs for index in range(start, stop)]


PLACEMENTS = {
    "shards": ((4,), (Shard(0),)),
    "shards of columns": ((3,), (Shard(1),)),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "two dimensions": ((2, 2), (Shard(0), Shard(1))),
    "one dimension twice": ((2, 2), (Shard(0), Shard(0))),
    "queries, keys and values together": ((2,), (_StridedShard(0, split_factor=3),)),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=20)
@given(rows=st.integers(1, 25), columns=st.integers(1, 7))
def test_what_is_held_is_what_pytorch_says(kind: str, rows: int, columns: int) -> None:
    """Sizes and first index are those that its own checkpoints use, uneven and empty parts included."""
    grid, placements = PLACEMENTS[kind]
    mesh = Mesh(torch.arange(math.prod(grid)).view(grid))
    for coordinate in mesh.coordinates():
        held = [indices(runs) for runs in _runs(mesh, coordinate, placements, (rows, columns))]
        sizes, offsets = _compute_local_shape_and_global_offset((rows, columns), grid, list(coordinate), placements)
        assert tuple(map(len, held)) == sizes
        if math.prod(sizes):
            assert tuple(one[0] for one in held) == offsets


@pytest.mark.parametrize("inner", [Shard(0), _StridedShard(0, split_factor=3)], ids=str)
@settings(max_examples=20)
@given(rows=st.integers(1, 40))
def test_shards_of_a_divided_matrix_are_cut_from_what_each_process_was_left(inner: Any, rows: int) -> None:
    """As FSDP2 cuts after tensor parallel: each gets a run of its local rows, the earlier ones the longer."""
    mesh, left = Mesh([[0, 1], [2, 3]]), Mesh([0, 1])
    for shard, tensor in mesh.coordinates():
        (found,) = _runs(mesh, (shard, tensor), (_StridedShard(0, split_factor=2), inner), (rows,))
        (before,) = _runs(left, (tensor,), (inner,), (rows,))
        size = math.ceil(len(indices(before)) / 2)
        assert indices(found) == indices(before)[size * shard : size * (shard + 1)]


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_together_processes_hold_each_element_as_often_as_it_is_replicated(kind: str) -> None:
    """Nothing is missing, and nothing is held that is not listed."""
    grid, placements = PLACEMENTS[kind]
    mesh = Mesh(torch.arange(math.prod(grid)).view(grid))
    counts = torch.zeros(13, 5)
    for coordinate in mesh.coordinates():
        rows, columns = (indices(runs) for runs in _runs(mesh, coordinate, placements, (13, 5)))
        counts[torch.tensor(rows)[:, None], torch.tensor(columns)] += 1
    copies = math.prod(size for size, placement in zip(grid, placements, strict=True) if placement.is_replicate())
    assert (counts == copies).all()


def test_holders_of_a_part_are_found_from_the_layout() -> None:
    """Along axes that a tensor's mesh lacks, and along those over which it is replicated; never in another stage."""
    layout = Layout(stages=2, replicas=2, shards=2)
    assert layout.coordinates(5) == (1, 0, 1, 0)
    hybrid = Mesh([[4, 5], [6, 7]])
    assert _holders(hybrid, (Replicate(), Shard(0)), layout, 5) == (5, 7)
    assert _holders(hybrid, (Shard(0), Shard(1)), layout, 5) == (5,)
    assert _holders(Mesh([4, 5]), (Shard(0),), layout, 4) == (4, 6)
    assert _holders(Mesh([4, 5]), (Replicate(),), layout, 4) == (4, 5, 6, 7)
    divided = Layout(replicas=2, tensor=2)
    assert _holders(Mesh([2, 3]), (Shard(0),), divided, 3) == (1, 3)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 50), min_size=4, max_size=30), replicas=st.integers(2, 5))
def test_replicas_share_the_writing_evenly_and_write_each_tensor_once(sizes: list[int], replicas: int) -> None:
    """No process writes more than its part and one tensor; all of them find the same without a word."""
    layout = Layout(replicas=replicas)
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    written = [shards_to_write(tensors, World(layout, rank)) for rank in range(replicas)]
    assert sorted(name for one in written for name in one) == sorted(tensors)
    for one in written:
        assert sum(part.local.numel() for part in one.values()) <= sum(sizes) / replicas + max(sizes)


def test_stages_write_their_own() -> None:
    """A process of one stage does not count on those of another, which hold other tensors."""
    layout = Layout(stages=2, replicas=2)
    assert [shard_of(torch.zeros(3), World(layout, rank)).holders for rank in range(4)] == [(0, 1)] * 2 + [(2, 3)] * 2


class Summand:
    """A tensor whose processes hold summands of it."""

    shape, placements, device_mesh = (4,), (Partial(),), None

    def to_local(self) -> torch.Tensor:
        """This process's."""
        return torch.zeros(4)


def test_what_is_still_to_be_added_up_is_refused() -> None:
    """No process holds a part of it."""
    with pytest.raises(RunFailed, match=r"a tensor of shape \[4\] that is still to be added up"):
        shard_of(Summand(), World())  # type: ignore[arg-type]


def test_an_empty_tensor_is_written() -> None:
    """It is part of the state as well."""
    assert list(shards_to_write({"none": torch.zeros(0, 3)}, World())) == ["none"]
