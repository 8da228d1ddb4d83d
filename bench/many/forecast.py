"""Forecasts for two processes on this CPU against what they measure: time of an update, state and peak of each rank.

    python -m bench.many.forecast [--rounds 3] [--budget 25] [--set held_out|calibration] [--only WORDS]

First, once: times of operations on one thread, and the links between two processes. Then all forecasts, from traces.
Then layouts and models take turns, a fresh set of processes each time: after an update that warms up, updates for a
slice of time, the median of them on the slower process; a case's time is the median over rounds. Bytes of parameters,
gradients and optimiser state are counted in each process; the peak is the process's high-water mark, which on Linux
counts since it began. Models of the set `calibration` are those that `planning/model/layout_forecast.py`
was fitted on; those of `held_out` were never looked at for it.

Bars, on `held_out`: the median error of the time at most 12 %, of the peak at most 10 %; bytes exact.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stoker
from bench.forecast.registration import register, write
from stoker.devices import attached_cpu, load_between, sample_cpu
from stoker.devices.malloc import apply_malloc, resident_bytes
from stoker.errors import BadJob, DoesNotFit
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.model.layout_forecast import LayoutForecasts, LayoutNeeds
from stoker.planning.model.run_forecast import Extents
from stoker.planning.model.trace_extrapolation import expanded
from stoker.profiling.job_profile import job_profile, model_parts
from stoker.profiling.links import measure_links
from stoker.profiling.micro_benchmark import measure_operations
from stoker.profiling.tracing.repetition import trace_with_repetition
from stoker.records import Coupling, Hardware, Layout, MicroBenchmark, Plan, Position, Trace, TraceSettings, to_json
from stoker.records.hardware import Links
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts import divided_parts, model_problem
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT

BARS = {"time": 0.12, "peak": 0.10}
RESULTS = Path(__file__).parents[1] / "results"
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
LAYOUTS = (
    Layout(replicas=2),
    Layout(shards=2),
    Layout(shards=2, reshard=False),
    Layout(tensor=2),
    Layout(stages=2),
)
SAMPLES, SLICE_S, MOST_UPDATES = 512, 1.5, 40


@dataclass(frozen=True)
class Case:
    """A model and its batch; `micro_batch` is that of a process that has half of the batch."""

    name: str
    batch: int
    micro_batch: int
    layers: int = 0
    width: int = 0
    context: int = 64
    vocab: int = 256

    def job(self) -> stoker.Job:
        """Over random samples; the same in every process."""
        random = torch.Generator().manual_seed(0)
        if self.layers:
            tokens = torch.randint(self.vocab, (SAMPLES, self.context + 1), generator=random)
            data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            model: Callable[[], nn.Module] = functools.partial(
                GPT, layers=self.layers, width=self.width, heads=4, context=self.context, vocab=self.vocab
            )
            loss = "token_cross_entropy"
        else:
            inputs = torch.randn(SAMPLES, *((self.width,) if "mlp" in self.name else (3, 32, 32)), generator=random)
            data = inputs, torch.randint(10, (SAMPLES,), generator=random)
            model = functools.partial(_mlp if "mlp" in self.name else _cnn, self.width)
            loss = "cross_entropy"
        return stoker.Job(
            model=model,
            data=data,
            loss=loss,
            optimizer=stoker.AdamW(lr=1e-3),
            clip_norm=1.0,
            batch=self.batch,
            until=stoker.updates(10_000),
        )


SETS = {
    "calibration": (
        Case("gpt 6 x 96", batch=16, micro_batch=8, layers=6, width=96),
        Case("gpt 2 x 320", batch=8, micro_batch=2, layers=2, width=320),
        Case("mlp 768", batch=64, micro_batch=32, width=768),
    ),
    "held_out": (
        Case("gpt 4 x 256", batch=16, micro_batch=8, layers=4, width=256),
        Case("gpt 8 x 128", batch=32, micro_batch=8, layers=8, width=128, context=32),
        Case("cnn 32", batch=64, micro_batch=32, width=32),
        Case("mlp 1024", batch=256, micro_batch=64, width=1024),
    ),
}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + torch.relu(self.layer(self.norm(x_BD)))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Sequential(*(_Block(width) for _ in range(4))), nn.Linear(width, 10))


def _cnn(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 10))


@dataclass
class Compared:
    """A case under a layout: its forecast, and what its processes said."""

    case: Case
    layout: Layout
    plan: Plan
    forecasts: LayoutForecasts
    step_s: list[float] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`gpt 4 x 256, 2 replicas`."""
        return f"{self.case.name}, {self.layout.in_words()}"


def trained(world: World, case: Case, plan: Plan) -> dict[str, Any]:
    """Train in this process, a member of `world`: times of updates [s], bytes of its state, and its peak."""
    torch.set_num_threads(1)
    if problem := apply_malloc(plan.malloc):
        raise SystemExit(problem)
    job = case.job()
    data = datasets_of(job)
    held = resident_bytes()
    step = Step(job, plan, SEPARABLE, world=world)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        plan,
        split=world.split(SEPARABLE),
    )
    batches = list(source.batches(Position(), 4))
    for number in range(2):
        float(step.update(batches[number], number, 0.0))
    times: list[float] = []
    for number in range(_agreed_number(step, batches, world)):
        began = time.perf_counter()
        float(step.update(batches[number % 4], number, 0.0))
        times.append(time.perf_counter() - began)
    step.gradients(batches[0], 0)
    return {"times": times, "held": held, "peak": _high_water_bytes(), **_state(step)}


def _agreed_number(step: Step, batches: Sequence[Any], world: World) -> int:
    """How many updates fill a slice of time; the same everywhere."""
    began = time.perf_counter()
    step.update(batches[2], 2, 0.0)
    said = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    if world.mesh is not None:
        torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX)
    return max(5, min(MOST_UPDATES, int(SLICE_S / float(said))))


def _state(step: Step) -> dict[str, int]:
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    storages = [local(p.detach()).untyped_storage() for p in parameters]
    state = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": sum({one.data_ptr(): one.nbytes() for one in storages}.values()),
        "gradients": sum(local(p.grad).nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(local(v).nbytes for v in state),
    }


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the system does not tell a process's peak memory")


def forecast_of(case: Case, layout: Layout, benchmark: MicroBenchmark, links: Links, held: int) -> Compared | None:
    """A case with its forecast; None where the layout does not go with it."""
    job, cpu = case.job(), attached_cpu()
    with torch.device("meta"):
        model = job.model()  # type: ignore[operator]  # it is a function
    if model_problem(model, layout) is not None:
        return None
    parts = divided_parts(model_parts(model), model, layout)
    data = datasets_of(job)
    facts = job_profile(job, data, SEPARABLE, model, device_kind="cpu")
    hardware = Hardware(device=replace(cpu, cores=1), dense_flops={}, bandwidth_bytes_per_s=None, benchmark=benchmark)
    micro_batch = case.micro_batch if layout.stages == 1 else max(1, case.batch // 4)
    plan = Plan(
        device="cpu",
        micro_batch=micro_batch,
        optimizer_implementation="fused",
        malloc="retained",
        layout=layout,
        checkpoint_every_s=1e9,
    )

    @functools.cache
    def traces(settings: TraceSettings) -> Trace:
        return expanded(trace_with_repetition(job, data, SEPARABLE, settings))

    needs = LayoutNeeds(layout, parts, traces)
    forecasts = LayoutForecasts(
        needs, facts, lambda _: hardware, lambda _: Extents(1, 1, 0), lambda *_: links, held_bytes=held
    )
    return Compared(case, layout, plan, forecasts)


def measure(one: Compared) -> bool:
    """One round of a case; False where the layout does not run it."""
    try:
        said = on_ranks(one.layout, trained, one.case, one.plan)
    except (AssertionError, BadJob, DoesNotFit) as problem:
        print(f"  {one.name}: {str(problem).strip().splitlines()[-1]}")
        return False
    one.said = said
    one.step_s.append(max(statistics.median(rank["times"]) for rank in said))
    return True


def row_of(one: Compared) -> dict[str, Any]:
    """What was forecast and what was measured."""
    plain = replace(one.plan, layout=Layout())
    spread, measured_s = one.forecasts.spread(plain), statistics.median(one.step_s)
    update = one.forecasts.update(plain).step_s
    states = [one.forecasts.state(plain, rank) for rank in range(len(one.said))]
    is_exact = all(
        (state.parameters, state.gradients, state.optimizer)
        == tuple(said[key] for key in ("parameters", "gradients", "optimizer"))
        for state, said in zip(states, one.said, strict=True)
    )
    peak = max(rank["peak"] for rank in one.said)
    # What a checkpoint copies is part of the forecast, and nothing here saves any.
    copied = states[0].parameters + states[0].optimizer
    needed = one.forecasts.needed_bytes(plain) - copied
    return {
        "case": one.case.name,
        "layout": one.layout.in_words(),
        "forecast_s": spread.total_s,
        "low_s": update.low,
        "high_s": update.high,
        "measured_s": measured_s,
        "spread": max(one.step_s) / min(one.step_s) - 1,
        "error": spread.total_s / measured_s - 1,
        "compute_s": spread.compute_s,
        "exposed_s": spread.exposed_s,
        "overhead_s": spread.overhead_s,
        "waiting_s": spread.waiting_s,
        "state_is_exact": is_exact,
        "peak_forecast": needed,
        "peak_measured": peak,
        "peak_error": needed / peak - 1,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all cases, and whether they keep the bars."""
    time_error = statistics.median(abs(row["error"]) for row in rows)
    peak_error = statistics.median(abs(row["peak_error"]) for row in rows)
    return {
        "median_time_error": time_error,
        "median_peak_error": peak_error,
        "all_states_exact": all(row["state_is_exact"] for row in rows),
        "within_interval": sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows) / len(rows),
        "keeps_bars": time_error <= BARS["time"]
        and peak_error <= BARS["peak"]
        and all(row["state_is_exact"] for row in rows),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each case."""
    for row in rows:
        print(
            f"{row['case']:<12} {row['layout']:<26} forecast {row['forecast_s'] * 1e3:7.1f} ms, measured "
            f"{row['measured_s'] * 1e3:7.1f} ms ({row['error']:+.0%}); arithmetic {row['compute_s'] * 1e3:.1f}, "
            f"messages {row['exposed_s'] * 1e3:.1f}, waiting {row['waiting_s'] * 1e3:.1f}, layout "
            f"{row['overhead_s'] * 1e3:.1f}; peak "
            f"{row['peak_forecast'] / 2**20:.0f} / {row['peak_measured'] / 2**20:.0f} MiB ({row['peak_error']:+.0%}); "
            f"state {'exact' if row['state_is_exact'] else 'NOT exact'}"
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=25.0)
    parser.add_argument("--set", choices=sorted(SETS), default="held_out")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    before = sample_cpu()
    benchmark = measure_operations(attached_cpu(), threads=1, budget_s=given.budget)
    links = measure_links(attached_cpu(), 2)
    print(f"links: overlap {links.overlap:.2f}, company {links.slowdown}, waits {links.waits}")
    _start_forkserver()
    held = int(statistics.median(rank["held"] for rank in on_ranks(Layout(replicas=2), _held)))
    compared = [
        one
        for case in SETS[given.set]
        for layout in LAYOUTS
        if (one := forecast_of(case, layout, benchmark, links, held)) is not None
        and all(word in one.name for word in given.only)
    ]
    now = datetime.now(UTC)
    path = RESULTS / f"many_forecast_{given.set}_{now.date().isoformat()}.json"
    registered = [
        {"case": one.name, "step_s": one.forecasts.update(replace(one.plan, layout=Layout())).step_s.value}
        for one in compared
    ]
    command = f"python -m bench.many.forecast --set {given.set} --rounds {given.rounds} --budget {given.budget:g}"
    found = register(path, "forecasts for two processes on this CPU, and what they measured", command, registered)
    gc.collect()
    for _ in range(given.rounds):
        compared = [one for one in compared if measure(one)]
    rows = [row_of(one) for one in compared]
    show(rows)
    after = sample_cpu()
    load = None if before is None or after is None else load_between(before, after)
    stolen = None if load is None else load.stolen  # what others used cannot be told: it has our own processes in it
    found |= {"bars": BARS, "summary": summary(rows), "stolen_share": stolen, "links": to_json(links), "rows": rows}
    print(found["summary"])
    write(path, found)


def _start_forkserver() -> None:
    """Members as users' runs have them: they import what a first step needs in that step, which forecasts count."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["stoker.testing.ranks", "stoker.stepping.step"])
    forkserver.ensure_running()


def _held(_: World) -> dict[str, int]:
    """What a process holds before it makes a step."""
    SETS["calibration"][0].job()
    return {"held": resident_bytes()}


if __name__ == "__main__":
    main()
