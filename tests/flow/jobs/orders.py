"""A small classifier on data of every class and in every order there is; `kind` says which.

All draw from the global generators where they are read, and end an epoch in a ragged batch.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import stoker

NUM_SAMPLES = 110


def sample(index: int) -> tuple[torch.Tensor, int]:
    """Sample `index`, brighter or darker by chance: 1 to 9 tokens, and whether their sum is odd."""
    length = 1 + index % 9
    tokens = (torch.arange(length) * (index + 3)) % 11
    noise = random.randrange(3) + int(np.random.randint(2))  # noqa: NPY002 - what users write
    return (tokens + noise) % 11 + 1, int(index % 5 == 0)


class Items(torch.utils.data.Dataset):
    """By number."""

    targets = tuple(int(index % 5 == 0) for index in range(NUM_SAMPLES))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Streamed(torch.utils.data.IterableDataset):
    """One after the other."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(NUM_SAMPLES):
            yield sample(index)


class Seekable(Streamed):
    """With a state."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < NUM_SAMPLES:
            self.at += 1
            yield sample(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Rows(torch.utils.data.Dataset):
    """Samples to pack: each token's label says whether the sum of its sample is odd."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        tokens, label = sample(index)
        return {"tokens": tokens, "labels": torch.full_like(tokens, label)}


class OfTokens(nn.Module):
    """The mean of a sample's embedded tokens, padding left out, and a layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(12, 8), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        there = (tokens > 0).unsqueeze(-1)
        mean = (self.embedding(tokens) * there).sum(1) / there.sum(1).clamp_min(1)
        return self.head(self.drop(mean))


class OfRows(OfTokens):
    """Attention within each sample of a packed row."""

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + 0.1 * position_ids.unsqueeze(-1)
        mask = stoker.lengths.segment_mask(segment_ids)[:, 0]
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        return self.head(self.drop(scores.softmax(-1) @ x))


def job(kind: str = "stream", epochs: float = 25) -> stoker.Job:
    """Seven updates an epoch, the last of them smaller."""
    padded = stoker.lengths.padded()
    of_items = {"data": Items(), "fields": stoker.Fields(collate=padded)}
    settings: dict[str, dict[str, Any]] = {
        "stream": {"data": stoker.data.stream(Streamed(), length=NUM_SAMPLES)},
        "shuffled": {"data": stoker.data.shuffled(Streamed(), buffer=25, length=NUM_SAMPLES)},
        "seekable": {"data": stoker.data.stream(Seekable(), length=NUM_SAMPLES)},
        "shuffled-seekable": {"data": stoker.data.shuffled(Seekable(), buffer=25, length=NUM_SAMPLES)},
        "balanced": of_items | {"sampling": stoker.sampling.balanced()},
        "stratified": of_items | {"sampling": stoker.sampling.stratified()},
        "in order": of_items | {"sampling": stoker.sampling.in_order()},
        "bucketed": of_items | {"sampling": stoker.lengths.bucketed(window=3)},
        "tokens": of_items | {"sampling": stoker.lengths.bucketed(window=2), "batch": stoker.tokens(85)},
        "packed": {
            "data": Rows(),
            "model": OfRows,
            "sampling": stoker.lengths.packed(12),
            "fields": stoker.Fields(),
            "batch": 9,
            "loss": "token_cross_entropy",
            "metrics": ["token_accuracy"],
        },
    }
    common: dict[str, Any] = {
        "model": OfTokens,
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "fields": stoker.Fields(collate=padded),
        "optimizer": stoker.AdamW(lr=0.01),
        "batch": 17,
        "until": stoker.epochs(epochs),
        "average": 0.9,
        "valid": stoker.data.stream(Streamed(), length=30) if kind != "packed" else stoker.holdout(0.1),
        "evaluation": stoker.Evaluation(every=stoker.epochs(5)),
    }
    return stoker.Job(**(common | settings[kind]))
