"""Trace of a job's own update: the step that `stepping` builds, on fake samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stoker.jobs import Job
from stoker.loading.batches import Batch, InputPipeline
from stoker.loading.datasets import Datasets
from stoker.loading.fields import Content, map_tensors, picked, tensors_of
from stoker.loading.order import Indices
from stoker.profiling.tracing.fake_device import fake_like
from stoker.profiling.tracing.operations import tensors_in
from stoker.profiling.tracing.session import TracingSession, tracing_session
from stoker.profiling.tracing.storages import Storages
from stoker.records import Coupling, Operation, Plan, Storage, TensorShape, Trace, TraceSettings
from stoker.stepping.bf16_weights import Bf16Weights
from stoker.stepping.frozen_parameters import with_all_unfrozen
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from stoker.stepping.torch_compile import compiled_regions

if TYPE_CHECKING:
    from stoker.profiling.tracing.repetition import RepeatedBlocks

_PROGRESS = 0.5
"""Share of the run done: in the middle the schedule has no special value, such as a rate of 0."""
FETCHED = 2
"""Samples whose shapes stand for those of a micro-batch."""


def trace_update(job: Job, data: Datasets, coupling: Coupling, settings: TraceSettings) -> Trace:
    """Trace of an update of `job` after its first; nothing is computed, and little allocated.

    Args:
        job: the job; its model is built without memory for weights.
        data: two of its samples are fetched, for their shapes.
        coupling: the coupling of samples, as probed.
        settings: target, micro-batch [samples], and how the update is executed.

    Raises:
        BadJob: the step cannot be traced, sizes depend on the data, or the settings would change what is learned.
    """
    (trace,) = trace_updates(job, data, coupling, (settings,))
    return trace


def trace_updates(job: Job, data: Datasets, coupling: Coupling, every: Sequence[TraceSettings]) -> list[Trace]:
    """Traces of updates that differ in their micro-batch alone, as `trace_update` makes each.

    The model and its state are made once: two traces take two thirds of the time of two that are made separately.
    Samples must be separable. A model that keeps something for each size keeps that of the sizes before, too.

    Args:
        job: as of `trace_update`, as the other arguments.
        data: two samples are fetched for each.
        coupling: the coupling of samples.
        every: settings of each trace; at least one.

    Raises:
        BadJob: as `trace_update`.
    """
    return UpdateTracer(job, data, coupling, every).traces(every)


class UpdateTracer:
    """Traces updates of one model that differ in their micro-batch alone.

    Args:
        job: as of `trace_updates`, as the other arguments.
        data: as there.
        coupling: as there.
        every: the first updates that are to be traced; later ones may be others.
        shortening: leaves out repeated parts.
    """

    def __init__(
        self,
        job: Job,
        data: Datasets,
        coupling: Coupling,
        every: Sequence[TraceSettings],
        shortening: RepeatedBlocks | None = None,
    ) -> None:
        largest = max(settings.micro_batch for settings in every) * every[0].parts
        if coupling.kind == "separable":  # of coupled ones the batch may decide what a group is
            largest = max(largest, job.batch_size)
        # Values are not used; the end takes most memory.
        self._job = with_all_unfrozen(replace(job, batch=largest, init=None))
        self._train, self._coupling, self.shortening = data.train, coupling, shortening
        self._made: tuple[TracingSession, Step, _WatchedPipeline] | None = None
        self._sample_shapes: list[torch.Size] | None = None
        self.goes_on = every[0].target == "cuda" and coupling.kind == "separable"
        """Whether another trace would be as of a model that is made for it. Not where something is kept besides the
        optimiser's state; on a CPU, batches lie in the midst of the state."""

    def traces(self, every: Sequence[TraceSettings]) -> list[Trace]:
        """The traces of updates under these settings.

        Raises:
            BadJob: as `trace_updates`.
        """
        train, shortening, known = self._train, self.shortening, self._made
        few_samples = [train.fetch(train.representative(FETCHED, each.micro_batch), 0) for each in every]
        indices = np.arange(max(each.micro_batch * each.parts for each in every), dtype=np.int64) % len(train)
        traces: list[Trace] = []
        with tracing_session(every[0], None, None if known is None else known[0]) as traced:
            if known is None:
                step = _fake_step(self._job, self._coupling, traced, shortening)
                pipeline = _WatchedPipeline(
                    **vars(step.pipeline(train, augmented=True)), storages=traced.recorder.storages
                )
                self._made = traced, step, pipeline
            else:
                _, step, pipeline = known
            updates = itertools.count(0 if known is None else 1)

            def update(raw: Content, size: int) -> None:
                step.update(Batch(raw, indices[:size], 0, pipeline), next(updates), _PROGRESS)

            def begin(fetched: Content, size: int) -> None:
                """Update by one micro-batch, which leaves the same state as by several, in less time."""
                update(_widened(fetched, traced, size), size)
                step.loss_pass.ordinary.forget_constants()

            for settings, fetched in zip(every, few_samples, strict=True):
                micro_batch, size = settings.micro_batch, settings.micro_batch * settings.parts
                step.change_to(replace(step.plan, micro_batch=micro_batch))
                raw = _widened(fetched, traced, size)
                with (
                    shortening.while_tracing(lambda: traced.recorder.storages.recording)
                    if shortening
                    else nullcontext()
                ):
                    trace, recording = traced.trace(
                        settings,
                        functools.partial(update, raw, size),
                        functools.partial(_hold, step, raw, traced),
                        functools.partial(begin, fetched, micro_batch) if settings.parts > 1 else None,
                        has_begun=known is not None or bool(traces),
                    )
                shapes = [tensor.shape for tensor in tensors_of(fetched)]
                self._sample_shapes = self._sample_shapes or shapes
                self.goes_on &= recording.is_steady and not recording.is_second and shapes == self._sample_shapes
                trace = trace if shortening is None else shortening.annotate(trace, recording)
                traces.append(with_masters(trace) if settings.gathered_in is not None else trace)
        return traces


def _fake_step(job: Job, coupling: Coupling, traced: TracingSession, shortening: RepeatedBlocks | None) -> Step:
    settings, fakes = traced.settings, traced.fakes
    plan = Plan(
        device=str(traced.device),
        micro_batch=settings.micro_batch,
        precision="fp32" if settings.precision == "tf32" else settings.precision,  # they differ in time only
        memory_format=settings.memory_format,
        optimizer_implementation=settings.optimizer_implementation,
        checkpointed_blocks=settings.checkpointed_blocks,
        checkpointing=settings.checkpointing,
        loss_chunks=settings.loss_chunks,
        loader="inline",
    )
    if isinstance(job.model, nn.Module):
        copied = fakes.copy(job.model)
        model = build_model(replace(job, model=lambda: copied))
    else:
        with fakes.building():
            model = build_model(job)
    regions = set(compiled_regions(model))
    traced.recorder.regions = tuple(name for name, module in model.named_modules() if module in regions)
    if shortening is not None:  # first: what is left out needs no fakes on the device
        model = shortening.shorten(model)
        plan = replace(plan, checkpointed_blocks=shortening.checkpointed_blocks)
    model = fakes.in_place(model)
    if shortening is not None:
        fakes.forget_all_but(model)
    if settings.gathered_in is not None:
        Bf16Weights(model)
        in_bf16(model)
        fakes.forget_all_but(model)
    with fakes.copying():  # a loss that is a module has tensors of its own
        step = Step(job, plan, coupling, model=model)
    traced.recorder.name_modules(step.model)
    return step


def in_bf16(model: nn.Module) -> None:
    """Replace all fp32 parameters by bf16 ones, as `fully_shard` gathers them; buffers keep their dtype."""
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.dtype != torch.float32:
                continue
            if parameter not in gathered:
                with torch.no_grad():
                    cast = parameter.to(torch.bfloat16)
                gathered[parameter] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
            setattr(module, name, gathered[parameter])


_LARGEST_COUNTER = 8
"""State of an optimiser up to this size [bytes] is a counter, which is fp32 already."""


def with_masters(trace: Trace) -> Trace:
    """The trace of a model of bf16 parameters with state and optimiser in fp32: parameters, gradients, moments.

    A gradient is summed over processes, and then is fp32, before it is kept.
    """
    kept = {"parameter", "gradient", "optimizer state", "average"}
    is_optimizer = [occurrence.phase == "optimizer" for occurrence in trace.occurrences]

    def is_fp32(storage: Storage) -> bool:
        """Whether a storage of bf16 is fp32 then: state, and what the optimiser makes."""
        in_optimizer = storage.category == "temporary" and storage.born >= 0 and is_optimizer[storage.born]
        return (storage.category in kept or in_optimizer) and storage.num_bytes > _LARGEST_COUNTER

    def widened(operation: Operation) -> Operation:
        def wide(shapes: tuple[TensorShape, ...]) -> tuple[TensorShape, ...]:
            return tuple(replace(shape, dtype="fp32") if shape.dtype == "bf16" else shape for shape in shapes)

        factor = 2 if any(tensor.dtype == "bf16" for tensor in (*operation.inputs, *operation.outputs)) else 1
        return replace(
            operation,
            inputs=wide(operation.inputs),
            outputs=wide(operation.outputs),
            bytes_read=factor * operation.bytes_read,
            bytes_written=factor * operation.bytes_written,
        )

    operations = list(trace.operations)
    places: dict[int, int] = {}
    occurrences = []
    for occurrence in trace.occurrences:
        if occurrence.phase == "optimizer":
            if occurrence.operation not in places:
                operations.append(widened(trace.operations[occurrence.operation]))
                places[occurrence.operation] = len(operations) - 1
            occurrence = replace(occurrence, operation=places[occurrence.operation])  # noqa: PLW2901 - the same occurrence
        occurrences.append(occurrence)
    storages = tuple(
        replace(storage, num_bytes=2 * storage.num_bytes) if is_fp32(storage) else storage for storage in trace.storages
    )
    repetition = trace.repetition
    if repetition is not None:
        repetition = replace(
            repetition,
            widened=tuple(
                replace(one, operation=widened(one.operation)) if is_optimizer[one.occurrence] else one
                for one in repetition.widened
            ),
            grown=tuple(
                (index, 2 * size if is_fp32(trace.storages[index]) else size) for index, size in repetition.grown
            ),
        )
    return replace(
        trace, operations=tuple(operations), occurrences=tuple(occurrences), storages=storages, repetition=repetition
    )


@dataclass(frozen=True)
class _WatchedPipeline(InputPipeline):
    """A pipeline that records the beginning of each micro-batch, and marks its results as inputs."""

    storages: Storages = field(kw_only=True)

    def __call__(self, content: Content, epoch: int, indices: Indices, progress: float = 1.0) -> Content:
        recording = self.storages.recording
        if recording is not None:
            recording.micro_batch_starts.append(len(recording.occurrences))
        ready = super().__call__(content, epoch, indices, progress)
        for tensor in tensors_of(ready):
            self.storages.hold(tensor, "input")
        return ready


def _widened(fetched: Content, traced: TracingSession, size: int) -> Content:
    """A fake batch of `size` samples like the fetched ones, on the host."""
    counts: list[int] = []
    host = torch.device("cpu")

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        counts.append(tensor.shape[0] if tensor.dim() else 0)
        return fake_like(traced.fakes.mode, tensor, host)  # freed once widened

    content = map_tensors(fetched, fake)
    count = max(set(counts), key=counts.count, default=0)

    def pick(entry: Any) -> Any:
        if isinstance(entry, torch.Tensor):
            return entry[torch.arange(size) % max(1, count)]  # fake indices: turning real ones into fakes is slow
        return type(entry)(entry[row % max(1, count)] for row in range(size))

    return picked(content, pick, count)


def _hold(step: Step, raw: Content, traced: TracingSession) -> None:
    """Mark the tensors that live from update to update."""
    hold = traced.recorder.storages.hold
    owners: dict[torch.Tensor, str] = {}
    for tensor in tensors_of(raw):
        hold(tensor, "input")
    for name, buffer in step.model.named_buffers():
        hold(buffer, "buffer", name.rpartition(".")[0])
    for name, parameter in step.model.named_parameters():
        owners[parameter] = name.rpartition(".")[0]
        hold(parameter, "parameter", owners[parameter])
    for optimised, values in step.optimizer.state.items():
        for value in tensors_in(values.values()):
            hold(value, "optimizer state", owners.get(optimised, ""))
    if step.average is not None and step.average.has_own_weights:
        for name, weight in step.average.weights.items():
            hold(weight, "average", name.rpartition(".")[0])
