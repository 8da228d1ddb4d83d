"""Updates of weights: fused and foreach AdamW and SGD over tensors of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from stoker.profiling.operations.call import Arguments, Call, Pool, aten

_ADAM = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
_SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 1e-9, "dampening": 0.0, "nesterov": False, "maximize": False}
_FOREACH: tuple[tuple[OpOverload, int, tuple[object, ...]], ...] = (
    (aten("_foreach_add_", "List"), 2, ()),
    (aten("_foreach_mul_", "Scalar"), 1, (1.0,)),
    (aten("_foreach_lerp_", "Scalar"), 2, (0.1,)),
    (aten("_foreach_addcdiv_", "Scalar"), 3, ()),
    (aten("_foreach_sqrt"), 1, ()),
)


def optimizer_calls(sizes: Sequence[tuple[int, int]]) -> list[Call]:
    """For each (number of tensors, elements of each): fused AdamW and SGD, and what foreach variants are made of."""
    calls = []
    for num, numel in sizes:
        calls += [_adamw(num, numel), _sgd(num, numel)]
        calls += [_foreach(*row, num, numel) for row in _FOREACH]
    return calls


def _positive(pool: Pool, num: int, numel: int) -> list[torch.Tensor]:
    """Own memory: these are written, and roots are taken of them."""
    return [torch.ones(numel, device=pool.device) for _ in range(num)]


def _adamw(num: int, numel: int) -> Call:
    def arguments(pool: Pool) -> Arguments:
        tensors = [_positive(pool, num, numel) for _ in range(4)]
        steps = [torch.ones((), device=pool.device) for _ in range(num)]
        return (*tensors, [], steps), dict(_ADAM)

    return Call(aten("_fused_adamw_"), arguments)


def _sgd(num: int, numel: int) -> Call:
    def arguments(pool: Pool) -> Arguments:
        return tuple(_positive(pool, num, numel) for _ in range(3)), {**_SGD, "is_first_step": False}

    return Call(aten("_fused_sgd_"), arguments)


def _foreach(function: OpOverload, inputs: int, settings: tuple[object, ...], num: int, numel: int) -> Call:
    def arguments(pool: Pool) -> Arguments:
        return (*(_positive(pool, num, numel) for _ in range(inputs)), *settings), {}

    return Call(function, arguments)
