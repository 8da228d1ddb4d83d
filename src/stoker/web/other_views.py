"""What the pages of studies, plans, data checks and places are sent."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from stoker.devices import attached_devices
from stoker.errors import BadRun, StokerError
from stoker.records import Candidate, Decision, loads, to_json
from stoker.records.codec import JSON, Record
from stoker.records.data_check import CleanList, DataCheck
from stoker.records.study import StudyForecast, StudySettings
from stoker.reporting.data_page import render_data_page
from stoker.reporting.wording import short
from stoker.store.foreign_files import read_below
from stoker.store.run_query import value_of
from stoker.web.run_index import Row, RunIndex, read_json

R = TypeVar("R", bound=Record)

_MOST_BYTES = 64 * 2**20


def _read(root: Path, name: str, read: Callable[[bytes], R], what: str) -> R:
    content = read_below(root, name, _MOST_BYTES)
    if content is None:
        raise BadRun(f"{what} is gone: {short(name)}.")
    try:
        return read(content)
    except (ValueError, TypeError, AttributeError, RecursionError) as problem:
        raise BadRun(f"{what} cannot be used: {short(problem, 300)}.") from problem


# -------------------------------------------------------------------------------------------------------------- studies


def study_document(index: RunIndex, study: str) -> dict[str, JSON]:
    """A study by its trials' runs: parameters, value of the objective, state, cost, and what mattered.

    Raises:
        BadRun: there is no such study, or it cannot be read.
    """
    if study not in index.studies:
        raise BadRun(f"there is no study {short(study)!r} here")
    root, name = index.studies[study]
    settings = _read(root, f"{name}/study.json", partial(loads, record=StudySettings), "the study")
    prefix = f"{study}/trials/"
    rows = [row for row in index.rows.values() if row.id.startswith(prefix)]
    trials = [_trial(row, settings) for row in rows]
    values = [(trial["parameters"], trial["value"]) for trial in trials if trial["value"] is not None]
    forecast = None
    try:
        content = read_below(root, f"{name}/forecast.json", _MOST_BYTES)
        forecast = loads(content, StudyForecast) if content else None
    except (StokerError, ValueError):
        forecast = None
    return {
        "name": short(settings.name),
        "objective": short(settings.objective, 60),
        "higher_is_better": settings.higher_is_better,
        "sampler": settings.sampler,
        "pruner": settings.pruner,
        "on": short(settings.on, 60),
        "job": short(settings.job, 200),
        "space": [
            {
                "name": short(one.name, 60),
                "kind": one.kind,
                "low": one.low,
                "high": one.high,
                "choices": [short(choice, 60) for choice in one.choices],
                "is_log": one.is_logarithmic,
            }
            for one in settings.space
        ],
        "trials": trials,
        "influence": influence(values, [one.name for one in settings.space]),
        "forecast": None
        if forecast is None
        else {name: to_json(getattr(forecast, name)) for name in ("total_s", "pruned_s", "cost_usd", "energy_kwh")},
        "planned_trials": forecast.trials if forecast else None,
    }


def _trial(row: Row, settings: StudySettings) -> dict[str, JSON]:
    document = row.document
    value = value_of(settings.objective, row.values) if document.get("status") == "finished" else None
    if value is None:  # not finished: the last evaluation that has it
        named = {
            name: one
            for name, one in row.latest.items()
            if name.rsplit("/", 1)[-1] == settings.objective.rsplit("/", 1)[-1]
        }
        value = next(iter(named.values()), None)
    return {
        "id": row.id,
        "name": document.get("name"),
        "state": document.get("state"),
        "trial": document.get("trial"),
        "value": value if isinstance(value, float) and math.isfinite(value) else None,
        "parameters": {short(one.name, 60): row.values.get(one.name) for one in settings.space},
        "samples": document.get("samples"),
        "total_samples": document.get("total_samples"),
        "wall_s": document.get("wall_s"),
        "cost_usd": document.get("cost_usd"),
        "curve": document.get("curve"),
    }


def influence(values: Sequence[tuple[Mapping[str, JSON], float]], names: Sequence[str]) -> dict[str, float]:
    """How much of the objective's order each parameter alone explains [0 to 1]; none of fewer than 5 trials.

    Numbers: the square of the rank correlation, which sees what rises or falls. Choices: the correlation ratio of
    ranks. Neither sees what only parameters together do.

    >>> influence([({"lr": lr}, -lr) for lr in (0.1, 0.2, 0.3, 0.4, 0.5)], ["lr"])
    {'lr': 1.0}
    """
    if len(values) < 5:
        return {}
    target = _ranks([value for _, value in values])
    found = {}
    for name in names:
        given = [parameters.get(name) for parameters, _ in values]
        if all(isinstance(one, int | float) for one in given):
            ranks = _ranks([float(one) for one in given])  # type: ignore[arg-type]
            if ranks.std() and target.std():
                found[name] = round(float(np.corrcoef(ranks, target)[0, 1] ** 2), 6)
        elif target.std():
            groups: dict[str, list[float]] = {}
            for one, rank in zip(given, target, strict=True):
                groups.setdefault(str(one), []).append(float(rank))
            between = sum(len(group) * (np.mean(group) - target.mean()) ** 2 for group in groups.values())
            found[name] = round(float(between / (target.std() ** 2 * len(target))), 6)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    array = np.asarray(values, dtype=float)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    ranks: np.ndarray = (starts + (counts - 1) / 2)[inverse]
    return ranks


# ---------------------------------------------------------------------------------------------------------------- plans


def plan_document(index: RunIndex, plan: str) -> dict[str, JSON]:
    """A Decision: of a run, or of a file that `stoker plan --json` wrote.

    Raises:
        BadRun: there is none, or it cannot be read.
    """
    if plan in index.rows:
        row = index.rows[plan]
        root, name = row.root, f"{row.name}/plan.json"
    elif plan in index.plans:
        root, name = index.plans[plan]
    else:
        raise BadRun(f"there is no plan {short(plan)!r} here")
    decision = _read(root, name, partial(loads, record=Decision), "the plan")
    return {
        "name": short(plan),
        "device": short(decision.device),
        "took_s": decision.took_s,
        "advice": short(decision.advice, 600),
        "is_settled": decision.is_settled,
        "explanation": [short(line, 400) for line in decision.explanation[:60]],
        "candidates": [_candidate(one) for one in decision.candidates[:400]],
        "rejected": [
            {"device": short(one.device, 60), "plan": short(one.plan.in_words(), 300), "reason": short(one.reason, 300)}
            for one in decision.rejected[:400]
        ],
        "breakdown": None if decision.breakdown is None else to_json(decision.breakdown),
    }


def _candidate(one: Candidate) -> dict[str, JSON]:
    forecast = one.forecast
    return {
        "device": short(one.device, 60),
        "plan": short(one.plan.in_words(), 300),
        "is_here": one.is_here,
        "memory_bytes": one.memory_bytes,
        "why": short(one.why, 200),
        "devices": one.plan.layout.world_size,
        "usd_per_hour": one.price.usd_per_hour if one.price else None,
        "provider": short(one.price.provider, 60) if one.price else None,
        **{
            name: to_json(getattr(forecast, name))
            for name in ("total_s", "cost_usd", "peak_bytes", "samples_per_s", "energy_kwh")
        },
    }


def plans_known(index: RunIndex) -> list[dict[str, JSON]]:
    """Plan files in the folders, and runs, whose plans can be looked at."""
    files = [
        {"id": name, "name": short(name), "kind": "file"}
        for name, (root, file) in index.plans.items()
        if read_json(root, file).get("record") == "Decision"
    ]
    runs = sorted(
        (row.document for row in index.rows.values() if not row.document.get("study")),
        key=lambda document: str(document.get("created_at")),
        reverse=True,
    )
    return files + [{"id": one["id"], "name": one["name"], "kind": "run"} for one in runs[:200]]


# --------------------------------------------------------------------------------------------------------- data checks


def checks_known(index: RunIndex) -> list[dict[str, JSON]]:
    """Data checks in the folders: of what, samples, faults and suspects, when; or why one cannot be read."""
    documents: list[dict[str, JSON]] = []
    for check, (root, name) in list(index.checks.items())[:200]:
        try:
            found = _read(root, f"{name}/check.json", partial(loads, record=DataCheck), "the data check")
        except StokerError as problem:
            documents.append({"id": check, "problem": short(problem, 300)})
            continue
        gravities = [finding.gravity for finding in found.findings]
        documents.append(
            {
                "id": check,
                "source": short(found.source),
                "samples": found.num_samples,
                "faults": gravities.count("fault") + gravities.count("corrupt"),
                "suspects": gravities.count("suspect"),
                "made_at": short(found.made_at, 40),
            }
        )
    return documents


def check_html(index: RunIndex, check: str) -> str:
    """A data check as HTML, without pictures: those are files elsewhere, which this page does not read.

    Raises:
        BadRun: there is none, or it cannot be read.
    """
    if check not in index.checks:
        raise BadRun(f"there is no data check {short(check)!r} here")
    root, name = index.checks[check]
    found = _read(root, f"{name}/check.json", partial(loads, record=DataCheck), "the data check")
    try:
        clean = _read(root, f"{name}/clean.json", partial(loads, record=CleanList), "its clean list")
    except StokerError:
        clean = CleanList(source=found.source, made_at=found.made_at, kept=found.num_samples)
    return render_data_page(found, clean, {}, layout="fragment")


# --------------------------------------------------------------------------------------------------------------- places


def places_document(index: RunIndex) -> dict[str, JSON]:
    """Where runs are: this machine with its devices, and each place elsewhere with what it says of its runs."""
    devices = [
        {"name": one.name, "model": one.model, "cores": one.cores, "memory_bytes": one.memory_bytes}
        for one in attached_devices()
    ]
    rows = [row.document for row in index.rows.values()]
    here = [
        one["id"] for one in rows if not one.get("launch") and one.get("state") in ("running", "planning", "stalled")
    ]
    places: dict[str, list[dict[str, JSON]]] = {}
    for one in rows:
        if launch := one.get("launch"):
            places.setdefault(str(launch["place"]), []).append(one)
    return {
        "host": platform.node(),
        "devices": devices,
        "here": here,
        "places": [
            {
                "place": place,
                "kind": members[0]["launch"]["kind"],
                "runs": [member["id"] for member in members],
                "cost_usd": sum(member.get("cost_usd") or 0.0 for member in members),
                "max_cost": sum(member["launch"].get("max_cost") or 0.0 for member in members) or None,
            }
            for place, members in sorted(places.items())
        ],
    }
