"""Dropout with two draws from each number of the generator: PyTorch's distribution, the same under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stoker
from stoker.records import Coupling, Plan
from stoker.stepping.dropout import fewer_draws, has_dropout, kept
from stoker.stepping.precision import attention_by_products
from stoker.stepping.step import Step


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(p: float) -> None:
    """Within five standard deviations, in both halves of a number, and without a pattern between neighbours."""
    torch.manual_seed(0)
    factors = kept(torch.empty(400_001), p)
    is_kept = (factors > 0).double()
    spread = 5 * (p * (1 - p) / 200_000) ** 0.5
    assert abs(float(is_kept[::2].mean()) - (1 - p)) < spread
    assert abs(float(is_kept[1::2].mean()) - (1 - p)) < spread
    together = float((is_kept[:-1] * is_kept[1:]).mean())
    assert abs(together - (1 - p) ** 2) < 2 * spread
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


def test_the_same_elements_are_dropped_in_every_precision_and_memory_format() -> None:
    """A plan never changes what is learned: its draws do not either."""
    images = torch.ones(3, 4, 5, 5)
    forms = (images, images.to(torch.bfloat16), images.to(memory_format=torch.channels_last))
    dropped = []
    for form in forms:
        torch.manual_seed(7)
        with fewer_draws():
            dropped.append(functional.dropout(form, 0.3) == 0)
    assert torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropped[0], dropped[2])
    assert dropped[0].any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.eye(6, dtype=torch.bool)},
        {"attn_mask": torch.linspace(-1, 1, 36).view(6, 6)},
    ],
    ids=["all pairs", "causal", "mask", "mask of numbers"],
)
def test_attention_drops_the_same_weights_in_every_precision(settings: dict[str, Any]) -> None:
    """As attention by products does in bf16; without what is dropped it is PyTorch's own."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 6, 8, generator=random, requires_grad=True) for _ in range(3))
    torch.manual_seed(5)
    with fewer_draws():
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3, **settings)
    torch.manual_seed(5)
    factors = kept(torch.empty(2, 3, 6, 6), 0.3)
    eye = torch.eye(6).expand(2, 3, 6, 6)
    weights = functional.scaled_dot_product_attention(query, key, eye, **settings)
    assert torch.allclose(found, (weights * factors) @ value, atol=1e-5)
    q, k, v = (one.detach().to(torch.bfloat16).requires_grad_() for one in (query, key, value))
    torch.manual_seed(5)
    with fewer_draws(), attention_by_products():
        in_bf16 = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **settings)
    assert float((in_bf16 - found).detach().norm()) < 0.03 * float(found.detach().norm())


def test_gradients_pass_where_the_value_did() -> None:
    """And are scaled in the same way."""
    inputs = torch.ones(1000, requires_grad=True)
    with fewer_draws():
        output = functional.dropout(inputs, 0.25)
    output.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, output.detach())


@pytest.mark.parametrize(
    "settings",
    [{"training": False}, {"p": 0.0}, {"p": 1.0}, {"inplace": True}],
    ids=["evaluation", "0", "1", "inplace"],
)
def test_what_does_not_suit_is_pytorchs_own(settings: dict[str, float]) -> None:
    """The same bits."""
    torch.manual_seed(1)
    expected = functional.dropout(torch.ones(64), **settings)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with fewer_draws():
        found = functional.dropout(torch.ones(64), **settings)  # type: ignore[arg-type]
    assert torch.equal(found, expected)


def test_pytorch_is_as_before_after_the_block_even_if_it_fails() -> None:
    """Its function, not one that looks like it."""
    before = functional.dropout
    with pytest.raises(ZeroDivisionError), fewer_draws():
        _ = 1 // 0
    assert functional.dropout is before


def test_a_step_uses_it_for_a_model_that_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's serial draws of single elements are never asked for; a model without dropout is left alone."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert has_dropout(model)
    assert not has_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0)))
    job = stoker.Job(
        model=lambda: model,
        data=(torch.randn(32, 4), torch.randint(2, (32,))),
        loss="cross_entropy",
        batch=16,
        optimizer=stoker.SGD(lr=0.1),
        until=stoker.updates(2),
    )
    separable = Coupling(kind="separable", group=None, causes=(), evidence="")
    step = Step(job, Plan(device="cpu", micro_batch=16), separable)
    monkeypatch.setattr(functional, "dropout", lambda *_: pytest.fail("PyTorch's own was called"))
    inputs = (torch.randn(16, 4), torch.randint(2, (16,)))
    assert torch.isfinite(step.loss_of(inputs, 16, 0, 0).sum)
