"""Forecasts of whole training steps on GPUs that are not here, against step times that others published.

    python -m bench.forecast.published CASES.csv [--json] [--out FILE] [--only TEXT]

A line of `CASES.csv` names a job file (`job`, relative to the CSV), its parameters (`set`, JSON), the devices (`on`),
the plan to pin (`plan`, JSON: fields of a Plan, `layout` among them), `what` was timed (`step`, or the `forward` pass
alone), `measured_step_ms`, its `precision`, `group` and `id`; other columns are not read. Nothing is searched and
nothing runs: the given plan is traced and forecast. `fits` is the probability that it fits the device's memory. Cases
that cannot be forecast are named with the reason, and counted. Jobs may need packages of their own, such as timm.

fp16 stands as bf16 in the plans of the cases. Where `precision` says fp16 and there is one device, the plan is in fp16
with a loss scale: cuDNN computes batch norms, and a V100 has kernels for attention. On several devices that have fp16
alone bf16 is priced at the rate of fp16.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import platform
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stoker.devices import Place, attached_devices, planned_devices
from stoker.errors import StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.planning.model.run_forecast import TracedForecasts
from stoker.planning.multi_device import LayoutCandidates, without_layout
from stoker.planning.pinned_plan import plan_of
from stoker.planning.plan_ranking import SURE_ENOUGH
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan
from stoker.stepping.coupling import coupling_by_types

GIB = 2**30


def forecast(case: dict[str, str], folder: Path) -> dict[str, Any]:
    """One case's forecast against its measurement.

    Raises:
        StokerError: the job or the plan cannot be forecast.
    """
    job, entry = load_job(folder / case["job"], {name: str(value) for name, value in json.loads(case["set"]).items()})
    (place,) = planned_devices(case["on"], attached_devices())
    rates = place.hardware.dense_flops
    if "bf16" not in rates and "fp16" in rates:
        hardware = dataclasses.replace(place.hardware, dense_flops=rates | {"bf16": rates["fp16"]})
        place = dataclasses.replace(place, hardware=hardware)
    fields = json.loads(case["plan"])
    if case.get("precision", "").startswith("fp16") and not fields.get("layout"):
        job, fields = dataclasses.replace(job, numerics=[*job.numerics, "fp16"]), fields | {"precision": "fp16"}
    forecasts, plan = forecasts_of(planner_of(job, entry), place, fields)
    update = forecasts.update(plan)
    step_s = update.step_s
    if case["what"] == "forward":
        step_s = step_s.scaled(update.forward_s / step_s.value)
    measured_ms, forecast_ms = float(case["measured_step_ms"]), 1e3 * step_s.value
    return {
        "id": case["id"],
        "group": case["group"],
        "forecast_ms": forecast_ms,
        "measured_ms": measured_ms,
        "low_ms": 1e3 * step_s.low,
        "high_ms": 1e3 * step_s.high,
        "error": forecast_ms / measured_ms - 1,
        "inside": step_s.low <= measured_ms / 1e3 <= step_s.high,
        "needed_gib": forecasts.needed_bytes(plan) / GIB,
        "fits": forecasts.probability_it_fits(plan),
    }


def planner_of(job: Job, entry: Entry) -> Planner:
    """The planner of a job for devices elsewhere; what samples share is stated by types of layers, without a probe."""
    planner = Planner(resolve_job(job, entry), is_all_elsewhere=True)
    vars(planner)["coupling"] = coupling_by_types(job, planner.prepared.model, "forecast for elsewhere")
    return planner


def forecasts_of(planner: Planner, place: Place, fields: dict[str, Any]) -> tuple[TracedForecasts, Plan]:
    """Forecasts at a place and the plan of `fields`, pinned; under a layout, that of one of its processes.

    Raises:
        StokerError: the plan is not one, or cannot be forecast.
    """
    usual = {"optimizer_implementation": "fused", "loader": "device", "precision": "fp32"}
    plan = plan_of(usual | fields, place, planner.profile(place.device.kind))
    if plan.layout.world_size == 1:
        return planner.forecasts(place), plan
    return LayoutCandidates(planner, place).forecasts(plan.layout), without_layout(plan)


def statistics_of(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and mean absolute error [fractions], how many lie inside their interval, and how many are said to fit.

    A plan is used only where it fits with the planner's probability (`would_be_planned`).
    """
    errors = [case["error"] for case in cases]
    return {
        "cases": len(cases),
        "median_error": statistics.median(errors),
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "inside": sum(case["inside"] for case in cases),
        "said_to_fit": sum(case["fits"] >= 0.5 for case in cases),
        "would_be_planned": sum(case["fits"] >= SURE_ENOUGH for case in cases),
    }


def _line(one: dict[str, Any]) -> str:
    """A case for people: measured, forecast, error, memory."""
    inside = "inside" if one["inside"] else ""
    times = f"{one['measured_ms']:>10,.0f} ms {one['forecast_ms']:>10,.0f} ms {one['error']:>+7.0%}"
    return f"{one['id']:<34}{times}  {inside:<6} {one['needed_gib']:>6.1f} GiB, fits {one['fits']:.2f}"


def main() -> int:
    """Forecast all cases, print them, and write the document if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--out", type=Path, help="write the document here, too")
    parser.add_argument("--only", default="", help="cases whose id contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    say = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    found, failed = [], []
    with options.cases.open(newline="", encoding="utf-8") as file:
        for case in csv.DictReader(file):
            if options.only not in case["id"]:
                continue
            try:
                one = forecast(case, options.cases.parent)
            except StokerError as error:
                failed.append({"id": case["id"], "problem": error.message})
                say(f"{case['id']:<34} cannot be forecast: {error.message}")
                continue
            found.append(one)
            say(_line(one))
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        groups[one["group"]].append(one)
    document = {
        "command": f"python -m bench.forecast.published {options.cases.name}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cases": found,
        "failed": failed,
        "overall": statistics_of(found) if found else {},
        "groups": {name: statistics_of(members) for name, members in groups.items()},
    }
    text = json.dumps(document, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    say(json.dumps(document["overall"]))
    if options.json:
        print(text)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
