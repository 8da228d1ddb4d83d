"""A model by name, trained on one batch that repeats: what `bench.forecast.measure_cases` measures and forecasts.

Language models and those of `bench.forecast.jobs` are by their names here, all others timm's, with fused attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import stoker
from bench.forecast.jobs import JOBS
from bench.train.models import ResNet50
from stoker.zoo import GPT, Encoder, Llama

_VOCAB = 50304


class WrittenOut(nn.Module):
    """tokens_BT to logits_BTV as nanoGPT had it before flash attention: products, mask and softmax one by one."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_VOCAB, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_WrittenOutBlock(width, heads, context) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, _VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the next tokens."""
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class _WrittenOutBlock(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self._attended(self.before_attention(x_BTD))
        hidden = self.up(self.before_mlp(x_BTD))
        hidden = (
            0.5 * hidden * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))))
        )
        return x_BTD + self.down(hidden)

    def _attended(self, x_BTD: torch.Tensor) -> torch.Tensor:
        length, width = x_BTD.shape[1:]
        parts = self.qkv(x_BTD).split(width, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores_BHTS = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores_BHTS = scores_BHTS.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed_BHTE = F.softmax(scores_BHTS, dim=-1) @ v
        return self.out(mixed_BHTE.transpose(1, 2).contiguous().view_as(x_BTD))


class MaskedLanguageModel(nn.Module):
    """tokens_BT to logits_BTV by BERT-large, dropout included."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.encoder = Encoder(layers=24, width=1024, heads=16, context=context)
        self.head = nn.Linear(1024, 30522)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        logits_BTV: torch.Tensor = self.head(self.encoder(tokens_BT))
        return logits_BTV


def _llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int) -> Callable[[int], nn.Module]:
    return lambda context: Llama(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocab, context=context
    )


LANGUAGE: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": lambda context: GPT(layers=12, width=768, heads=12, context=context, vocab=_VOCAB, tied=True),
    "gpt2-medium": lambda context: GPT(layers=24, width=1024, heads=16, context=context, vocab=_VOCAB, tied=True),
    "gpt2-written-out": lambda context: WrittenOut(12, 768, 12, context),
    "llama-1b": _llama(16, 2048, 32, 8, 8192, 32000),
    "llama-8b-4-layers": _llama(4, 4096, 32, 8, 14336, 32000),
    "bert-large": MaskedLanguageModel,
}
"""Language models by name: made for a context."""


def job(
    model: str = "gpt2", batch: int = 16, context: int = 1024, size: int = 224, optimizer_states: str = "full"
) -> stoker.Job:
    """A job of `batch` samples an update: of `context` tokens, or images of `size` pixels."""
    numerics = ["fp8"] + ([f"{optimizer_states}-states"] if optimizer_states != "full" else [])
    if model in JOBS["gpu"]:
        return dataclasses.replace(JOBS["gpu"][model](), numerics=numerics if model == "gpt" else [])
    if model in LANGUAGE:
        row = torch.arange(context + 1, dtype=torch.int64).remainder(30000)
        data = (row[:-1].unsqueeze(0).expand(batch, context), row[1:].unsqueeze(0).expand(batch, context))
        return stoker.Job(
            model=lambda: LANGUAGE[model](context),
            data=data,
            loss="token_cross_entropy",
            optimizer=stoker.AdamW(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
            clip_norm=1.0,
            batch=batch,
            until=stoker.updates(1000),
            numerics=numerics,
            name=model,
        )
    return stoker.Job(
        model=lambda: _of_images(model),
        data=(torch.zeros(1, 3, size, size).expand(batch, -1, -1, -1), torch.arange(batch) % 1000),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1, momentum=0.9, nesterov=True),
        batch=batch,
        until=stoker.updates(1000),
        name=model,
    )


def _of_images(model: str) -> nn.Module:
    if model == "resnet50":
        return ResNet50(classes=1000)
    if not torch.cuda.is_available():  # torchvision's build for CUDA lacks operators here, which no classifier needs
        with contextlib.suppress(RuntimeError):
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    from timm import create_model  # noqa: PLC0415 - of some models alone

    made: nn.Module = create_model(model, num_classes=1000)
    return made
