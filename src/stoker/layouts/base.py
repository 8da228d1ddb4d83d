"""The interface of an axis of a layout to all but its execution, and the facts and messages that it is asked with."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stoker.records import Layout, MeshAxis, Operation, Profile, Trace
from stoker.records.hardware import Collective
from stoker.records.profile import ModelParts, Parameter
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.layouts.rules import JobTraits

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""Sizes of DistributedDataParallel's buckets [bytes]: the first to be full, and all others."""

Seconds = Callable[[Operation], float]
"""Time of an operation on the device [s]."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind: tensors of `sizes` [bytes] one after the other, all of them `times` in an update.

    They are between the processes of an axis of the layout, or (`data`) all that take parts of a batch. `overlaps` is
    the arithmetic that they overlap with: the backward pass, whose first results are sent first (`backward`), that of
    each block in a pass, for the next one (`forward blocks`, `backward blocks`), or none. `stops` is the share of
    messages without overlap that stop arithmetic: not those right after other messages, nor those sent before they are
    needed.
    """

    what: str
    collective: Collective
    axis: str
    sizes: tuple[int, ...]
    times: float = 1
    overlaps: Literal["backward", "forward blocks", "backward blocks", "nothing"] = "nothing"
    stops: float = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages in an update."""
        return round(sum(self.sizes) * self.times)


@dataclass(frozen=True, kw_only=True)
class DividedUpdate:
    """One update over the processes of a layout.

    `parts` are those of the whole model, `held` those of the first process; `passes` is its number of forward passes.
    `trace` gives the trace of an update in one process of the whole model. `gathered_share` is the size of a gathered
    parameter over that of its master: a half where fp32 parameters are gathered in bf16.
    """

    layout: Layout
    parts: ModelParts
    held: ModelParts
    passes: int
    trace: Callable[[], Trace]
    gathered_share: float = 1.0


class LayoutAxis(abc.ABC):
    """One way to divide an update over processes, as all but its execution knows it.

    A file of `stoker.layouts` with an object `AXIS` of a subclass is an axis. Methods are asked only for layouts with
    more than one process along the axis. By default an axis costs nothing and changes nothing.
    """

    name: str
    """Name of the mesh's dimension, of both files, and of the field of `Layout` if there is one."""
    explanation: str
    """The divided parts, as a clause."""
    complexity: int = 100
    """Simpler axes are tried first, and preferred where they are about as fast."""
    added: MeshAxis | None = None
    """The axis as `Layout.added` has it, of any size; None if `Layout` has a field of its name."""
    is_uneven: bool = False
    """Whether processes along the axis do different work; the traces of such processes leave out the state."""
    compiles: bool = False
    """Whether the modules of a process may be compiled, each without the messages around it."""
    exchanges_in_blocks: bool = False
    """Whether blocks send messages in between, so that they are compiled in parts."""
    report_note: str = ""
    """A note on the times for the reader of a run's report."""

    def of_size(self, layout: Layout, size: int) -> Layout:
        """`layout`, which has one process along this axis, with `size` of them."""
        if self.added is None:
            return layout.with_size(self.name, size)
        return dataclasses.replace(layout, added=(*layout.added, dataclasses.replace(self.added, size=size)))

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The layout with each choice of this axis's settings."""
        yield layout

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """Why a job does not go with the layout because of this axis, with the numbers; None if it does.

        What depends on the model is asked of the execution.
        """
        return None

    def searched(self, profile: Profile, layout: Layout) -> Profile:
        """The facts of a process's part of a job among whose plans the best is searched."""
        return profile

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """Messages of an update."""
        return ()

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """Time of a CPU process without arithmetic, copies and messages in an update [s]; on a GPU it is hidden."""
        return 0.0

    def copies_s(self, traffic: Sequence[Traffic], layout: Layout, seconds: Seconds) -> float:
        """Time of a process's copies into and out of messages in an update [s]."""
        return 0.0

    def num_idle_turns(self, layout: Layout, passes: int) -> float:
        """Number of micro-batches in whose time a process waits for others in an update of so many [1]."""
        return 0

    def waiting_share(self, layout: Layout) -> float:
        """Share of a GPU's arithmetic that it waits for others besides, idle turns and messages left out [1]."""
        return 0.0

    def representatives(self, parts: ModelParts, layout: Layout) -> Sequence[int]:
        """Coordinates along this axis whose processes stand for all: one of each kind of work, the first if even.

        Of processes that do the same work the one that needs the most memory stands for the others.
        """
        return range(layout.group(self.name)[0]) if self.is_uneven else (0,)

    def held(self, parts: ModelParts, layout: Layout, rank: int) -> ModelParts:
        """The parts whose parameters, or parts of them, process number `rank` holds."""
        return parts

    def local_shape(self, one: Parameter, shape: tuple[int, ...], layout: Layout, rank: int | None) -> tuple[int, ...]:
        """The shape of a parameter in a process, of `shape` before this axis divides it; without `rank` padded."""
        return shape

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """The trace of process number `rank`, from the trace before this axis divides it, of `parts`."""
        return trace

    def message_bytes(self, parts: ModelParts, layout: Layout, *, is_on_cpu: bool, gathered_share: float = 1.0) -> int:
        """Peak memory of a process's message buffers [bytes]; `parts` are those that it holds.

        `gathered_share` as in `DividedUpdate`.
        """
        return 0

    def bucket_bytes(self, parts: ModelParts) -> int:
        """Memory of a process's permanent gradient buckets [bytes]; `parts` are those that it holds."""
        return 0

    def waiting_bytes(self, trace: Trace, update: DividedUpdate, rank: int) -> int:
        """Memory of micro-batches that wait in process `rank`, whose `trace` has one [bytes]."""
        return 0


def gradient_buckets(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """Sizes of DistributedDataParallel's buckets [bytes], in the order in which they are summed: the last ones first.

    They are filled in the order of registration, up to a limit.
    Source: `_compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets: list[int] = []
    held, limit = 0, FIRST_BUCKET_BYTES
    for parameter in parameters:
        held += parameter.num_bytes if parameter.is_trained else 0
        if held >= limit:
            buckets.append(held)
            held, limit = 0, BUCKET_BYTES
    return tuple(reversed([*buckets, held] if held else buckets))
