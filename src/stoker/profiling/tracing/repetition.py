"""Of equal blocks that a model repeats, or of time steps, a few are traced; what the others do is known from them.

The model is shortened before the update is traced: of N >= 6 equal blocks four stay, of which the first and the last
may be special, and the two in between must turn out to be alike (`stoker.records.trace.prove`). Where the first m
are checkpointed, these and the rest are shortened apart. A model whose blocks differ, or that does not run when it is
shortened, is traced whole. Where no blocks are left out, steps of recurrent layers are (`time_steps.py`).

Not checked: that the model treats the blocks left out like those traced, whatever their number; a model that keeps the
output of block 17 and of no other is traced as if it did not.

Of a recurrent layer that PyTorch runs step by step, six steps are traced; what the others do is known from them.

What: on a CPU, GRUs, plain RNNs, and LSTMs that oneDNN has no kernel for are a loop in C++: the input is taken apart
along time (`unbind`), each step runs operations of its own, the outputs are put together (`stack`). Both ends of the
loop are replaced, so that it is handed the first three and the last three steps alone, while both ends are executed in
full size, forward and backward. The loop itself stays PyTorch's own.
Costs: nothing where no such layer runs. Loops of a trace that have another length than its first are run in full.
Does not combine with: checkpointed layers, which are computed again up to the middle of the last step only. They are
traced whole.
Source: aten/src/ATen/native/RNN.cpp of PyTorch 2.13 (`FullLayer`, `FullBidirectionalLayer`).

Whether modules are the same but for the values of their weights, so that they do the same.
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

from stoker.jobs import Job, Optimizer
from stoker.loading.datasets import Datasets
from stoker.profiling.tracing.fake_device import next_sequence_number
from stoker.profiling.tracing.storages import Recording, TensorUse, TracedLoop, Widening
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Repetition, Segment, Trace, TraceSettings
from stoker.records.trace import NotPeriodic, prove
from stoker.stepping.blocks import repeated_blocks
from stoker.stepping.torch_optimizers import group_of

_TRACED_BLOCKS = 4
_FEWEST_BLOCKS = 6


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
        traced=TRACED_STEPS,
        segments=_segments(_without_gaps(trace, labels_of(recording))),
        copies=((TEMPLATE_STEP, left_out_of(num_steps)),),
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


# ruff: noqa: SLF001 - the kernel of a composite operation, and what lies below autograd, have private names alone


TRACED_STEPS = 6
"""Steps that are traced: the first three and the last three. In a backward pass the last two and the first two are
special: sums of gradients are begun, first out of place, and what came from the outputs is freed."""
TEMPLATE_STEP = 2
"""The step that stands for those left out, counted from 0; it must turn out to be like the next."""
_FEWEST_STEPS = 10
_LAYERS = ("gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input")


class CutLoops:
    """Cuts the loops of recurrent layers short while a recording is made.

    Attributes:
        length: steps of each loop that was cut; 0 as long as none was.
    """

    def __init__(self) -> None:
        self.length = 0

    @contextlib.contextmanager
    def cutting(self, recording: Callable[[], Recording | None]) -> Iterator[None]:
        """Within the block, recurrent layers on the CPU run six of their steps; what `recording` gives is told."""
        with _replaced({name: self._layer(name, recording) for name in _LAYERS}):
            yield

    def _layer(self, name: str, recording: Callable[[], Recording | None]) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        original = getattr(getattr(torch.ops.aten, base), overload)

        def run(inputs: torch.Tensor, state: Any, *others: Any) -> Any:
            *_, batch_first = others
            call = _Call(self, inputs.shape[1 if batch_first else 0], state, recording)
            with _replaced({"unbind.int": call.unbind, "stack": call.stack}):
                return original._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, inputs, state, *others)

        return run


class _Call:
    """A call of a recurrent layer: its loops, one after the other, of each layer and direction."""

    def __init__(self, cut: CutLoops, num_steps: int, state: Any, recording: Callable[[], Recording | None]) -> None:
        self._cut, self._num_steps, self._recording = cut, num_steps, recording
        # By their ids, since PyTorch keeps a replaced kernel, and what that holds, for a while.
        self._states = {id(one) for one in (state if isinstance(state, list | tuple) else [state])}
        self._open: tuple[int, int] | None = None  # first occurrence and node of the loop that runs

    def unbind(self, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """The steps of a layer's input, a few of them; the layers of a state, all."""
        if id(tensor) in self._states or tensor.shape[dim] != self._num_steps or not self._is_cut():
            return list(_Unbound.apply(tensor, dim, 0))  # type: ignore[no-untyped-call]
        steps = list(_Unbound.apply(tensor, dim, left_out_of(self._num_steps)))  # type: ignore[no-untyped-call]
        self._open = self._now, next_sequence_number() - 1
        return steps

    def stack(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The outputs of all steps together; the last states of all layers."""
        if self._open is None:
            return _Stacked.apply(dim, 0, *tensors)  # type: ignore[no-any-return, no-untyped-call]
        (start, node), self._open = self._open, None
        recording = self._recording()
        if recording is not None:
            recording.loops.append(TracedLoop(start, self._now, node))
        return _Stacked.apply(dim, left_out_of(self._num_steps), *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def _is_cut(self) -> bool:
        if self._num_steps >= _FEWEST_STEPS and not self._cut.length:
            self._cut.length = self._num_steps
        return self._num_steps == self._cut.length

    @property
    def _now(self) -> int:
        """The number of the next occurrence."""
        recording = self._recording()
        return 0 if recording is None else len(recording.occurrences)


class _Unbound(torch.autograd.Function):
    """`unbind` without those elements in the middle that are left out, for which the third stands."""

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
    """`stack` with the third tensor in place of those in the middle that are left out."""

    @staticmethod
    def forward(ctx: Any, dim: int, left_out: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.left_out = dim, left_out
        with torch._C._AutoDispatchBelowAutograd():
            return torch.stack(_with_middle(tensors, left_out), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_without_middle(grads[0].unbind(ctx.dim), ctx.left_out)


def left_out_of(num_steps: int) -> int:
    """How many steps are left out of a loop of `num_steps`."""
    return num_steps - TRACED_STEPS


def _without_middle(steps: Sequence[torch.Tensor], left_out: int) -> tuple[torch.Tensor, ...]:
    return (*steps[: TEMPLATE_STEP + 1], *steps[TEMPLATE_STEP + 1 + left_out :])


def _with_middle(steps: Sequence[torch.Tensor], left_out: int) -> list[torch.Tensor]:
    # Views are tensors of their own: what `stack` reads is counted once for each.
    return [*steps[:TEMPLATE_STEP], *(steps[TEMPLATE_STEP].detach() for _ in range(left_out)), *steps[TEMPLATE_STEP:]]


@contextlib.contextmanager
def _replaced(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, operations of ATen on CPU tensors run these kernels in place of autograd's own."""
    library = torch.library.Library("aten", "IMPL", "AutogradCPU")
    for name, kernel in kernels.items():
        library.impl(name, kernel)
    try:
        yield
    finally:
        library._destroy()  # what its own finaliser calls, at a time of our choosing


def labels_of(recording: Recording) -> list[int | None]:
    """The step that each occurrence belongs to, forward and backward; None outside of loops.

    Steps are equally many operations, but for the first, in which autocast casts weights. Whether steps are alike is
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
    """Whether all of `modules` are built alike, weights apart.

    The same classes under the same names, parameters and buffers of the same shapes and dtypes, and the same attributes
    otherwise; but a whole number may be the module's own place in the list, counted from anywhere.
    Not checked: what functions that are attributes do, beyond their code.
    """
    first, *others = (_configuration(module) for module in modules)
    for place, other in enumerate(others, start=1):
        if first.keys() != other.keys():
            return False
        for name, value in first.items():
            if other[name] != value and not _is_own_place(value, other[name], place):
                return False
    return True


def _is_own_place(first: object, value: object, place: int) -> bool:
    return type(first) is int and type(value) is int and value - first == place


def _configuration(module: nn.Module) -> dict[str, object]:
    """What `module` is made of, by dotted names."""
    found: dict[str, object] = {}
    for name, part in module.named_modules():
        found[f"{name}:class"] = type(part)
        for own, tensor in (*part._parameters.items(), *part._buffers.items()):
            found[f"{name}:{own}"] = None if tensor is None else _form(tensor)
        for own, value in vars(part).items():
            if own not in _PLUMBING:
                found.update(_leaves(f"{name}:{own}", value, _DEPTH))
    return found


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, object]]:
    """An attribute's parts that compare by value; an object without any is told by its class alone."""
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
