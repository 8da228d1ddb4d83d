"""The jobs that benchmarks train."""

from __future__ import annotations

import math

import pytest

from bench.forecast.jobs import JOBS
from bench.forecast.measuring import Subject
from stoker.loading.datasets import datasets_of
from stoker.records import Plan
from stoker.stepping.coupling import coupling_by_types
from stoker.stepping.model import meta_model
from stoker.stepping.step import Step


@pytest.mark.parametrize("name", JOBS["tiny"])
def test_a_tiny_job_makes_an_update_in_parts(name: str) -> None:
    """Two micro-batches of half a batch, with a loss that is a number."""
    job = JOBS["tiny"][name]()
    data = datasets_of(job)
    coupling = coupling_by_types(job, meta_model(job), "a test")
    subject = Subject(job, data, coupling)
    step = Step(job, Plan(device="cpu", micro_batch=job.batch // 2), coupling)
    assert math.isfinite(step.update(next(subject.batches(step)), 0, 0.0))


def test_every_size_has_the_four_families() -> None:
    """A CNN, a GPT, an LSTM and an MLP, in each size."""
    assert all({"cnn", "gpt", "lstm", "mlp"} <= set(of_size) for of_size in JOBS.values())
