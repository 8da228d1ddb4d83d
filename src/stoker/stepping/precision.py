"""The arithmetic of a plan: autocast, tf32 products, and what proofs compute under."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.records import Precision
from stoker.stepping.bf16_attention import attention_by_products
from stoker.stepping.model import default_dtype
from stoker.stepping.random_draws import RandomDraws

_TF32_SINCE = (8, 0)
"""Compute capability of the first devices that multiply in tf32.

Source: NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020), table 5.
"""


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raise BadJob where the device has no such arithmetic and would compute in another one, unseen."""
    if precision != "tf32":
        return
    remedy = 'Use precision "fp32" or "bf16".'
    if device.type != "cuda":
        raise BadJob(f"the plan's precision is tf32, which a {device.type.upper()} does not have", remedy=remedy)
    capability = torch.cuda.get_device_capability(device)
    if capability < _TF32_SINCE:
        have, since = (".".join(map(str, pair)) for pair in (capability, _TF32_SINCE))
        raise BadJob(
            f"the plan's precision is tf32, but {device} has compute capability {have}; tf32 came with {since}",
            remedy=remedy,
        )


def products_in(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within the block, matrix products and convolutions of fp32 tensors on a GPU are in tf32 or, otherwise, in fp32.

    PyTorch lets cuDNN use tf32 unless told not to; under a plan of fp32 it may not. On a CPU nothing changes.
    """
    return _tf32(allowed=precision == "tf32") if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _tf32(*, allowed: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn  # its parts are missing from the stubs
    matmul, conv, rnn = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [each.fp32_precision for each in (matmul, conv, rnn)]
    older = _older_flags()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        matmul.fp32_precision, conv.fp32_precision, rnn.fp32_precision = before


def _older_flags() -> tuple[str, bool] | None:
    """The same state in PyTorch's older flags, which the compiler reads; None where a user's newer ones contradict."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def autocasting(
    precision: Precision, device: torch.device, *, dtype: torch.dtype | None, draws: bool
) -> contextlib.AbstractContextManager[Any]:
    """What a forward pass runs under: autocast for bf16; for proofs `dtype` throughout, or no random draws."""
    if dtype is not None or not draws:
        return _proof(device, dtype, is_bf16=precision == "bf16" and dtype is None, draws=draws)
    return _bf16(device) if precision == "bf16" else contextlib.nullcontext()


def _bf16(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return _bf16_on_cpu() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


@contextlib.contextmanager
def _bf16_on_cpu() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), attention_by_products():
        yield


@contextlib.contextmanager
def _proof(device: torch.device, dtype: torch.dtype | None, *, is_bf16: bool, draws: bool) -> Iterator[None]:
    with contextlib.ExitStack() as conditions:
        conditions.enter_context(_bf16(device) if is_bf16 else torch.autocast(device.type, enabled=False))
        if dtype is not None:
            conditions.enter_context(default_dtype(dtype))
        if not draws:
            conditions.enter_context(RandomDraws(silenced=True))
        yield
