"""Facts of a job that planning rests on: the coupling of its samples, its size, and the parts of its model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

CouplingKind = Literal["separable", "batch_norm", "whole_group"]

NOT_COMPARED = "assumed: samples have not been compared yet"
"""The evidence of a coupling before samples are compared: what is legal under it is legal under any other."""


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """How the samples of a batch influence each other's losses.

    `separable`: any micro-batch is legal. `batch_norm`: only through batch statistics, so a micro-batch is any whole
    number of groups. `whole_group`: through something that must see each group alone, so a micro-batch is one group.
    `group` is the number of samples in a group (None when separable). `tried` is the largest batch that was compared
    with its parts [samples] (None: unknown). `unsaved` names what a pass leaves for the next one where no
    checkpoint holds it, such as tensors in plain attributes. `notices` say what is probably a mistake in the job.
    """

    schema: ClassVar[int] = 1
    kind: CouplingKind
    group: int | None
    causes: tuple[str, ...]
    evidence: str
    tried: int | None = None
    unsaved: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "separable") != (self.group is None) or (self.group is not None and self.group < 1):
            raise ValueError(f"a {self.kind} coupling does not go with group={self.group}")

    def problem_with(self, micro_batch: int, batch: int) -> str | None:
        """Why a micro-batch of that many samples would change what is learned; None if it does not."""
        if not 1 <= micro_batch <= batch:
            return f"a micro-batch has 1 to {batch} samples, not {micro_batch}"
        if self.group is None or micro_batch == self.group:
            return None
        if self.kind == "batch_norm" and (micro_batch % self.group == 0 or micro_batch == batch):
            return None
        rule = "a whole number of groups" if self.kind == "batch_norm" else "exactly one group"
        return f"samples are coupled in groups of {self.group}: a micro-batch is {rule}, not {micro_batch} samples"

    def legal_micro_batches(self, batch: int) -> tuple[int, ...]:
        """Legal sizes, largest first: of a separable job the batch and its halvings, else whole groups of that size.

        There are none if a group is larger than the batch.
        """
        if self.kind == "whole_group" and self.group is not None:
            return (self.group,) if self.group <= batch else ()
        halvings = [batch // 2**k for k in range(batch.bit_length()) if batch // 2**k > 0]
        group = self.group or 1
        sizes = dict.fromkeys(size if size == batch else max(group, size - size % group) for size in halvings)
        return tuple(size for size in sizes if self.problem_with(size, batch) is None)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Facts of a job that planning rests on.

    `parameters` counts scalars; `num_blocks` is how many equal blocks the model repeats (0: none), the most that can be
    checkpointed. `loss_chunks` is in how many parts the loss is worth computing where memory is short (1: it is not, or
    cannot be). `data_bytes` is what the arrays take that batches are gathered from (None: there are none, or not
    known). `has_own_step`: the job makes its updates itself. `most_workers` is how many processes may fetch (None: any
    number; a stream is read by one). `mean_batch` is how many samples an update has on average where their number
    differs, of which `batch` is then the most (None: it does not). `has_one_shape`: all whole batches are of one shape,
    as far as is known. `relative_cost` is the mean time of an update over the run, as a share of one of a whole batch
    of whole images (progressive resizing, selective backprop). `device_mtbf_h` is how long one device works between two
    failures [h], if it was given; `machine_devices` are those of one machine, which share its disk, and `restart_s` is
    the time to go on after a failure [s] (None: by the number of machines). `is_double`: all weights are in float64.
    `numerics` are the job's. `offload_problem` says why the optimiser's state cannot be on the host (None: it can);
    `can_offload` is False of a part of the job, since several processes keep all on their devices.
    """

    schema: ClassVar[int] = 2
    num_train: int
    num_valid: int
    num_test: int
    batch: int
    parameters: int
    parameter_bytes: int
    has_convolutions: bool
    is_in_memory: bool
    optimizer_implementations: tuple[str, ...]
    coupling: Coupling
    num_blocks: int = 0
    loss_chunks: int = 1
    data_bytes: int | None = None
    has_own_step: bool = False
    most_workers: int | None = None
    mean_batch: float | None = None
    has_one_shape: bool = True
    relative_cost: float = 1.0
    device_mtbf_h: float | None = None
    machine_devices: int = 8
    restart_s: float | None = None
    is_double: bool = False
    numerics: tuple[str, ...] = ()
    offload_problem: str | None = None
    can_offload: bool = True

    def of_site(self, num_sites: int) -> Profile:
        """The facts of one of so many sites: its part of a batch, in whose time all of them train on a whole one."""
        if num_sites == 1:
            return self
        return dataclasses.replace(
            self,
            batch=math.ceil(min(self.batch, self.num_train) / num_sites),
            mean_batch=None if self.mean_batch is None else self.mean_batch / num_sites,
            relative_cost=self.relative_cost / num_sites,
        )


Division = Literal["columns", "rows", "vocabulary"]
"""How the matrix of a layer is divided among the processes of a tensor group: by its outputs, by its inputs, or, of an
embedding, by the words it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter. `block` is the repeated block it belongs to, from 0 (None: it is outside of them).

    `division` says along which of its dimensions a tensor-parallel layout divides it (None: it is kept whole).
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    block: int | None = None
    is_trained: bool = True
    division: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the whole parameter [bytes]."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model's parameters in the order of registration, each tied one once, and what else stands in a layout's way.

    `blocks` are the dotted names of its repeated blocks, in order. `divided` says for the dotted name of each layer
    that a tensor-parallel layout divides, how. `buffer_bytes` are kept whole by every process. `cuts` are the first
    blocks of all pipeline stages but the first, as the model is cut when it runs (None: spaced evenly). `tied_bytes`
    are those of parameters that two stages hold, which are here twice. `passed` says for each stage but the last how
    many times the bytes of the activations between two blocks it passes on (empty: once).
    """

    schema: ClassVar[int] = 1
    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[str, ...] = ()
    divided: dict[str, Division] = field(default_factory=dict)
    buffer_bytes: int = 0
    cuts: tuple[int, ...] | None = None
    tied_bytes: int = 0
    passed: tuple[float, ...] = ()

    def with_tied(self, tied: Mapping[str, str]) -> ModelParts:
        """The same model, with what pipeline stages hold again of other stages: the first name by the other one."""
        by_name = {one.name: one for one in self.parameters}
        copies = tuple(
            dataclasses.replace(
                by_name[first],
                name=name,
                block=next((n for n, block in enumerate(self.blocks) if name.startswith(f"{block}.")), None),
            )
            for name, first in tied.items()
        )
        num_bytes = sum(one.num_bytes for one in copies if one.is_trained)
        return dataclasses.replace(self, parameters=(*self.parameters, *copies), tied_bytes=num_bytes)

    def in_blocks(self, blocks: tuple[str, ...], cuts: tuple[int, ...] | None = None) -> ModelParts:
        """The same model with other modules as its blocks."""
        numbered = tuple(
            dataclasses.replace(
                parameter,
                block=next((n for n, block in enumerate(blocks) if parameter.name.startswith(f"{block}.")), None),
            )
            for parameter in self.parameters
        )
        return dataclasses.replace(self, parameters=numbered, blocks=blocks, cuts=cuts)

    @property
    def trained_bytes(self) -> int:
        """Size of all trained parameters, whole [bytes]."""
        return sum(parameter.num_bytes for parameter in self.parameters if parameter.is_trained)
