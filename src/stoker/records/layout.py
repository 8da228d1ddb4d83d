"""Layouts: how one update is divided over processes, one device each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from stoker.records.profile import Coupling

_MOST = 2**24
"""Devices along one axis of a mesh; the largest machines have some 10^5."""

Schedule = Literal["1f1b", "gpipe"]
"""The order in which a pipeline's stages take their micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh of processes: `stages` x `replicas` x `shards` x `tensor`, the last one the closest together.

    `replicas` hold a whole copy each and take a part of every batch (data parallel); over `shards` a copy's parameters,
    gradients and optimiser state are split, and each takes a part of the batch too (fully sharded data parallel; with
    replicas it is hybrid). With `reshard`, gathered parameters are let go of after the forward pass and gathered again
    for the backward pass. `tensor` processes split the matrices of each layer; with `sequence`, what lies between these
    layers is split along the sequence. `stages` hold consecutive layers each, and micro-batches go through them in the
    order of `schedule`.
    """

    schema: ClassVar[int] = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    stages: int = 1
    reshard: bool = True
    sequence: bool = False
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        for name in ("replicas", "shards", "tensor", "stages"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} must be from 1 to {_MOST:,}, got {getattr(self, name)}")

    @cached_property
    def world_size(self) -> int:
        """Number of processes [1]."""
        return self.stages * self.replicas * self.shards * self.tensor

    @property
    def data_size(self) -> int:
        """Number of processes, or groups of them, that each take a part of every batch [1]."""
        return self.replicas * self.shards

    @property
    def is_replicated(self) -> bool:
        """True if every process holds all of the state, so that each can send it to the others."""
        return self.world_size == self.replicas

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Stage, replica, shard and place in the tensor group of a process.

        >>> Layout(replicas=2, tensor=2).coordinates(3)
        (0, 1, 0, 1)
        """
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shards)
        stage, replica = divmod(rest, self.replicas)
        return stage, replica, shard, tensor

    def data_rank(self, rank: int) -> int:
        """Index of the part of every batch that a process takes [0 to data_size - 1].

        >>> Layout(shards=2, tensor=2).data_rank(3)
        1
        """
        _, replica, shard, _ = self.coordinates(rank)
        return replica * self.shards + shard

    def resized(self, world_size: int) -> Layout | None:
        """The layout for another number of processes, which share the batch; None if there is none.

        Stages and tensor groups keep their size, replicas if possible.

        >>> Layout(replicas=4).resized(3).in_words()
        '3 replicas'
        >>> Layout(shards=2, tensor=2).resized(3) is None
        True
        """
        data, rest = divmod(world_size, self.stages * self.tensor)
        if rest or data < 1:
            return None
        if self.shards == 1:
            return replace(self, replicas=data)
        replicas = self.replicas if data % self.replicas == 0 else 1
        return replace(self, replicas=replicas, shards=data // replicas)

    def usable(self, world_size: int) -> int:
        """Number of processes, of `world_size`, that this layout resized can use; 0 if they are too few."""
        return next((size for size in range(world_size, 0, -1) if self.resized(size) is not None), 0)

    def problem_with(self, coupling: Coupling, batch: int) -> str | None:
        """Why a batch cannot be divided like this, with the numbers and the remedy; None if it can.

        Every process needs a sample, and one process must have all samples that are coupled through the loss or the
        model as a whole.
        """
        size, group = self.data_size, coupling.group
        if size == 1:
            return None
        if size > batch:
            return f"{size} processes cannot take parts of a batch of {batch} samples: at most {batch} can"
        if coupling.kind == "whole_group":
            causes = ", ".join(coupling.causes)
            return (
                f"samples are coupled in groups of {group} by {causes}, which one process has to see whole: "
                f"replicas × shards must be 1, not {self.replicas} × {self.shards}"
            )
        if group is not None and size > group:
            return f"{size} processes cannot take parts of a group of {group} coupled samples: at most {group} can"
        return None

    def in_words(self) -> str:
        """`2 replicas`, `8 shards`, `2 stages (1f1b) × 4-way tensor with sequence`; empty for one process."""
        words = []
        if self.stages > 1:
            words.append(f"{self.stages} stages ({self.schedule})")
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        if self.shards > 1:
            words.append(f"{self.shards} shards" + ("" if self.reshard else " kept gathered"))
        if self.tensor > 1:
            words.append(f"{self.tensor}-way tensor" + (" with sequence" if self.sequence else ""))
        return " × ".join(words)


ONE_PROCESS = Layout()
