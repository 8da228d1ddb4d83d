"""The processes that train one job together, as one of them sees them.

Standing on `torch.distributed`: gloo between CPUs, NCCL between GPUs, and a device mesh whose axes are those of the
layout. A world is joined anew whenever somebody leaves or comes, each time under a name of its own in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stoker.errors import BadJob
from stoker.loading import Split
from stoker.records import ONE_PROCESS, Coupling, Layout

AXES = ("stages", "replicas", "shards", "tensor")
"""Names of the mesh's dimensions, as in `Layout`."""

PATIENCE_S = 20.0
"""Longest that a process waits for the others within one call [s]; whoever has not come then counts as lost."""


@dataclass(frozen=True)
class World:
    """Process number `rank` of those of `layout`.

    `mesh` has the dimensions AXES, and `data` is the group of those that take parts of the same batches; both None in a
    world of one.
    """

    layout: Layout = ONE_PROCESS
    rank: int = 0
    mesh: DeviceMesh | None = None
    data: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and tells."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which part of every batch is taken here."""
        return self.layout.data_rank(self.rank)

    def split(self, coupling: Coupling) -> Split:
        """What of each batch this process takes: of each group of coupled samples, or of the whole."""
        return Split(self.data_rank, self.layout.data_size, coupling.group)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the processes that take parts of a batch; in place."""
        if self.data is not None:
            dist.all_reduce(values, group=self.data)
        return values


ALONE = World()


def join(
    layout: Layout,
    rank: int,
    store: Store,
    *,
    device: torch.device,
    name: str = "0",
    patience_s: float = PATIENCE_S,
) -> World:
    """Meet the other processes of `layout`; `leave` before joining again.

    Args:
        layout: of how many processes, and in which order.
        rank: of this one, from 0.
        store: where all of them can be found.
        device: this process's.
        name: of this meeting, which no other one in the store has.
        patience_s: see PATIENCE_S.

    Raises:
        RuntimeError: somebody does not come in time.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=patience_s)
    meeting = PrefixStore(f"world/{name}", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=layout.world_size, timeout=patience)
    shape = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    data = mesh["replicas", "shards"]._flatten("data").get_group()  # noqa: SLF001 - as FSDP2's own guides do
    return World(layout, rank, mesh, data)


def leave() -> None:
    """Part from the other processes, whether they are still there or not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def require_divisible(layout: Layout, batch: int) -> None:
    """Refuse a layout with more parts than samples.

    Raises:
        BadJob: some process would never have a sample.
    """
    if layout.data_size > batch:
        raise BadJob(
            f"{layout.data_size} processes cannot take parts of a batch of {batch} samples: some would have none",
            remedy=f"Use at most {batch} replicas and shards together, or a larger batch, which is a change of Job.",
        )
