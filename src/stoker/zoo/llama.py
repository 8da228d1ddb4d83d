"""Llama: a decoder-only transformer with rotary positions, grouped-query attention, RMSNorm and SwiGLU.

Shapes: B samples, T tokens, V vocabulary, D width, H query heads, K key and value heads, E = D / H, F hidden, L layers.
Parameters: 2*V*D + L*(2*D^2 + 2*D*K*E + 3*D*F + 2*D) + D; none has a bias, the output layer is not tied.
FLOPs to train on one sample of T tokens, the matrix products alone: 6*T*(L*(2*D^2 + 2*D*K*E + 3*D*F) + V*D) +
12*L*D*T^2, where the last term counts all pairs of tokens. A multiply and an add count as two.

Source: A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.2 and table 3 (the sizes of 8B,
rotary base 500,000). Rotation: J. Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2; which components form a pair
is our choice (the two halves, as in the published checkpoints' conversions), initialisation GPT-2's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob

_INIT_STD = 0.02
_NORM_EPS = 1e-5


class Llama(nn.Module):
    """tokens_BT (int64, 0..V-1) to logits_BTV; logit t sees tokens 0..t and no later one. Defaults: Llama-3-8B's.

    Args:
        layers: L.
        width: D.
        heads: H, a divisor of D; D / H is even.
        kv_heads: K, a divisor of H.
        hidden: F.
        vocab: V.
        context: T at most; angles are computed for so many positions.
        theta: the base of the rotation's wavelengths.

    Raises:
        BadJob: a size is not positive, or one does not divide another as it has to.
    """

    def __init__(
        self,
        layers: int = 32,
        width: int = 4096,
        heads: int = 32,
        kv_heads: int = 8,
        hidden: int = 14336,
        vocab: int = 128256,
        context: int = 8192,
        theta: float = 500_000.0,
    ) -> None:
        super().__init__()
        if min(layers, width, heads, kv_heads, hidden, vocab, context) < 1:
            raise BadJob("Llama takes sizes >= 1: layers, width, heads, kv_heads, hidden, vocab and context")
        if width % heads or (width // heads) % 2:
            raise BadJob(
                f"{heads} heads over a width of {width} have {width / heads:g} components each, wanted an even number",
                remedy="Give a width that is an even multiple of heads.",
            )
        if heads % kv_heads:
            raise BadJob(
                f"{kv_heads} key/value heads do not divide {heads} query heads",
                remedy="Give kv_heads that divide heads.",
            )
        self.context = context
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=_NORM_EPS)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("angles_TE", rotation_angles(context, width // heads, theta), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the token after each of tokens [B, T].

        Raises:
            BadJob: there are more tokens than the context holds.
        """
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.context:
            raise BadJob(
                f"samples have {num_tokens} tokens, the model's context is {self.context}",
                remedy=f"Give Llama(context={num_tokens}), or data in windows of {self.context}.",
            )
        x_BTD: torch.Tensor = self.tokens(tokens_BT)
        angles_TE = self.angles_TE[:num_tokens]  # type: ignore[index]  # a buffer
        cos_TE, sin_TE = angles_TE.cos().to(x_BTD.dtype), angles_TE.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class _Block(nn.Module):
    """Attention and gated MLP, each added to its input, each seeing it normalised."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=_NORM_EPS)
        self.attention = _GroupedQueryAttention(width, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=_NORM_EPS)
        self.mlp = _SwiGLU(width, hidden)

    def forward(self, x_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        change_BTD: torch.Tensor = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + change_BTD


class _GroupedQueryAttention(nn.Module):
    """Attention of each token to itself and those before it; H / K query heads share a key and value.

    H and K are as many as its layers hold here: a tensor-parallel layout divides them among processes.

    With K < H in fp32 on a GPU, PyTorch up to 2.13 writes attention out, with scores [B, H, T, T]: its kernel for fp32
    takes as many keys as queries. In half precision flash attention takes fewer.
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q_BHTE, k_BKTE, v_BKTE = (
            project(x_BTD).view(B, T, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q_BHTE, k_BKTE = rotated(q_BHTE, cos_TE, sin_TE), rotated(k_BKTE, cos_TE, sin_TE)
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
        out_BTD: torch.Tensor = self.out(mixed_BHTE.transpose(1, 2).reshape(B, T, -1))
        return out_BTD


class _SwiGLU(nn.Module):
    """A hidden layer of which one projection, through SiLU, gates the other."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


def rotation_angles(positions: int, head_dim: int, theta: float) -> torch.Tensor:
    """Angles [T, E] [rad] by which the component pairs (e, e + E/2) turn at each position; equal within a pair."""
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rates)
    return torch.cat([angles, angles], dim=1)


def rotated(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Heads with each position's component pairs turned by its angles."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat([-second, first], dim=-1) * sin_TE
