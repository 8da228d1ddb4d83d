"""Peak memory of an update on the CPU: traced, before anything is run, against what PyTorch's allocator then held.

    python -m bench.forecast.peak_memory [--threads 1] [--only NAME ...] [--quick] [--date 2026-11-21]

For each architecture of `models.py`, in fp32 and bf16, with and without activation checkpointing of all its blocks: the
job's second update is traced on fake tensors, and its allocations replayed (`planning.model.memory`). Then the same
update is made, and each allocation and free of the CPU's allocator is read from PyTorch's profiler. Both peaks count
what lives before the update: weights, buffers, the optimiser's state, the batch.

No number is fitted to these peaks. What convolutions and bf16 products hide (`planning.model.workspaces`) follows
laws that were read off single operations of the architectures; `HELD_OUT` holds ten others, reported on their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.forecast.models import CASES, HELD_OUT, Case
from stoker.errors import StokerError
from stoker.jobs import Job
from stoker.loading.batches import Batch
from stoker.loading.datasets import datasets_of
from stoker.planning.model.memory import forecast_memory
from stoker.profiling.ceilings import computing_threads
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Plan, Trace, TraceSettings
from stoker.stepping.activation_checkpointing import num_blocks
from stoker.stepping.model import build_model
from stoker.stepping.step import Step

RESULTS = Path(__file__).parents[1] / "results"
MEDIAN_BAR, WORST_BAR = 0.005, 0.02
PACKAGES = ("torch", "timm", "transformers")
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="one micro-batch is the whole batch")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case. Peaks in bytes; `error` is signed, of the measured peak; `activations` their share of the forecast."""

    model: str
    family: str
    is_held_out: bool
    precision: str
    checkpointed_blocks: int
    num_parameters: int
    forecast_bytes: int
    measured_bytes: int
    error: float
    before_forecast_bytes: int
    before_measured_bytes: int
    activations: float
    trace_s: float
    update_s: float


def main() -> int:
    """Measure, print a row for each case, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of architectures")
    parser.add_argument("--quick", action="store_true", help="fp32 without checkpointing alone; nothing is written")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's; kernels have scratch memory for each")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    parser.add_argument("--date", default=today, help="under which results are written (default: today, UTC)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, failures = [], []
    with computing_threads(arguments.threads):
        for case in (case for case in (*CASES, *HELD_OUT) if not arguments.only or case.name in arguments.only):
            job = case.job()
            for plan in _plans(job, quick=arguments.quick):
                try:
                    rows.append(compared(case, job, plan))
                except (StokerError, RuntimeError, TypeError, AttributeError) as error:
                    failures.append({"model": case.name, "plan": plan.in_words(), "problem": str(error)[:500]})
                    print(f"{case.name:34} {plan.in_words()}: {error}", file=sys.stderr)
                    continue
                print(_line(rows[-1]), flush=True)
    summary = _summary([row for row in rows if not row.is_held_out])
    held_out = _summary([row for row in rows if row.is_held_out])
    print(json.dumps({"summary": summary, "held_out": held_out}))
    if not arguments.only and not arguments.quick:
        _write(rows, failures, {"summary": summary, "held_out": held_out}, arguments)
    is_within = all(
        part.get("median", 0) <= MEDIAN_BAR and part.get("worst", 0) <= WORST_BAR for part in (summary, held_out)
    )
    return 0 if not failures and is_within else 1


def compared(case: Case, job: Job, plan: Plan) -> Row:
    """Forecast and measure one case."""
    trace = _traced(job, plan)
    forecast = forecast_memory(trace)
    started = time.perf_counter()
    measured = measured_peak(job, plan)
    took_s = time.perf_counter() - started
    model = build_model(job)
    return Row(
        model=case.name,
        family=case.family,
        is_held_out=case in HELD_OUT,
        precision=plan.precision,
        checkpointed_blocks=plan.checkpointed_blocks,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        forecast_bytes=forecast.allocated,
        measured_bytes=measured.peak,
        error=forecast.allocated / measured.peak - 1,
        before_forecast_bytes=forecast.before_update,
        before_measured_bytes=measured.before,
        activations=forecast.by_category.get("activation", 0.0) / forecast.allocated,
        trace_s=trace.took_s,
        update_s=took_s,
    )


@dataclass(frozen=True)
class Measured:
    """Bytes at the peak of an update, and before it."""

    peak: int
    before: int


def measured_peak(job: Job, plan: Plan) -> Measured:
    """What the CPU's allocator holds at most during the job's second update."""
    gc.collect()
    step = Step(job, plan, SEPARABLE)
    data = datasets_of(job)
    indices = np.arange(job.batch, dtype=np.int64)
    raw = data.train.fetch(indices, 0)
    batch = Batch(raw, indices, 0, step.pipeline(data.train, augmented=True))
    step.update(batch, 0, 0.5)
    gc.collect()
    before = _bytes_of(_living(step, batch))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.update(batch, 1, 0.5)
    live = peak = before
    for change in _changes(profiler):
        live += change
        peak = max(peak, live)
    return Measured(peak, before)


def _changes(profiler: profile) -> Iterator[int]:
    """Bytes allocated (positive) and freed (negative), in order."""
    recorded = profiler.profiler.kineto_results.events()
    memory = [
        (event.start_ns(), order, event.nbytes()) for order, event in enumerate(recorded) if event.name() == "[memory]"
    ]
    return (change for _, _, change in sorted(memory))


def _living(step: Step, batch: Batch) -> Iterator[torch.Tensor]:
    yield from step.model.parameters()
    yield from step.model.buffers()
    for values in step.optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
    yield from (tensor for tensor in batch.cut(0, batch.size) if isinstance(tensor, torch.Tensor))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _traced(job: Job, plan: Plan) -> Trace:
    settings = TraceSettings(
        target="cpu",
        capability="",
        micro_batch=plan.micro_batch,
        precision=plan.precision,
        checkpointed_blocks=plan.checkpointed_blocks,
    )
    return trace_update(job, datasets_of(job), SEPARABLE, settings)


def _plans(job: Job, *, quick: bool) -> Iterator[Plan]:
    blocks = num_blocks(build_model(job))
    for precision in ("fp32", "bf16"):
        for count in dict.fromkeys((0, blocks)):
            if not quick or (precision, count) == ("fp32", 0):
                yield Plan(device="cpu", micro_batch=job.batch, precision=precision, checkpointed_blocks=count)


def _line(row: Row) -> str:
    checkpointed = f"{row.checkpointed_blocks} blocks" if row.checkpointed_blocks else "-"
    return (
        f"{row.model:34} {row.precision} {checkpointed:>10} {row.forecast_bytes / 1e6:9.2f} MB "
        f"{row.measured_bytes / 1e6:9.2f} MB {100 * row.error:+7.3f} %  activations {100 * row.activations:3.0f} %  "
        f"trace {row.trace_s:5.2f} s, updates {row.update_s:5.2f} s"
    )


def _summary(rows: list[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    errors = [abs(row.error) for row in rows]
    within = [row for row in rows if row.precision == "fp32" and not row.checkpointed_blocks]
    return {
        "cases": len(rows),
        "architectures": len({row.model for row in rows}),
        "median": statistics.median(errors),
        "mean": statistics.fmean(errors),
        "worst": max(errors),
        "exact": sum(error < 1e-4 for error in errors),
        "activations_fp32": [min(row.activations for row in within), max(row.activations for row in within)],
    }


def _write(
    rows: list[Row], failures: list[dict[str, str]], summaries: dict[str, Any], arguments: argparse.Namespace
) -> None:
    num_threads, date = arguments.threads, arguments.date
    document = {
        "what": "peak memory of an update on the CPU, traced against PyTorch's allocator",
        "command": f"python -m bench.forecast.peak_memory --threads {num_threads}",
        "date": date,
        "machine": f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}, {num_threads} threads",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "bars": {"median": MEDIAN_BAR, "worst": WORST_BAR},
        **summaries,
        "failures": failures,
        "rows": [asdict(row) for row in rows],
    }
    path = RESULTS / f"peak_memory_{num_threads}_threads_{date}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    sys.exit(main())
