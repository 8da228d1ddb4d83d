"""Repetition in a trace: of equal blocks, or of time steps, only a few are traced, and stand for the others.

The model is shortened before the update is traced: of N >= 6 equal blocks four stay. The first and the last may be
special, and the two in between must prove equal (`stoker.records.trace.prove`). If the first m are checkpointed, these
and the rest are shortened separately. A model whose blocks differ, or that fails when shortened, is traced whole. If no
blocks can be left out, steps of recurrent layers are (`CutLoops`).

Not checked: that the model treats omitted blocks like the traced ones, whatever their number; a model that uses the
output of block 17 only is traced as if it did not.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from stoker.activity import doing
from stoker.imports import older_objects_kept
from stoker.jobs import Job, Optimizer
from stoker.loading.datasets import Datasets
from stoker.profiling.tracing.fake_device import next_sequence_number
from stoker.profiling.tracing.storages import Recording, TensorUse, TracedLoop, Widening
from stoker.profiling.tracing.target_kernels import replaced_kernels
from stoker.profiling.tracing.update import UpdateTracer, trace_updates
from stoker.records import Coupling, Repetition, Segment, Trace, TraceSettings
from stoker.records.trace import NotPeriodic, prove
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.stepping.torch_optimizers import group_of

_TRACED_BLOCKS = 4
_FEWEST_BLOCKS = 6


def trace_with_repetition(job: Job, data: Datasets, coupling: Coupling, settings: TraceSettings) -> Trace:
    """As `trace_update`, with repeated blocks or time steps traced once; a model without any is traced whole.

    Raises:
        BadJob: as `trace_update`.
    """
    (trace,) = traces_with_repetition(job, data, coupling, (settings,))
    return trace


Tracers = dict[TraceSettings, UpdateTracer]
"""Tracers that may go on, by the settings of their updates with a micro-batch of 1."""

_MOST_TRACERS = 16
"""Tracers that are kept."""


@older_objects_kept()
def traces_with_repetition(
    job: Job, data: Datasets, coupling: Coupling, every: Sequence[TraceSettings], kept: Tracers | None = None
) -> Sequence[Trace]:
    """As `trace_with_repetition`, of several updates as of `trace_updates`.

    `kept` are tracers of the same job, which is not made again for other micro-batches.

    Raises:
        BadJob: as `trace_update`.
    """
    sizes = " and ".join(str(settings.micro_batch) for settings in every)
    what = f"tracing an update in {every[0].precision}, {sizes} samples"
    key, kept = dataclasses.replace(every[0], micro_batch=1), {} if kept is None else kept
    if (tracer := kept.pop(key, None)) is not None:
        with contextlib.suppress(Exception), doing(what):  # a model that is made again shows any real error
            traces = tracer.traces(every)
            if tracer.goes_on and _have_all(traces, tracer.shortening):
                kept[key] = tracer
                return traces
    blocks = RepeatedBlocks(job, every[0].checkpointed_blocks)
    tracer = UpdateTracer(job, data, coupling, every, blocks)
    try:
        with doing(what):
            traces = tracer.traces(every)
    except Exception:  # the shortened model may fail for its own reasons: the whole one shows any real error
        if not blocks.has_shortened:
            raise
    else:
        if _have_all(traces, blocks):
            if tracer.goes_on:
                if len(kept) == _MOST_TRACERS:
                    del kept[next(iter(kept))]
                kept[key] = tracer
            return traces
    with doing(f"{what}, all blocks"):
        return trace_updates(job, data, coupling, every)


def _have_all(traces: Sequence[Trace], shortening: RepeatedBlocks | None) -> bool:
    """Whether what was left out of a model is known in all of its traces."""
    is_short = shortening is not None and shortening.has_shortened
    return not is_short or all(trace.repetition is not None for trace in traces)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """The blocks left out of a model: `module` names their list; see `Repetition` for the other fields."""

    module: str
    num_blocks: int
    traced: int
    copies: tuple[tuple[int, int], ...]


class RepeatedBlocks:
    """Shortens the longest list of equal blocks of a job's model, or its loops over time, and annotates the trace.

    Attributes:
        left_out: the blocks left out; None before a model is shortened, or if none can be.
        checkpointed_blocks: number of remaining blocks to checkpoint, the first ones.
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
        if not copies or not _have_equal_groups(self._job, name, blocks):
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
        """The context for tracing: loops over time are cut, unless blocks were left out."""
        return nullcontext() if self.left_out is not None else self._loops.cutting(recording)

    def annotate(self, trace: Trace, recording: Recording) -> Trace:
        """The shortened trace with its repetition, or unchanged if blocks or steps differ."""
        try:
            if self.left_out is not None:
                owners = [life.owner for life in recording.lives]
                return _with_repetition(trace, self.left_out, owners, recording.uses)
            if not self._loops.length:
                return trace
            repetition = Repetition(
                module="",
                num_blocks=self._loops.length,
                traced=TRACED_STEPS,
                segments=_segments(_without_gaps(trace, labels_of(recording))),
                copies=((TEMPLATE_STEP, left_out_of(self._loops.length)),),
            )
            prove(trace, repetition)
            return dataclasses.replace(trace, repetition=repetition)
        except NotPeriodic:
            return trace


def _with_repetition(trace: Trace, left_out: LeftOut, owners: Sequence[str], uses: Sequence[TensorUse]) -> Trace:
    """The trace with its repeated blocks; raises NotPeriodic."""
    of_module = _Numbers(left_out.module)
    labels = _without_gaps(trace, [of_module[trace.modules[occurrence.module]] for occurrence in trace.occurrences])
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


class _Numbers(dict[str, int | None]):
    """The block of a module by its dotted name; None outside of blocks."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._pattern = re.compile(rf"{re.escape(module)}\.(\d+)(\.|$)")

    def __missing__(self, name: str) -> int | None:
        match = self._pattern.match(name)
        self[name] = None if match is None else int(match[1])
        return self[name]


def _without_gaps(trace: Trace, labels: Sequence[int | None]) -> list[int | None]:
    """Labels with gaps filled: operations between equal or neighbouring blocks of a pass belong to the first one."""
    filled, before = list(labels), None
    for index, after in enumerate(labels):
        if after is None:
            continue
        if before is not None and index - before > 1:
            first, last, block = trace.occurrences[before], trace.occurrences[index], labels[before]
            is_one_pass = (first.phase, first.part) == (last.phase, last.part) and first.phase != "optimizer"
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
    """Original numbers of the remaining blocks; and for each block that stands for others, the number left out."""
    kept: list[int] = []
    copies: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise((0, min(checkpointed, num_blocks), num_blocks)):
        if stop - start < _FEWEST_BLOCKS:
            kept.extend(range(start, stop))
            continue
        copies.append((len(kept) + 1, stop - start - _TRACED_BLOCKS))
        kept.extend((start, start + 1, stop - 2, stop - 1))
    return kept, tuple(copies)


def _lists_of_equals(model: nn.Module) -> Iterable[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and len(module) >= _FEWEST_BLOCKS:
            blocks = list(module)
            have_parameters = all(next(block.parameters(), None) is not None for block in blocks)
            if have_parameters and _share_nothing(model, blocks) and are_equal(blocks):
                yield name, module


def _share_nothing(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether every parameter and module of the blocks is in one place only."""
    places = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    places += [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    inside = {id(part) for block in blocks for part in (*block.modules(), *block.parameters())}
    return sum(place in inside for place in places) == len(inside)


def _have_equal_groups(job: Job, name: str, blocks: nn.ModuleList | nn.Sequential) -> bool:
    """Whether the job's groups of parameters treat all blocks the same."""
    if not isinstance(job.optimizer, Optimizer):
        return True
    chosen = [
        [group_of(job.optimizer, f"{name}.{number}.{own}", parameter) for own, parameter in block.named_parameters()]
        for number, block in enumerate(blocks)
    ]
    return all(groups == chosen[0] for groups in chosen)


# ruff: noqa: SLF001 - the kernel of a composite operation, and functions below autograd, have private names only

TRACED_STEPS = 6
"""Number of traced steps: the first three and the last three. In a backward pass the last two and the first two are
special: sums of gradients begin, first out of place, and tensors of the outputs are freed."""
TEMPLATE_STEP = 2
"""The step that stands for the ones left out, counted from 0; it must prove equal to the next."""
_FEWEST_STEPS = 10
_LAYERS = ("gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input")


class CutLoops:
    """Cuts the loops of recurrent layers short during a recording.

    What: on a CPU, GRUs, plain RNNs, and LSTMs without a oneDNN kernel are a loop in C++: the input is split along time
    (`unbind`), each step runs its operations, the outputs are joined (`stack`). Both ends of the loop are replaced: it
    gets the first three and the last three steps only, while both ends are executed in full size, forward and backward.
    The loop itself stays PyTorch's own.
    Costs: nothing without such a layer. Loops of another length than the first one of a trace run in full.
    Does not combine with: checkpointed layers, which are recomputed up to the middle of the last step only. They are
    traced whole.
    Source: aten/src/ATen/native/RNN.cpp of PyTorch 2.13 (`FullLayer`, `FullBidirectionalLayer`).

    Attributes:
        length: steps of each loop that was cut; 0 as long as none was.
    """

    def __init__(self) -> None:
        self.length = 0

    @contextlib.contextmanager
    def cutting(self, recording: Callable[[], Recording | None]) -> Iterator[None]:
        """Within the block, recurrent layers on the CPU run six of their steps; loops go to `recording`."""
        with replaced_kernels("AutogradCPU", {name: self._layer(name, recording) for name in _LAYERS}):
            yield

    def _layer(self, name: str, recording: Callable[[], Recording | None]) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        original = getattr(getattr(torch.ops.aten, base), overload)

        def run(inputs: torch.Tensor, state: Any, *others: Any) -> Any:
            *_, batch_first = others
            call = _Call(self, inputs.shape[1 if batch_first else 0], state, recording)
            with replaced_kernels("AutogradCPU", {"unbind.int": call.unbind, "stack": call.stack}):
                return original._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, inputs, state, *others)

        return run


class _Call:
    """A call of a recurrent layer: its loops in sequence, of each layer and direction."""

    def __init__(self, cut: CutLoops, num_steps: int, state: Any, recording: Callable[[], Recording | None]) -> None:
        self._cut, self._num_steps, self._recording = cut, num_steps, recording
        # By their ids, since PyTorch keeps a replaced kernel, and its references, for a while.
        self._states = {id(tensor) for tensor in (state if isinstance(state, list | tuple) else [state])}
        self._open: tuple[int, int] | None = None  # first occurrence and node of the running loop

    def unbind(self, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """A few steps of a layer's input, or all layers of a state."""
        is_loop = id(tensor) not in self._states and tensor.shape[dim] == self._num_steps
        if is_loop and self._num_steps >= _FEWEST_STEPS and not self._cut.length:
            self._cut.length = self._num_steps
        if not is_loop or self._num_steps != self._cut.length:
            return list(_Unbound.apply(tensor, dim, 0))  # type: ignore[no-untyped-call]
        steps = list(_Unbound.apply(tensor, dim, left_out_of(self._num_steps)))  # type: ignore[no-untyped-call]
        self._open = self._now, next_sequence_number() - 1
        return steps

    def stack(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The joined outputs of all steps, or the joined last states of all layers."""
        if self._open is None:
            return _Stacked.apply(dim, 0, *tensors)  # type: ignore[no-any-return, no-untyped-call]
        (start, node), self._open = self._open, None
        recording = self._recording()
        if recording is not None:
            recording.loops.append(TracedLoop(start, self._now, node))
        return _Stacked.apply(dim, left_out_of(self._num_steps), *tensors)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def _now(self) -> int:
        """The number of the next occurrence."""
        recording = self._recording()
        return 0 if recording is None else len(recording.occurrences)


class _Unbound(torch.autograd.Function):
    """`unbind` without the middle elements, for which the third stands."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, left_out: int) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.left_out = dim, left_out
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return _without_middle(tensor.unbind(dim), left_out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return torch.stack(_with_middle(grads, ctx.left_out), ctx.dim), None, None


class _Stacked(torch.autograd.Function):
    """`stack` with the third tensor in place of the omitted middle ones."""

    @staticmethod
    def forward(ctx: Any, dim: int, left_out: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.left_out = dim, left_out
        with torch._C._AutoDispatchBelowAutograd():
            return torch.stack(_with_middle(tensors, left_out), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_without_middle(grads[0].unbind(ctx.dim), ctx.left_out)


def left_out_of(num_steps: int) -> int:
    """Number of steps left out of a loop of `num_steps` [steps]."""
    return num_steps - TRACED_STEPS


def _without_middle(steps: Sequence[torch.Tensor], left_out: int) -> tuple[torch.Tensor, ...]:
    return (*steps[: TEMPLATE_STEP + 1], *steps[TEMPLATE_STEP + 1 + left_out :])


def _with_middle(steps: Sequence[torch.Tensor], left_out: int) -> list[torch.Tensor]:
    # Separate views, so that `stack` counts the bytes of each.
    return [*steps[:TEMPLATE_STEP], *(steps[TEMPLATE_STEP].detach() for _ in range(left_out)), *steps[TEMPLATE_STEP:]]


def labels_of(recording: Recording) -> list[int | None]:
    """The step of each occurrence, forward and backward; None outside of loops.

    Steps have the same number of operations, except the first one, in which autocast casts weights. Their equality is
    not checked here.

    Raises:
        NotPeriodic: a loop has fewer operations than steps.
    """
    labels: list[int | None] = [None] * len(recording.occurrences)
    for loop in recording.loops:
        each, more = divmod(loop.stop - loop.start, TRACED_STEPS)
        if not each:
            raise NotPeriodic(f"{loop.stop - loop.start} operations are not {TRACED_STEPS} steps")
        stops = [loop.start + more + each * (step + 1) for step in range(TRACED_STEPS)]
        for step, (start, stop) in enumerate(itertools.pairwise((loop.start, *stops))):
            labels[start:stop] = [step] * (stop - start)
        last_nodes = [recording.nodes[stop - 1] for stop in stops]
        for index in range(loop.stop, len(labels)):
            if loop.node < recording.nodes[index] <= last_nodes[-1]:
                labels[index] = bisect.bisect_left(last_nodes, recording.nodes[index])
    return labels


_PLUMBING = {"_parameters", "_buffers", "_modules"}
_DEPTH = 6
_BY_VALUE = (bool, int, float, complex, str, bytes, type, torch.dtype, types.BuiltinFunctionType)


def are_equal(modules: Sequence[nn.Module]) -> bool:
    """Whether all of `modules` are equal except for the values of their weights.

    The same classes under the same names, parameters and buffers of the same shapes and dtypes, and the same other
    attributes; but an int may be the module's own index in the list, counted from anywhere.
    Not checked: the behaviour of functions that are attributes, beyond their code.
    """
    first, *others = (_configuration(module) for module in modules)
    for place, other in enumerate(others, start=1):
        if first.keys() != other.keys():
            return False
        for name, value in first.items():
            other_value = other[name]
            is_index = type(value) is int and type(other_value) is int and other_value - value == place
            if other_value != value and not is_index:
                return False
    return True


def _configuration(module: nn.Module) -> dict[str, object]:
    """The structure and attributes of `module`, by dotted names."""
    parts: dict[str, object] = {}
    for name, part in module.named_modules():
        parts[f"{name}:class"] = type(part)
        for own, tensor in (*part._parameters.items(), *part._buffers.items()):
            parts[f"{name}:{own}"] = None if tensor is None else _form(tensor)
        for own, value in vars(part).items():
            if own not in _PLUMBING:
                parts.update(_leaves(f"{name}:{own}", value, _DEPTH))
    return parts


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, object]]:
    """The parts of an attribute that compare by value; an object without any is represented by its class."""
    if value is None or isinstance(value, _BY_VALUE):
        yield name, value
    elif isinstance(value, torch.Tensor):
        yield name, _form(value)
    elif isinstance(value, Mapping):
        yield f"{name}:len", (type(value), len(value))
        for key, item in value.items():
            yield from _leaves(f"{name}[{key if isinstance(key, str | int) else type(key).__name__}]", item, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        yield f"{name}:len", (type(value), len(value))
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item, depth)
    elif isinstance(value, types.FunctionType | types.MethodType):
        yield name, value.__code__
    elif isinstance(value, functools.partial):
        yield from _leaves(f"{name}()", (value.func, value.args, value.keywords), depth)
    elif isinstance(value, nn.Module) or not hasattr(value, "__dict__") or depth == 0:
        yield name, type(value)
    else:
        yield f"{name}:class", type(value)
        for own, item in vars(value).items():
            yield from _leaves(f"{name}.{own}", item, depth - 1)
