"""Mixtures of experts are traced as if their routers spread tokens evenly."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import Trace
from stoker.store.record_caches import packed_trace, unpacked_trace
from tests.profiling.tracing import jobs
from tests.profiling.tracing.jobs import SEPARABLE, peak_of, real_sizes, settings, sizes_of
from tests.stepping.experts import mixture
from tests.stepping.models import TOKENS, VOCAB, make_job, texts

KINDS = ("grouped", "batched", "list")


def experts_job(kind: str, **changed: Any) -> Any:
    """Trains routed experts on texts; tokens go to them in turn."""
    make = functools.partial(mixture, kind, is_even=True, **changed)
    return make_job(make, data=texts(), loss="token_cross_entropy")


def traced(kind: str, target: str = "cpu", **changed: Any) -> Trace:
    """The trace of an update of `experts_job`."""
    job = experts_job(kind)
    return trace_update(job, datasets_of(job), SEPARABLE, settings(target, **changed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_the_allocators_where_tokens_are_spread_evenly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the 16 bytes of Python numbers that kernels turn into tensors: sizes by the data are the real ones."""
    monkeypatch.setitem(jobs.JOBS, kind, lambda: experts_job(kind))
    difference = peak_of(real_sizes(kind, settings())) - peak_of(sizes_of(traced(kind)))
    assert difference in (0, 12, 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_experts_take_two_rows_of_each_token(kind: str, target: str) -> None:
    """FLOPs of the forward pass are those of N x 2 rows, whatever number of experts there are."""
    trace, rows = traced(kind, target), 2 * jobs.BATCH * TOKENS
    flops = sum(
        trace.operations[one.operation].flops
        for one in trace.occurrences
        if one.phase == "forward" and trace.modules[one.module].split(".")[1:2] == ["experts"]
    )
    assert flops == 2 * rows * 2 * 2 * 8 * 16  # layers, products, D x F
    assert trace.is_balanced == (kind != "batched")
    assert unpacked_trace(packed_trace(trace)).is_balanced == trace.is_balanced


def test_a_size_that_no_router_decides_is_refused() -> None:
    """A threshold on features says nothing of how many rows pass it."""

    class Threshold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            x_BTD = self.tokens(tokens_BT)
            rows = (x_BTD[..., 0] > 0.5).nonzero()
            return self.head(x_BTD) + len(rows)

    job = make_job(Threshold, data=texts(), loss="token_cross_entropy")
    with pytest.raises(BadJob, match=r"`nonzero` at test_routing\.py"):
        trace_update(job, datasets_of(job), SEPARABLE, settings())


def test_a_loss_that_chooses_is_no_router() -> None:
    """How many rows a loss keeps is decided by the data, and not assumed to be even."""

    def kept(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        keep = logits_BTV.argmax(-1) != 0
        return nn.functional.cross_entropy(logits_BTV[keep], targets_BT[keep])

    model = functools.partial(nn.Sequential, nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    job = make_job(model, data=texts(), loss=kept)
    with pytest.raises(BadJob, match="size depends on the data"):
        trace_update(job, datasets_of(job), SEPARABLE, settings())
