"""The language models whose times were published, as the library of that day executed them with eager attention.

Their authors ran transformers 4.36 on PyTorch 2.1, whose eager attention has other element-wise operations than later
releases (a mask by `where`, a maximum after adding it, no fused attention); these passes over the scores are a tenth of
the time, so the architectures are written down here as they were then. Only shapes matter: nothing is initialised.
In training mode dropout is on. Inference of an encoder has a classifier of two classes, training its language-model and
next-sentence heads, as in the published harness.

Legend of shapes: B batch, T tokens, S keys, H heads, D width, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """A linear layer stored as (inputs, outputs), as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, inputs) to (B, T, outputs)."""
        flat = torch.addmm(self.bias, x_BTD.view(-1, x_BTD.size(-1)), self.weight)
        return flat.view(*x_BTD.shape[:-1], -1)


def heads_of(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, D) as (B, H, T, E), a view."""
    return x_BTD.view(*x_BTD.shape[:2], heads, -1).transpose(1, 2)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GPT-2's GELU, operation by operation."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2Block(nn.Module):
    """A decoder block: layer norm first, one projection for query, key and value, causal mask by `where`."""

    def __init__(self, width: int, heads: int, positions: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.register_buffer("causal", torch.ones(1, 1, positions, positions, dtype=torch.bool))
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = Projection(width, 3 * width), Projection(width, width)
        self.widen, self.narrow = Projection(width, 4 * width), Projection(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        attended = self.attend(self.before_attention(x_BTD))
        x_BTD = F.dropout(self.project(attended), self.dropout, self.training) + x_BTD
        wide = gelu_by_tanh(self.widen(self.before_mlp(x_BTD)))
        return x_BTD + F.dropout(self.narrow(wide), self.dropout, self.training)

    def attend(self, x_BTD: Tensor) -> Tensor:
        """Causal attention of all heads, before its output projection."""
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x_BTD).split(x_BTD.size(-1), dim=2))
        scores_BHTS = torch.matmul(q, k.transpose(-1, -2))
        scores_BHTS = scores_BHTS / torch.full([], v.size(-1) ** 0.5, device=v.device)
        tokens = q.size(-2)
        lowest = torch.full([], torch.finfo(scores_BHTS.dtype).min, device=v.device)
        scores_BHTS = torch.where(self.causal[:, :, :tokens, :tokens], scores_BHTS, lowest)
        weights_BHTS = F.dropout(F.softmax(scores_BHTS, dim=-1), self.dropout, self.training)
        return torch.matmul(weights_BHTS, v).transpose(1, 2).contiguous().view(x_BTD.shape)


class GPT2(nn.Module):
    """GPT-2 and the GPT-3 shapes: a decoder with a language-model head."""

    def __init__(self, config: Mapping[str, Any], layers: int) -> None:
        super().__init__()
        width, self.dropout = config["n_embd"], config["embd_pdrop"]
        self.tokens, self.positions = nn.Embedding(config["vocab_size"], width), nn.Embedding(config["n_ctx"], width)
        make = (width, config["n_head"], config["n_ctx"], config["attn_pdrop"])
        self.blocks = nn.ModuleList(GPT2Block(*make) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of token numbers (B, T)."""
        positions = torch.arange(ids_BT.size(1), device=ids_BT.device).unsqueeze(0)
        x_BTD = F.dropout(self.tokens(ids_BT) + self.positions(positions), self.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class OPTBlock(nn.Module):
    """A decoder block with three projections, a mask that is added, and a maximum against minus infinity."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads, self.dropout = config["num_attention_heads"], config["dropout"]
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, config["ffn_dim"]), nn.Linear(config["ffn_dim"], width)

    def forward(self, x_BTD: Tensor, mask_B1TS: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        attended = self.project(self.attend(self.before_attention(x_BTD), mask_B1TS))
        x_BTD = x_BTD + F.dropout(attended, self.dropout, self.training)
        flat = x_BTD.reshape(-1, x_BTD.size(-1))
        narrow = self.narrow(F.relu(self.widen(self.before_mlp(flat))))
        return (flat + F.dropout(narrow, self.dropout, self.training)).view(x_BTD.shape)

    def attend(self, x_BTD: Tensor, mask_B1TS: Tensor) -> Tensor:
        """Attention of all heads, before its output projection."""
        batch, tokens, width = x_BTD.shape
        q, k, v = (
            heads_of(part, self.heads).contiguous().view(batch * self.heads, tokens, -1)
            for part in (self.query(x_BTD) * (width // self.heads) ** -0.5, self.key(x_BTD), self.value(x_BTD))
        )
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, self.heads, tokens, tokens) + mask_B1TS
        scores = torch.max(scores, torch.full([], torch.finfo(scores.dtype).min, device=scores.device))
        weights = F.dropout(F.softmax(scores.view(batch * self.heads, tokens, tokens), dim=-1), 0.0, self.training)
        attended = torch.bmm(weights, v).view(batch, self.heads, tokens, -1)
        return attended.transpose(1, 2).reshape(batch, tokens, width)


class OPT(nn.Module):
    """OPT with a language-model head tied to its embedding."""

    def __init__(self, config: Mapping[str, Any], layers: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.tokens = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"] + 2, width)
        self.blocks = nn.ModuleList(OPTBlock(config) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of token numbers (B, T)."""
        batch, tokens = ids_BT.shape
        positions = torch.cumsum(torch.ones_like(ids_BT), dim=1) + 1
        mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min, device=ids_BT.device).triu(1)
        mask_B1TS = mask.expand(batch, 1, tokens, tokens)
        x_BTD = self.tokens(ids_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_B1TS)
        return self.head(self.norm(x_BTD)).contiguous()


class BertBlock(nn.Module):
    """An encoder block: layer norm after each half."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, wide = config["hidden_size"], config["intermediate_size"]
        self.heads, self.dropout = config["num_attention_heads"], config["hidden_dropout_prob"]
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.after_attention, self.after_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x_BTD: Tensor, mask_B11S: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        attended = F.dropout(self.project(self.attend(x_BTD, mask_B11S)), self.dropout, self.training)
        x_BTD = self.after_attention(attended + x_BTD)
        narrow = F.dropout(self.narrow(F.gelu(self.widen(x_BTD))), self.dropout, self.training)
        return self.after_mlp(narrow + x_BTD)

    def attend(self, x_BTD: Tensor, mask_B11S: Tensor) -> Tensor:
        """Attention of all heads, before its output projection."""
        q, k, v = (heads_of(part(x_BTD), self.heads) for part in (self.query, self.key, self.value))
        scores_BHTS = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + mask_B11S
        weights_BHTS = F.dropout(F.softmax(scores_BHTS, dim=-1), self.dropout, self.training)
        return torch.matmul(weights_BHTS, v).transpose(1, 2).contiguous().view(x_BTD.shape)


class Bert(nn.Module):
    """BERT: a classifier of two classes where it infers, the heads of pre-training where it is trained."""

    def __init__(self, config: Mapping[str, Any], layers: int, *, is_training: bool) -> None:
        super().__init__()
        width, self.dropout = config["hidden_size"], config["hidden_dropout_prob"]
        self.is_pretraining = is_training
        self.tokens = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.kinds = nn.Embedding(config["type_vocab_size"], width)
        self.norm, self.pooler, self.classifier = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(layers))
        if is_training:
            self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.head = nn.Linear(width, config["vocab_size"])
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, V) in training, (B, 2) in inference, of token numbers (B, T)."""
        positions = torch.arange(ids_BT.size(1), device=ids_BT.device).unsqueeze(0)
        mask_B11S = (1.0 - torch.ones_like(ids_BT)[:, None, None, :].to(torch.float32)) * -3.4e38
        x_BTD = self.tokens(ids_BT) + self.kinds(torch.zeros_like(ids_BT)) + self.positions(positions)
        x_BTD = F.dropout(self.norm(x_BTD), self.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_B11S)
        pooled = torch.tanh(self.pooler(x_BTD[:, 0]))
        if not self.is_pretraining:
            return self.classifier(F.dropout(pooled, self.dropout, self.training))
        self.classifier(pooled)
        return self.head(self.head_norm(F.gelu(self.transform(x_BTD))))
