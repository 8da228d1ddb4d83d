"""Why this plan, in a few lines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from stoker.records import Candidate, Device, Measurement, Profile, Rejection
from stoker.units import format_bytes, format_count, format_seconds


def explain(
    chosen: Candidate,
    profile: Profile,
    device: Device,
    measured: Sequence[Measurement],
    rejected: Sequence[Rejection],
) -> tuple[str, ...]:
    """Five lines: the plan, what the contract allows, what each setting gave, the memory, and the time to finish."""
    plan, forecast = chosen.plan, chosen.forecast
    total, peak = forecast.total_s, forecast.peak_bytes
    return (
        f"{device.model}, {device.cores} cores: {plan.in_words()}",
        _legality(profile),
        _gains(chosen, measured, rejected),
        f"memory: {format_bytes(peak.value)} at the peak ({peak.basis}), of {format_bytes(device.memory_bytes)}",
        f"to finish: {format_seconds(total.value)} ({format_seconds(total.low)} to {format_seconds(total.high)}, "
        f"{total.basis}) for {format_count(forecast.total_samples)} samples in {forecast.total_updates} updates, "
        f"{format_seconds(forecast.update_s.value)} each",
    )


def _legality(profile: Profile) -> str:
    coupling = profile.coupling
    if coupling.kind == "separable":
        return f"samples are separable: any micro-batch up to the batch of {profile.batch} learns the same"
    rule = "whole groups" if coupling.kind == "batch_norm" else "exactly one group"
    through = ", ".join(coupling.causes)
    return f"samples are coupled by {through}: a micro-batch is {rule} of {coupling.group} samples"


def _gains(chosen: Candidate, measured: Sequence[Measurement], rejected: Sequence[Rejection]) -> str:
    """What the chosen settings gave against the plans that differ in one of them."""
    best = next(m for m in measured if m.plan == chosen.plan)
    pace = statistics.median(best.update_s)
    parts = []
    for other in measured:
        changed = _only_difference(best, other)
        if changed is not None:
            mine, theirs = (getattr(m.plan, changed) for m in (best, other))
            parts.append(f"{_word(changed, mine)} {statistics.median(other.update_s) / pace:.2f}x {_word(changed, theirs)}")
    parts += [f"{r.plan.precision} ruled out: {r.reason}" for r in rejected]
    error = chosen.forecast.gradient_error
    if error is not None:
        parts.append(f"gradient {error:.1%} from fp32's")
    return "speed: " + ("; ".join(parts) if parts else "nothing else was tried, it would not have paid back")


def _only_difference(one: Measurement, other: Measurement) -> str | None:
    names = [f.name for f in dataclasses.fields(one.plan) if getattr(one.plan, f.name) != getattr(other.plan, f.name)]
    names = [name for name in names if name != "num_workers"] if "loader" in names else names
    return names[0] if len(names) == 1 else None


def _word(setting: str, value: object) -> str:
    """A setting's value as one would say it."""
    words = {"threads": f"{value} threads", "micro_batch": f"micro-batch {value}",
             "optimizer_implementation": f"{value} optimiser", "loader": f"{value} loader"}  # fmt: skip
    return words.get(setting, str(value).replace("_", "-"))
