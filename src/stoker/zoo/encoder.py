"""Encoder: a transformer that reads text in both directions, LayerNorm after attention and MLP, as BERT has it.

Shapes: B samples, T tokens, V vocabulary, S positions, D width, H heads, E = D / H, M width of the MLP, L layers,
K classes. Weights have the names that Hugging Face gives BERT's, so that those of such a model can be taken over.
Parameters: (V + S + 2)*D + 2*D + L*(4*D^2 + 2*D*M + 9*D + M), D^2 + D more with a pooler and (D + 1)*K with a
classifier; 109,482,240 for BERT-base with a pooler.
FLOPs to train on one sample of T tokens, the matrix products of the layers alone: 6*T*L*(4*D^2 + 2*D*M) + 12*L*D*T^2. A
multiply and an add count as two; the backward pass costs twice the forward one.

Source: J. Devlin et al., "BERT" (2018), https://arxiv.org/abs/1810.04805, and its released code (normal initialisation
of deviation 0.02, exact GELU, LayerNorm with 1e-12).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob

_INIT_STD = 0.02
_EPS = 1e-12
_SEGMENTS = 2


class Encoder(nn.Module):
    """input_ids_BT (int64, 0..V-1) to features_BTD; to logits_BK of the whole text if there are classes.

    Tokens with a 0 in `attention_mask_BT` are padding: no token attends to them.

    Args:
        layers: L.
        width: D.
        heads: H, a divisor of D.
        vocab: V.
        context: S, tokens at most.
        mlp: M; four times the width by default.
        classes: K; None for features of each token.
        pooled: put tanh of a linear layer between the first token's features and the classes, as BERT does.
        dropout: share of embeddings, attention weights and residual updates set to zero in training.

    Raises:
        BadJob: a size is not positive, `heads` does not divide `width`, or `dropout` is not in [0, 1).
    """

    def __init__(  # noqa: PLR0913 - the sizes of a transformer
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocab: int = 30522,
        context: int = 512,
        mlp: int | None = None,
        classes: int | None = None,
        dropout: float = 0.1,
        *,
        pooled: bool = True,
    ) -> None:
        super().__init__()
        hidden = 4 * width if mlp is None else mlp
        sizes = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "vocab": vocab,
            "context": context,
            "mlp": hidden,
            "classes": 1 if classes is None else classes,
        }
        if min(sizes.values()) < 1 or width % heads or not 0 <= dropout < 1:
            raise BadJob(
                f"Encoder takes sizes >= 1, heads that divide the width and 0 <= dropout < 1, got {sizes} and "
                f"dropout {dropout}"
            )
        self.context = context
        self.embeddings = _Embeddings(vocab, context, width, dropout)
        self.encoder = _Layers(_Layer(width, heads, hidden, dropout) for _ in range(layers))
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)}) if pooled else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = None if classes is None else nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, K], or features [B, T, D] where there are no classes, of tokens [B, T].

        Raises:
            BadJob: there are more tokens than the context holds.
        """
        if input_ids.shape[1] > self.context:
            raise BadJob(f"samples have {input_ids.shape[1]} tokens, the model's context is {self.context}")
        mask_B11T = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x_BTD: torch.Tensor = self.embeddings(input_ids)
        x_BTD = self.encoder(x_BTD, mask_B11T)
        if self.classifier is None:
            return x_BTD
        first_BD = x_BTD[:, 0]
        if self.pooler is not None:
            first_BD = torch.tanh(self.pooler["dense"](first_BD))
        logits_BK: torch.Tensor = self.classifier(self.dropout(first_BD))
        return logits_BK


class _Embeddings(nn.Module):
    """Token, position and segment (all of the first) added and normalised."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.position_embeddings = nn.Embedding(context, width)
        self.token_type_embeddings = nn.Embedding(_SEGMENTS, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions_TD = self.position_embeddings.weight[: input_ids.shape[1]]
        x_BTD = self.word_embeddings(input_ids) + positions_TD + self.token_type_embeddings.weight[0]
        embedded_BTD: torch.Tensor = self.dropout(self.LayerNorm(x_BTD))
        return embedded_BTD


class _Layers(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Iterable[_Layer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layer:
            x_BTD = layer(x_BTD, mask_B11T)
        return x_BTD


class _Layer(nn.Module):
    """Attention and MLP, each added to its input, and the sum normalised."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": _Attention(width, heads, dropout), "output": _Added(width, width, dropout)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, hidden)})
        self.output = _Added(hidden, width, dropout)

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor | None) -> torch.Tensor:
        x_BTD = self.attention["output"](self.attention["self"](x_BTD, mask_B11T), x_BTD)
        out_BTD: torch.Tensor = self.output(F.gelu(self.intermediate["dense"](x_BTD)), x_BTD)
        return out_BTD


class _Attention(nn.Module):
    """Multi-head attention of every token to all that the mask leaves."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor | None) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q_BHTE, k_BHTE, v_BHTE = (
            project(x_BTD).view(B, T, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_B11T, dropout_p=dropout)
        return mixed_BHTE.transpose(1, 2).reshape(B, T, -1)


class _Added(nn.Module):
    """A linear layer's output added to what went past it, and normalised."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, past_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = self.LayerNorm(self.dropout(self.dense(x)) + past_BTD)
        return out_BTD
