"""Recurrent networks over tokens, LSTM or GRU: one that predicts the next token, one that names a class.

Shapes: B samples, T tokens, V vocabulary, D width of embedding and of each layer, L layers, K classes; G gates: 4 of
an LSTM, 3 of a GRU.
Parameters of the language model: V*D + L*G*(2*D^2 + 2*D) + (D + 1)*V, where the last term is V if the output layer
is tied to the embedding. Of the classifier, with R directions and the inputs of the first layer D wide, of the others
R*D: V*D + R*G*(2*D^2 + 2*D) + (L - 1)*R*G*((R + 1)*D^2 + 2*D) + (R*D + 1)*K.
FLOPs to train the language model on one sample of T tokens, the matrix products alone: 6*T*(2*L*G*D^2 + V*D). A
multiply and an add count as two; the backward pass costs twice the forward one.

Source: W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent Neural Network Regularization" (2014),
https://arxiv.org/abs/1409.2329 (dropout between layers, not from token to token); tying: O. Press, L. Wolf (2016),
https://arxiv.org/abs/1608.05859. Each sample starts from a state of zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from stoker.errors import BadJob

Cell = Literal["lstm", "gru"]


class RecurrentLM(nn.Module):
    """tokens_BT (int64, 0..V-1) to logits_BTV; logit t sees tokens 0..t.

    Args:
        cell: "lstm" or "gru".
        layers: L.
        width: D.
        vocab: V; 256 for bytes.
        dropout: share of the outputs of embedding and layers set to zero in training.
        tied: let the output layer share the embedding's weights.

    Raises:
        BadJob: there is no such cell, a size is not positive, or `dropout` is not in [0, 1).
    """

    def __init__(
        self,
        cell: Cell = "lstm",
        layers: int = 2,
        width: int = 650,
        vocab: int = 256,
        dropout: float = 0.0,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        _check(cell, dropout, layers=layers, width=width, vocab=vocab)
        self.embedding = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = _layers(cell, width, layers, dropout)
        self.head = nn.Linear(width, vocab)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the token after each of tokens [B, T]."""
        states_BTD, _ = self.layers(self.dropout(self.embedding(tokens_BT)))
        logits_BTV: torch.Tensor = self.head(self.dropout(states_BTD))
        return logits_BTV


class RecurrentClassifier(nn.Module):
    """input_ids_BT (int64, 0..V-1) to logits_BK, by the mean of the last layer's states over all tokens.

    Tokens with a 0 in `attention_mask_BT` do not count in the mean. Padding comes last, where no other token sees it
    (read in one direction).

    Args:
        cell: "lstm" or "gru".
        layers: L.
        width: D.
        vocab: V.
        classes: K.
        dropout: share of the outputs of embedding and layers set to zero in training.
        both_ways: also read from the end; then padding is seen by the tokens before it.

    Raises:
        BadJob: there is no such cell, a size is not positive, or `dropout` is not in [0, 1).
    """

    def __init__(
        self,
        cell: Cell = "lstm",
        layers: int = 1,
        width: int = 128,
        vocab: int = 256,
        classes: int = 2,
        dropout: float = 0.0,
        *,
        both_ways: bool = False,
    ) -> None:
        super().__init__()
        _check(cell, dropout, layers=layers, width=width, vocab=vocab, classes=classes)
        self.embedding = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = _layers(cell, width, layers, dropout, both_ways=both_ways)
        self.head = nn.Linear(2 * width if both_ways else width, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, K] of tokens [B, T]."""
        states_BTD, _ = self.layers(self.dropout(self.embedding(input_ids)))
        if attention_mask is None:
            mean_BD = states_BTD.mean(1)
        else:
            mask_BT1 = attention_mask[:, :, None].to(states_BTD.dtype)
            mean_BD = (states_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp_min(1)
        logits_BK: torch.Tensor = self.head(self.dropout(mean_BD))
        return logits_BK


def _layers(cell: Cell, width: int, layers: int, dropout: float, *, both_ways: bool = False) -> nn.RNNBase:
    kind = nn.LSTM if cell == "lstm" else nn.GRU
    between = dropout if layers > 1 else 0.0  # PyTorch warns about dropout after a single layer
    return kind(width, width, num_layers=layers, batch_first=True, dropout=between, bidirectional=both_ways)


def _check(cell: object, dropout: float, **sizes: int) -> None:
    """Raise BadJob for an unknown cell or a size out of range."""
    if cell not in ("lstm", "gru") or min(sizes.values()) < 1 or not 0 <= dropout < 1:
        raise BadJob(
            f'wanted cell "lstm" or "gru", sizes >= 1 and 0 <= dropout < 1, got {cell!r}, {sizes} and dropout {dropout}'
        )
