"""A pass forward and backward as a list of operations, captured once and then repeated without autograd.

What: the operations that a micro-batch's loss and gradient come down to are noted once, on the job's own batch, with
weights and buffers in place, and then called one after another; on a GPU they become a CUDA graph, which the host
starts as one. Use when: many small operations follow each other, so that Python and autograd take a good part of the
time; whole optimiser batches of one size (the last, smaller one of an epoch runs as it would uncaptured). Costs: a
tenth of a second once, and on a GPU the memory of one pass that stays. Does not combine with: checkpointed blocks,
compilation, a model or a loss whose path depends on values, on Python's state or on random draws outside PyTorch.
What was noted is compared with an ordinary pass at first and every thousand updates.
Source: CUDA graphs as in https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; tracing by
`torch.fx.experimental.proxy_tensor.make_fx`. That is not yet public: where it is gone nothing can be captured.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.errors import RunFailed
from stoker.jobs import Loss
from stoker.loading import Content, map_tensors
from stoker.stepping.losses import without_values

CHECK_EVERY = 1000
"""Updates between comparisons of what was captured with an ordinary pass."""
LARGEST_ERROR = 1e-3
"""A captured gradient may be so far from an ordinary one [fraction of its norm]: the kernels are the same, but counts
are divided by in another way, and under autocast that rounds."""
_REMEDY = "Use a plan with captured false."

_Pass = Callable[..., tuple[torch.Tensor, ...]]


class CapturedPass:
    """The mean loss of a batch, its gradient left in the parameters.

    Args:
        loss: of a batch in the model's precision; draws from PyTorch's generators alone.
        model: whose parameters and buffers it reads, and may write.
        parameters: those that get gradients.
        seed: puts PyTorch's generators where update number `update` begins.
    """

    def __init__(
        self,
        loss: Callable[[Content], Loss],
        model: nn.Module,
        parameters: list[nn.Parameter],
        seed: Callable[[int], None],
    ) -> None:
        self._loss, self._model, self._parameters, self._seed = loss, model, parameters, seed
        self._signature: tuple[Any, ...] = ()
        self._repeat: _Pass | None = None
        self._used: list[int] = []

    def __call__(self, content: Content, update: int) -> torch.Tensor | None:
        """The mean loss before the update, a detached scalar; None if such a batch has to be passed uncaptured.

        Raises:
            RunFailed: the pass cannot be captured, or no longer does what an ordinary one does.
        """
        leaves = _leaves(content)
        signature = tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)
        is_first = self._repeat is None
        if self._repeat is None:
            self._signature, self._repeat = signature, self._captured(content, leaves, update)
        if signature != self._signature:
            return None
        if is_first or update % CHECK_EVERY == 0:
            self._check(content, leaves, update)
        self._seed(update)
        with torch.no_grad():
            mean, *gradients = self._repeat(*leaves)
        for at, gradient in zip(self._used, gradients, strict=True):
            self._parameters[at].grad = gradient
        return mean

    def _pass(self, content: Content) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """An ordinary pass: the mean loss and each parameter's gradient, laid out like the parameter."""
        with without_values():
            loss = self._loss(content)
            count = torch.as_tensor(loss.count, dtype=loss.sum.dtype, device=loss.sum.device)
            gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                loss.sum, self._parameters, count.reciprocal(), allow_unused=True
            )
        pairs = zip(gradients, self._parameters, strict=True)
        return loss.sum.detach() / count, [None if g is None else _laid_out(g, p) for g, p in pairs]

    def _captured(self, content: Content, leaves: list[torch.Tensor], update: int) -> _Pass:
        def work(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mean, gradients = self._pass(map_tensors(content, functools.partial(_next, iter(given))))
            self._used = [at for at, gradient in enumerate(gradients) if gradient is not None]
            return (mean, *(gradient for gradient in gradients if gradient is not None))

        before = self._python_state()
        with self._buffers_kept():
            self._seed(update)
            try:
                from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - where it is gone, nothing else is

                graph = make_fx(work)(*leaves)
            except Exception as problem:  # whatever a model does that cannot be noted
                raise RunFailed(f"the pass cannot be captured: {_first_line(problem)}", remedy=_REMEDY) from problem
        if self._python_state() != before:
            raise RunFailed(
                "the pass cannot be captured: the model or the loss changes Python values as it runs, or draws from "
                "Python's or NumPy's generators",
                remedy=_REMEDY,
            )
        _drop_aliases(graph)
        return graph.forward if leaves[0].device.type == "cpu" else self._on_gpu(graph.forward, leaves)

    def _on_gpu(self, forward: _Pass, leaves: list[torch.Tensor]) -> _Pass:
        """The pass as a CUDA graph, which reads its inputs from, and leaves its results in, memory of its own."""
        inputs = [leaf.clone() for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        with self._buffers_kept(), torch.no_grad():
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                forward(*inputs)  # libraries have their workspaces, and choose their kernels, before capture
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph):
                results = forward(*inputs)

        def repeat(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            torch._foreach_copy_(inputs, list(given))
            graph.replay()
            return (results[0].clone(), *results[1:])

        return repeat

    def _check(self, content: Content, leaves: list[torch.Tensor], update: int) -> None:
        """Compare the captured pass with an ordinary one from the same state, which is left as it was."""
        assert self._repeat is not None
        with self._buffers_kept():
            self._seed(update)
            _, expected = self._pass(content)
        with self._buffers_kept(), torch.no_grad():
            self._seed(update)
            _, *found = self._repeat(*leaves)
        wanted = [gradient for gradient in expected if gradient is not None]
        error = _distance(found, wanted) if len(found) == len(wanted) else float("inf")
        if not error <= LARGEST_ERROR:
            raise RunFailed(
                f"at update {update + 1} the captured gradient is {error:.1e} of its norm from an ordinary one: the "
                "model or the loss depends on something that has changed since it was captured",
                remedy=f"{_REMEDY} Start anew: updates since the last comparison may be wrong.",
            )

    def _buffers_kept(self) -> _BuffersKept:
        return _BuffersKept(list(self._model.buffers()))

    def _python_state(self) -> tuple[Any, ...]:
        """What a captured pass would not change: plain values in modules, and the generators that are not PyTorch's."""
        plain = (bool, int, float, str, type(None))
        values = [
            (name, key, value)
            for name, module in self._model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, plain)
        ]
        numbers = np.random.get_state(legacy=False)  # noqa: NPY002 - the generator that users' code shares
        return values, random.getstate(), numbers["state"]["key"].tobytes(), numbers["state"]["pos"]


class _BuffersKept:
    """Within its block a model's buffers may change; after it they are as before."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._kept = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(kept)


def _leaves(content: Content) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    map_tensors(content, leaves.append)
    return leaves


def _next(leaves: Iterator[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return next(leaves)


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """With the parameter's strides, as autograd leaves gradients: fused optimisers read both side by side."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _drop_aliases(graph: torch.fx.GraphModule) -> None:
    """Leave out `detach`, which stands for nothing once there is no autograd."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


def _distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of the difference over the norm of what is expected, over all tensors together."""
    apart = torch.stack([(one.float() - other.float()).norm() for one, other in zip(found, expected, strict=True)])
    return float(apart.norm() / torch.stack([one.float().norm() for one in expected]).norm().clamp_min(1e-30))


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
