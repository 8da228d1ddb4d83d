"""Of equal blocks that a model repeats, or of time steps, a few are traced; what the others do is known from them.

The model is shortened before the update is traced: of N >= 6 equal blocks four stay, of which the first and the last
may be special, and the two in between must turn out to be alike (`stoker.records.timeline.prove`). Where the first m
are checkpointed, these and the rest are shortened apart. A model whose blocks differ, or that does not run when it is
shortened, is traced whole. Where no blocks are left out, steps of recurrent layers are (`time_steps.py`).

Not checked: that the model treats the blocks left out like those traced, whatever their number; a model that keeps the
output of block 17 and of no other is traced as if it did not.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from stoker.jobs import Job, Optimizer
from stoker.loading import Datasets
from stoker.profiling.tracing.equality import are_equal
from stoker.profiling.tracing.storages import Recording
from stoker.profiling.tracing.time_steps import TEMPLATE, TRACED, CutLoops, labels_of, left_out_of
from stoker.profiling.tracing.update import trace_update
from stoker.profiling.tracing.widening import TensorUse, Widening
from stoker.records import Coupling, Repetition, Segment, Trace, TraceSettings
from stoker.records.timeline import NotPeriodic, prove
from stoker.stepping import repeated_blocks
from stoker.stepping.optimizers import group_of

_TRACED = 4
_FEWEST = 6


def trace_with_repetition(job: Job, data: Datasets, coupling: Coupling, settings: TraceSettings) -> Trace:
    """As `trace_update`, with repeated blocks or time steps traced once; of a model without any, the whole.

    Raises:
        BadJob: as `trace_update`.
    """
    blocks = RepeatedBlocks(job, settings.checkpointed_blocks)
    try:
        trace = trace_update(job, data, coupling, settings, shortening=blocks)
    except Exception:  # whatever a shortened model cannot do: the whole one says what is wrong, if anything is
        if not blocks.has_shortened:
            raise
    else:
        if not blocks.has_shortened or trace.repetition is not None:
            return trace
    return trace_update(job, data, coupling, settings)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What was left out of a model: `module` names the list of blocks; see `Repetition` for the others."""

    module: str
    num_blocks: int
    traced: int
    copies: tuple[tuple[int, int], ...]


class RepeatedBlocks:
    """Shortens the longest list of equal blocks of a job's model, or its loops over time, and tells a trace of it.

    Attributes:
        left_out: what; None before a model is shortened, and where none can be.
        checkpointed_blocks: how many of the blocks that are left are to be checkpointed, the first ones.
    """

    def __init__(self, job: Job, checkpointed_blocks: int) -> None:
        self._job = job
        self._loops = CutLoops()
        self.left_out: LeftOut | None = None
        self.checkpointed_blocks = checkpointed_blocks

    def shorten(self, model: nn.Module) -> nn.Module:
        """The same model, shortened in place if it can be."""
        name, blocks = max(_lists_of_equals(model), key=lambda item: len(item[1]), default=("", nn.ModuleList()))
        kept, copies = _kept(len(blocks), self.checkpointed_blocks)
        if not copies or not _are_optimised_alike(self._job, name, blocks):
            return model
        members = list(blocks)
        if self.checkpointed_blocks and repeated_blocks(model) != members:
            return model
        del blocks[len(kept) :]
        if self.checkpointed_blocks and repeated_blocks(model) != list(blocks):
            blocks.extend(members[len(kept) :])
            return model
        self.left_out = LeftOut(module=name, num_blocks=len(members), traced=len(kept), copies=copies)
        self.checkpointed_blocks = sum(index < self.checkpointed_blocks for index in kept)
        return model

    @property
    def has_shortened(self) -> bool:
        """Whether anything was left out: blocks, or time steps."""
        return self.left_out is not None or self._loops.length > 0

    def while_tracing(self, recording: Callable[[], Recording | None]) -> AbstractContextManager[None]:
        """What a model without blocks to leave out runs in: loops over time are cut."""
        return nullcontext() if self.left_out is not None else self._loops.cutting(recording)

    def annotate(self, trace: Trace, recording: Recording) -> Trace:
        """The trace of what was shortened with its repetition, or as it is where blocks or steps turn out to differ."""
        try:
            if self.left_out is not None:
                owners = [life.owner for life in recording.lives]
                return _with_repetition(trace, self.left_out, owners, recording.uses)
            return _with_steps(trace, recording, self._loops.length) if self._loops.length else trace
        except NotPeriodic:
            return trace


def _with_repetition(trace: Trace, left_out: LeftOut, owners: Sequence[str], uses: Sequence[TensorUse]) -> Trace:
    """The trace with its repetition; raises NotPeriodic."""
    of_module = _Numbers(left_out.module)
    labels = _without_gaps(trace, [of_module[trace.modules[one.module]] for one in trace.occurrences])
    widening = Widening(trace, left_out.traced, dict(left_out.copies), of_module)
    for index, label in enumerate(labels):
        if label is None:
            widening.look_at(index, uses[index])
        else:
            widening.require_near(index, label, uses[index])
    blocks = {index: of_module[owner] for index, owner in enumerate(owners)} | dict.fromkeys(widening.grown)
    storages = [dataclasses.replace(storage, block=blocks[index]) for index, storage in enumerate(trace.storages)]
    repetition = Repetition(
        module=left_out.module,
        num_blocks=left_out.num_blocks,
        traced=left_out.traced,
        segments=_segments(labels),
        copies=left_out.copies,
        widened=tuple(widening.widened),
        grown=tuple(widening.grown.items()),
    )
    labelled = dataclasses.replace(trace, storages=tuple(storages), repetition=repetition)
    prove(labelled, repetition)
    return labelled


def _with_steps(trace: Trace, recording: Recording, num_steps: int) -> Trace:
    """The trace with its time steps as a repetition; raises NotPeriodic."""
    repetition = Repetition(
        module="",
        num_blocks=num_steps,
        traced=TRACED,
        segments=_segments(_without_gaps(trace, labels_of(recording))),
        copies=((TEMPLATE, left_out_of(num_steps)),),
    )
    prove(trace, repetition)
    return dataclasses.replace(trace, repetition=repetition)


class _Numbers(dict[str, int | None]):
    """The block that a module of some dotted name belongs to; None for those outside."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._pattern = re.compile(rf"{re.escape(module)}\.(\d+)(\.|$)")

    def __missing__(self, name: str) -> int | None:
        found = self._pattern.match(name)
        self[name] = None if found is None else int(found[1])
        return self[name]


def _without_gaps(trace: Trace, labels: Sequence[int | None]) -> list[int | None]:
    """What stands between occurrences of the same or neighbouring blocks in one pass belongs to the one before it."""
    filled, before = list(labels), None
    for index, after in enumerate(labels):
        if after is None:
            continue
        if before is not None and index - before > 1:
            one, other, block = trace.occurrences[before], trace.occurrences[index], labels[before]
            is_one_pass = (one.phase, one.part) == (other.phase, other.part) and one.phase != "optimizer"
            if is_one_pass and block is not None and abs(block - after) <= 1:
                filled[before + 1 : index] = [block] * (index - before - 1)
        before = index
    return filled


def _segments(labels: Sequence[int | None]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for block, group in itertools.groupby(range(len(labels)), key=labels.__getitem__):
        members = list(group)
        if block is not None:
            segments.append(Segment(block=block, start=members[0], stop=members[-1] + 1))
    return tuple(segments)


def _kept(num_blocks: int, checkpointed: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Numbers of the blocks that those which stay stand for, and after which of them how many are left out."""
    kept: list[int] = []
    copies: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise((0, min(checkpointed, num_blocks), num_blocks)):
        if stop - start < _FEWEST:
            kept.extend(range(start, stop))
            continue
        copies.append((len(kept) + 1, stop - start - _TRACED))
        kept.extend((start, start + 1, stop - 2, stop - 1))
    return kept, tuple(copies)


def _lists_of_equals(model: nn.Module) -> Iterable[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and len(module) >= _FEWEST:
            blocks = list(module)
            have_parameters = all(next(block.parameters(), None) is not None for block in blocks)
            if have_parameters and _share_nothing(model, blocks) and are_equal(blocks):
                yield name, module


def _share_nothing(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether no parameter or module of the blocks is in two places."""
    places = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    places += [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    inside = {id(part) for block in blocks for part in (*block.modules(), *block.parameters())}
    return sum(place in inside for place in places) == len(inside)


def _are_optimised_alike(job: Job, name: str, blocks: nn.ModuleList | nn.Sequential) -> bool:
    """Whether the job's groups of parameters treat all blocks the same."""
    if not isinstance(job.optimizer, Optimizer):
        return True
    chosen = [
        [group_of(job.optimizer, f"{name}.{number}.{own}", parameter) for own, parameter in block.named_parameters()]
        for number, block in enumerate(blocks)
    ]
    return all(one == chosen[0] for one in chosen)
