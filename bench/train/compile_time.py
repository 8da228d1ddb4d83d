"""What compiling costs and gives: seconds until the first update is made, and the time of an update after it.

    python -m bench.train.compile_time [--only gpt]

Each job is trained as Stoker trains it, in fp32 and bf16: not compiled, compiled as a whole, and by its repeated blocks
where it has any. Every measurement is a process of its own; a compiled one starts with an empty cache on disk (*cold*),
and is repeated with the cache that this left (*warm*): what a resumed run pays. One thread computes. `first_s` is the
first update, `first_cpu_s` what the process and its children used for it [CPU-seconds], which other people's work moves
less; `step_s` and `step_cpu_s` are medians of later updates. Printed, and written to bench/results/ job by job, against
what is there of the other jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch

import stoker
from bench.forecast import jobs
from bench.forecast.registration import dated, surroundings
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan, Position
from stoker.records.codec import JSON
from stoker.stepping import torch_compile
from stoker.stepping.model import build_model
from stoker.stepping.step import Step

UPDATES = 9
WAYS = ("eager", "whole", "regions")


def _resnet9() -> stoker.Job:
    """ResNet-9, 32 wide, batches of 64: no two of its layers are alike."""
    return stoker.Job(
        model=lambda: stoker.zoo.ResNet9(width=32, in_channels=1),
        data=jobs.images(256, 28, 1, 10),
        loss="cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=64,
        until=stoker.updates(1000),
    )


JOBS: dict[str, Callable[[], stoker.Job]] = {
    "gpt": lambda: jobs.gpt(layers=6, width=384, heads=6, context=256, vocab=65, batch=2),
    "gpt-12": lambda: jobs.gpt(layers=12, width=128, heads=4, context=64, vocab=65, batch=8),
    "resnet9": _resnet9,
    "mlp": lambda: jobs.mlp(inputs=784, hidden=(256, 128), batch=64),
}


def main() -> None:
    """Measure every job in every way, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="one of the jobs", choices=[*JOBS])
    parser.add_argument("--child", nargs=3, metavar=("JOB", "PRECISION", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child)))
        return
    for name in [arguments.only] if arguments.only else JOBS:
        write(name, rows_of(name))


def write(name: str, rows: list[dict[str, JSON]]) -> None:
    """Put one job's rows in the place of those that the results have of it."""
    path = dated("compile_time")
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    document = {
        "what": "compiling: what the first update takes with it, and later ones after it; one thread",
        "command": "python -m bench.train.compile_time",
        "machine": surroundings(),
        "updates": UPDATES,
        "rows": [*(row for row in earlier if row["job"] != name), *rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def rows_of(name: str) -> list[dict[str, JSON]]:
    """Every way to run one job, each in processes of its own."""
    rows: list[dict[str, JSON]] = []
    ways = WAYS if _has_regions(JOBS[name]()) else WAYS[:2]
    for precision in ("fp32", "bf16"):
        for way in ways:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("none",) if way == "eager" else ("cold", "warm"):
                    row = {"cache": state, **_in_a_process(name, precision, way, cache)}
                    print(_line(row), flush=True)
                    rows.append(row)
    return rows


def measure(name: str, precision: str, way: str) -> dict[str, JSON]:
    """One job in one way, in this process."""
    torch.set_num_threads(1)
    job = JOBS[name]()
    planner = Planner(resolve_job(job, None))
    plan = Plan(
        device="cpu",
        micro_batch=job.batch,
        precision=precision,
        threads=1,  # type: ignore[arg-type]
        memory_format="channels_last" if name == "resnet9" else "contiguous",
        optimizer_implementation="fused",
        compile=way != "eager",
    )
    as_whole = mock.patch.object(torch_compile, "compiled_regions", lambda model: [model])
    with as_whole if way == "whole" else contextlib.nullcontext():
        step = Step(job, plan, planner.coupling)
    data = datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    times, spent = [], []
    with contextlib.closing(source.batches(Position(), UPDATES)) as batches:
        for update, batch in enumerate(batches):
            began, used = time.perf_counter(), _cpu_s()
            step.update(batch, update, 0.0)
            times.append(time.perf_counter() - began)
            spent.append(_cpu_s() - used)
    regions = step.compilation.regions if step.compilation else ()
    return {
        "job": name,
        "precision": precision,
        "way": way,
        "regions": len(regions),
        "first_s": times[0],
        "first_cpu_s": spent[0],
        "step_s": statistics.median(times[2:]),
        "step_cpu_s": statistics.median(spent[2:]),
        "problem": step.compilation.problem if step.compilation else None,
    }


def _has_regions(job: stoker.Job) -> bool:
    return len(torch_compile.compiled_regions(build_model(job))) > 1


def _in_a_process(name: str, precision: str, way: str, cache: str) -> dict[str, JSON]:
    command = [sys.executable, "-m", "bench.train.compile_time", "--child"]
    surrounding = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, name, precision, way], check=True, stdout=subprocess.PIPE, text=True, env=surrounding
    )
    row: dict[str, JSON] = json.loads(done.stdout.splitlines()[-1])
    return row


def _cpu_s() -> float:
    """CPU time of this process, finely, and of the children it has waited for, in ticks."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _line(row: dict[str, JSON]) -> str:
    return (
        f"{row['job']:<8} {row['precision']} {row['way']:<8} {row['cache']:<5} first {row['first_s']:6.1f} s "
        f"({row['first_cpu_s']:5.1f} CPU-s), then {1e3 * row['step_s']:7.1f} ms ({1e3 * row['step_cpu_s']:7.1f} CPU-ms)"
        + (f"  {row['problem']}" if row["problem"] else "")
    )


if __name__ == "__main__":
    main()
