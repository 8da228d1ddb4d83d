"""Of a recurrent layer that PyTorch runs step by step, six steps are traced; what the others do is known from them.

What: on a CPU, GRUs, plain RNNs, and LSTMs that oneDNN has no kernel for are a loop in C++: the input is taken apart
along time (`unbind`), each step runs operations of its own, the outputs are put together (`stack`). Both ends of the
loop are replaced, so that it is handed the first three and the last three steps alone, while both ends are executed in
full size, forward and backward. The loop itself stays PyTorch's own.
Costs: nothing where no such layer runs. Loops of a trace that have another length than its first are run in full.
Does not combine with: checkpointed layers, which are computed again up to the middle of the last step only. They are
traced whole.
Source: aten/src/ATen/native/RNN.cpp of PyTorch 2.13 (`FullLayer`, `FullBidirectionalLayer`).
"""

# ruff: noqa: SLF001 - the kernel of a composite operation, and what lies below autograd, have private names alone

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stoker.profiling.tracing.fake_device import next_sequence_number
from stoker.profiling.tracing.storages import Loop, Recording
from stoker.records.timeline import NotPeriodic

TRACED = 6
"""Steps that are traced: the first three and the last three. In a backward pass the last two and the first two are
special: sums of gradients are begun, first out of place, and what came from the outputs is freed."""
TEMPLATE = 2
"""The step that stands for those left out, counted from 0; it must turn out to be like the next."""
_FEWEST = 10
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
            recording.loops.append(Loop(start, self._now, node))
        return _Stacked.apply(dim, left_out_of(self._num_steps), *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def _is_cut(self) -> bool:
        if self._num_steps >= _FEWEST and not self._cut.length:
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
    return num_steps - TRACED


def _without_middle(steps: Sequence[torch.Tensor], left_out: int) -> tuple[torch.Tensor, ...]:
    return (*steps[: TEMPLATE + 1], *steps[TEMPLATE + 1 + left_out :])


def _with_middle(steps: Sequence[torch.Tensor], left_out: int) -> list[torch.Tensor]:
    # Views are tensors of their own: what `stack` reads is counted once for each.
    return [*steps[:TEMPLATE], *(steps[TEMPLATE].detach() for _ in range(left_out)), *steps[TEMPLATE:]]


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
        each, more = divmod(loop.stop - loop.start, TRACED)
        if not each:
            raise NotPeriodic(f"{loop.stop - loop.start} operations are not {TRACED} steps")
        stops = [loop.start + more + each * (step + 1) for step in range(TRACED)]
        for step, (start, stop) in enumerate(itertools.pairwise((loop.start, *stops))):
            labels[start:stop] = [step] * (stop - start)
        last_nodes = [recording.nodes[stop - 1] for stop in stops]
        for index in range(loop.stop, len(labels)):
            if loop.node < recording.nodes[index] <= last_nodes[-1]:
                labels[index] = bisect.bisect_left(last_nodes, recording.nodes[index])
    return labels
