"""Long samples on eight GPUs: what is chosen, and why."""

from __future__ import annotations

import pytest

import stoker
from bench.forecast.situations import SITUATIONS, job


@pytest.mark.slow  # plans of 8 billion parameters
def test_128k_tokens_are_divided_as_published_runs_do() -> None:
    """Llama 8B on 8 H100: 4 or 8 parts of a sample, recomputed, in bf16; the plan says why."""
    decision = stoker.plan(job(13), on="8xh100")
    chosen = decision.chosen.plan
    assert not list(SITUATIONS[13].accepts(chosen)), chosen
    line = next(line for line in decision.explanation if line.startswith("tokens: "))
    assert f"{131_072 // chosen.layout.context:,} of a sample's 131,072" in line
    assert "gathers keys and values" in line
