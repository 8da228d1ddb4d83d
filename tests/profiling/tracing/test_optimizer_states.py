"""Optimisers in a trace: their state is what they really keep, on a CPU and on a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker import optimizers
from stoker.jobs import EMA, Adam
from stoker.jobs.averages import SWA
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import TraceSettings
from stoker.stepping.model import meta_model
from stoker.stepping.torch_optimizers import implementations
from tests.stepping.driving import SEPARABLE, trained
from tests.stepping.models import make_job, mlp

KINDS: dict[str, Any] = {
    "rmsprop": optimizers.RMSprop(lr=1e-2, momentum=0.5, centered=True),
    "adagrad": optimizers.Adagrad(lr=1e-2),
    "adadelta": optimizers.Adadelta(),
    "adamax": optimizers.Adamax(lr=1e-2),
    "nadam": optimizers.NAdam(lr=1e-2),
    "radam": optimizers.RAdam(lr=1e-2),
    "adafactor": optimizers.Adafactor(lr=1e-2),
    "amsgrad": Adam(lr=1e-2, amsgrad=True),
    "schedule-free sgd": optimizers.ScheduleFreeSGD(lr=1e-2),
    "schedule-free adamw": optimizers.ScheduleFreeAdamW(lr=1e-2),
}
SCALAR_BYTES = 8


def traced(target: str, implementation: str, **settings: Any) -> dict[str, int]:
    """Bytes that live from update to update, by category."""
    job = make_job(mlp, **settings)
    given: Any = {"target": target, "optimizer_implementation": implementation}
    trace = trace_update(
        job,
        datasets_of(job),
        SEPARABLE,
        TraceSettings(capability="8.0" if target == "cuda" else "", micro_batch=16, **given),
    )
    found: dict[str, int] = {}
    for storage in trace.storages:
        if storage.born < 0 and storage.num_bytes > SCALAR_BYTES:
            found[storage.category] = found.get(storage.category, 0) + storage.num_bytes
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_a_trace_is_what_the_optimiser_keeps(name: str) -> None:
    """Counted from a step that was really made; in each implementation that a plan may choose."""
    job = make_job(mlp, optimizer=KINDS[name])
    state = trained(job, 16, updates=2).optimizer.state
    tensors = [value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    kept = sum(4 * tensor.numel() for tensor in tensors if 4 * tensor.numel() > SCALAR_BYTES)
    for target in ("cpu", "cuda"):
        for implementation in implementations(job, meta_model(job), target):
            assert traced(target, implementation, optimizer=KINDS[name])["optimizer state"] == kept, implementation


def test_an_average_of_its_own_is_counted_and_a_hidden_one_is_not() -> None:
    """SWA is as large as an EMA; a schedule-free optimiser's average is computed where it is wanted."""
    ema, swa = (traced("cpu", "default", average=one)["average"] for one in (EMA(0.9), SWA()))
    assert swa == ema
    assert "average" not in traced("cpu", "default", optimizer=KINDS["schedule-free adamw"])
