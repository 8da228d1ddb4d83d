from __future__ import annotations

import pytest
import torch

from stoker.errors import BadJob
from stoker.zoo import RecurrentClassifier, RecurrentLM

L, D, V, K = 2, 6, 11, 3
GATES = {"lstm": 4, "gru": 3}
every_cell = pytest.mark.parametrize("cell", GATES)


def some_tokens(batch: int = 3, length: int = 7) -> torch.Tensor:
    """Tokens [B, T]."""
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(1))


@every_cell
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_the_language_model_are_as_stated(cell, tied):
    """The closed form of the module's docstring; tied, the output layer adds its bias alone."""
    model = RecurrentLM(cell, layers=L, width=D, vocab=V, tied=tied)
    expected = V * D + L * GATES[cell] * (2 * D**2 + 2 * D) + (V if tied else (D + 1) * V)
    assert sum(p.numel() for p in model.parameters()) == expected


@every_cell
@pytest.mark.parametrize("ways", [1, 2])
def test_parameters_of_the_classifier_are_as_stated(cell, ways):
    """The closed form of the module's docstring, read in one direction or in both."""
    model = RecurrentClassifier(cell, layers=L, width=D, vocab=V, classes=K, both_ways=ways == 2)
    gates = GATES[cell]
    first, others = ways * gates * (2 * D**2 + 2 * D), (L - 1) * ways * gates * ((ways + 1) * D**2 + 2 * D)
    assert sum(p.numel() for p in model.parameters()) == V * D + first + others + (ways * D + 1) * K


@every_cell
def test_a_later_token_never_moves_an_earlier_logit(cell):
    """Changing the last token changes its logits alone."""
    model, tokens = RecurrentLM(cell, layers=L, width=D, vocab=V).double(), some_tokens()
    before = model(tokens)
    tokens[:, -1] = (tokens[:, -1] + 1) % V
    moved = (model(tokens) - before).abs().amax(dim=(0, 2))
    assert moved[:-1].eq(0).all()
    assert moved[-1] > 0


@every_cell
def test_padding_does_not_count(cell):
    """Samples padded to another length have the same logits, read in one direction."""
    model, tokens = RecurrentClassifier(cell, layers=L, width=D, vocab=V, classes=K).double(), some_tokens()
    padded = torch.cat([tokens, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    mask = torch.cat([torch.ones(3, 7), torch.zeros(3, 4)], dim=1)
    assert torch.allclose(model(padded, mask), model(tokens), rtol=1e-12)
    assert not torch.allclose(model(padded), model(tokens), rtol=1e-3)


def test_sizes_that_make_no_model_are_refused():
    """An unknown cell, a width of nothing, a dropout of all."""
    for given in ({"cell": "rnn"}, {"width": 0}, {"dropout": 1.0}):
        with pytest.raises(BadJob, match="wanted cell"):
            RecurrentLM(**given)
