"""Candidates that were not traced: what is known as a rule, for an order in which to try them and nothing more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from stoker.planning.space import execution_settings, saving_memory, saving_of
from stoker.records import Candidate, Device, Estimate, Forecast, Plan, Profile

_COPIES_OF_PARAMETERS = 4

_AS_A_RULE = {"fp32": 1.6, "contiguous": 1.1, "half the micro-batch": 1.05, "half the threads": 1.5,
              "checkpointed": 1.3, "default": 1.1, "mapped": 1.2, "inline": 1.2}  # fmt: skip
"""How much longer an update takes with each of these than without, for an order in which to try plans."""
_OPTIMIZERS_AS_A_RULE = {"fused": 1.0, "foreach": 1.05, "default": 1.1}

_PLENTY = 3.0
"""Times what a plan takes that is enough for any other of as many samples."""


def unforecast(
    profile: Profile,
    device: Device,
    *,
    name: str,
    plans: Sequence[Plan] | None = None,
    after: Sequence[Candidate] = (),
) -> tuple[Candidate, ...]:
    """Legal plans, those first that are fast as a rule: reduced precision, large micro-batches, all cores.

    Their paces are guesses, basis `unknown`: a search learns from trials which hold. Where others have a forecast, a
    guess is that of the plan most like it, and what the settings in which they differ give as a rule.

    Args:
        profile: the job's facts.
        device: where it is to run.
        name: what the device is called.
        plans: these alone.
        after: candidates that have a forecast; the others are given.
    """
    bases = [c for c in after if not (c.plan.captured or c.plan.compile)]
    known = {c.plan for c in after}
    chosen = [plan for plan in plans or _legal(profile, device) if plan not in known]
    return tuple(
        Candidate(
            device=name,
            plan=plan,
            forecast=_guess(plan, profile, _pace_like(plan, bases, profile, device)),
            memory_bytes=device.memory_bytes,
        )
        for plan in chosen
    )


def has_plenty(plan: Plan, candidates: Sequence[Candidate], device: Device) -> bool:
    """Whether a plan fits for sure: a traced one that passes as many samples at once takes a third of the memory.

    What a guess may differ in beside, such as fp32 for bf16, takes twice as much at most.
    """
    alike = (
        c for c in candidates if c.forecast.peak_bytes.basis != "unknown" and c.plan.micro_batch >= plan.micro_batch
    )
    most = device.memory_bytes / _PLENTY
    return any(saving_of(c.plan) == saving_of(plan) and c.forecast.peak_bytes.value <= most for c in alike)


def last_resorts(plans: Sequence[Plan], traced: Sequence[Plan], profile: Profile) -> frozenset[Plan]:
    """Those of the plans that save more memory than any that was traced, or pass fewer samples at once.

    By forecast those save just enough to fit, and more costs time; if the forecast is wrong, these are what is left.
    """
    if not traced:
        return frozenset()
    ways = [saving_of(way) for way in saving_memory(traced[0], profile)]
    places = [ways.index(way) for way in map(saving_of, traced) if way in ways]
    beyond = set(ways[1 + max(places, default=len(ways)) :])
    smallest = min(plan.micro_batch for plan in traced)
    return frozenset(plan for plan in plans if plan.micro_batch < smallest or saving_of(plan) in beyond)


def _legal(profile: Profile, device: Device) -> Iterator[Plan]:
    """All plans; those that save memory last."""
    by_settings = [
        tuple(saving_memory(dataclasses.replace(settings, micro_batch=size), profile))
        for size in profile.coupling.legal_micro_batches(profile.batch)
        for settings in execution_settings(profile, device)
    ]
    for way in zip(*by_settings, strict=True):
        yield from way


def _pace_like(plan: Plan, bases: Sequence[Candidate], profile: Profile, device: Device) -> float:
    """Seconds for each sample, by the forecast of the plan that shares most settings; 1 for the fastest if none is."""
    slowness = _slowness(plan, profile, device)
    if not bases:
        return slowness
    nearest = max(bases, key=lambda one: (_num_shared(plan, one.plan), one.forecast.samples_per_s.value))
    return slowness / _slowness(nearest.plan, profile, device) / nearest.forecast.samples_per_s.value


def _num_shared(one: Plan, other: Plan) -> int:
    return sum(getattr(one, field.name) == getattr(other, field.name) for field in dataclasses.fields(Plan))


def _slowness(plan: Plan, profile: Profile, device: Device) -> float:
    """How much longer it takes than what is fast as a rule."""
    words: set[str] = {plan.precision, plan.memory_format, plan.malloc, plan.loader}
    words |= {"checkpointed"} if plan.checkpointed_blocks else set()
    halvings = {
        "half the micro-batch": math.log2(profile.batch / plan.micro_batch),
        "half the threads": math.log2(device.cores / plan.threads) if device.kind == "cpu" else 0.0,
    }
    powers = {word: 1.0 for word in words if word in _AS_A_RULE} | halvings
    settings = math.exp(sum(math.log(_AS_A_RULE[word]) * power for word, power in powers.items()))
    return settings * _OPTIMIZERS_AS_A_RULE[plan.optimizer_implementation]


def _guess(plan: Plan, profile: Profile, pace_s: float) -> Forecast:
    """Equal paces but for the order; memory grows with the micro-batch."""

    def unknown(value: float, unit: str) -> Estimate:
        return Estimate(value=value, low=0.0, high=10 * value, unit=unit, basis="unknown")

    saved = 1.0 / (1 + plan.checkpointed_blocks)
    needed = _COPIES_OF_PARAMETERS * profile.parameter_bytes * (1 + saved * plan.micro_batch / profile.batch)
    step = unknown(pace_s * profile.batch, "s")
    return Forecast(
        step_s=step, samples_per_s=unknown(1 / pace_s, "samples/s"), evaluate_s=step, checkpoint_s=step, total_s=step,
        peak_bytes=unknown(needed, "bytes"), total_samples=0, total_updates=0,
    )  # fmt: skip
