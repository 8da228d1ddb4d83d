"""Forecasts of updates whose optimiser keeps its moments in fewer bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.devices import planned_devices
from stoker.layouts.local_state import OptimizerFootprint
from stoker.loading.datasets import datasets_of
from stoker.planning.model.memory import forecast_memory
from stoker.planning.model.optimizer_states import STEP, block_problem, stored_share, with_states
from stoker.planning.model.update_time import counted, operation_times, update_time
from stoker.planning.model.workspaces import hidden_bytes
from stoker.profiling.job_profile import model_parts
from stoker.profiling.tracing.update import trace_update
from stoker.records import Layout, Trace, TraceSettings
from stoker.records.profile import ModelParts, Parameter
from stoker.stepping.layouts import divided_parts
from stoker.stepping.model import meta_model
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, plan_of, train
from tests.stepping.layouts.conformance import few_bits_job

STATES = ("bf16", "8bit")


def traced(target: Any = "cuda") -> Trace:
    """An update with full moments, by a fused kernel."""
    job = few_bits_job(128)
    return trace_update(
        job,
        datasets_of(job),
        SEPARABLE,
        TraceSettings(
            target=target,
            capability="8.0" if target == "cuda" else "",
            micro_batch=16,
            optimizer_implementation="fused",
        ),
    )


def state_bytes(trace: Trace) -> int:
    """Bytes of the optimiser's state, counters left out."""
    return sum(s.num_bytes for s in trace.storages if s.category == "optimizer state" and s.num_bytes > 8)


@pytest.mark.parametrize("states", STATES)
def test_the_forecast_state_is_what_the_optimiser_keeps(states: Any) -> None:
    """To 2 %: many rows here are shorter than a block. Full ones stay as they are traced."""
    job = few_bits_job(128)
    step = Step(job, plan_of(16, optimizer_states=states), SEPARABLE)
    train(job, step, 1)
    tensors = [value for values in step.optimizer.state.values() for value in values.values()]
    kept = sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor) and one.nbytes > 8)
    trace = traced()
    assert state_bytes(with_states(trace, states)) == pytest.approx(kept, rel=0.02)
    assert state_bytes(with_states(trace, "full")) == state_bytes(trace) > 1.9 * kept


@pytest.mark.parametrize("states", STATES)
def test_the_peak_falls_by_what_is_saved_and_the_time_rises(states: Any) -> None:
    """The step becomes plain operations, with what is between them; the passes stay."""
    trace = traced()
    few = with_states(trace, states)
    (step,) = [one for one in few.operations if one.name == STEP]
    assert hidden_bytes(step, target="cuda") == 32 * max(one.numel for one in step.inputs)
    saved = state_bytes(trace) - state_bytes(few)
    peaks = [forecast_memory(one).before_update for one in (trace, few)]
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.02)
    hardware = planned_devices("h200", ())[0].hardware
    times = operation_times(hardware)
    full_s, few_s = (update_time(counted(one), times, hardware).step_s.value for one in (trace, few))
    weights = sum(one.numel for one in step.inputs) / 4
    assert few_s - full_s == pytest.approx(weights * (step.bytes_read + step.bytes_written) / weights / 4.8e12, rel=1.0)
    assert few_s > full_s


def test_layouts_that_cut_blocks_are_known_beforehand() -> None:
    """Rows of 640 values by two tensor processes, say; shards alone never do."""
    parts = divided_parts(model_parts(meta_model(few_bits_job(128))), meta_model(few_bits_job(128)), Layout(tensor=2))
    assert "processes would divide the" in (block_problem(parts, Layout(tensor=2)) or "")
    wide = meta_model(few_bits_job(512))
    parts = divided_parts(model_parts(wide), wide, Layout(tensor=2))
    assert block_problem(parts, Layout(tensor=2)) is None
    assert block_problem(parts, Layout(shards=3)) is None
    assert "3 processes would divide the 512" in (block_problem(parts, Layout(tensor=2, shards=3)) or "")


def test_stacked_matrices_that_shards_cut_within_their_rows_are_known_beforehand() -> None:
    """Four experts over eight shards; a head of four rows is cut into rows and goes."""
    stacked, head = (
        ModelParts(name="one", parameters=(Parameter(name=name, shape=shape, item_bytes=4),))
        for name, shape in (("experts.up", (4, 64, 512)), ("head.weight", (4, 4096)))
    )
    assert "8 shards divide those of experts.up" in (block_problem(stacked, Layout(shards=8)) or "")
    assert block_problem(stacked, Layout(shards=4)) is block_problem(head, Layout(shards=8)) is None


def test_a_process_of_a_layout_holds_its_share() -> None:
    """What is known of moments before any layout is traced scales as they do."""
    parts = model_parts(meta_model(few_bits_job(128)))
    full = OptimizerFootprint.of(traced(), parts)
    for states in STATES:
        few = OptimizerFootprint.of(with_states(traced(), states), parts)  # type: ignore[arg-type]
        assert full.like == 2
        assert few.scalar_bytes == full.scalar_bytes
        expected = pytest.approx(0.5 if states == "bf16" else 0.254, abs=1e-3)
        assert stored_share(states, "fp32") == expected == 2 * stored_share(states, "fp64")  # type: ignore[arg-type]
