"""Stages: each process holds a few consecutive blocks, and micro-batches go from one to the next and back (pipeline).

Stages take `m` micro-batches in m + s - 1 turns of the slowest of s (Narayanan et al. 2021, arXiv:2104.04473,
section 2.2). Parameters registered before the first block are assumed to feed it, those after the last block to use its
output.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from stoker.layouts.base import DividedUpdate, LayoutAxis, Traffic
from stoker.layouts.rules import JobTraits
from stoker.layouts.trace_division import bytes_of, in_rows, with_operations
from stoker.records import Layout, Profile, Trace
from stoker.records.profile import ModelParts

_WAITING = 0.2
"""Share of a stage's arithmetic that it waits for its neighbours: each turn begins with a message from one of them,
turns are not equally long, and kernels of NCCL that wait for the other end keep multiprocessors from it. Between weak
scaling in Narayanan et al. 2021 (section 5.4, about 0.1) and a published run of nanotron (0.4), whose messages have the
host wait, too: their geometric mean."""
_UPDATE_S = 1.2e-3
"""Overhead of a pipeline's schedule: an update [s]."""


class Stages(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "stages"
    explanation = "each process holds a few consecutive blocks, and micro-batches go from one to the next and back"
    complexity = 3
    is_uneven = True
    report_note = "Communication includes the bubble: the time in which a stage has no micro-batch to work on."

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """As `LayoutAxis.problem_with`."""
        does_not = f"a layout of {layout.in_words()} does not go with"
        if job.model_measures:
            return f"{does_not} {', '.join(job.model_measures)}, which takes the model: no stage has all of it"
        if job.has_penalty:
            return f"{does_not} Objective(penalty=…): no stage has all weights"
        if job.stateful_metrics:
            return f"{does_not} {', '.join(job.stateful_metrics)}, which sees outputs: only the last stage has them"
        if job.model_optimizer is not None:
            return f"{does_not} {job.model_optimizer}, which finds hidden matrices by the whole model"
        if layout.chunks > 1 and layout.data_size > layout.replicas:
            return f"{layout.chunks} chunks in each stage do not go with shards: each would gather the weights of all"
        samples = None if job.batch is None else job.batch // layout.data_size
        if samples is not None and samples < layout.stages:
            return f"{layout.stages} stages need as many micro-batches, and have {samples} samples for them"
        return None

    def searched(self, profile: Profile, layout: Layout) -> Profile:
        """As `LayoutAxis.searched`: fewer micro-batches than stages leave some of them idle all the time."""
        return dataclasses.replace(profile, batch=max(1, profile.batch // layout.stages))

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`: in each turn of two messages one stage waits for the result of its neighbour.

        The stages that pass on the most have the others wait. Each process of a tensor group sends what it holds: all
        of it or, with `sequence`, its tokens. Two stages that hold a tied parameter add up its gradients.
        """
        layout = update.layout
        sizes = (max(self._passed_bytes(update)),)
        turns = 2 * layout.chunks * (update.passes + self.num_idle_turns(layout, update.passes))
        activations = Traffic(
            what="activations handed on",
            collective="point-to-point",
            axis="stages",
            sizes=sizes,
            times=turns,
            stops=0.5,
        )
        tied_bytes = update.parts.tied_bytes // (layout.shards * layout.tensor)
        if not tied_bytes:
            return (activations,)
        tied = Traffic(
            what="gradients of tied weights", collective="point-to-point", axis="stages", sizes=(tied_bytes,)
        )
        return (activations, tied)

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`."""
        return _UPDATE_S

    def num_idle_turns(self, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.num_idle_turns`: each turn is one of a chunk's.

        Chunks take micro-batches in groups of as many as there are processes, and wait where the last one has fewer.
        """
        missing = -passes % layout.stages * (layout.chunks - 1)
        return (layout.stages - 1 + missing) / layout.chunks

    def waiting_share(self, layout: Layout) -> float:
        """As `LayoutAxis.waiting_share`."""
        return _WAITING

    def representatives(self, parts: ModelParts, layout: Layout) -> Sequence[int]:
        """As `LayoutAxis.representatives`: the first stage, the last, and of those between them the first of each kind.

        There the most micro-batches wait. Stages with as many blocks and as large parameters are of one kind.
        """
        cuts = cuts_of(parts, layout.num_stages)
        kinds = [[0, 0] for _ in range(layout.stages)]
        for stage, (start, stop) in enumerate(itertools.pairwise((0, *cuts, len(parts.blocks)))):
            kinds[stage % layout.stages][0] += stop - start
        for one, stage in zip(parts.parameters, stages_of_parameters(parts, cuts), strict=True):
            kinds[stage % layout.stages][1] += one.num_bytes
        between = {tuple(kinds[stage]): stage for stage in reversed(range(1, layout.stages - 1))}
        return sorted({0, layout.stages - 1, *between.values()})

    def held(self, parts: ModelParts, layout: Layout, rank: int) -> ModelParts:
        """As `LayoutAxis.held`: the parts of one process's stages, their blocks numbered from 0."""
        place, cuts = layout.coordinate(rank, "stages"), cuts_of(parts, layout.num_stages)
        blocks = [
            block for block in range(len(parts.blocks)) if bisect.bisect_right(cuts, block) % layout.stages == place
        ]
        numbers = {block: number for number, block in enumerate(blocks)}
        return dataclasses.replace(
            parts,
            parameters=tuple(
                dataclasses.replace(one, block=None if one.block is None else numbers[one.block])
                for one, stage in zip(parts.parameters, stages_of_parameters(parts, cuts), strict=True)
                if stage % layout.stages == place
            ),
            blocks=tuple(parts.blocks[block] for block in blocks),
        )

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`."""
        place = layout.coordinate(rank, "stages")
        return of_blocks(trace, parts, cuts_of(parts, layout.num_stages), place, layout.stages)

    def waiting_bytes(self, trace: Trace, update: DividedUpdate, rank: int) -> int:
        """As `LayoutAxis.waiting_bytes`: activations between a micro-batch's forward and backward pass.

        What a stage has received, of all micro-batches and as a gradient, is not in its trace.
        """
        layout, passes, stages = update.layout, update.passes, update.layout.stages
        place = layout.coordinate(rank, "stages")
        kept = (
            sum(storage.num_bytes for storage in trace.storages if storage.category == "activation")
            // trace.settings.parts
        )
        ahead = (stages - place - 1) * (1 if layout.chunks == 1 else 2) + (layout.chunks - 1) * stages + 1
        if layout.schedule == "gpipe":
            ahead = passes
        ahead = min(ahead, passes * layout.chunks)  # passes through one of its stages
        passed = [0, *self._passed_bytes(update)]
        received = max(passed[place::stages])
        return kept * (ahead - 1) // layout.chunks + received * (ahead + 1)

    def _passed_bytes(self, update: DividedUpdate) -> list[int]:
        """Bytes that each stage but the last passes on for a micro-batch."""
        layout, parts = update.layout, update.parts
        one = boundary_bytes(update.trace(), parts) // (layout.tensor if layout.sequence else 1)
        return [round(share * one) for share in parts.passed or (1.0,) * (layout.num_stages - 1)]


AXIS = Stages()


def cuts_of(parts: ModelParts, stages: int) -> tuple[int, ...]:
    """First blocks of all stages but the first; if the model was not cut, stages hold equally many, give or take one.

    >>> cuts_of(ModelParts(name="M", parameters=(), blocks=("a", "b", "c", "d", "e", "f")), 4)
    (1, 3, 4)
    """
    return parts.cuts or tuple(len(parts.blocks) * stage // stages for stage in range(1, stages))


def stages_of_parameters(parts: ModelParts, cuts: Sequence[int]) -> list[int]:
    """Index of the stage that holds each parameter: that of its block, else the first or the last.

    `cuts` are the first blocks of all stages but the first.
    """
    first_block = next((n for n, one in enumerate(parts.parameters) if one.block is not None), len(parts.parameters))
    return [
        (len(cuts) if first_block <= index else 0) if one.block is None else bisect.bisect_right(cuts, one.block)
        for index, one in enumerate(parts.parameters)
    ]


def of_blocks(trace: Trace, parts: ModelParts, cuts: Sequence[int], place: int, processes: int) -> Trace:
    """The trace of one process, with the optimiser's work on its share of the parameters, and storages it allocates.

    `cuts` are the first blocks of all stages but the first, of which every `processes`-th one is here. Operations
    outside of blocks belong to the first stage if they come before all blocks in the forward pass, and to the last one
    if they come after them.
    """
    stages = _stages(trace, parts, cuts)
    keep = [stage is None or stage % processes == place for stage in stages]
    number, new_index = 0, list[int]()
    for one in keep:
        number += one
        new_index.append(number - 1)
    kept = [
        index
        for index, one in enumerate(trace.storages)
        if (one.born < 0 and one.category in ("input", "buffer")) or (one.born >= 0 and keep[one.born])
    ]
    renumbered = {old: new for new, old in enumerate(kept)}
    storages = []
    for old in kept:
        storage = trace.storages[old]
        died, born = storage.died, new_index[storage.born] if storage.born >= 0 else storage.born
        if died is not None:
            died = max(0, born, new_index[min(died, len(new_index) - 1)])
        storages.append(dataclasses.replace(storage, born=born, died=died))
    events = [
        (1 if event > 0 else -1) * (renumbered[abs(event) - 1] + 1)
        for event in trace.events
        if abs(event) - 1 in renumbered
    ]
    occurrences = [one for one, is_mine in zip(trace.occurrences, keep, strict=True) if is_mine]
    trained_bytes = sum(
        parameter.num_bytes
        for parameter, owner in zip(parts.parameters, stages_of_parameters(parts, cuts), strict=True)
        if parameter.is_trained and owner % processes == place
    )
    share = trained_bytes / max(1, parts.trained_bytes)
    staged = dataclasses.replace(
        trace, occurrences=tuple(occurrences), storages=tuple(storages), events=tuple(events), repetition=None
    )
    return with_operations(
        staged, lambda one, operation: in_rows(operation, share) if one.phase == "optimizer" else operation
    )


def boundary_bytes(trace: Trace, parts: ModelParts) -> int:
    """Bytes that a stage passes on for one micro-batch: the first tensor that a block in the middle reads."""
    middle = parts.blocks[len(parts.blocks) // 2]
    for occurrence in trace.occurrences:
        name, inputs = trace.modules[occurrence.module], trace.operations[occurrence.operation].inputs
        is_inside = name == middle or name.startswith(f"{middle}.")
        if occurrence.phase == "forward" and occurrence.part == 0 and is_inside and inputs:
            return bytes_of(inputs[0])
    return 0


def _stages(trace: Trace, parts: ModelParts, cuts: Sequence[int]) -> list[int | None]:
    """The stage of each occurrence; None for the optimiser's."""
    stage_of: list[int | None] = []
    stage_of_block = {name: bisect.bisect_right(cuts, block) for block, name in enumerate(parts.blocks)}
    for name in trace.modules:
        parents = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        stage_of.append(next((stage_of_block[parent] for parent in parents if parent in stage_of_block), None))
    first_block = next((index for index, p in enumerate(parts.parameters) if p.block is not None), 0)
    before_blocks = {p.name.rpartition(".")[0] for p in parts.parameters[:first_block]} - {""}
    stages: list[int | None] = []
    last, has_passed = 0, False
    for occurrence in trace.occurrences:
        stage = stage_of[occurrence.module]
        if occurrence.phase == "optimizer":
            stages.append(None)
            continue
        if stage is not None:
            last, has_passed = stage, True
        elif occurrence.phase == "forward":
            # Before the first block of a micro-batch, or after its last one; a module registered before the blocks
            # begins the next micro-batch.
            has_passed = has_passed and trace.modules[occurrence.module] not in before_blocks
            last = len(cuts) if has_passed else 0
        stages.append(last)
    return stages
