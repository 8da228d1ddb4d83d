from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import Encoder

L, D, H, V, S, M = 2, 12, 3, 17, 9, 20
SMALL = {"layers": L, "width": D, "heads": H, "vocab": V, "context": S, "mlp": M, "dropout": 0.0}


def some_tokens(batch: int = 3) -> torch.Tensor:
    """Tokens [B, S]."""
    return torch.randint(0, V, (batch, S), generator=torch.Generator().manual_seed(1))


def test_there_are_as_many_parameters_as_published():
    """109,482,240 for BERT-base with its pooler; made without memory for them."""
    with torch.device("meta"):
        assert sum(p.numel() for p in Encoder().parameters()) == 109_482_240


def test_parameters_and_flops_are_as_stated():
    """The closed forms of the module's docstring, at sizes of one's own."""
    model = Encoder(**SMALL, classes=5)
    layers = L * (4 * D**2 + 2 * D * M + 9 * D + M)
    expected = (V + S + 2) * D + 2 * D + layers + D**2 + D + (D + 1) * 5
    assert sum(p.numel() for p in model.parameters()) == expected
    plain = Encoder(**SMALL, pooled=False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        plain(some_tokens()).sum().backward()
    assert counter.get_total_flops() == 3 * (6 * S * L * (4 * D**2 + 2 * D * M) + 12 * L * D * S**2)


def test_it_computes_what_bert_computes_from_the_same_weights():
    """Names and shapes of weights are those of Hugging Face's BERT, and so are logits and features, padded or not."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=L,
        num_attention_heads=H,
        intermediate_size=M,
        num_labels=5,
        max_position_embeddings=S,
    )
    theirs = transformers.BertForSequenceClassification(config).double().eval()
    mine = Encoder(**SMALL, classes=5).double()
    mine.load_state_dict({name.removeprefix("bert."): one for name, one in theirs.state_dict().items()})
    mask = torch.ones(3, S, dtype=torch.int64)
    mask[1, 5:] = 0
    given = {"input_ids": some_tokens(), "attention_mask": mask}
    assert torch.allclose(mine(**given), theirs(**given).logits, rtol=1e-9)
    mine.classifier = None
    assert torch.allclose(mine(**given)[0], theirs.bert(**given).last_hidden_state[0], rtol=1e-9)


def test_padding_is_seen_by_nobody():
    """Whatever stands where the mask is 0, the other tokens' features stay the same."""
    model = Encoder(**SMALL, pooled=False).double()
    mask = torch.ones(3, S, dtype=torch.int64)
    mask[:, 6:] = 0
    tokens, others = some_tokens(), some_tokens()
    others[:, 6:] = (others[:, 6:] + 1) % V
    assert torch.equal(model(tokens, mask)[:, :6], model(others, mask)[:, :6])
    assert not torch.equal(model(tokens)[:, :6], model(others)[:, :6])


def test_long_samples_and_sizes_are_refused():
    """More tokens than positions, heads that do not divide the width."""
    with pytest.raises(BadJob, match="10 tokens, the model's context is 9"):
        Encoder(**SMALL)(torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(BadJob, match="heads that divide the width"):
        Encoder(**{**SMALL, "heads": 5})
