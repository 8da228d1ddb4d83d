"""How long `stoker plan` takes for models of Llama-3's shapes, on 25 devices and on many, and with how much memory.

    python -m bench.forecast.planning_time [--repeats 3] [--traces-only]
    python -m bench.forecast.planning_time --against CHECKOUT [--repeats 3] [--only NAME,NAME]

Each time in a fresh process: cold with an empty cache, then again with what the first has left there. Beside it, what
the parts take: tracing two micro-batches at once (repeated blocks once) under each precision, with and without
checkpointing; putting in the blocks left out of both; deriving a third micro-batch; writing and reading a trace.
Seconds are of wall clock and, since neighbours show in those, of the CPU, which the bars are of.

Against the checkout of another revision: each case cold, in turns with the other, and whether both decide the same, to
the last digit of every candidate's forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.forecast.registration import surroundings
from stoker.jobs import load_job
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import Datasets
from stoker.planning.model.trace_extrapolation import Derivation, expanded
from stoker.profiling.tracing.repetition import traces_with_repetition
from stoker.records import Coupling, Trace, TraceSettings
from stoker.store.record_caches import packed_trace, unpacked_trace

DATE = time.strftime("%Y-%m-%d")
ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "llama8b.py"
RESULTS = ROOT / "bench" / "results"
DEVICES = (
    "gb200",
    "b300",
    "b200",
    "gh200",
    "h200",
    "h100",
    "h100-nvl",
    "h100-pcie",
    "l40s",
    "l40",
    "l4",
    "a100-80",
    "a100-40",
    "a100-80-pcie",
    "a40",
    "a30",
    "a10g",
    "a10",
    "t4",
    "v100-32",
    "rtx-5090",
    "rtx-4090",
    "rtx-3090",
    "rtx-a6000",
    "rtx-2080-ti",
)
COLD_BAR_S, CACHED_BAR_S, MEMORY_BAR_GIB = 25.0, 10.0, 1.5
SHAPES = Path(__file__).parent / "llama_shapes.py"
ON_MANY = {
    "8B on 8xh100,8xb200": (JOB, (), "8xh100,8xb200", 60.0),
    "70B on 64xh100": (SHAPES, ("size=70b", "batch=512"), "64xh100", 60.0),
    "405B on 512xh100": (SHAPES, ("size=405b", "batch=1024"), "512xh100", 120.0),
    "8B on 1024xh100": (SHAPES, ("size=8b", "batch=1024"), "1024xh100", 30.0),
}
"""Job file, its settings, places, and the bar on CPU seconds with nothing cached."""
CASES = {"8B on 25 devices": (JOB, (), ",".join(DEVICES), COLD_BAR_S), **ON_MANY}
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="no module of it couples samples")


def main() -> int:
    """Measure, print and write; 0 if the bars are held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traces-only", action="store_true", help="the parts alone; nothing is written")
    parser.add_argument("--against", type=Path, help="a checkout of another revision, for a comparison alone")
    parser.add_argument("--only", default="", help="names of cases of a comparison, with commas between them")
    arguments = parser.parse_args()
    if arguments.against is not None:
        return compared(arguments.against.resolve(), arguments.repeats, arguments.only)
    parts = list(traced())
    if arguments.traces_only:
        return 0
    cold, cached = [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(planned(cache))
            cached.append(planned(cache))
    held = _hold(cold, COLD_BAR_S) and _hold(cached, CACHED_BAR_S)
    on_many = {}
    for name, (job, settings, on, bar_s) in ON_MANY.items():
        with tempfile.TemporaryDirectory() as cache:
            found = planned(cache, job, settings, on)
        on_many[name] = found | {"bar_s": bar_s, "held": found["cpu_s"] <= bar_s}
        held = held and found["cpu_s"] <= bar_s
    result = {
        "what": "planning models of Llama-3's shapes: 8B over 25 devices, and over several devices of one kind",
        "command": f"python -m bench.forecast.planning_time --repeats {arguments.repeats}",
        "date": DATE,
        "machine": surroundings(),
        "load": os.getloadavg(),
        "devices": DEVICES,
        "bars": {"cold_s": COLD_BAR_S, "cached_s": CACHED_BAR_S, "memory_gib": MEMORY_BAR_GIB, "held": held},
        "cold": cold,
        "cached": cached,
        "on_many": on_many,
        "parts": parts,
    }
    path = RESULTS / f"planning_time_{DATE}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"bars {'held' if held else 'NOT held'}; written to {path}")
    return 0 if held else 1


def compared(other: Path, repeats: int, only: str) -> int:
    """CPU seconds of both checkouts in turns, and differences between their decisions; 0 if there are none."""
    cases = {name: case for name, case in CASES.items() if name in only.split(",") or not only}
    seconds: dict[str, dict[str, list[float]]] = {name: {"here": [], "other": []} for name in cases}
    differing: dict[str, list[str]] = {}
    for _ in range(repeats):
        for name, (job, settings, on, _bar_s) in cases.items():
            decisions = {}
            for which, checkout in (("other", other), ("here", ROOT)):
                with tempfile.TemporaryDirectory() as cache:
                    found, decisions[which] = decided(cache, job, settings, on, checkout)
                seconds[name][which].append(found["cpu_s"])
            differing[name] = list(differences(decisions["other"], decisions["here"]))
    result = {
        "what": "planning by this revision and by another one: CPU seconds with nothing cached, and what differs",
        "command": f"python -m bench.forecast.planning_time --against CHECKOUT --repeats {repeats}"
        + (f" --only '{only}'" if only else ""),
        "date": DATE,
        "revisions": {"here": revision(ROOT), "other": revision(other)},
        "machine": surroundings(),
        "load": os.getloadavg(),
        "cases": {
            name: {
                "bar_s": cases[name][-1],
                "median_cpu_s": {which: statistics.median(each) for which, each in seconds[name].items()},
                "cpu_s": seconds[name],
                "differences": differing[name],
            }
            for name in cases
        },
    }
    path = RESULTS / f"planning_time_against_{result['revisions']['other']}_{DATE}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return int(any(differing.values()))


def revision(checkout: Path) -> str:
    """The commit of a checkout, short."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, the time that planning took aside."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key != "took_s":
                yield from differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{path}[{place}]")
    elif one != other:
        yield f"{path}: {one} and {other}"


def planned(cache: str, job: Path = JOB, settings: Sequence[str] = (), on: str = ",".join(DEVICES)) -> dict[str, float]:
    """One `stoker plan` in a process of its own."""
    found, _ = decided(cache, job, settings, on, ROOT)
    return found


def decided(
    cache: str, job: Path, settings: Sequence[str], on: str, checkout: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """As `planned`, by the code of a checkout, with its decision as JSON."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    given = [word for one in settings for word in ("--set", one)]
    command = [sys.executable, "-m", "stoker", "plan", str(job), *given, "--on", on, "--json"]
    environment = os.environ | {"STOKER_CACHE": cache, "PYTHONPATH": str(checkout / "src")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=checkout)
    decision = json.loads(process.communicate()[0] or "null")
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    found = {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "peak_gib": round(after.ru_maxrss / 2**20, 3),  # the largest of all so far: none is left out
        "candidates": len(decision["candidates"]),
    }
    print(checkout.name, found, flush=True)
    return found, decision


def traced() -> Iterator[dict[str, Any]]:
    """What one trace and what is made of it take [s]."""
    job, _ = load_job(JOB, {})
    data = Datasets(train=as_samples(job.data, what="data"), held_out={}, test=None)
    for precision in ("bf16", "fp32"):
        for blocks in (0, 32):
            small, large = (
                TraceSettings(
                    target="cuda", capability="9.0", micro_batch=size, precision=precision, checkpointed_blocks=blocks
                )
                for size in (2, 4)
            )
            both, trace_s = _timed(
                lambda small=small, large=large: traces_with_repetition(job, data, SEPARABLE, (small, large))
            )
            one = both[0]
            wholes, expand_s = _timed(lambda both=both: [expanded(each) for each in both])
            whole = wholes[0]
            _, derive_s = _timed(lambda wholes=wholes: Derivation(*wholes).at(8))
            content, pack_s = _timed(lambda one=one: packed_trace(one))
            _, read_s = _timed(lambda content=content: unpacked_trace(content))
            row = {
                "precision": precision,
                "checkpointed_blocks": blocks,
                "is_repeated": one.repetition is not None,
                "operations": [len(one.occurrences), len(whole.occurrences)],
                "trace_both_s": trace_s,
                "expand_both_s": expand_s,
                "derive_s": derive_s,
                "pack_s": pack_s,
                "read_s": read_s,
                "file_bytes": len(content),
                "flops": whole.flops,
                "peak_gib": round(_peak(whole) / 2**30, 3),
                "resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
            }
            print(row, flush=True)
            yield row


def _timed(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    made = make()
    return made, {
        "wall": round(time.perf_counter() - wall, 3),
        "cpu": round(time.process_time() - cpu, 3),
    }


def _peak(trace: Trace) -> int:
    """The most bytes that live at once."""
    live = most = 0
    for event in trace.events:
        num_bytes = trace.storages[abs(event) - 1].num_bytes
        live += num_bytes if event > 0 else -num_bytes
        most = max(most, live)
    return most


def _hold(runs: list[dict[str, float]], bar_s: float) -> bool:
    """Whether the median run is within the bar, and every run within that of memory."""
    return statistics.median(run["cpu_s"] for run in runs) <= bar_s and all(
        run["peak_gib"] <= MEMORY_BAR_GIB for run in runs
    )


if __name__ == "__main__":
    sys.exit(main())
