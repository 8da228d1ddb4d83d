"""Switch Transformers as the library of that day executed them, with experts in every second block.

The published inputs are one token repeated. All tokens of a sequence then go to the same expert, which takes as many of
them as its capacity allows, and the other experts get none: so the number of tokens an expert sees is known without
running anything. The shapes are those of `gpu_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.forecast.gpu_models import heads_of


class RootMeanSquareNorm(nn.Module):
    """T5's norm, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        variance = x_BTD.pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BTD * torch.rsqrt(variance + 1e-6))


class Attention(nn.Module):
    """Attention with a bias added to its scores."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads, self.dropout = config["d_model"], config["num_heads"], config["dropout_rate"]
        inner = self.heads * config["d_kv"]
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.project = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor, others_BSD: Tensor, bias_BHTS: Tensor) -> Tensor:
        """What tokens (B, T, D) take from others (B, S, D)."""
        q, k, v = (
            heads_of(part(x), self.heads)
            for part, x in ((self.query, x_BTD), (self.key, others_BSD), (self.value, others_BSD))
        )
        scores_BHTS = torch.matmul(q, k.transpose(3, 2))
        scores_BHTS += bias_BHTS
        weights_BHTS = F.dropout(F.softmax(scores_BHTS, dim=-1), self.dropout, self.training)
        attended = torch.matmul(weights_BHTS, v).transpose(1, 2).contiguous()
        return self.project(attended.view(*x_BTD.shape[:2], -1))


class Expert(nn.Module):
    """Two linear layers and a ReLU."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.dropout = config["dropout_rate"]
        self.widen = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.narrow = nn.Linear(config["d_ff"], config["d_model"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        return self.narrow(F.dropout(F.relu(self.widen(x)), self.dropout, self.training))


class Experts(nn.Module):
    """A router that sends each token to one of several experts, each of which takes a limited number."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.capacity = config["expert_capacity"]
        self.router = nn.Linear(config["d_model"], config["num_experts"], bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config["num_experts"]))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        batch, tokens, width = x_BTD.shape
        probabilities = F.softmax(self.router(x_BTD), dim=-1)
        chosen = F.one_hot(torch.argmax(probabilities, dim=-1), len(self.experts))
        chosen = chosen * (torch.cumsum(chosen, dim=-2) <= self.capacity)
        best = torch.max(probabilities, dim=-1).values.unsqueeze(-1)
        flat = x_BTD.reshape(-1, width)
        out = x_BTD.clone().view(-1, width)
        for number, expert in enumerate(self.experts):
            # All tokens are the same: the first expert is full, the others idle. Indexing by a mask finds its places.
            taken = batch * min(tokens, self.capacity) if number == 0 else 0
            mask = chosen[:, :, number].bool().view(-1)
            places = torch.nonzero_static(mask, size=taken).view(-1)
            given = expert(flat[places]) if taken else flat[places]
            out[torch.nonzero_static(mask, size=taken).view(-1)] = given
        return best * out.view(x_BTD.shape)


class SwitchBlock(nn.Module):
    """Self-attention, attention to the encoder in a decoder, then a dense layer or experts."""

    def __init__(self, config: Mapping[str, Any], *, is_decoder: bool, is_sparse: bool) -> None:
        super().__init__()
        width, self.dropout = config["d_model"], config["dropout_rate"]
        self.norms = nn.ModuleList(RootMeanSquareNorm(width) for _ in range(3 if is_decoder else 2))
        self.attention = Attention(config)
        self.cross = Attention(config) if is_decoder else None
        self.mlp: nn.Module = Experts(config) if is_sparse else Expert(config)

    def forward(self, x_BTD: Tensor, bias: Tensor, encoded: Tensor | None, cross_bias: Tensor | None) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        normed = self.norms[0](x_BTD)
        x_BTD = x_BTD + F.dropout(self.attention(normed, normed, bias), self.dropout, self.training)
        if self.cross is not None and encoded is not None and cross_bias is not None:
            attended = self.cross(self.norms[1](x_BTD), encoded, cross_bias)
            x_BTD = x_BTD + F.dropout(attended, self.dropout, self.training)
        return x_BTD + F.dropout(self.mlp(self.norms[-1](x_BTD)), self.dropout, self.training)


class Switch(nn.Module):
    """Encoder and decoder over the same tokens, with a language-model head. `layers` is a half's number of blocks."""

    def __init__(self, config: Mapping[str, Any], layers: int) -> None:
        super().__init__()
        width, self.dropout = config["d_model"], config["dropout_rate"]
        self.heads = config["num_heads"]
        self.tokens = nn.Embedding(config["vocab_size"], width)
        buckets = config["relative_attention_num_buckets"]
        self.near, self.near_decoder = nn.Embedding(buckets, self.heads), nn.Embedding(buckets, self.heads)
        sparse = [bool(i % config["encoder_sparse_step"] == 1) for i in range(layers)]
        self.encoder = nn.ModuleList(SwitchBlock(config, is_decoder=False, is_sparse=one) for one in sparse)
        self.decoder = nn.ModuleList(SwitchBlock(config, is_decoder=True, is_sparse=one) for one in sparse)
        self.norm, self.decoder_norm = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of token numbers (B, T)."""
        tokens = ids_BT.size(1)
        place = torch.zeros(tokens, tokens, dtype=torch.int64, device=ids_BT.device)
        mask = torch.zeros(ids_BT.size(0), 1, 1, tokens, device=ids_BT.device)
        causal = torch.zeros(ids_BT.size(0), 1, tokens, tokens, device=ids_BT.device)
        bias = self.near(place).permute(2, 0, 1).unsqueeze(0) + mask
        x_BTD = F.dropout(self.tokens(ids_BT), self.dropout, self.training)
        for block in self.encoder:
            x_BTD = block(x_BTD, bias, None, None)
        encoded = F.dropout(self.norm(x_BTD), self.dropout, self.training)
        bias = self.near_decoder(place).permute(2, 0, 1).unsqueeze(0) + causal
        cross = torch.zeros(1, self.heads, tokens, tokens, device=ids_BT.device) + mask
        x_BTD = F.dropout(self.tokens(ids_BT), self.dropout, self.training)
        for block in self.decoder:
            x_BTD = block(x_BTD, bias, encoded, cross)
        return self.head(
            F.dropout(self.decoder_norm(x_BTD), self.dropout, self.training) * self.norm.weight.numel() ** -0.5
        )
