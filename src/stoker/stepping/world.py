"""The processes that train one job together, as one of them sees them.

Built on `torch.distributed`: gloo between CPUs, NCCL between GPUs, and a device mesh whose axes are those of the
layout. Whenever a process leaves or joins, a new world is joined, each under its own name in the store.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # missing from the stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # settable nowhere else

from stoker.errors import RunFailed
from stoker.loading.batches import Split
from stoker.records import ONE_PROCESS, Coupling, Layout
from stoker.records.codec import JSON

if TYPE_CHECKING:
    from stoker.stepping.message_folder import MessageFolder

Moment = Literal["computed", "summing", "agreed"]
"""A moment of an update: this process's last gradient is ready; its passes are over, and losses are about to be summed;
gradients and losses are equal in all processes."""

SIGNALS = ("stop", "save", "meet", "slice")
"""Signals of a process to the others with each update: it was asked to stop, a checkpoint is due, a process waits to
join, its slice is over."""


class Signals:
    """Flags that processes exchange along with the loss of an update, so that all act on them after the same one."""

    def __init__(self) -> None:
        self._own = dict.fromkeys(SIGNALS, False)
        self._received: torch.Tensor | None = None

    def send(self, name: str, *, value: bool) -> None:
        """Send a signal to the others with the next update."""
        self._own[name] = value

    def is_set(self, name: str) -> bool:
        """Whether any process sent that signal with the last update."""
        return self._received is not None and bool(self._received[SIGNALS.index(name)] > 0)

    def outgoing(self, like: torch.Tensor) -> torch.Tensor:
        """This process's signals [len(SIGNALS)], to be summed over all processes."""
        return torch.tensor([float(self._own[name]) for name in SIGNALS], dtype=like.dtype, device=like.device)

    def receive(self, total: torch.Tensor) -> None:
        """Receive the sums of all processes' signals."""
        self._received = total


def unmarked(_: Moment) -> None:
    """The mark of a world whose time is not profiled."""


@dataclass(frozen=True)
class World:
    """Process number `rank` of those of `layout`.

    `mesh` has the dimensions of the layout's mesh, and `data` is the group of those that take parts of the same
    batches; both None in a world of one. `signals` are exchanged with every update. `mark` is called at each `Moment`
    of an update. `messages` are a process's exchanges with other sites, each of which is a world of one.
    """

    layout: Layout = ONE_PROCESS
    rank: int = 0
    mesh: DeviceMesh | None = None
    data: dist.ProcessGroup | None = None
    signals: Signals = field(default_factory=Signals, compare=False)
    mark: Callable[[Moment], None] = field(default=unmarked, compare=False)
    messages: MessageFolder | None = field(default=None, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and reports."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of tensors that are exchanged with other processes."""
        return torch.device("cpu" if self.mesh is None else self.mesh.device_type)

    @property
    def data_rank(self) -> int:
        """Index of this process's part of every batch [1]."""
        return self.layout.data_rank(self.rank)

    @property
    def num_sites(self) -> int:
        """Number of replicas that make updates of their own, where a job says so [1]."""
        return self.layout.data_size if self.messages is None else self.messages.num_sites

    @property
    def site(self) -> int:
        """Which of them this is, from 0."""
        return self.data_rank if self.messages is None else self.messages.site

    def split(self, coupling: Coupling) -> Split:
        """This process's part of each batch: of each group of coupled samples, or of the whole."""
        return Split(self.layout.sample_part(self.rank), self.layout.sample_parts, coupling.group)

    @property
    def is_all_data(self) -> bool:
        """Whether all processes take parts of the batch (no tensor group, no stages)."""
        return self.layout.data_size == self.layout.world_size

    def share_signals(self, like: torch.Tensor) -> None:
        """Exchange signals with all processes."""
        total = self.signals.outgoing(like)
        if self.mesh is not None:
            dist.all_reduce(total)
        self.signals.receive(total)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the processes that take parts of a batch; in place."""
        if self.data is not None:
            dist.all_reduce(values, group=self.data)
        return values

    def largest_in_stage(self, values: torch.Tensor) -> torch.Tensor:
        """The largest `values` of all processes that hold the same modules, or parts of them; in place."""
        for axis in self.layout.divided:
            if not axis.cuts_model and self.mesh is not None:
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.mesh[axis.name].get_group())
        return values


ALONE = World()


def join(
    layout: Layout,
    rank: int,
    store: Store,
    *,
    device: torch.device,
    name: str = "0",
    patience_s: float,
) -> World:
    """Meet the other processes of `layout`; `leave` before joining again.

    Args:
        layout: number and order of the processes.
        rank: of this process, from 0.
        store: the rendezvous of all of them.
        device: this process's.
        name: of this rendezvous, unique in the store.
        patience_s: longest wait for the others within one call [s]; a process that is later counts as lost. A process
            that has ended is noticed at once.

    Raises:
        RuntimeError: a process does not join in time.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for what names none: collectives of objects, events, streams
    patience = timedelta(seconds=patience_s)
    meeting = PrefixStore(f"world/{name}", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=layout.world_size, timeout=patience)
    names = tuple(axis.name for axis in layout.mesh)
    mesh = init_device_mesh(device.type, tuple(axis.size for axis in layout.mesh), mesh_dim_names=names)
    sharing = tuple(axis.name for axis in layout.mesh if axis.shares_batch)
    data = mesh[sharing]._flatten("data").get_group()  # noqa: SLF001 - as FSDP2's own guides do
    for group in (*mesh.get_all_groups(), data):  # those of a mesh would wait for half an hour
        _set_pg_timeout(patience, group)
    return World(layout, rank, mesh, data)


_GLOO = re.compile(r"\[(enforce fail at )?[^\s\]]*\bgloo/[^\s\]]+:\d+\]")
"""Where in gloo's own source an error was raised, which gloo puts before each of its messages."""


def is_broken(error: BaseException) -> bool:
    """Whether the cause of an error is another process that is gone, or did not answer in time.

    Decided by the origin: `torch.distributed` itself, whose errors have a class, or gloo, whose errors are plain
    RuntimeErrors that begin with a location in its source. Losses and metrics may have wrapped it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or (type(cause) is RuntimeError and _GLOO.search(str(cause))):
            return True
        cause = cause.__cause__
    return False


MOST_JSON_BYTES = 64 * 2**20
"""Longest JSON text that a process takes from another one [bytes]."""


def gather_bytes(mine: bytes, device: torch.device, *, most_bytes: int = MOST_JSON_BYTES) -> list[bytes]:
    """The bytes of each process of the world, by rank; collective.

    Replaces PyTorch's `all_gather_object`, which unpickles data of other processes: a pickle runs code.

    Raises:
        RunFailed: some process sends more than `most_bytes`; in all of them.
    """
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(length) for length in sizes]
    for rank, length in enumerate(lengths):
        _require_length(rank, length, most_bytes)
    longest = max(lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in lengths]
    if longest:
        dist.all_gather(rows, own.to(device))
    return [_bytes_of(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def gather_json(mine: JSON, device: torch.device) -> list[JSON]:
    """JSON values of all processes of the world, by rank; see `gather_bytes`."""
    return [_read(rank, text) for rank, text in enumerate(gather_bytes(json.dumps(mine).encode(), device))]


def broadcast_json(value: JSON, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> JSON:
    """The JSON value of process `source` of the world, in each process of `group` (None: of the world).

    Raises:
        RunFailed: it is longer than MOST_JSON_BYTES, or not JSON.
    """
    is_source = dist.get_rank() == source
    text = json.dumps(value).encode() if is_source else b""
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, src=source, group=group)
    _require_length(source, int(size), MOST_JSON_BYTES)
    content = torch.empty(int(size), dtype=torch.uint8)
    if is_source:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, src=source, group=group)
    return value if is_source else _read(source, _bytes_of(content))


def _bytes_of(row: torch.Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


def _require_length(rank: int, length: int, most_bytes: int) -> None:
    if not 0 <= length <= most_bytes:
        raise RunFailed(f"process {rank} announced a message of {length:,} bytes; at most {most_bytes:,} are taken")


def _read(rank: int, text: bytes) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise RunFailed(f"process {rank} sent {len(text):,} bytes that are no JSON: {problem}") from problem


def leave() -> None:
    """Leave the process group, whether the other processes still exist or not."""
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Clear DTensor's cache of sharding decisions.

    It is keyed by equal meshes: a mesh of a later world in which this process has another rank is equal to an earlier
    one, and tensors would get the placement of the earlier rank.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415 - takes time to import

        _clear_sharding_prop_cache()
