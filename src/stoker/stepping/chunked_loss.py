"""Token cross-entropy in chunks: the logits of all tokens never exist at once.

What: a model's output layer, the loss and the backward pass of both are computed over one chunk of tokens after the
other, within the forward pass; kept are the gradients of the layer's input [N, D], weight [V, D] and bias [V].
Use when: logits [N tokens, V vocabulary], their float copy, softmax and gradient are most of the memory.
Costs: no product more; the weight's gradient is held from the forward pass on, and added up chunk by chunk. The same
mathematics: the loss is a sum over tokens, and a loss scale is in it before gradients are rounded to fp16. Metrics that
need logits have them whole, in evaluation.
Does not combine with: models that do anything to the logits after the layer, which is checked at every pass; losses
other than `token_cross_entropy`; gradients of gradients.
Source: P. Hsu et al., "Liger Kernel", arXiv:2410.10989, section 3.2 (gradients in the forward pass, chunk by chunk);
here with PyTorch's own operations, the whole chunk's logits in memory, and chunks of equal numbers of tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading.fields import map_tensors
from stoker.loading.samples import Samples
from stoker.stepping.bf16_weights import is_cast
from stoker.stepping.foreign_models import scores
from stoker.stepping.step_failures import ran_out_of_memory

CHUNKS = 8
"""Number of chunks that planning considers: an eighth of the logits is small compared with other memory."""

_LEAST_VOCABULARY = 4
"""Least vocabulary per feature for which chunks pay: below, activations take more memory than logits."""

_REMEDY = "Use a plan with loss_chunks 1."


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that may make a model's logits: the last `nn.Linear` it registered; None if it has none, or hooked."""
    last = next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
    if type(last) is not nn.Linear or last._forward_hooks:  # noqa: SLF001 - a hook sees logits
        return None
    return last if all(map(is_cast, last._forward_pre_hooks.values())) else None  # noqa: SLF001 - likewise


class ChunkedLoss:
    """The summed cross-entropy of a model's tokens, its output layer computed in `chunks`.

    Args:
        model: ends with the layer: what the layer returns is what the model returns.
        chunks: number of chunks; the last may have fewer tokens.
        label_smoothing: share of the target spread over all classes.

    Raises:
        BadJob: the model has no such layer.
    """

    scale = 1.0
    """What multiplies the sum before its backward pass, as under fp16: gradients are made with it [1]."""

    def __init__(self, model: nn.Module, chunks: int, *, label_smoothing: float = 0.0) -> None:
        layer = output_layer(model)
        if layer is None:
            raise BadJob(
                f"the plan computes the loss in {chunks} chunks, but {type(model).__name__} has no plain nn.Linear "
                "at its end",
                remedy=_REMEDY,
            )
        self._layer, self._chunks, self._label_smoothing = layer, chunks, label_smoothing
        self._pass = self._keep_input  # one object for all passes
        self._inputs: list[tuple[torch.Tensor, int]] = []

    def __call__(self, call_model: Callable[[], Any], target: torch.Tensor) -> torch.Tensor:
        """The sum over valid tokens, a scalar.

        Args:
            call_model: makes a forward pass of the model.
            target: classes int64 [...], one for each of the layer's inputs [..., D]; -100 is not counted.

        Raises:
            BadJob: something happens between the layer and the end of the model, or targets do not fit.
        """
        features = self.features(call_model)
        if target.is_floating_point() or target.shape != features.shape[:-1]:
            raise BadJob(
                f"token_cross_entropy in chunks: targets are {target.dtype} {list(target.shape)}, the output layer's "
                f"inputs {list(features.shape)}; wanted one class for each",
                remedy=_REMEDY,
            )
        layer, flat = self._layer, target.flatten()
        size = math.ceil(max(1, flat.numel()) / self._chunks)
        inputs: list[torch.Tensor | None] = [features.flatten(0, -2), layer.weight, layer.bias]
        if not torch.is_grad_enabled():  # `requires_grad` is set even then, and gradients would be computed
            inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
        given = (*inputs, flat, size, self._label_smoothing, self.scale)
        summed: torch.Tensor = _ChunkedCrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
        return summed

    def features(self, call_model: Callable[[], Any]) -> torch.Tensor:
        """The layer's input, from a pass in which the layer returns it; the model must return it untouched.

        Raises:
            BadJob: it does not.
        """
        layer: Any = self._layer
        replaced = vars(layer).get("forward")
        layer.forward = self._pass
        try:
            output = call_model()
        except RuntimeError as problem:
            if not self._inputs or ran_out_of_memory(problem):
                raise  # of the model's own, before the layer
            raise self._not_at_the_end(f"{type(problem).__name__}: {str(problem).splitlines()[0]}") from problem
        finally:
            del layer.forward
            if replaced is not None:
                layer.forward = replaced
            inputs, self._inputs = self._inputs, []
        if len(inputs) != 1:
            raise self._not_at_the_end(f"the layer is called {len(inputs)} times")
        features: torch.Tensor
        [(features, version)] = inputs
        is_untouched = output is features and features._version == version  # noqa: SLF001 - autograd's own count
        if not is_untouched:
            raise self._not_at_the_end("its output is changed before the model returns it")
        return features

    def _keep_input(self, features: torch.Tensor) -> torch.Tensor:
        self._inputs.append((features, features._version))  # noqa: SLF001 - autograd's own count of changes
        return features

    def _not_at_the_end(self, why: str) -> BadJob:
        layer = f"{self._layer.in_features} to {self._layer.out_features}"
        return BadJob(
            f"the plan computes the loss in {self._chunks} chunks, but the last nn.Linear ({layer}) does not make the "
            f"model's output: {why}",
            remedy=_REMEDY,
        )


def in_chunks(job: Job, model: nn.Module, chunks: int) -> ChunkedLoss | None:
    """The loss of a plan with `loss_chunks`; None where that is 1.

    Raises:
        BadJob: it is more, and the job's loss is another or its model does not end with the layer.
    """
    if chunks == 1:
        return None
    if job.objective.loss != "token_cross_entropy" or job.step is not None or job.mix is not None:
        raise BadJob(
            f'the plan computes the loss in {chunks} chunks, which is possible for loss="token_cross_entropy" alone, '
            "and not with mix",
            remedy=_REMEDY,
        )
    return ChunkedLoss(model, chunks, label_smoothing=job.objective.label_smoothing)


def worthwhile_chunks(job: Job, model: nn.Module, samples: Samples) -> int:
    """Number of chunks in which a plan may compute the job's loss to save memory [chunks]; 1 if it cannot.

    Args:
        job: what is learned.
        model: its model; a copy on PyTorch's meta device is passed, where nothing is computed.
        samples: one is fetched, for its shapes.
    """
    layer = output_layer(model)
    is_large = layer is not None and layer.out_features >= _LEAST_VOCABULARY * layer.in_features
    if not is_large or job.objective.loss != "token_cross_entropy" or job.step is not None or job.mix is not None:
        return 1
    try:
        outline = copy.deepcopy(model).to("meta")
        content = samples.prepare(samples.fetch(np.zeros(1, dtype=np.int64), 0))
        content = map_tensors(content, lambda tensor: tensor.to("meta"))
        fields = job.fields
        with torch.random.fork_rng(devices=[]):
            ChunkedLoss(outline, CHUNKS).features(lambda: scores(fields.call(outline, content)))
    except Exception:  # noqa: BLE001 - a model that reads values fails on the meta device in many ways
        return 1
    return CHUNKS


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of N tokens; its gradients are there when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        size: int,
        label_smoothing: float,
        scale: float,
    ) -> torch.Tensor:
        """`size` tokens at a time; gradients are of `scale` times the sum."""
        needed = ctx.needs_input_grad[:3]
        fixed = [
            None if t is None else t.detach().requires_grad_(is_needed)
            for t, is_needed in zip((weight_VD, bias_V), needed[1:], strict=True)
        ]
        gradients = [
            torch.zeros_like(t) if is_needed and t is not None else None
            for t, is_needed in zip((x_ND, weight_VD, bias_V), needed, strict=True)
        ]
        total: torch.Tensor | float = 0.0
        for start in range(0, max(1, target_N.numel()), size):
            part = slice(start, start + size)
            leaves = [x_ND[part].detach().requires_grad_(needed[0]), *fixed]
            with torch.set_grad_enabled(any(needed)):
                logits = F.linear(*leaves)  # type: ignore[arg-type]
                logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
                loss = F.cross_entropy(logits, target_N[part], reduction="sum", label_smoothing=label_smoothing)
                del logits
            total = total + loss.detach()
            if any(needed):
                trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
                x_gradient = None if gradients[0] is None else gradients[0][part]
                sums = [total for total in (x_gradient, *gradients[1:]) if total is not None]
                torch._foreach_add_(sums, list(torch.autograd.grad(loss, trained, torch.full_like(loss, scale))))
        ctx.gradients, ctx.scale = gradients, scale
        return torch.as_tensor(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The forward pass's gradients times that of the sum, without its scale.

        In place, since they are as large as the weight.
        """
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a loss in chunks has one backward pass: its gradients are made in the forward pass")
        factor = gradient / ctx.scale
        return *(None if each is None else each.mul_(factor) for each in gradients), None, None, None, None
