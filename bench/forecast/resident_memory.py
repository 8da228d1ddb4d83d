"""Peak resident memory of a training process on a CPU: forecast, then measured in a fresh process.

    python -m bench.forecast.resident_memory [--repeats 3] [--measured FILE] [--fit]

For each job and each malloc setting the peak is forecast from a trace (nothing of the job is run) and the resident
memory that a fresh process has before training; that process then makes three updates, and the kernel tells its peak
(`VmHWM`). Measured is the median over fresh processes: under `default` one job's peaks differ by a tenth, since the
system places the heap at random. The CPU time of an update (user and system, one thread) is recorded too, the least of
all processes [s]: what `mapped` costs, and what `retained` saves.

The constants of `planning.model.memory` were fitted on the calibration set (printed with `--fit`, and kept in the
result); the error that counts is that on the held-out set. `--measured` forecasts again against an earlier result's
measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.forecast.memory_jobs import CASES, SEPARABLE, Case
from stoker.loading.datasets import datasets_of
from stoker.planning.model import memory
from stoker.profiling.tracing.update import trace_update
from stoker.records import Malloc, Trace, TraceSettings

SETTINGS: tuple[Malloc, ...] = ("retained", "default", "mapped")
_BAR = 0.10


def traced(case: Case) -> Trace:
    """The case's update on a pretended CPU."""
    job, plan = case.job(), case.plan_with("default")
    settings = TraceSettings(
        target="cpu",
        capability="",
        micro_batch=plan.micro_batch,
        parts=1 if plan.micro_batch >= job.batch else 2,
        precision=plan.precision,
        memory_format=plan.memory_format,
    )
    return trace_update(job, datasets_of(job), SEPARABLE, settings)


def measured(case: Case, repeats: int) -> dict[str, list[dict[str, float]]]:
    """What fresh processes took under each setting, which alternate: bytes before, at the peak, and time [s]."""
    rounds = [{malloc: _in_fresh_process(case, malloc) for malloc in SETTINGS} for _ in range(repeats)]
    return {malloc: [one[malloc] for one in rounds] for malloc in SETTINGS}


def compare(case: Case, found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Forecast and measured peaks of one case, under each setting."""
    trace, job = traced(case), case.job()
    micro_batches = -(-job.batch // case.plan["micro_batch"])
    rows = []
    for malloc in SETTINGS:
        before, peak = (statistics.median(one[key] for one in found[malloc]) for key in ("before", "peak"))
        forecast = memory.resident_peak(trace, malloc, before, micro_batches=micro_batches)
        rows.append(
            {
                "case": case.name,
                "use": case.use,
                "malloc": malloc,
                "forecast_bytes": round(forecast),
                "measured_bytes": round(peak),
                "error": forecast / peak - 1,
                "before_bytes": round(before),
                "replayed_bytes": memory.replayed(trace, memory.MODELS[malloc], micro_batches=micro_batches),
                "update_s": min(one["update_s"] for one in found[malloc]),
                "measured": found[malloc],
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the held-out cases by setting, and the time of the others over that of `default`."""
    result: dict[str, Any] = {}
    for malloc in SETTINGS:
        errors = sorted(abs(r["error"]) for r in rows if r["malloc"] == malloc and r["use"] == "held out")
        if errors:
            result[malloc] = {"cases": len(errors), "median_error": statistics.median(errors), "worst": errors[-1]}
    times = {malloc: {r["case"]: r["update_s"] for r in rows if r["malloc"] == malloc} for malloc in SETTINGS}
    for malloc in ("retained", "mapped"):
        ratios = {name: times[malloc][name] / times["default"][name] for name in times[malloc]}
        result[f"{malloc}_time_over_default"] = {"median": statistics.median(ratios.values()), **ratios}
    return result


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Constants from the calibration set: what libraries take, then by how much the heaps exceed their replays.

    Each factor is the one of least mean absolute relative error of the whole peak.
    """
    by_setting = {m: [r for r in rows if r["malloc"] == m and r["use"] == "calibration"] for m in SETTINGS}
    mapped = by_setting["mapped"]
    library = statistics.median(r["measured_bytes"] - r["before_bytes"] - r["replayed_bytes"] for r in mapped)

    def error(factor: float, malloc: Malloc) -> float:
        return sum(
            abs((r["before_bytes"] + library + factor * r["replayed_bytes"]) / r["measured_bytes"] - 1)
            for r in by_setting[malloc]
        )

    factors = [1 + step / 100 for step in range(101)]
    best = {f"factor of {m}": min(factors, key=partial(error, malloc=m)) for m in ("retained", "default")}
    return {"library_bytes": library, **best}


def main() -> None:
    """Measure all cases, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measured", type=Path, help="an earlier result, whose measurements are taken")
    parser.add_argument("--fit", action="store_true", help="print the constants that suit the calibration set best")
    arguments = parser.parse_args()
    earlier = _earlier(arguments.measured)
    rows = []
    for case in CASES:
        rows += compare(case, earlier.get(case.name) or measured(case, arguments.repeats))
        for row in rows[-len(SETTINGS) :]:
            mb = {key: row[f"{key}_bytes"] / 1e6 for key in ("forecast", "measured", "before", "replayed")}
            print(
                f"{row['case']:30} {row['use']:12} {row['malloc']:8} forecast {mb['forecast']:6.0f} MB, "
                f"measured {mb['measured']:6.0f} MB ({row['error']:+.1%}); before {mb['before']:.0f}, "
                f"replayed {mb['replayed']:.0f}; {row['update_s']:.2f} s",
                flush=True,
            )
    if arguments.fit:
        print(json.dumps(fitted(rows), indent=2))
    result = {
        "what": "peak resident memory of a training process on a CPU, forecast and measured",
        "command": f"python -m bench.forecast.resident_memory --repeats {arguments.repeats}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{_cpu()}, {os.cpu_count()} shared CPUs, 1 thread used, {' '.join(platform.libc_ver())}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "bar": {"median_error": _BAR},
        "held_out": summary(rows),
        "best_constants_of_the_calibration_set": fitted(rows),
        "constants_used": {m: asdict(memory.MODELS[m]) for m in SETTINGS},
        "cases": rows,
    }
    print(json.dumps(result["held_out"], indent=2))
    path = Path(__file__).parents[1] / "results" / f"resident_memory_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _earlier(path: Path | None) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Measurements of an earlier result by case and setting."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["cases"] if path else ():
        found.setdefault(row["case"], {})[row["malloc"]] = row["measured"]
    return found


def _in_fresh_process(case: Case, malloc: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.forecast.resident_run", case.name, malloc]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
