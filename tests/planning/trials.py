"""A planner's world without a device: facts of a job, and trials whose times come from a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.planning.model.run_forecast import Extents
from stoker.planning.plan_search import PlanSearch
from stoker.records import (
    Basis,
    Candidate,
    Coupling,
    Device,
    Estimate,
    Forecast,
    Measurement,
    Plan,
    Price,
    Profile,
)

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="probed")
NORMS = Coupling(kind="batch_norm", group=64, causes=("5 BatchNorm2d",), evidence="probed")

CPU = Device(name="cpu", kind="cpu", model="a CPU", cores=4, memory_bytes=8 * 2**30, fast_dtypes=("fp32", "bf16"))
OLD_CPU = Device(name="cpu", kind="cpu", model="an old CPU", cores=1, memory_bytes=2**30, fast_dtypes=("fp32",))
GPU = Device(name="gpu", kind="cuda", model="H200", cores=132, memory_bytes=139 * 2**30, fast_dtypes=("fp32", "bf16"))


def profile(**changes: Any) -> Profile:
    """A convolutional network over images in memory, with changes."""
    facts = {
        "num_train": 54_000,
        "num_valid": 6_000,
        "num_test": 10_000,
        "batch": 512,
        "parameters": 10**6,
        "parameter_bytes": 4 * 10**6,
        "has_convolutions": True,
        "is_in_memory": True,
        "optimizer_implementations": ("fused", "default"),
        "coupling": SEPARABLE,
    }
    return Profile(**facts | changes)


def measurement(plan: Plan, update_s: float | tuple[float, ...], **changes: Any) -> Measurement:
    """What a trial of `plan` found: the same time for every update, unless several are given."""
    found = {
        "plan": plan,
        "samples_per_update": 512,
        "evaluate_s_per_sample": 1e-4,
        "peak_bytes": 2**30,
        "update_s": (update_s,) * 5 if isinstance(update_s, float) else update_s,
        "state_bytes": 2 * 10**7,
        "took_s": 0.0,
    }
    return Measurement(**found | changes)


def extents(_samples_per_s: float) -> Extents:
    """Five epochs."""
    return Extents(total_samples=270_000, total_updates=530, evaluations=5)


def run(search: PlanSearch, trial: Callable[[Plan], Measurement | str], at_most: int = 200) -> list[Plan]:
    """Try what the search asks for until it is done, and return that; a trial that gives a text is a rejection."""
    tried: list[Plan] = []
    while (plan := search.next_plan()) is not None:
        tried.append(plan)
        assert len(tried) <= at_most, "the search does not end"
        found = trial(plan)
        if isinstance(found, str):
            search.reject(plan, found)
        else:
            search.record(found)
    return tried


def estimate(value: float, unit: str, basis: Basis = "datasheet") -> Estimate:
    """Ten per cent around a value."""
    return Estimate(value=value, low=value * 0.9, high=value * 1.1, unit=unit, basis=basis)


def candidate(
    device: str, *, total_s: float, cost: float | None, is_here: bool = False, energy: float | None = 1.0
) -> Candidate:
    """A forecast of a run on some device."""
    plan = Plan(device="cpu" if is_here else "cuda:0", micro_batch=64)
    price = (
        None
        if cost is None
        else Price(
            device=device,
            provider="RunPod",
            usd_per_hour=1.0,
            market="on demand",
            source="a list",
            seen_on="2026-11-01",
        )
    )
    return Candidate(
        device=device,
        plan=plan,
        forecast=forecast_of(plan, total_s=total_s, cost=cost, energy=energy),
        memory_bytes=2**34,
        is_here=is_here,
        price=price,
    )


def forecast_of(
    plan: Plan,
    *,
    total_s: float = 53.0,
    cost: float | None = None,
    energy: float | None = None,
    pace_s: float = 0.1 / 512,
    peak_bytes: float = 2**30,
    basis: Basis = "calibrated",
    compile_s: float | None = None,
) -> Forecast:
    """A forecast with these figures."""
    return Forecast(
        step_s=estimate(pace_s * 512, "s", basis),
        samples_per_s=estimate(1 / pace_s, "samples/s", basis),
        evaluate_s=estimate(1, "s"),
        checkpoint_s=estimate(0.1, "s"),
        total_s=estimate(total_s, "s", basis),
        peak_bytes=estimate(peak_bytes, "bytes"),
        total_samples=270_000,
        total_updates=530,
        probability_it_fits=1.0,
        cost_usd=None if cost is None else estimate(cost, "USD"),
        energy_kwh=None if energy is None else estimate(energy, "kWh"),
        compile_s=None if compile_s is None else estimate(compile_s, "s"),
    )
