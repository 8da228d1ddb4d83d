"""bf16 weights: a model that computes in bf16 throughout, from parameters whose masters are fp32 somewhere else.

What: under shards, parameters are gathered in bf16 from fp32 masters and their gradients summed in fp32, by FSDP2's
`MixedPrecisionPolicy`. Within the model's forward pass autocast is off: floating-point inputs of its repeated blocks,
and of each module with parameters of its own, are cast to bf16, so that residual stream and norms are bf16 as well.
Around the model autocast stays on: losses are computed in fp32.
Use when: precision bf16 with shards; most published runs of large models are such a program. Costs: nothing against
autocast, which gathers twice the bytes and keeps a bf16 copy of each weight; but norms and the residual stream are
rounded to bf16. Does not combine with: models that mix bf16 with fp32 tensors of their own in one product or attention,
which autocast casts: they are refused, with their line.
Source: W. Liang et al., "TorchTitan", arXiv:2410.06511, section 2.1; P. Micikevicius et al., "Mixed Precision
Training", arXiv:1710.03740, section 3.1 (masters).
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob, first_line
from stoker.loading.fields import map_tensors
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.stepping.torch_compile import users_line

_MIXED = re.compile(
    r"same dtype|same data type|scalar type|should be the same|must match|Attempting to use (float|c10)"
)
"""Texts of PyTorch's errors about operands of several dtypes, of real tensors and of fake ones."""


class Bf16Weights:
    """A model whose fp32 parameters are bf16 whenever it is called; made before they are replaced.

    Changes `model` in place: hooks on its modules, and its own `forward`. `is_on` may be switched between passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_on = True
        blocks = set(repeated_blocks(model))
        for module in model.modules():
            has_own = any(p.dtype == torch.float32 for p in module.parameters(recurse=False))
            if module is not model and (has_own or module in blocks):
                module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        model.forward = functools.wraps(model.forward)(functools.partial(self._forward, model, model.forward))

    def _cast_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return (map_tensors(args, _cast), map_tensors(kwargs, _cast)) if self.is_on else None

    def _forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Raises:
            BadJob: it mixes dtypes.
        """
        if not self.is_on:
            return forward(*args, **kwargs)
        try:
            device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
            with torch.autocast(device_type, enabled=False):
                return forward(*args, **kwargs)
        except RuntimeError as problem:
            if isinstance(problem, torch.OutOfMemoryError) or not _MIXED.search(str(problem)):
                raise
            line = users_line(traceback.extract_tb(problem.__traceback__))
            where = f" at {Path(line.filename).name}:{line.lineno} (`{line.line}`)" if line is not None else ""
            raise BadJob(
                f"under shards, precision bf16 computes in bf16 throughout, and {type(model).__name__} mixes it with "
                f"another dtype{where}: {first_line(problem)}",
                remedy="Cast to the dtype of the other operand there (`y.to(x.dtype)`), or use a plan of precision "
                "fp32 or tf32.",
            ) from problem


def is_cast(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is one that casts its inputs for `Bf16Weights`."""
    return isinstance(getattr(hook, "__self__", None), Bf16Weights)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
