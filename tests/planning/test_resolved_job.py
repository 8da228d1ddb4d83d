"""A job with its data loaded and its model outlined, and what is doubtful about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.planning.resolved_job import resolve_job
from tests.training.builders import tiny_job


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, "less than 0.002 of"), (torch.float16, "less than 0.00024 of")]
)
def test_trained_weights_in_half_precision_are_doubted(dtype: torch.dtype, least: str) -> None:
    """As of a pretrained model that was loaded so; not those that are frozen, and not full ones."""
    (warning,) = resolve_job(tiny_job(model=lambda: nn.Linear(4, 2).to(dtype))).warnings
    assert str(dtype).removeprefix("torch.") in warning
    assert least in warning
    share = torch.finfo(dtype).eps / 4
    weights = torch.linspace(1, 1.99, 500).to(dtype)
    assert torch.equal((weights.double() * (1 + 0.99 * share)).to(dtype), weights)
    assert not torch.equal((weights.double() * (1 + 1.1 * share)).to(dtype), weights)

    def adapted() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4).to(dtype).requires_grad_(False), nn.Linear(4, 2))

    assert resolve_job(tiny_job(model=adapted)).warnings == ()
    assert resolve_job(tiny_job()).warnings == ()
