"""A model whose blocks give each other several tensors, some of them integers, and read what others made before."""

from __future__ import annotations

import torch
from torch import nn

from stoker.jobs import AdamW, Job
from tests.stepping.models import VOCAB, make_job, texts

WIDTH = 16


class PassingBlock(nn.Module):
    """Returns activations, a mask and positions made from them, and a bias that the first block alone makes."""

    def __init__(self, *, makes_bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(8, WIDTH) if makes_bias else None

    def forward(
        self,
        x_BTD: torch.Tensor,
        memory_BTD: torch.Tensor | None,
        mask_BT: torch.Tensor,
        found: dict[str, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
        """Activations, mask, positions [B, T] and bias [T, D]."""
        bias_TD = found["bias"]
        if self.bias is not None:
            bias_TD = self.bias(torch.arange(x_BTD.shape[1], device=x_BTD.device))
        positions_BT = found["positions"]
        if positions_BT is None:
            positions_BT = x_BTD.detach().sum(-1).argsort(-1)
        added_BTD = torch.tanh(self.inner(x_BTD) + bias_TD)
        if memory_BTD is not None:
            index_BTD = positions_BT[..., None].expand_as(memory_BTD)
            added_BTD = added_BTD + self.outer(memory_BTD.gather(1, index_BTD))
        mask_BT = mask_BT & (added_BTD.detach().mean(-1) > -0.5)
        x_BTD = x_BTD + added_BTD * mask_BT[..., None]
        return x_BTD, mask_BT, {"bias": bias_TD, "positions": positions_BT}


class Passing(nn.Module):
    """An encoder, whose output all blocks of the decoder read, and a skip connection around everything."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.squash = nn.Tanh()
        self.encoder = nn.ModuleList(PassingBlock(makes_bias=number == 0) for number in range(blocks // 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder_embedding = nn.Embedding(VOCAB, WIDTH)
        self.decoder = nn.ModuleList(PassingBlock(makes_bias=False) for _ in range(blocks - blocks // 2))
        self.last = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        first_BTD = self.squash(self.embedding(tokens_BT))
        mask_BT = (tokens_BT > 0) & (first_BTD != 0).any(-1)
        x_BTD, found = first_BTD, {"bias": None, "positions": None}
        for block in self.encoder:
            x_BTD, mask_BT, found = block(x_BTD, None, mask_BT, found)
        memory_BTD = self.norm(x_BTD)
        memory_BTD *= 0.5
        y_BTD = self.decoder_embedding(tokens_BT)
        kept: list[torch.Tensor] = []
        for block in self.decoder:
            kept.append(y_BTD)
            y_BTD, mask_BT, found = block(y_BTD, memory_BTD, mask_BT, found)
        return self.last(y_BTD + first_BTD + sum(kept))


def passing_job(blocks: int = 4) -> Job:
    """A job over texts whose last batch has 7 samples."""
    return make_job(
        lambda: Passing(blocks),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
    )
