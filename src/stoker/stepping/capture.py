"""A pass forward and backward as a list of operations, captured once and then repeated without autograd.

What: the operations that a micro-batch's loss and gradient come down to are recorded once, on the job's own batch, with
weights and buffers in place, and then repeated one after another: on a CPU by PyTorch's own interpreter, in one call
(`graph_interpreter`), on a GPU as a CUDA graph, which the host starts as one. Use when: many small operations follow
each other, so that Python and autograd take a good part of the time; whole optimiser batches of one size (the last,
smaller one of an epoch runs as it would uncaptured). Costs: a tenth of a second once, and on a GPU the memory of one
pass that stays. Does not combine with: checkpointed blocks, compilation, a model or a loss whose path depends on
values, on Python's state or on random draws outside PyTorch.
The recorded pass is compared with an ordinary one at first, every thousand updates, and before each checkpoint.
Source: CUDA graphs as in https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; tracing by
`torch.fx.experimental.proxy_tensor.make_fx`. That is not yet public: where it is gone nothing can be captured.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.activity import doing
from stoker.devices.malloc import heap_kept_small, renew_heap
from stoker.errors import RunFailed
from stoker.loading.batches import Batch
from stoker.loading.fields import Content, map_tensors, tensors_of
from stoker.loading.order import python_generators
from stoker.stepping.buffers import Buffers, have_changed, marks_of, writes_to
from stoker.stepping.gradient_distance import gradient_distance
from stoker.stepping.graph_interpreter import Repeat, called_from_python, interpreted
from stoker.stepping.loss_pass import AutogradPass, BatchPass
from stoker.stepping.named_losses import without_values
from stoker.stepping.python_state import python_state, unchanged
from stoker.stepping.step_failures import ran_out_of_memory
from stoker.stepping.torch_compile import users_line

CHECK_EVERY = 1000
"""Updates between comparisons of what was captured with an ordinary pass."""
LARGEST_ERROR = 1e-3
"""Largest distance of a captured gradient from an ordinary one [fraction of its norm]: the kernels are the same, but
counts are divided by in another way, and under autocast that rounds."""
_PLAIN = (bool, int, float, str, type(None))
_MOVES = "the model or the loss changes parameters as it runs"


class CapturedPass(BatchPass):
    """A pass that is recorded at the first batch of a whole micro-batch; batches of another form pass as usual.

    Args:
        ordinary: the pass by autograd; the loss draws from PyTorch's generators alone.
        model: whose parameters and buffers it reads, and may write.
        parameters: those that the optimiser moves.
    """

    def __init__(self, ordinary: AutogradPass, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self._ordinary, self._model, self._moved = ordinary, model, parameters
        self.renew()

    def renew(self) -> None:
        """Record another pass at the next batch, with gradients of the parameters that are trained now."""
        self._parameters = [parameter for parameter in self._moved if parameter.requires_grad]
        self._form: tuple[Any, ...] = ()
        self._repeat: Repeat | None = None
        self.graph: torch.fx.GraphModule | None = None
        """What is repeated, where PyTorch's interpreter repeats it."""
        self._used: list[int] = []
        self._last: tuple[Content, int] | None = None

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `BatchPass`.

        Random draws go on from where PyTorch's generators are, as in an ordinary pass.

        Raises:
            RunFailed: the pass cannot be captured, or no longer does what an ordinary one does.
        """
        if batch.size != self._ordinary.micro_batch:
            return self._ordinary(batch, update)
        content = self._ordinary.whole(batch, update)
        leaves: list[torch.Tensor] = []
        form = _form_of(content, leaves)
        if self._repeat is None:
            with doing("recording a forward and backward pass", is_long=True), _in_capture(), heap_kept_small():
                renew_heap()  # what is recorded stays: among other passes' tensors it would keep these from their place
                self._form, self._repeat = form, self._captured(content, leaves)
                weights = marks_of(self._model.parameters())  # after one pass: weights may be normalised in place
                self._check(content, update)
                if any(have_changed(weights, marks_of(self._model.parameters()))):
                    raise _uncapturable(_MOVES)
        if form != self._form:
            return self._ordinary(batch, update)
        if update % CHECK_EVERY == 0:
            self._check(content, update)
        mean, *gradients = self._repeat(*leaves)
        for index, gradient in zip(self._used, gradients, strict=True):
            self._parameters[index].grad = gradient
        self._last = content, update
        return mean.detach()

    def check(self) -> None:
        """Compare the captured pass with an ordinary one on the last batch, before a checkpoint.

        Raises:
            RunFailed: they differ.
        """
        if self._last is not None:
            self._check(*self._last)

    def _pass(self, content: Content) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """An ordinary pass: the mean loss and each parameter's gradient, laid out like the parameter."""
        with without_values():
            loss = self._ordinary.loss(content, self._ordinary.micro_batch)
            count = torch.as_tensor(loss.count, dtype=loss.sum.dtype, device=loss.sum.device)
            gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                loss.sum, self._parameters, count.reciprocal(), allow_unused=True
            )
        laid_out = list(gradients)  # with the parameter's strides, as autograd leaves them: fused optimisers read both
        for index, (gradient, parameter) in enumerate(zip(gradients, self._parameters, strict=True)):
            if gradient is not None and gradient.stride() != parameter.stride():
                laid_out[index] = torch.empty_like(parameter).copy_(gradient)
        return loss.sum.detach() / count, laid_out

    def _captured(self, content: Content, leaves: list[torch.Tensor]) -> Repeat:
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._parameters):
            raise _uncapturable("a parameter has a hook after accumulation, which nothing would call")

        def work(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            remaining = iter(inputs)
            mean, gradients = self._pass(map_tensors(content, lambda _: next(remaining)))
            self._used = [index for index, gradient in enumerate(gradients) if gradient is not None]
            return (mean, *(gradient for gradient in gradients if gradient is not None))

        writes = self._frozen_writes()
        with self._undone(leaves), self._nothing_else_changed():
            from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - where it is gone, nothing else is

            graph = make_fx(work)(*leaves)
        if self._frozen_writes() != writes:  # by values nothing shows where a teacher begins as a copy
            raise _uncapturable(_MOVES)
        _simplify(graph)
        if leaves[0].device.type != "cpu":
            return self._on_gpu(graph.forward, leaves)
        repeat = interpreted(graph)
        self.graph = None if repeat is None else graph
        return repeat or called_from_python(graph)

    def inputs(self, batch: Batch, update: int) -> list[torch.Tensor] | None:
        """The graph's inputs for a batch; None where an ordinary pass, or a check, is due."""
        if batch.size != self._ordinary.micro_batch or update % CHECK_EVERY == 0:
            return None
        leaves: list[torch.Tensor] = []
        self._last = self._ordinary.whole(batch, update), update
        return leaves if _form_of(self._last[0], leaves) == self._form else None

    def gradients(self, values: list[Any]) -> dict[torch.Tensor, Any]:
        """Which of the graph's outputs after the first is whose gradient."""
        return {self._parameters[index]: value for index, value in zip(self._used, values, strict=True)}

    def _on_gpu(self, forward: Repeat, leaves: list[torch.Tensor]) -> Repeat:
        """The pass as a CUDA graph, which reads its inputs from, and leaves its results in, memory of its own."""
        inputs = [leaf.clone() for leaf in leaves]
        graph, buffers, device = torch.cuda.CUDAGraph(), self._buffers(), leaves[0].device
        aside, here = _capture_stream(device.index), torch.cuda.current_stream(device)
        with self._undone(leaves), torch.no_grad(), torch.cuda.device(device):
            aside.wait_stream(here)
            try:
                with torch.cuda.stream(aside), _without_waiting():
                    forward(*inputs)  # libraries have their workspaces, and choose their kernels, before capture
            finally:
                here.wait_stream(aside)  # buffers that a failed pass has changed are put back after it
            # Other threads, such as loader workers', may page-lock memory through the driver at the same time.
            # The outer context sets the stream back also where the capture fails as it ends.
            with (
                torch.cuda.stream(here),
                torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"),
            ):
                results = forward(*inputs)

        def repeat(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            torch._foreach_copy_(inputs, list(given))
            graph.replay()
            torch.autograd.graph.increment_version(buffers)  # a graph writes to them past their version counters
            return (results[0].clone(), *results[1:])

        return repeat

    def _check(self, content: Content, update: int) -> None:
        """Compare the captured pass with an ordinary one from the same state, which is left as it was."""
        assert self._repeat is not None
        leaves = tensors_of(content)
        with self._undone(leaves), self._nothing_else_changed():
            _, gradients = self._pass(content)
            expected = [gradient for gradient in gradients if gradient is not None]
            buffers = [buffer.clone() for buffer in self._buffers()]
        if not all(bool(gradient.isfinite().all()) for gradient in expected):
            return  # reported by the check of the loss
        with self._undone(leaves):
            _, *repeated = self._repeat(*leaves)
            error = gradient_distance(repeated, expected) if len(repeated) == len(expected) else math.inf
            now, then = ([b for b in every if b.is_floating_point()] for every in (self._buffers(), buffers))
            error = max(error, gradient_distance(now, then))
        if not error <= LARGEST_ERROR:
            raise RunFailed(
                f"at update {update + 1} the captured pass is {error:.1e} from an ordinary one, relative to its "
                "gradient or buffers: the model or the loss depends on something that has changed since the capture",
                remedy="Go on from the last checkpoint: --fork RUN, under a plan whose captured is false.",
            )

    @contextlib.contextmanager
    def _undone(self, leaves: list[torch.Tensor]) -> Iterator[None]:
        """Restores the model's buffers, plain values of model and loss, and PyTorch's generators at the end."""
        buffers, devices = Buffers(self._model), {leaf.device.index or 0 for leaf in leaves if leaf.is_cuda}
        buffers.keep()
        with unchanged(self._model, self._ordinary.loss_object), torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                buffers.restore()

    @contextlib.contextmanager
    def _nothing_else_changed(self) -> Iterator[None]:
        """Raises RunFailed if a pass within changed what a captured one would not."""
        before, buffers = self._python_state(), self._buffers()
        yield
        if self._python_state() != before or any(
            now is not then for now, then in zip(self._buffers(), buffers, strict=True)
        ):
            raise _uncapturable(
                "the model or the loss changes Python values or replaces buffers as it runs, or draws from "
                "Python's or NumPy's generators"
            )

    def _frozen_writes(self) -> list[tuple[int, int]]:
        """The memory of each frozen parameter, and how often it was written to."""
        return writes_to(parameter for parameter in self._model.parameters() if not parameter.requires_grad)

    def _buffers(self) -> list[torch.Tensor]:
        return list(self._model.buffers())

    def _python_state(self) -> tuple[Any, ...]:
        """State that a captured pass would not change: plain values, and generators other than PyTorch's."""
        values = python_state(self._model, self._ordinary.loss_object, with_tensors=False).values
        return values, *python_generators()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for each device: libraries keep their workspaces of each stream, 32 MiB of cuBLAS's on an H100, for good."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _without_waiting() -> Iterator[None]:
    """An operation that waits for the GPU raises: within a capture it would leave allocator and generators unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # once a process, that not every such operation is seen
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _form_of(content: Any, leaves: list[torch.Tensor]) -> tuple[Any, ...]:
    """All that is captured of a batch except its tensors' values: a pass is repeated for batches of equal form.

    Appends the batch's tensors to `leaves`.
    """
    if isinstance(content, torch.Tensor):
        leaves.append(content)
        return content.shape, content.dtype, content.stride()
    if isinstance(content, Mapping):
        return tuple([(key, _form_of(item, leaves)) for key, item in content.items()])
    if isinstance(content, list | tuple):
        return tuple([_form_of(item, leaves) for item in content])
    return type(content), content if isinstance(content, _PLAIN) else repr(content)


def _simplify(graph: torch.fx.GraphModule) -> None:
    """Remove operations without effect: `detach` where there is no autograd, a matrix transposed twice."""
    detach, transpose = torch.ops.aten.detach.default, torch.ops.aten.t.default
    for node in list(graph.graph.nodes):
        if node.target is detach:
            node.replace_all_uses_with(node.args[0])
        elif node.target is transpose and node.args[0].target is transpose:
            node.replace_all_uses_with(node.args[0].args[0])
    for node in reversed(graph.graph.nodes):
        if node.target in (detach, transpose) and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


@contextlib.contextmanager
def _in_capture() -> Iterator[None]:
    """Names the user's line for an operation that cannot be recorded, or not be repeated without autograd."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as problem:
        if ran_out_of_memory(problem):
            raise
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        # PyTorch's messages are about its own modes.
        if "tracing tensor" in reason or "synchronizing CUDA operation" in reason:
            reason = "what is computed depends on the values of a tensor"
        line = users_line(traceback.extract_tb(problem.__traceback__))
        where = f", at {Path(line.filename).name}:{line.lineno} (`{line.line}`)" if line is not None else ""
        raise _uncapturable(f"{reason}{where}") from problem


def _uncapturable(why: str) -> RunFailed:
    return RunFailed(f"the pass cannot be captured: {why}", remedy="Use a plan with captured false.")
