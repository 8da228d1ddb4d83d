"""The arithmetic of a plan: autocast, tf32 products, what proofs compute under, and attention in bf16 on a CPU.

On a CPU, autocast to bf16 comes with attention by batched matrix products in place of PyTorch's fused kernel.
What: `scaled_dot_product_attention` multiplies queries and keys, takes the softmax and multiplies with the values, each
in one call, and keeps the attention weights for the backward pass. Same mathematics; as close to exact gradients as the
fused kernel, whose backward pass in bf16 takes up to six times as long (docs/log.md, 2026-11-22).
Use when: training in bf16 on a CPU, with up to about a thousand keys; with more, the weights outgrow the caches.
Costs: 2 bytes for each query, key and head until the backward pass.
Does not combine with: float masks, heads that share keys, compiled code, or function
transforms. These, and passes without gradients, go to the fused kernel as before.
Source: A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.2.1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from stoker.errors import BadJob
from stoker.records import Precision
from stoker.stepping.distributed_tensors import is_spread
from stoker.stepping.dropout import draws_fewer, fewer_draws, kept
from stoker.stepping.fp8_linear import FP8_SINCE, fp8_products, has_fp8_products
from stoker.stepping.model import default_dtype
from stoker.stepping.random_draws import RandomDraws

NO_CONDITIONS = contextlib.nullcontext()
"""A context without effect, made once: it can be entered again and within itself."""

_AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}

_SINCE = {"tf32": (8, 0), "fp8": FP8_SINCE}
"""Compute capability of the first devices that multiply in a precision.

Source of tf32: NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020), table 5.
"""


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raise BadJob where the device or this PyTorch lacks this arithmetic.

    A CPU multiplies in fp8, slowly.
    """
    if precision not in _SINCE:
        return
    remedy = 'Use precision "fp32" or "bf16".'
    if precision == "fp8" and not has_fp8_products():
        raise BadJob(f"the plan's precision is fp8, and this PyTorch ({torch.__version__}) has none", remedy=remedy)
    if precision == "tf32" and device.type != "cuda":
        raise BadJob(f"the plan's precision is tf32, which a {device.type.upper()} does not have", remedy=remedy)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _SINCE[precision]:
        have, since = (".".join(map(str, pair)) for pair in (capability, _SINCE[precision]))
        raise BadJob(
            f"the plan's precision is {precision}, but {device} has compute capability {have}; {precision} came with "
            f"{since}",
            remedy=remedy,
        )


def products_in(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within the block, matrix products and convolutions of fp32 tensors on a GPU are in tf32 or, otherwise, in fp32.

    By default PyTorch lets cuDNN use tf32; under a plan of fp32 it may not. On a CPU nothing changes.
    """
    return _tf32(allowed=precision == "tf32") if device.type == "cuda" else NO_CONDITIONS


@contextlib.contextmanager
def _tf32(*, allowed: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn  # its parts are missing from the stubs
    matmul, conv, rnn = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [each.fp32_precision for each in (matmul, conv, rnn)]
    older: tuple[str, bool] | None = None  # the same state in PyTorch's older flags, which the compiler reads
    with contextlib.suppress(RuntimeError):  # a user's newer flags may contradict them
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        matmul.fp32_precision, conv.fp32_precision, rnn.fp32_precision = before


def autocasting(
    precision: Precision, device: torch.device, *, dtype: torch.dtype | None, draws: bool, drops: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass: autocast for bf16, fp8, fp16; for proofs `dtype` throughout, or no random draws.

    `drops`: the model has dropout, which takes fewer draws on a CPU.
    """
    drops = drops and draws and dtype is None and device.type == "cpu"
    if dtype is None and draws and precision not in _AUTOCAST:
        return fewer_draws() if drops else NO_CONDITIONS
    cast_to = _AUTOCAST.get(precision) if dtype is None else None
    is_fp8 = dtype is None and precision == "fp8"
    return _conditions(device, dtype, cast_to=cast_to, draws=draws, drops=drops, is_fp8=is_fp8)


@contextlib.contextmanager
def _conditions(
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    cast_to: torch.dtype | None,
    draws: bool,
    drops: bool,
    is_fp8: bool,
) -> Iterator[None]:
    with contextlib.ExitStack() as conditions:
        if is_fp8:
            conditions.enter_context(fp8_products())
        conditions.enter_context(torch.autocast(device.type, cast_to, enabled=cast_to is not None))
        if drops:
            conditions.enter_context(fewer_draws())
        if cast_to == torch.bfloat16 and device.type == "cpu":
            conditions.enter_context(attention_by_products())
        if dtype is not None:
            conditions.enter_context(default_dtype(dtype))
        if not draws:
            conditions.enter_context(RandomDraws(silenced=True))
        yield


MOST_KEYS = 1024
"""With 1024 keys products take 0.8 of the fused kernel's time, with 64 to 256 from 0.3 to 0.5."""


@contextlib.contextmanager
def attention_by_products() -> Iterator[None]:
    """Within the block, attention of bf16 tensors on a CPU is computed by products where gradients are recorded."""
    fused = functional.scaled_dot_product_attention

    def attention(*args: Any, **named: Any) -> torch.Tensor:  # a function: the compiler asks for its name
        return _attention(fused, *args, **named)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused


def _attention(  # noqa: PLR0913, PLR0917 - PyTorch's own signature
    fused: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as above
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - as above
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, which it replaces."""
    operands = (query, key, value)
    is_plain = not (enable_gqa or (dropout_p and not draws_fewer()) or (is_causal and attn_mask is not None))
    is_mask = attn_mask is None or (attn_mask.dtype == torch.bool and not is_spread(attn_mask))
    if not (is_plain and is_mask and _is_for_products(*operands)):
        return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (operand.to(torch.bfloat16) for operand in operands)  # as autocast does
    mixed: torch.Tensor = _Products.apply(query, key, value, attn_mask, is_causal, factor, dropout_p)  # type: ignore[no-untyped-call]
    return mixed


def _is_for_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether attention of these is in bf16 on a CPU, with gradients, and of a suitable shape and size."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # noqa: SLF001 - no public way
        return False
    operands = (query, key, value)
    is_cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    dtypes = {torch.bfloat16, torch.float32} if is_cast else {torch.bfloat16}
    return (
        torch.is_grad_enabled()
        and any(operand.requires_grad for operand in operands)
        and all(operand.device.type == "cpu" and operand.dtype in dtypes for operand in operands)
        and not any(operand.is_nested or is_spread(operand) for operand in operands)
        and query.dim() > 2
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and 0 < key.shape[-2] <= MOST_KEYS
        and query.numel() > 0
    )


class _Products(torch.autograd.Function):
    """dropout(softmax(query @ key.T * factor + mask)) @ value, with any number of leading dimensions.

    The mask, which broadcasts to the weights, or causality says which keys each query sees.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,  # noqa: FBT001 - arguments of a Function have no names
        factor: float,
        dropout: float,
    ) -> torch.Tensor:
        q_NTD, k_NSD, v_NSE = (_flat(operand) for operand in (query, key, value))
        added = _hidden(_causal(query, key)) if is_causal else None
        scores_NTS = _scaled(q_NTD, k_NSD.transpose(1, 2), factor, added)
        if mask is not None:
            scores_NTS.view(*query.shape[:-1], -1).add_(_hidden(mask))
        weights_NTS = torch._softmax(scores_NTS, -1, False)  # noqa: SLF001 - what its derivative goes with
        kept_NTS = kept(weights_NTS, dropout) if dropout else None
        used_NTS = weights_NTS if kept_NTS is None else weights_NTS * kept_NTS
        mixed = torch.bmm(used_NTS, v_NSE).view(*query.shape[:-1], -1)
        ctx.save_for_backward(query, key, value, mask, weights_NTS, kept_NTS)
        ctx.is_causal, ctx.factor = is_causal, factor
        return _of_those_that_see(mixed, mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, weights_NTS, kept_NTS = ctx.saved_tensors
        operands = (query, key, value)
        if torch.is_grad_enabled():  # these gradients are to be differentiated themselves
            seen = _causal(query, key) if ctx.is_causal else mask
            scores = query @ key.transpose(-1, -2) * ctx.factor
            weights = torch.softmax(scores if seen is None else scores + _hidden(seen), -1)
            weights = weights if kept_NTS is None else weights * kept_NTS.view_as(weights)
            mixed = _of_those_that_see(weights @ value, seen)
            trained = [operand for operand in operands if operand.requires_grad]
            again = iter(torch.autograd.grad(mixed, trained, grads, create_graph=True))
            return (*(next(again) if operand.requires_grad else None for operand in operands), None, None, None, None)
        q_NTD, k_NSD, v_NSE = (_flat(operand) for operand in operands)
        grad_NTE = _flat(_of_those_that_see(grads[0], mask))
        used_NTS = weights_NTS if kept_NTS is None else weights_NTS * kept_NTS
        grad_v = torch.bmm(used_NTS.transpose(1, 2), grad_NTE)
        grad_weights = torch.bmm(grad_NTE, v_NSE.transpose(1, 2))
        if kept_NTS is not None:
            grad_weights.mul_(kept_NTS)
        grad_scores = torch._softmax_backward_data(grad_weights, weights_NTS, -1, weights_NTS.dtype)  # noqa: SLF001 - as above
        grad_q = _scaled(grad_scores, k_NSD, ctx.factor)
        grad_k = _scaled(grad_scores.transpose(1, 2), q_NTD, ctx.factor)
        gradients = (grad_q, grad_k, grad_v)
        shaped = (grad.view_as(operand) for grad, operand in zip(gradients, operands, strict=True))
        return (*shaped, None, None, None, None)


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mask [queries, keys] by which each query sees the keys up to its own position."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


def _of_those_that_see(mixed: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Zeros for a query that sees no key, as from the fused kernel."""
    return mixed if seen is None else mixed * seen.any(-1, keepdim=True)


def _flat(operand: torch.Tensor) -> torch.Tensor:
    """The operand with one leading dimension."""
    return operand.reshape(math.prod(operand.shape[:-2]), *operand.shape[-2:])


def _scaled(a: torch.Tensor, b: torch.Tensor, factor: float, added: torch.Tensor | None = None) -> torch.Tensor:
    """`factor * (a @ b) + added` of batches of matrices, rounded once."""
    start = a.new_zeros(()) if added is None else added
    return torch.baddbmm(
        start.expand(a.shape[0], a.shape[1], b.shape[2]), a, b, beta=0 if added is None else 1, alpha=factor
    )


def _hidden(seen: torch.Tensor) -> torch.Tensor:
    """The term added to scores: 0 where a key is seen, else the lowest finite number, so that its weight is 0.

    Not minus infinity: a row of that has no softmax.
    """
    return torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill_(~seen, torch.finfo(torch.bfloat16).min)
