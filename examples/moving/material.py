"""The models and data that the files here share: handwritten digits for an image net, Python source for a Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stoker

Labelled = tuple[torch.Tensor, torch.Tensor]
"""Images float32 [N, 1, 8, 8] and their digits int64 [N]."""


def digits() -> tuple[Labelled, Labelled, Labelled]:
    """1,280 images to train on, 157 to validate, 360 to test; all are inside the package."""
    train, test = stoker.data.digits()
    images, labels = train.prepare(train.arrays())
    return (images[:1280], labels[:1280]), (images[1280:], labels[1280:]), test.prepare(test.arrays())


def net() -> nn.Module:
    """Images [B, 1, 8, 8] to scores of 10 classes [B, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


def source(context: int = 32, windows: int = 1344) -> torch.Tensor:
    """Bytes of Python's own library as tokens: int64 [windows, context]."""
    train, _ = stoker.data.python_source(context=context, limit_bytes=2_000_000)
    return torch.stack([train[at][0] for at in range(windows)]).long()


def llama() -> Any:
    """A small Llama over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            max_position_embeddings=32,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
