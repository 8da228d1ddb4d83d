"""Forecasts of whole training steps on GPUs that are not here, against step times that others published.

    python -m bench.forecast.published CASES.csv [--json] [--out FILE] [--only TEXT]

A line of `CASES.csv` names a job file (`job`, relative to the CSV), its parameters (`set`, JSON), the devices (`on`),
the plan to pin (`plan`, JSON: fields of a Plan, `layout` among them), `what` was timed (`step`, or the `forward` pass
alone), `measured_step_ms`, its `precision`, `group` and `id`; other columns are not read. Nothing is searched and
nothing runs: the given plan is traced and forecast. `fits` is the probability that it fits the device's memory. Cases
that cannot be forecast, whatever the reason, are named with it under `failed`, and the others are forecast. Jobs may
need packages of their own, such as timm.

fp16 stands as bf16 in the plans of the cases. Where `precision` says fp16 and nothing but samples is divided, the plan
is in fp16 with a loss scale: cuDNN computes batch norms, and a V100 has kernels for attention. Over other layouts of
devices that have fp16 alone bf16 is priced at the rate of fp16. Words of other programs in `plan` are understood
(`stoker.planning.plan_words`).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stoker.devices import Place, attached_devices, planned_devices
from stoker.errors import BadJob, StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.planning.model.run_forecast import TracedForecasts
from stoker.planning.multi_device import LayoutCandidates, without_layout
from stoker.planning.pinned_plan import plan_of
from stoker.planning.plan_ranking import SURE_ENOUGH
from stoker.planning.plan_words import plan_fields
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan, Profile
from stoker.stepping.coupling import coupling_by_types

GIB = 2**30


def forecast(case: dict[str, str], folder: Path) -> dict[str, Any]:
    """One case's forecast against its measurement.

    Raises:
        StokerError: the job or the plan cannot be forecast.
    """
    _require_columns(case)
    settings, fields, measured_ms = _object(case, "set"), _object(case, "plan"), _milliseconds(case)
    job, entry = load_job(folder / case["job"], {name: str(value) for name, value in settings.items()})
    place = _place(case["on"])
    rates = place.hardware.dense_flops
    if "bf16" not in rates and "fp16" in rates:
        hardware = dataclasses.replace(place.hardware, dense_flops=rates | {"bf16": rates["fp16"]})
        place = dataclasses.replace(place, hardware=hardware)
    if (case.get("precision") or "").startswith("fp16") and set(fields.get("layout") or {}) <= {"replicas"}:
        fields |= {"precision": "fp16"}
    job = dataclasses.replace(job, numerics=sorted({*job.numerics, *_numerics(fields)}))
    forecasts, plan = forecasts_of(planner_of(job, entry), place, fields)
    update = forecasts.update(plan)
    step_s = update.step_s
    if case["what"] == "forward":
        step_s = step_s.scaled(update.forward_s / step_s.value)
    forecast_ms = 1e3 * step_s.value
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


def _numerics(fields: Mapping[str, Any]) -> set[str]:
    """What a Job has to allow for a plan of these fields; whoever published a step allowed what it ran with."""
    words = {str(value).lower() for value in fields.values()}
    states = {"bf16-states"} if fields.get("optimizer_states") == "bf16" else set()
    states |= {"8bit-states"} if any("8bit" in word or "8-bit" in word or "8_bit" in word for word in words) else set()
    return {"fp16", "fp8"} | states


_COLUMNS = ("id", "group", "job", "set", "on", "plan", "what", "measured_step_ms")


def _require_columns(case: dict[str, str]) -> None:
    """Raise BadJob for a case that lacks a value that every forecast needs, or whose `what` is unknown."""
    missing = [column for column in _COLUMNS if not case.get(column)]
    if missing:
        raise BadJob(f"the case has no {' and no '.join(missing)}")
    if case["what"] not in ("step", "forward"):
        raise BadJob(f"what is {case['what']!r}, wanted step or forward")


def _object(case: dict[str, str], column: str) -> dict[str, Any]:
    try:
        value = json.loads(case[column])
    except json.JSONDecodeError as problem:
        raise BadJob(f"{column} is no JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise BadJob(f"{column} is {case[column]}, wanted a JSON object")
    return value


def _milliseconds(case: dict[str, str]) -> float:
    text = case["measured_step_ms"]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadJob(f"measured_step_ms is {text!r}, wanted a positive number")
    return value


def _place(words: str) -> Place:
    places = planned_devices(words, attached_devices())
    if len(places) != 1:
        names = ", ".join(place.name for place in places)
        raise BadJob(f"on is {words!r}, which means {len(places)} places ({names}), wanted one")
    return places[0]


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
    profile = planner.profile(place.device.kind)
    try:
        given = plan_fields(fields, place.count, place.cluster.node_devices, profile)
    except ValueError as problem:
        raise BadJob(f"plan: {problem}") from problem
    if (
        given.get("optimizer_states", "full") != "full"
    ):  # Stoker has one implementation of these, others have fused ones
        given["optimizer_implementation"] = "default"
    usual = {"optimizer_implementation": "fused", "loader": "device", "precision": "fp32"}
    plan = plan_of(usual | given, place, profile)
    if (problem := _problem_with(plan, place, profile)) is not None:
        raise BadJob(problem)
    if plan.layout.world_size == 1:
        return planner.forecasts(place), plan
    return LayoutCandidates(planner, place).forecasts(plan.layout), without_layout(plan)


def _problem_with(plan: Plan, place: Place, profile: Profile) -> str | None:
    """Why a plan cannot be that of the place and the job, with the numbers; None if it can.

    A plan that Stoker would not run, such as one of axes that it does not combine, is forecast all the same.
    """
    layout, batch = plan.layout, min(profile.batch, profile.num_train)
    if layout.world_size != place.count:
        return f"the plan's layout has {layout.world_size} processes, and {place.name} has {place.count} devices"
    local = -(-batch // layout.sample_parts)
    if plan.micro_batch > local:
        return f"micro_batch is {plan.micro_batch}, and a process has {local} of the {batch} samples of a batch"
    if plan.checkpointed_blocks > profile.num_blocks:
        return f"checkpointed_blocks is {plan.checkpointed_blocks}, and the model has {profile.num_blocks} equal blocks"
    return None


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


_FAILURES = (
    StokerError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a case that cannot be forecast raises: errors of Stoker, and of a model that is given sizes it does not take."""


def _sentence(error: BaseException) -> str:
    """What is wrong with a case, and what to do, in one line."""
    text = str(error) if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


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
        reader = csv.DictReader(file)
        for case in reader:
            name = case.get("id") or f"line {reader.line_num}"
            if options.only not in name:
                continue
            try:
                one = forecast(case, options.cases.parent)
            except _FAILURES as error:
                problem = _sentence(error)
                failed.append({"id": name, "problem": problem})
                say(f"{name:<34} cannot be forecast: {problem}")
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
