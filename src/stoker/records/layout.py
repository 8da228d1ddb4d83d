"""Layouts: how one update is divided over processes, one device each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from stoker.records.device import Precision
from stoker.records.profile import Coupling

_MOST = 2**24
"""Devices along one axis of a mesh; the largest machines have some 10^5."""

Schedule = Literal["1f1b", "gpipe"]
"""The order in which a pipeline's stages take their micro-batches."""


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One dimension of the mesh of processes: `size` processes, and what is divided among them.

    With `shares_batch` each takes a part of every batch: some of its samples or, with `divides_samples`, a part of each
    of them. With `divides_tensors` each has a part of single tensors of the state, with `cuts_model` some of the
    modules. Where neither divides the state, each holds all of it.
    """

    schema: ClassVar[int] = 1
    name: str
    size: int
    shares_batch: bool = False
    divides_tensors: bool = False
    cuts_model: bool = False
    divides_samples: bool = False


_EXPERTS = MeshAxis(name="experts", size=1, shares_batch=True, divides_tensors=True)
_CONTEXT = MeshAxis(name="context", size=1, shares_batch=True, divides_tensors=True, divides_samples=True)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh of processes: `stages` x `replicas` x `shards` x `tensor`, the last one the closest together.

    `replicas` hold a whole copy each and take a part of every batch (data parallel); over `shards` a copy's parameters,
    gradients and optimiser state are split, and each takes a part of the batch too (fully sharded data parallel; with
    replicas it is hybrid). With `reshard`, gathered parameters are let go of after the forward pass and gathered again
    for the backward pass. `tensor` processes split the matrices of each layer; with `sequence`, activations between
    these layers are split along the sequence. `stages` hold consecutive layers each, and micro-batches go through them
    in the order of `schedule`; with `chunks` above 1 each holds so many pieces of the model, dealt out in turn, and
    waits less (interleaved 1F1B). `experts` hold different experts of a mixture each, shards of all else, and take
    parts of the batch; if there are several, they are a dimension of the mesh after `shards`. `context` processes take
    a part of the tokens of each sample, and hold shards; if there are several, they are the last dimension that shares
    the batch. `added` are axes without a field here: those that share a batch come before `context`, the others last.

    What an axis costs, requires and does is in `stoker.layouts` and `stoker.stepping.layouts`, in files of its name.
    """

    schema: ClassVar[int] = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    stages: int = 1
    reshard: bool = True
    sequence: bool = False
    schedule: Schedule = "1f1b"
    chunks: int = 1
    experts: int = 1
    context: int = 1
    added: tuple[MeshAxis, ...] = ()

    def __post_init__(self) -> None:
        for axis in self.mesh:
            if not 1 <= axis.size <= _MOST:
                raise ValueError(f"{axis.name} must be from 1 to {_MOST:,}, got {axis.size}")
        if not 1 <= self.chunks <= _MOST:
            raise ValueError(f"chunks must be from 1 to {_MOST:,}, got {self.chunks}")
        if self.chunks > 1 and (self.stages == 1 or self.schedule != "1f1b"):
            raise ValueError(
                f"{self.chunks} chunks need several stages in the schedule 1f1b, got {self.stages} in {self.schedule}"
            )
        names = [axis.name for axis in self.mesh]
        if len(set(names)) < len(names):
            raise ValueError(f"the axes of a layout have different names, got {', '.join(names)}")

    @cached_property
    def mesh(self) -> tuple[MeshAxis, ...]:
        """The dimensions of the mesh, the last one the closest together; those of size 1 are among them."""
        return (
            MeshAxis(name="stages", size=self.stages, cuts_model=True),
            MeshAxis(name="replicas", size=self.replicas, shares_batch=True),
            MeshAxis(name="shards", size=self.shards, shares_batch=True, divides_tensors=True),
            *([] if self.experts == 1 else [replace(_EXPERTS, size=self.experts)]),
            *(axis for axis in self.added if axis.shares_batch),
            *([] if self.context == 1 else [replace(_CONTEXT, size=self.context)]),
            MeshAxis(name="tensor", size=self.tensor, divides_tensors=True),
            *(axis for axis in self.added if not axis.shares_batch),
        )

    @property
    def divided(self) -> tuple[MeshAxis, ...]:
        """The axes of more than one process, in the order of the mesh."""
        return tuple(axis for axis in self.mesh if axis.size > 1)

    @cached_property
    def world_size(self) -> int:
        """Number of processes [1]."""
        return math.prod(axis.size for axis in self.mesh)

    @property
    def data_size(self) -> int:
        """Number of processes, or groups of them, that each take a part of every batch [1]."""
        return math.prod(axis.size for axis in self.mesh if axis.shares_batch)

    @property
    def sample_parts(self) -> int:
        """Number of parts into which the samples of every batch are divided [1]; `data_size` if none is cut."""
        return math.prod(axis.size for axis in self.mesh if axis.shares_batch and not axis.divides_samples)

    @property
    def num_stages(self) -> int:
        """Number of pieces that the model is cut into [1]: `chunks` in each of `stages` processes."""
        return self.stages * self.chunks

    @property
    def num_copies(self) -> int:
        """How many times the processes together hold each part of the state [1]."""
        return math.prod(axis.size for axis in self.mesh if not (axis.divides_tensors or axis.cuts_model))

    @property
    def is_replicated(self) -> bool:
        """True if every process holds all of the state, so that each can send it to the others."""
        return self.world_size == self.num_copies

    def gathered_in(self, precision: Precision) -> Literal["bf16"] | None:
        """The dtype in which shards gather fp32 parameters, and compute, in a precision; None: as they are stored."""
        return "bf16" if precision in ("bf16", "fp8") and self.shards * self.experts * self.context > 1 else None

    @property
    def has_fp8(self) -> bool:
        """Whether plans in fp8 go with it: replicas and shards alone do."""
        return self.world_size == self.replicas * self.shards

    @property
    def divides_tensors(self) -> bool:
        """Whether processes hold parts of single tensors, which are DTensors then."""
        return any(axis.divides_tensors for axis in self.divided)

    @property
    def cuts_model(self) -> bool:
        """Whether a process holds only some of the model's modules."""
        return any(axis.cuts_model for axis in self.divided)

    @property
    def cuts_samples(self) -> bool:
        """Whether processes have parts of single samples."""
        return any(axis.divides_samples for axis in self.divided)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Index of a process along each axis of the mesh: its stage, replica, shard and place in the tensor group.

        >>> Layout(replicas=2, tensor=2).coordinates(3)
        (0, 1, 0, 1)
        """
        indices = []
        for axis in reversed(self.mesh):
            rank, index = divmod(rank, axis.size)
            indices.append(index)
        return tuple(reversed(indices))

    def coordinate(self, rank: int, name: str) -> int:
        """Index of a process along the axis of that name [0 to its size - 1]."""
        return next(place for place, axis in zip(self.coordinates(rank), self.mesh, strict=True) if axis.name == name)

    def group(self, name: str) -> tuple[int, int]:
        """Number of processes in a group along an axis, and their distance in rank; `data`: of all that share a batch.

        >>> Layout(stages=2, replicas=2, tensor=4).group("data")
        (2, 4)
        """
        chosen = [
            number
            for number, axis in enumerate(self.mesh)
            if axis.name == name or (name == "data" and axis.shares_batch)
        ]
        size = math.prod(self.mesh[number].size for number in chosen)
        return size, math.prod(axis.size for axis in self.mesh[chosen[-1] + 1 :])

    def with_same_modules(self, rank: int) -> tuple[int, ...]:
        """The processes that hold the same modules as process `rank`, or parts of them; it is one of them."""
        if not self.cuts_model:
            return tuple(range(self.world_size))

        def cut(other: int) -> list[int]:
            return [
                coordinate
                for coordinate, axis in zip(self.coordinates(other), self.mesh, strict=True)
                if axis.cuts_model
            ]

        mine = cut(rank)
        return tuple(other for other in range(self.world_size) if cut(other) == mine)

    def data_rank(self, rank: int) -> int:
        """Index of the part of every batch that a process takes [0 to data_size - 1].

        >>> Layout(shards=2, tensor=2).data_rank(3)
        1
        """
        size, distance = self.group("data")
        return rank // distance % size

    def sample_part(self, rank: int) -> int:
        """Index of the part of every batch's samples that a process takes [0 to sample_parts - 1].

        >>> Layout(shards=2, context=2).sample_part(3)
        1
        """
        return self.data_rank(rank) // (self.data_size // self.sample_parts)

    def with_size(self, name: str, size: int) -> Layout:
        """The layout with another size of one of its axes."""
        if all(axis.name != name for axis in self.added):
            return replace(self, **{name: size})  # type: ignore[arg-type]  # each of them is a number
        return replace(self, added=tuple(replace(a, size=size) if a.name == name else a for a in self.added))

    def resized(self, world_size: int) -> Layout | None:
        """The layout for another number of processes, which share the batch; None if there is none.

        Axes that do not share the batch keep their size, replicas if possible.

        >>> Layout(replicas=4).resized(3).in_words()
        '3 replicas'
        >>> Layout(shards=2, tensor=2).resized(3) is None
        True
        """
        data, rest = divmod(world_size, self.world_size // self.sample_parts)
        if rest or data < 1:
            return None
        if self.experts > 1:
            experts = math.gcd(self.experts, data)
            return replace(self, experts=experts, shards=data // experts)
        if self.cuts_samples:  # their processes hold shards
            return replace(self, shards=data)
        sharing = [axis.name for axis in self.divided if axis.shares_batch and axis.name != "replicas"]
        if not sharing:
            return replace(self, replicas=data)
        replicas = self.replicas if data % self.replicas == 0 else 1
        layout = replace(self, replicas=replicas)
        for name in sharing[:-1]:
            layout = layout.with_size(name, 1)
        return layout.with_size(sharing[-1], data // replicas)

    def usable(self, world_size: int) -> int:
        """Number of processes, of `world_size`, that this layout resized can use; 0 if they are too few."""
        return next((size for size in range(world_size, 0, -1) if self.resized(size) is not None), 0)

    def problem_with(self, coupling: Coupling, batch: int) -> str | None:
        """Why a batch cannot be divided like this, with the numbers and the remedy; None if it can.

        Every process needs a sample, and one process must have all samples that are coupled through the loss or the
        model as a whole.
        """
        size, group = self.sample_parts, coupling.group
        if self.cuts_samples and coupling.kind != "separable":
            causes = ", ".join(coupling.causes)
            return (
                f"samples are coupled by {causes}, which would see parts of them: no process may have parts of tokens"
            )
        if size == 1:
            return None
        if size > batch:
            return f"{size} processes cannot take parts of a batch of {batch} samples: at most {batch} can"
        if coupling.kind == "whole_group":
            causes = ", ".join(coupling.causes)
            sharing = [axis for axis in self.mesh if axis.shares_batch and not axis.divides_samples]
            return (
                f"samples are coupled in groups of {group} by {causes}, which one process has to see whole: "
                f"{' × '.join(axis.name for axis in sharing)} must be 1, "
                f"not {' × '.join(str(axis.size) for axis in sharing)}"
            )
        if group is not None and size > group:
            return f"{size} processes cannot take parts of a group of {group} coupled samples: at most {group} can"
        return None

    def in_words(self) -> str:
        """`2 replicas`, `8 shards`, `2 stages (1f1b) × 4-way tensor with sequence`; empty for one process."""
        of_fields = {
            "stages": f"{self.stages} stages "
            + (f"({self.schedule})" if self.chunks == 1 else f"of {self.chunks} chunks (interleaved {self.schedule})"),
            "shards": f"{self.shards} shards" + ("" if self.reshard else " kept gathered"),
            "experts": f"{self.experts}-way experts",
            "context": f"{self.context}-way context" + ("" if self.reshard or self.shards > 1 else " kept gathered"),
            "tensor": f"{self.tensor}-way tensor" + (" with sequence" if self.sequence else ""),
        }
        return " × ".join(of_fields.get(axis.name, f"{axis.size} {axis.name}") for axis in self.divided)


ONE_PROCESS = Layout()
