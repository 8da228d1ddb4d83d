"""Stoker on a GPU with PyTorch and NumPy alone installed: its planner chooses, its Step and BatchSource train.

`stoker.train` needs packages that a bare machine with a GPU may lack (the report's, the checkpoints'). This is the same
planning and the same update, driven as `training.loop` drives it: no evaluation, no checkpoint, no events.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch

import stoker
from bench.train.contenders.gpu_memory import share_device
from bench.train.contenders.stoker_job import the_job
from bench.train.material import Material
from bench.train.pacing import Pacer
from stoker import records
from stoker.devices import attached_devices, resolve_place
from stoker.loading.batches import BatchSource
from stoker.loading.order import RandomStream, key_of, seed_generators
from stoker.profiling.ceilings import computing_threads
from stoker.records import Position
from stoker.stepping.step import Step


def run(material: Material, pacer: Pacer, *, compiled: bool = False) -> None:
    """Train until stopped; `compiled`: under the plan that `gpu_by_hand` has, which is tried once and nothing else is.

    Raises:
        RuntimeError: the run ended by itself: the case has too few epochs.
    """
    without_reports()
    from stoker.planning.decision import decide  # noqa: PLC0415 - once the package can be imported without its reports
    from stoker.planning.resolved_job import resolve_job  # noqa: PLC0415 - likewise

    job = the_job(material)
    prepared = resolve_job(job)
    device = resolve_place("here", attached_devices())
    decision, coupling = decide(prepared, device, _compiled(material, device) if compiled else None)
    plan = decision.chosen.plan
    pacer.notes |= {
        "plan": records.to_json(plan),
        "took_s": decision.took_s,
        "explanation": list(decision.explanation),
        "forecast_s": decision.chosen.forecast.total_s.value,
    }
    share_device(pacer, torch.device(plan.device))
    with computing_threads(plan.threads):
        step = Step(job, plan, coupling)
        seed_generators(key_of(RandomStream.MICRO_BATCH, job.seed))
        samples, extent = prepared.data.train, prepared.extent
        source = BatchSource(samples, step.pipeline(samples, augmented=True), extent, job.seed, plan)
        total = decision.chosen.forecast.total_updates
        for update, batch in enumerate(source.batches(Position(), total)):
            loss = step.update(batch, update, update / total)
            pacer.updated(batch.size, loss.item)
    raise RuntimeError(f"{material.case.name} ended before it was stopped; give the case more epochs")


def _compiled(material: Material, device: records.Device) -> records.Plan:
    return records.Plan(
        device=device.torch_name,
        micro_batch=material.case.batch,
        precision="bf16",
        compile=True,
        optimizer_implementation="fused",
        memory_format="contiguous" if material.case.is_text else "channels_last",
        threads=torch.get_num_threads(),
    )


def without_reports() -> None:
    """Let modules of `stoker.planning` be imported where what reports need is not installed."""
    if all(importlib.util.find_spec(name) for name in ("rich", "plotly", "safetensors")):
        return
    package = types.ModuleType("stoker.planning")
    package.__path__ = [str(Path(stoker.__file__).parent / "planning")]
    sys.modules["stoker.planning"] = package
