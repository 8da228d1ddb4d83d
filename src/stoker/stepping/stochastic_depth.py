"""Stochastic depth: in training, residual blocks are skipped at random, sample by sample, deeper ones more often.

What: of the model's residual blocks (the repeated ones, as activation checkpointing finds them), number l of L gives
back its input for a sample with probability rate * l / L; else what it adds is divided by one minus that, so that the
mean stays. Evaluation uses every block. `Job(loss=stoker.Objective(…, stochastic_depth=rate))`.
Use when: a deep residual network or transformer with norms before its branches overfits.
Costs: one pass over each block's output; skipped samples are computed all the same. The draws are dropout's: the same
law under another micro-batch.
Does not combine with: models without residual blocks, blocks that normalise the sum (post-norm) or give more than one
tensor; a step of the job's own. Blocks that change the shape of their input are never skipped.
Source: G. Huang, Y. Sun, Z. Liu, D. Sedra, K. Weinberger, "Deep Networks with Stochastic Depth", arXiv:1603.09382,
equation 4 and section 3; there whole batches are skipped, and outputs scaled in evaluation. By sample, and scaled in
training, as torchvision's `stochastic_depth(mode="row")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from stoker.errors import BadJob
from stoker.stepping.activation_checkpointing import repeated_blocks

_REMEDY = "Leave Objective(stochastic_depth=…) out, or give the model's blocks the form x + f(x)."


def skip_blocks(model: nn.Module, rate: float) -> None:
    """Let the repeated blocks of `model` be skipped in training, in place; names and identity of modules stay.

    Args:
        model: the model; the `forward` of its blocks is wrapped.
        rate: probability that the last block is skipped; 0 changes nothing.

    Raises:
        BadJob: the model has no repeated blocks.
    """
    if rate == 0:
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise BadJob(f"stochastic depth skips repeated blocks, and {type(model).__name__} has none", remedy=_REMEDY)
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks, 1):
        block.forward = SkippedAtRandom(block, block.forward, names[id(block)], rate * number / len(blocks))


@dataclass(eq=False)
class SkippedAtRandom:
    """A block's forward pass that gives back its input for some samples, with probability `rate`, in training.

    Raises:
        BadJob: at the first pass: the block is no residual one.
    """

    block: nn.Module
    forward: Callable[..., Any]
    name: str
    rate: float
    is_known: bool = field(default=False, init=False)
    """Whether the block was seen to be residual."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        output = self.forward(*args, **kwargs)
        if not self.block.training or not torch.is_grad_enabled():
            return output
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(output, torch.Tensor) and isinstance(x, torch.Tensor)):
            raise BadJob(
                f"stochastic depth takes blocks from one tensor to one tensor; {self.name!r} makes a "
                f"{type(output).__name__} of a {type(x).__name__}",
                remedy=_REMEDY,
            )
        if output.shape != x.shape:
            return output
        # Not of a traced or a compiled pass, which have no values; a real one comes before either is trusted.
        if not self.is_known and type(x) is torch.Tensor and not torch.compiler.is_compiling():
            self._require_residual(x, args[1:], kwargs)
        keep = 1 - self.rate
        kept = torch.full([len(x)] + [1] * (x.dim() - 1), keep, dtype=output.dtype, device=x.device).bernoulli(p=keep)
        return x + (output - x) * (kept / keep)

    def _require_residual(self, x: torch.Tensor, more: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a block that does not give back an input without negative values when all its weights are 0."""
        is_first = next((key for key, value in kwargs.items() if value is x), None)
        positive = x.detach().abs()
        given = ((positive, *more), kwargs) if is_first is None else (more, {**kwargs, is_first: positive})
        zeros = {name: torch.zeros_like(parameter) for name, parameter in self.block.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in self.block.named_buffers()}
        wrapped = self.block.__dict__.get("forward")
        self.block.forward = self.forward
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                output = functional_call(self.block, {**zeros, **buffers}, *given)
        finally:
            self.block.forward = wrapped  # type: ignore[assignment]
        if not torch.allclose(output.to(positive.dtype), positive, rtol=1e-2, atol=1e-6):
            raise BadJob(
                f"stochastic depth skips residual blocks, and {self.name!r} ({type(self.block).__name__}) is none: "
                "with all weights 0 it does not give back its input",
                remedy=_REMEDY,
            )
        self.is_known = True
