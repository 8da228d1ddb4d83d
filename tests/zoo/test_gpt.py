from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import GPT

L, D, H, T, V = 2, 24, 3, 10, 17


def small(**settings) -> GPT:
    """A model of two layers, the same at every call."""
    torch.manual_seed(0)
    return GPT(layers=L, width=D, heads=H, context=T, vocab=V, **settings)


def some_tokens(batch: int = 3) -> torch.Tensor:
    """Tokens [B, T]."""
    return torch.randint(0, V, (batch, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_as_stated(tied):
    """The closed form of the module's docstring; tied, the output layer adds none."""
    expected = V * D + T * D + L * (12 * D**2 + 13 * D) + 2 * D + (0 if tied else V * D)
    assert sum(p.numel() for p in small(tied=tied).parameters()) == expected


def test_flops_are_as_stated():
    """The closed form equals what PyTorch counts in a training step when attention is written as matrix products."""
    model = small()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(some_tokens(2)).sum().backward()
    assert counter.get_total_flops() == 2 * (6 * T * (12 * L * D**2 + V * D) + 12 * L * D * T**2)


@pytest.mark.parametrize("length", [1, 4, T])
def test_every_token_has_logits(length):
    """Samples shorter than the context pass as well."""
    assert small()(some_tokens()[:, :length]).shape == (3, length, V)


def test_a_later_token_never_moves_an_earlier_logit():
    """Changing token t changes logits from t on, and none before."""
    model = small().double()
    tokens = some_tokens()
    before = model(tokens)
    for at in range(T):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % V
        moved = (model(changed) - before).abs().amax(dim=(0, 2))
        assert moved[:at].eq(0).all() if at else True
        assert moved[at:].gt(0).all()


def test_position_matters():
    """The same token at another place gives other logits."""
    logits = small()(torch.zeros(1, T, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_tied_weights_are_one_tensor_that_learns_from_both_uses():
    """Output layer and embedding are the same parameter, also after conversion, and stay so in training."""
    model = small(tied=True).double()
    assert model.head.weight is model.tokens.weight
    model(some_tokens()).sum().backward()
    unseen = [token for token in range(V) if token not in some_tokens()]
    assert model.tokens.weight.grad[unseen].abs().sum() > 0 or not unseen
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(model.head.weight, model.tokens.weight)


def test_initialisation_is_gpt2s():
    """Weights have deviation 0.02, those into the residual stream 0.02 / sqrt(2 L); biases are zero."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=96, heads=4)
    for name, parameter in model.state_dict().items():
        if name.endswith(".out.weight"):
            assert float(parameter.std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.05), name
        elif parameter.dim() == 2:
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.05), name
        else:
            assert parameter.unique().tolist() == [1.0 if name.endswith("norm.weight") else 0.0], name


def test_the_first_loss_is_that_of_guessing():
    """Untrained, cross-entropy is ln(V) to within a few per cent."""
    logits = small()(some_tokens())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some_tokens().flatten())
    assert loss.item() == pytest.approx(math.log(V), rel=0.05)


def test_dropout_acts_in_training_only():
    """In evaluation the output is a function of the tokens alone."""
    model = small(dropout=0.3)
    tokens = some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_more_tokens_than_the_context_are_told():
    """Both numbers, and what to give."""
    with pytest.raises(BadJob, match=f"samples have 11 tokens, the model's context is {T}"):
        small()(torch.zeros(1, 11, dtype=torch.int64))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [({"layers": 0}, "sizes >= 1"), ({"width": 10, "heads": 4}, "4 does not divide 10"), ({"dropout": 1.5}, "got 1.5")],
)
def test_sizes_that_make_no_model_are_refused(sizes, complaint):
    """Each is reported with its numbers."""
    with pytest.raises(BadJob, match=complaint):
        GPT(**sizes)
