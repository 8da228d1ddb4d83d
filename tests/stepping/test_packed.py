"""Packed rows through a step: the gradient is that of the samples, alone or together, however rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="attention within samples")


class Sentences(torch.utils.data.Dataset):
    """23 sentences of 1 to 9 tokens, each labelled with the next one."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (2 + (7 * index) % 9,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Attention(nn.Module):
    """One causal layer within each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(position_ids)
        mask = stoker.lengths.segment_mask(segment_ids, causal=True)[:, 0]
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def job(into: int) -> stoker.Job:
    """All 23 sentences in one update."""
    return stoker.Job(
        model=Attention,
        data=Sentences(),
        sampling=stoker.lengths.packed(into),
        loss="token_cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=23,
        until=stoker.epochs(1),
    )


def gradient(job: stoker.Job, micro_batch: int) -> tuple[float, list[torch.Tensor]]:
    """The mean loss of the first update and its gradient, in float64."""
    step = Step(job, Plan(device="cpu", micro_batch=micro_batch), SEPARABLE, dtype=torch.float64)
    data = datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, step.plan)
    (batch,) = source.batches(Position(), 1)
    loss = step.gradients(batch, 0)
    return float(loss), [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("into", [9, 16])
@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_accumulated_over_rows_is_the_whole_batch(into: int, micro_batch: int) -> None:
    """Rows of unequally many valid tokens, one micro-batch after another: divided once, by the tokens of all."""
    whole, cut = gradient(job(into), 23), gradient(job(into), micro_batch)
    assert abs(whole[0] - cut[0]) < 1e-12
    for one, other in zip(whole[1], cut[1], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_packed_sentences_learn_what_they_would_alone() -> None:
    """Whatever the row they lie in, and its neighbours: the mean over all tokens of what each sentence gives alone."""
    torch.manual_seed(0)
    step = Step(job(16), Plan(device="cpu", micro_batch=23), SEPARABLE, dtype=torch.float64)
    total, count = 0.0, 0
    for index in range(23):
        sample = Sentences()[index]
        length = len(sample["tokens"])
        output = step.model(sample["tokens"][None], torch.arange(length)[None], torch.ones(1, length))
        loss = nn.functional.cross_entropy(output[0], sample["labels"], reduction="sum")
        loss.backward()
        total, count = total + float(loss.detach()), count + length
    alone = [p.grad / count for p in step.model.parameters() if p.grad is not None]
    packed = gradient(job(16), 4)
    assert abs(packed[0] - total / count) < 1e-12
    for one, other in zip(alone, packed[1], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
