"""What one update is made of: its operations and the life of every storage, in the order in which they happen.

A trace is made without computing anything, for a target that need not be here. It is short: operations that recur are
written once, and of repeated blocks only a few are in it (see `Repetition`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.records.codec import JSON
from stoker.records.device import Precision

Phase = Literal["forward", "backward", "optimizer"]
"""Where in an update: the forward pass and loss; the backward pass, recomputation included; what follows (clipping,
the optimiser, the average of weights)."""

Category = Literal["parameter", "buffer", "gradient", "optimizer state", "average", "input", "activation", "temporary"]
"""What a storage is for. An `activation` is made in a forward pass and outlives it; a `temporary` does not, or is made
later and is neither a gradient nor state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Sizes of a tensor and its dtype, such as `fp32`, `bf16` or `int64`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of scalars."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An ATen operation as the device executes it; views and what moves no data are left out.

    `name` is ATen's, without namespace and overload: `addmm`, `convolution_backward`, `_foreach_add_`. Lists of tensors
    are flattened into `inputs`. `flops` counts a multiply-add as two, a causal attention's mask not at all (as
    `torch.utils.flop_counter` does). Bytes count what has to cross memory once; broadcast dimensions count once.
    `attributes` are what else sets the time, sorted by name: of convolutions `stride`, `padding`, `dilation`, `groups`,
    `transposed`, `channels_last`, of backward passes `output_mask`, of attention `is_causal`, of matrix products
    `transpose_a` and `transpose_b` (whether the operand lies in memory transposed), of softmaxes and reductions `dim`.
    """

    name: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    attributes: tuple[tuple[str, JSON], ...] = ()

    def attribute(self, name: str, default: JSON = None) -> JSON:
        """An attribute's value."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One execution.

    `operation`, `module` and `source` are places in `Trace.operations`, `Trace.modules` and `Trace.sources`; `part` is
    the number of the micro-batch, from 0.
    """

    operation: int
    phase: Phase
    part: int
    module: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that is allocated once and freed once.

    `born` is the index of the occurrence that allocates it (-1: before the update), `died` of the one after which it is
    freed (None: it outlives the update). `num_bytes` is what PyTorch asks the allocator for. `block` is the repeated
    block it belongs to (None: outside of them).
    """

    num_bytes: int
    category: Category
    born: int
    died: int | None
    block: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Occurrences start <= i < stop: what one repeated block does in one go."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """What the whole model executes in place of an occurrence whose operation goes over tensors of many blocks."""

    occurrence: int
    operation: Operation


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """A model of `num_blocks` equal blocks of which only `traced` were traced.

    `module` is the list of the blocks; empty where they are the time steps of its recurrent layers.
    `segments` are in the order of execution. `copies` says which blocks stand for more than themselves: after each
    traced block (its number among those traced) so many more like it. `widened` are the operations over lists of
    tensors, `grown` the storages whose sizes [bytes] go with the number of blocks. `planning.expanded` puts the blocks
    that are missing where they belong.
    """

    schema: ClassVar[int] = 1
    module: str
    num_blocks: int
    traced: int
    segments: tuple[Segment, ...]
    copies: tuple[tuple[int, int], ...]
    widened: tuple[Widened, ...] = ()
    grown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What a trace depends on, besides the job.

    `capability` is the compute capability of a CUDA target, such as `8.9`, and empty for a CPU: it decides which
    attention kernel runs. `parts` is 1, or 2 for an update of several micro-batches, whose second stands for all but
    the first. `checkpointed_blocks` and `loss_chunks` as in a Plan.
    """

    schema: ClassVar[int] = 1
    target: Literal["cpu", "cuda"]
    capability: str
    micro_batch: int
    parts: int = 1
    precision: Precision = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    optimizer_implementation: Literal["default", "foreach", "fused"] = "default"
    checkpointed_blocks: int = 0
    loss_chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One update, with the optimiser's state already there.

    `occurrences` in order of execution; `events` is the exact order of allocations and frees: `i + 1` for the birth of
    storage `i`, `-(i + 1)` for its death, those that live before the update first. `modules` are dotted names
    (`''` for none), `sources` the user's lines, as `train_me.py:42`. `is_fallback` says that the target could not be
    pretended, and a CPU was traced in its place.
    """

    schema: ClassVar[int] = 1
    settings: TraceSettings
    operations: tuple[Operation, ...]
    occurrences: tuple[Occurrence, ...]
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    modules: tuple[str, ...]
    sources: tuple[str, ...]
    repetition: Repetition | None = None
    is_fallback: bool = False
    took_s: float = 0.0

    def where(self, one: Occurrence) -> str:
        """Where an occurrence comes from: the user's line, or the module where the line is Stoker's own."""
        line = self.sources[one.source] if self.sources else ""
        is_own = line.startswith("stoker/") and not line.startswith("stoker/zoo/")
        return (self.modules[one.module] if self.modules else "") if is_own else line

    @property
    def flops(self) -> int:
        """FLOPs of all occurrences."""
        return sum(self.operations[one.operation].flops for one in self.occurrences)
