"""GPT: a decoder-only transformer, LayerNorm before attention and MLP, learned positions, GPT-2's initialisation.

Shapes: B samples, T tokens of context, V vocabulary, D width, H heads, E = D / H, L layers.
Parameters: V*D + T*D + L*(12*D^2 + 13*D) + 2*D, and V*D more unless the output layer is tied to the token embedding.
FLOPs to train on one sample of T tokens, the matrix products alone: 6*T*(12*L*D^2 + V*D) + 12*L*D*T^2, where the second
term counts all pairs of tokens; a kernel that skips the masked half does 6*L*D*T^2. A multiply and an add count as two;
the backward pass costs twice the forward one.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3 (LayerNorm before
each block and at the end; projections into the residual stream scaled by 1/sqrt(2*L)), and its released code (normal
initialisation of deviation 0.02, GELU by tanh). There output and token embedding are always tied; here if asked for.
FLOPs as in A. Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob

_INIT_STD = 0.02


class GPT(nn.Module):
    """tokens_BT (int64, 0..V-1) to logits_BTV; logit t sees tokens 0..t and no later one.

    Args:
        layers: L.
        width: D.
        heads: H, a divisor of D.
        context: T at most.
        vocab: V; 256 for bytes.
        dropout: share of embeddings, attention weights and residual updates set to zero in training.
        tied: let the output layer share the token embedding's weights.

    Raises:
        BadJob: a size is not positive, `heads` does not divide `width`, or `dropout` is not in [0, 1).
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        context: int = 256,
        vocab: int = 256,
        dropout: float = 0.0,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if min(layers, width, heads, context, vocab) < 1:
            raise BadJob(
                f"GPT takes sizes >= 1, got layers {layers}, width {width}, heads {heads}, context {context}, "
                f"vocab {vocab}"
            )
        if width % heads:
            divisors = ", ".join(str(count) for count in range(1, width + 1) if width % count == 0)
            raise BadJob(
                f"GPT's heads must divide its width: {heads} does not divide {width}",
                remedy=f"Give heads of {divisors}.",
            )
        if not 0 <= dropout < 1:
            raise BadJob(f"GPT takes 0 <= dropout < 1, got {dropout}")
        self.context = context
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(".out")
                nn.init.normal_(module.weight, std=_INIT_STD / math.sqrt(2 * layers) if into_residual else _INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the token after each of tokens [B, T].

        Raises:
            BadJob: there are more tokens than the context holds.
        """
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.context:
            raise BadJob(
                f"samples have {num_tokens} tokens, the model's context is {self.context}",
                remedy=f"Give GPT(context={num_tokens}), or data in windows of {self.context}.",
            )
        x_BTD: torch.Tensor = self.dropout(self.tokens(tokens_BT) + self.positions.weight[:num_tokens])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class _Block(nn.Module):
    """Attention and MLP, each added to its input, each seeing it normalised."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = _FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        change_BTD: torch.Tensor = self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD + change_BTD


class _CausalAttention(nn.Module):
    """Multi-head attention of each token to itself and those before it; of as many heads as its layers hold here."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        qkv_BT3HE = self.qkv(x_BTD).view(B, T, 3, -1, self.head_dim)
        q_BHTE, k_BHTE, v_BHTE = qkv_BT3HE.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, dropout_p=dropout, is_causal=True)
        out_BTD: torch.Tensor = self.out(mixed_BHTE.transpose(1, 2).reshape(B, T, -1))
        return out_BTD


class _FeedForward(nn.Module):
    """Two linear layers, four times the width between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = self.out(F.gelu(self.into(x_BTD), approximate="tanh"))
        return out_BTD
