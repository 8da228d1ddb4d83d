"""Attention by products against the kernel it replaces, and against exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker.stepping import dropout, precision
from stoker.stepping.precision import MOST_KEYS, attention_by_products

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(queries: int = 12, keys: int = 12, dtype: torch.dtype = torch.bfloat16, heads: int = 3) -> Operands:
    """Two samples, heads of width 16, values of width 8."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 16), (2, heads, keys, 16), (2, heads, keys, 8))
    q, k, v = (torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def attended(inputs: Operands, **settings: Any) -> tuple[torch.Tensor, ...]:
    """What attention gives, and gradients of a weighted sum of it."""
    mixed = functional.scaled_dot_product_attention(*inputs, **settings)
    weights = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view_as(mixed)
    return mixed.detach(), *torch.autograd.grad((mixed * weights).sum(), inputs)


def error_of(found: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> list[float]:
    """Of each, relative to its norm."""
    return [float((one.double() - true).norm() / true.norm()) for one, true in zip(found, exact, strict=True)]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an element for each time that products were used."""
    times: list[int] = []
    before = precision._Products.apply
    monkeypatch.setattr(precision._Products, "apply", lambda *given: (times.append(1), before(*given))[1])
    return times


PADDING = torch.ones(2, 1, 1, 12, dtype=torch.bool)
PADDING[0, ..., 7:] = False


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({}, {"scale": 0.7}),
        ({"queries": 5}, {"is_causal": True}),
        ({"queries": 20}, {"is_causal": True}),
        ({}, {"attn_mask": PADDING}),
    ],
    ids=["all pairs", "causal", "scaled", "causal, fewer queries", "causal, more queries", "padded"],
)
def test_it_is_as_near_to_exact_attention_as_the_fused_kernel(
    shape: dict[str, int], settings: dict[str, Any], used: list[int]
) -> None:
    """The output and all three gradients, against float64 on the same operands."""
    inputs = operands(**shape)
    exact = attended(tuple(one.detach().double().requires_grad_() for one in inputs), **settings)  # type: ignore[arg-type]
    fused = attended(inputs, **settings)
    assert not used
    with attention_by_products():
        found = attended(inputs, **settings)
    assert used
    assert [one.dtype for one in found] == [torch.bfloat16] * 4
    for mine, theirs in zip(error_of(found, exact), error_of(fused, exact), strict=True):
        assert mine < max(2 * theirs, 0.01)


def test_dropout_falls_on_the_weights_in_both_directions(used: list[int]) -> None:
    """Against float64 with the same draws: what is dropped mixes nothing and gets no gradient."""
    inputs = operands()
    torch.manual_seed(3)
    with dropout.fewer_draws(), attention_by_products():
        found = attended(inputs, dropout_p=0.4)
    assert used
    torch.manual_seed(3)
    query, key, value = (one.detach().double().requires_grad_() for one in inputs)
    weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
    kept = dropout.kept(torch.empty(weights.flatten(0, -3).shape, dtype=torch.bfloat16), 0.4)
    assert 0.3 < float((kept == 0).double().mean()) < 0.5
    mixed = (weights * kept.view_as(weights)) @ value
    weighed = mixed * torch.linspace(-1, 1, mixed.numel(), dtype=torch.bfloat16).double().view_as(mixed)
    exact = (mixed.detach(), *torch.autograd.grad(weighed.sum(), (query, key, value)))
    assert all(error < 0.02 for error in error_of(found, exact))


def test_a_query_that_sees_no_key_gets_nothing_and_gives_nothing(used: list[int]) -> None:
    """As from the fused kernel; what others see is not disturbed."""
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[1, :, 4] = False
    inputs = operands()
    with attention_by_products():
        mixed, grad_q, *others = attended(inputs, attn_mask=mask)
    assert used
    assert not mixed[1, :, 4].any()
    assert not grad_q[1, :, 4].any()
    assert mixed[1, :, 5].all()
    assert all(one.isfinite().all() for one in others)


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        (operands, {"dropout_p": 0.5}),
        (operands, {"attn_mask": torch.zeros(12, 12, dtype=torch.bfloat16)}),
        (lambda: (operands(heads=6)[0], *operands(heads=3)[1:]), {"enable_gqa": True}),
        (lambda: operands(dtype=torch.float32), {}),
        (lambda: operands(keys=MOST_KEYS + 1), {}),
    ],
    ids=["dropout as PyTorch draws it", "mask of numbers", "shared keys", "fp32", "too many keys"],
)
def test_what_does_not_suit_goes_to_the_fused_kernel(
    inputs: Callable[[], Operands], settings: dict[str, Any], used: list[int]
) -> None:
    """The same bits as without."""
    torch.manual_seed(0)
    expected = attended(inputs(), **settings)
    torch.manual_seed(0)
    with attention_by_products():
        found = attended(inputs(), **settings)
    assert not used
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_gradients_the_fused_kernel_is_used(used: list[int]) -> None:
    """Nothing is kept for a backward pass that never comes."""
    with attention_by_products(), torch.no_grad():
        functional.scaled_dot_product_attention(*operands())
    assert not used


def test_under_autocast_fp32_operands_are_cast(used: list[int]) -> None:
    """As autocast does for the fused kernel; gradients come back in fp32."""
    inputs = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), attention_by_products():
        mixed, *grads = attended(inputs)
    assert used
    assert mixed.dtype == torch.bfloat16
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


def test_pytorch_is_as_before_after_the_block_even_if_it_fails() -> None:
    """Its function, not one that looks like it."""
    before = functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), attention_by_products():
        _ = 1 // 0
    assert functional.scaled_dot_product_attention is before


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"attn_mask": PADDING}], ids=["all", "causal", "padded"])
def test_gradients_can_be_differentiated(settings: dict[str, Any]) -> None:
    """A penalty on a gradient, for which PyTorch's fused kernel has no derivative, against ordinary operations."""

    def penalty_gradients(inputs: Operands) -> tuple[torch.Tensor, ...]:
        query, key, value = inputs
        mixed = functional.scaled_dot_product_attention(query, key.detach(), value, **settings)
        (grad,) = torch.autograd.grad((mixed * mixed).sum(), query, create_graph=True)
        return torch.autograd.grad((grad * grad).sum(), (query, value))

    inputs = operands()
    with attention_by_products():
        found = penalty_gradients(inputs)
    exact: Operands = tuple(one.detach().double().requires_grad_() for one in inputs)  # type: ignore[assignment]
    with sdpa_kernel(SDPBackend.MATH):
        assert max(error_of(found, penalty_gradients(exact))) < 0.05
