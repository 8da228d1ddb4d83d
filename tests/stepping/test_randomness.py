from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.stepping.random_draws import RandomDraws

X = torch.linspace(-2, 2, 32).view(4, 8)

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "bernoulli_": lambda: F.dropout(X, 0.3),
    "rand": lambda: torch.rand(3),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(3),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(2, 9, (3,)),
    "randperm": lambda: torch.randperm(8),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 3, replacement=True),
    "bernoulli": lambda: torch.bernoulli(torch.full((20,), 0.4)),
    "exponential_": lambda: F.gumbel_softmax(X),
    "normal_": lambda: torch.empty(3).normal_(1.0, 2.0),
    "uniform_": lambda: torch.empty(3).uniform_(2.0, 4.0),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(3, 9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_seen_and_silenced(name: str) -> None:
    """Every usual draw is named, and gives the same values under any seed once silenced."""
    with RandomDraws(silenced=True) as draws:
        torch.manual_seed(0)
        one = DRAWS[name]()
        torch.manual_seed(1)
        two = DRAWS[name]()
    assert torch.equal(one, two)
    assert draws.drawn == {name}
    torch.manual_seed(0)
    one = DRAWS[name]()
    torch.manual_seed(1)
    assert not torch.equal(one, DRAWS[name]())


def test_silenced_dropout_drops_nothing() -> None:
    """By module, by function, inside attention and inside a recurrent layer: as in evaluation."""
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
    sequence = X[None]
    passes: list[Callable[[], torch.Tensor]] = [
        lambda: attention(sequence, sequence, sequence, need_weights=False)[0],
        lambda: recurrent(sequence)[0],
    ]
    with RandomDraws(silenced=True):
        assert torch.equal(F.dropout(X, 0.5), X)
        assert torch.equal(nn.Dropout1d(0.5)(X), X)
        in_training = [one() for one in passes]
        weighted = F.scaled_dot_product_attention(sequence, sequence, sequence, dropout_p=0.5)
    torch.testing.assert_close(weighted, F.scaled_dot_product_attention(sequence, sequence, sequence))
    attention.eval()
    recurrent.eval()
    for found, one in zip(in_training, passes, strict=True):
        torch.testing.assert_close(found, one())


def test_silenced_draws_are_averages() -> None:
    """A draw is replaced by what it is on average, in its own shape and type."""
    with RandomDraws(silenced=True):
        assert torch.rand(2).tolist() == [0.5, 0.5]
        assert torch.randn(2, dtype=torch.float64).tolist() == [0.0, 0.0]
        assert torch.empty(2).normal_(3.0, 1.0).tolist() == [3.0, 3.0]
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]
        assert torch.randint(2, 9, (2,)).tolist() == [2, 2]


def test_gradients_flow_through_silenced_draws() -> None:
    """The backward pass of silenced dropout is that of the identity."""
    x = X.clone().requires_grad_()
    with RandomDraws(silenced=True):
        total = F.dropout(x, 0.5).sum()
    total.backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_attention_without_dropout_draws_nothing() -> None:
    """Operations that could draw, but are set to drop nothing, are not reported."""
    with RandomDraws() as draws:
        F.scaled_dot_product_attention(X[None], X[None], X[None], is_causal=True)
    assert draws.drawn == set()


def test_dropout_share_of_a_fused_operation_is_silenced() -> None:
    """Where attention drops inside one operation, its share is set to zero; this one refuses any other on a CPU."""
    query = X.view(1, 1, 4, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with RandomDraws(silenced=True) as draws:
        found = attention(query, query, query, 0.5)[0]
    assert torch.equal(found, attention(query, query, query, 0.0)[0])
    assert draws.drawn == {"_scaled_dot_product_flash_attention_for_cpu"}


def test_coarsest_rounding_is_noted() -> None:
    """One fp32 result among float64 ones shows that a computation is no finer than fp32."""
    x = X.double()
    with RandomDraws() as draws:
        x @ x.T
        assert draws.coarsest == torch.finfo(torch.float64).eps
        x.float().double()
    assert draws.coarsest == torch.finfo(torch.float32).eps
