"""Tensor parallel: processes that pass the same samples hold a part of each large matrix.

Layers add up their partial outputs forward, and the gradients of their inputs backward (Shoeybi et al. 2019,
arXiv:1909.08053, section 3); with sequence parallel each of these sums is a gather and a scatter (Korthikanti et al.
2022, arXiv:2205.05198, section 4.2).

Not checked: that everything between two divided layers is divided as they are, as in attention and feed-forward layers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from stoker.layouts.base import DividedUpdate, LayoutAxis, Traffic
from stoker.layouts.local_state import local_bytes, with_local_state
from stoker.layouts.rules import JobTraits
from stoker.layouts.stages import AXIS as STAGES
from stoker.layouts.stages import cuts_of, stages_of_parameters
from stoker.layouts.trace_division import (
    PRODUCTS,
    STATE,
    bytes_of,
    divided_product,
    in_rows,
    scaled,
    with_dim,
    with_operations,
    with_output_shares,
)
from stoker.records import Layout, Occurrence, Operation, Profile, TensorShape, Trace
from stoker.records.profile import Division, ModelParts, Parameter

_UPDATE_S, _LAYER_S, _SEQUENCE_LAYER_S = 3e-3, 4.5e-4, 7.9e-4
"""Overhead of DTensor: an update, and in each pass a divided layer, without or with divided sequences [s]."""


class TensorGroup(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "tensor"
    explanation = "processes that pass the same samples hold a part of each large matrix"
    complexity = 2

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """As `LayoutAxis.variants`: what is between divided layers is whole, or divided along the sequence."""
        for sequence in (False, True):
            yield dataclasses.replace(layout, sequence=sequence)

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """As `LayoutAxis.problem_with`."""
        name = layout.in_words()
        if job.tensor_devices is not None and layout.tensor > job.tensor_devices:
            return f"{layout.tensor} tensor processes are more than the {job.tensor_devices} devices of a node"
        if job.has_penalty:
            return f"a layout of {name} does not go with Objective(penalty=…), which would see parts of matrices"
        if job.matrix_optimizer is not None:
            return f"a layout of {name} does not go with {job.matrix_optimizer}, which needs whole matrices"
        return None

    def searched(self, profile: Profile, layout: Layout) -> Profile:
        """As `LayoutAxis.searched`: logits are divided already."""
        return dataclasses.replace(profile, loss_chunks=1)

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`."""
        forward, backward = tensor_sums(update.trace(), _with_layers_of_stage(update.parts, update.layout))
        # A stage waits for the messages of the others, as for their arithmetic.
        sizes, times = (*forward, *backward), update.passes + STAGES.num_idle_turns(update.layout, update.passes)
        if not update.layout.sequence:
            return (
                Traffic(
                    what="partial outputs summed", collective="all-reduce", axis="tensor", sizes=sizes, times=times
                ),
            )
        return (
            Traffic(what="sequences gathered", collective="all-gather", axis="tensor", sizes=sizes, times=times),
            Traffic(what="sequences scattered", collective="reduce-scatter", axis="tensor", sizes=sizes, times=times),
        )

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`."""
        return _UPDATE_S + passes * len(parts.divided) / layout.stages * (
            _SEQUENCE_LAYER_S if layout.sequence else _LAYER_S
        )

    def local_shape(self, one: Parameter, shape: tuple[int, ...], layout: Layout, rank: int | None) -> tuple[int, ...]:
        """As `LayoutAxis.local_shape`."""
        return tuple(size // layout.tensor if dim == one.division else size for dim, size in enumerate(shape))

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`."""
        # On a CPU the measured overhead of a divided layer has what is computed whole in the forecast.
        is_cuda = trace.settings.target == "cuda"
        divided = _DividedLayers(trace, parts, layout.tensor, sequence=layout.sequence and is_cuda)
        factors = [divided.output_share(one) for one in trace.occurrences]
        local = with_local_state(trace, parts, layout, ("gradient", *STATE))
        storages = with_output_shares(local, factors)
        whole = max(1, sum(one.num_bytes for one in parts.parameters))
        share = sum(local_bytes(one, layout) for one in parts.parameters) / whole
        return with_operations(
            dataclasses.replace(trace, storages=storages),
            lambda one, operation: in_rows(operation, share) if one.phase == "optimizer" else divided.operation(one),
        )


AXIS = TensorGroup()


def tensor_sums(trace: Trace, parts: ModelParts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the tensors that a tensor group sums for one micro-batch [bytes]: forward outputs, backward gradients.

    Forward the outputs of layers divided by rows or by vocabulary, once more where a checkpointed block computes them
    again; backward the input gradient of layers divided by columns: once for the layers of one parent, such as queries,
    keys and values, since they share their input.
    """
    forward: list[int] = []
    backward: dict[str, int] = {}
    executed = _forward_operations(trace)
    for occurrence in trace.occurrences:
        name = trace.modules[occurrence.module]
        division, operation = parts.divided.get(name), trace.operations[occurrence.operation]
        if division is None or occurrence.part != 0 or (occurrence.module, occurrence.operation) not in executed:
            continue
        if division == "columns" and operation.name in PRODUCTS:
            backward[name.rpartition(".")[0]] = bytes_of(operation.inputs[-2])
        elif division == "vocabulary" or operation.name in PRODUCTS:
            forward.append(bytes_of(operation.outputs[0]))
    return tuple(forward), tuple(backward.values())


def _with_layers_of_stage(parts: ModelParts, layout: Layout) -> ModelParts:
    """The parts with the divided layers of the process of a pipeline that has the most of them."""
    if layout.stages == 1:
        return parts
    by_stage: defaultdict[int, dict[str, Division]] = defaultdict(dict)
    for one, stage in zip(
        parts.parameters, stages_of_parameters(parts, cuts_of(parts, layout.num_stages)), strict=True
    ):
        layer = one.name.rpartition(".")[0]
        if layer in parts.divided:
            by_stage[stage % layout.stages][layer] = parts.divided[layer]
    return dataclasses.replace(parts, divided=max(by_stage.values(), key=len, default={}))


def _forward_operations(trace: Trace) -> frozenset[tuple[int, int]]:
    """Module and operation of what forward passes execute: in a backward pass, that is a block computed again."""
    return frozenset(
        (occurrence.module, occurrence.operation) for occurrence in trace.occurrences if occurrence.phase == "forward"
    )


class _DividedLayers:
    """The operations of a trace as a tensor group divides them.

    With `sequence`, operations between divided layers (norms, sums of the residual stream) cover a part of each
    sample's tokens: the dimension after the batch's of tensors of three.
    """

    def __init__(self, trace: Trace, parts: ModelParts, tensor: int, *, sequence: bool = False) -> None:
        self._trace, self._share, self._forward = trace, 1 / tensor, _forward_operations(trace)
        lengths = Counter(
            shape.shape[1]
            for occurrence in trace.occurrences
            if sequence and occurrence.phase == "forward"
            for shape in trace.operations[occurrence.operation].outputs
            if len(shape.shape) == 3
        )
        self._tokens = lengths.most_common(1)[0][0] if lengths else 0
        self._divided: dict[str, Division] = parts.divided
        self._weights = {
            parameter.name.rpartition(".")[0]: parameter.shape
            for parameter in parts.parameters
            if len(parameter.shape) == 2
        }
        between: defaultdict[str, set[Division]] = defaultdict(set)
        for name, division in self._divided.items():
            between[name.rpartition(".")[0]].add(division)
        self._between = {name for name, kinds in between.items() if name and len(kinds) > 1}
        self._known: dict[tuple[object, ...], tuple[Operation, float]] = {}

    def output_share(self, one: Occurrence) -> float:
        """Share of an occurrence's outputs in one process [0 to 1]."""
        return self._part_of(one)[1]

    def operation(self, one: Occurrence) -> Operation:
        """One process's part of an occurrence's operation."""
        return self._part_of(one)[0]

    def _part_of(self, one: Occurrence) -> tuple[Operation, float]:
        """The operation in one process and the share of its outputs, computed once for all equal blocks."""
        name = self._trace.modules[one.module]
        division, weight, is_between = self._divided.get(name), self._weights.get(name, ()), name in self._between
        is_forward = (one.module, one.operation) in self._forward
        key = one.operation, division, weight, is_between, is_forward, one.phase == "optimizer"
        if key not in self._known:
            operation = self._trace.operations[one.operation]
            after = self._divided_operation(one, division, weight, is_between=is_between, is_forward=is_forward)
            whole = sum(shape.numel for shape in operation.outputs)
            self._known[key] = after, sum(shape.numel for shape in after.outputs) / whole if whole else 1.0
        return self._known[key]

    def _divided_operation(
        self, one: Occurrence, division: Division | None, weight: tuple[int, ...], *, is_between: bool, is_forward: bool
    ) -> Operation:
        operation = self._trace.operations[one.operation]
        if division is not None and operation.name in PRODUCTS:
            return self._product(operation, division, weight, is_forward=is_forward)
        if is_between or division == "columns":

            def narrowed(shape: TensorShape) -> TensorShape:
                if not shape.shape:
                    return shape
                dim = 1 if len(shape.shape) == 4 else len(shape.shape) - 1  # heads, or features
                return with_dim(shape, dim, self._share)

            return scaled(operation, self._share, narrowed)
        if self._tokens and one.phase != "optimizer" and operation.name not in PRODUCTS:
            return self._of_tokens(operation)
        return operation

    def _of_tokens(self, operation: Operation) -> Operation:
        """The operation on one process's part of the sequence; unchanged if no tensor has the sequence."""

        def narrowed(shape: TensorShape) -> TensorShape:
            has_tokens = len(shape.shape) >= 3 and shape.shape[1] == self._tokens
            return with_dim(shape, 1, self._share) if has_tokens else shape

        tensors = (*operation.inputs, *operation.outputs)
        before = sum(bytes_of(tensor) for tensor in tensors)
        after = sum(bytes_of(narrowed(tensor)) for tensor in tensors)
        return scaled(operation, after / before, narrowed) if after < before else operation

    def _product(
        self, operation: Operation, division: Division, weight: tuple[int, ...], *, is_forward: bool
    ) -> Operation:
        """The product with m, k or n of [m, k] @ [k, n] divided: the layer's outputs (columns) or inputs (rows)."""
        out = operation.outputs[0].shape[-2:]
        dim: Literal["m", "k", "n"]
        if is_forward:
            dim = "n" if division == "columns" else "k"
        elif sorted(out) == sorted(weight):
            is_as_stored = out == tuple(weight)
            dim = "m" if (division == "columns") == is_as_stored else "n"
        else:
            dim = "k" if division == "columns" else "n"
        return divided_product(operation, dim, self._share)
