"""Ranking the legal plans of one device by their forecasts, without running any.

What cannot be better than another is not looked at: for each way to execute and each micro-batch, only what saves just
enough memory to fit (saving more costs time and gives nothing); of micro-batches that fit, the largest few, and, where
all of these compute blocks twice, the largest that need not. Of compiled plans only those are kept whose compilation
pays back within the run.

Candidates that were not traced: what is known as a rule, for an order in which to try them and nothing more.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from stoker.errors import DoesNotFit
from stoker.planning.model.memory import largest_that_fits
from stoker.planning.model.search_space import execution_settings, saving_memory, saving_of
from stoker.records import Candidate, Device, Estimate, Forecast, Plan, Profile
from stoker.units import format_bytes

SURE_ENOUGH = 0.9
"""A plan is used if it fits with at least this probability."""

LEAST_GAIN = 0.02
"""A plan is preferred to an earlier one only if it is faster by more than this: less is within the noise of a trial."""

MOST_SIZES, MOST_SIZES_ELSEWHERE = 4, 2
"""Micro-batches that are forecast for each way to execute, the largest that fit; fewer where none will be tried."""

LARGE_BYTES = 2**30
"""Weights of a model whose time is that of its products."""

MANY_SAMPLES = 16
"""A batch of a large model that is no faster at once than by halves; a process's share of one may have fewer."""

COMPILING_PAYS_BACK = 1.5
"""A compiled plan must be forecast to save at least this many times what compiling may take, the interval's high end:
what is saved is the less certain of the two."""

RANKING_SHARE = 0.02
LEAST_RANKING_S = 0.5
"""Ranking for a device that is here ends early once it has taken this long [s] and this share of the forecast run."""


class Forecasts(Protocol):
    """What plans on one device will need."""

    def probability_it_fits(self, plan: Plan) -> float:
        """That the device's memory is enough."""
        ...

    def needed_bytes(self, plan: Plan) -> float:
        """Memory [bytes]."""
        ...

    def forecast(self, plan: Plan) -> Forecast:
        """All of it."""
        ...


def rank(
    profile: Profile,
    device: Device,
    forecasts: Forecasts,
    *,
    name: str,
    is_here: bool = True,
    is_limited: bool = False,
    can_compile: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Candidate, ...]:
    """Plans that are forecast to fit, the fastest first.

    Args:
        profile: the job's facts.
        device: where it is to run.
        forecasts: what plans need there.
        name: what the device is called.
        is_here: whether it is attached.
        is_limited: whether its memory is what somebody allows of it, not what there is.
        can_compile: whether compiled plans can be run there.
        clock: reads seconds.

    Raises:
        DoesNotFit: not even the plan that needs the least fits.
    """
    started, found = clock(), list[Candidate]()
    can_compile = can_compile and not profile.has_own_step
    for settings in execution_settings(profile, device, (False, True) if can_compile and is_here else (False,)):
        if not is_here and _is_dominated(settings, device, profile, has_plan=bool(found)):
            continue
        for plan in _fitting(settings, profile, forecasts, MOST_SIZES if is_here else MOST_SIZES_ELSEWHERE):
            found.append(
                Candidate(
                    device=name, plan=plan, forecast=forecasts.forecast(plan), memory_bytes=device.memory_bytes,
                    is_here=is_here,
                )
            )  # fmt: skip
        spent_s = clock() - started
        if is_here and found and spent_s > max(LEAST_RANKING_S, RANKING_SHARE * _fastest(found).forecast.total_s.value):
            break
    if not found:
        raise does_not_fit(profile, device, forecasts, is_limited=is_limited)
    fastest = _fastest([c for c in found if not c.plan.compile])
    plain = fastest.forecast
    if can_compile and not is_here:  # where nothing is tried, one forecast tells whether compiling pays
        compiled = dataclasses.replace(fastest.plan, compile=True)
        found.append(dataclasses.replace(fastest, plan=compiled, forecast=forecasts.forecast(compiled)))
    kept = [c for c in found if pays_back(c.forecast, plain)]
    captured = [one for c in kept if (one := _captured(c, profile, forecasts)) is not None] if is_here else []
    return tuple(sorted((*kept, *captured), key=_pace))


def _captured(candidate: Candidate, profile: Profile, forecasts: Forecasts) -> Candidate | None:
    """The same plan captured, where its pass can be, and that is forecast to save more than the noise of a trial."""
    plan, plain = candidate.plan, candidate.forecast
    saves_memory = plan.checkpointed_blocks > 0 or plan.loss_chunks > 1
    if plan.compile or saves_memory or plan.micro_batch < profile.batch or profile.has_own_step:
        return None
    if not profile.has_one_shape:  # a captured pass is of one, and batches of others would be passed as ever
        return None
    forecast = forecasts.forecast(dataclasses.replace(plan, captured=True))
    if forecast.step_s.value > (1 - LEAST_GAIN) * plain.step_s.value or not pays_back(forecast, plain):
        return None
    return dataclasses.replace(candidate, plan=dataclasses.replace(plan, captured=True), forecast=forecast)


def pays_back(compiled: Forecast, plain: Forecast) -> bool:
    """Whether compiling or capturing is forecast to save enough of the run; so it is for a plan that is neither."""
    if compiled.compile_s is None:
        return True
    return saved_s(compiled, plain) > COMPILING_PAYS_BACK * compiled.compile_s.high


def saved_s(compiled: Forecast, plain: Forecast) -> float:
    """What a compiled plan saves of the time after compiling [s]; less than nothing where it is slower.

    Of as many samples: a budget of seconds gives the faster plan more of them.
    """
    training_s = [forecast.total_s.value - _once_s(forecast) for forecast in (plain, compiled)]
    return training_s[0] * compiled.total_samples / plain.total_samples - training_s[1]


def _once_s(forecast: Forecast) -> float:
    """What is done once before training, compiling or capturing [s]."""
    return forecast.compile_s.value if forecast.compile_s is not None else 0.0


def _is_dominated(settings: Plan, device: Device, profile: Profile, *, has_plan: bool) -> bool:
    """Whether a precision cannot be better than what was looked at before, on a device where nothing will be tried.

    fp32 has the tensors of tf32, and products no faster; large models are bound by products, which bf16 halves.
    """
    if settings.precision == "fp32" and "tf32" in device.fast_dtypes:
        return True
    return settings.precision == "tf32" and has_plan and profile.parameter_bytes > LARGE_BYTES


def _fitting(settings: Plan, profile: Profile, forecasts: Forecasts, most: int) -> Iterator[Plan]:
    """The largest micro-batches that fit under `settings`, each with the least it takes to make it fit.

    And the largest that fits without computing anything twice, which often is the fastest of all. Less memory is needed
    by fewer samples, and by a plan that saves more: a size that does not fit with all that can be saved rules out the
    larger ones.
    """

    def ways(size: int) -> list[Plan]:
        return list(saving_memory(dataclasses.replace(settings, micro_batch=size), profile))

    def fits(plan: Plan) -> bool:
        return forecasts.probability_it_fits(plan) >= SURE_ENOUGH

    def lightest(size: int) -> Plan:
        return next(plan for plan in ways(size) if plan == ways(size)[-1] or fits(plan))

    def fits_once(size: int) -> bool:
        return fits([plan for plan in ways(size) if not plan.checkpointed_blocks][-1])

    sizes = profile.coupling.legal_micro_batches(profile.batch)
    is_large = profile.parameter_bytes > LARGE_BYTES and profile.batch >= MANY_SAMPLES
    if most == MOST_SIZES_ELSEWHERE and is_large:
        # Products of half the batch are as fast, and are traced anyway; those of half as many again tell nothing new.
        sizes, most = sizes[-max(1, len(sizes) - 1) :], 1
    if not sizes or not fits(ways(sizes[-1])[-1]):
        return
    # The whole batch at once is looked at last: it is an update of another kind, and has to be traced for itself.
    largest = largest_that_fits(sizes[1:], lambda size: fits(ways(size)[-1])) if len(sizes) > 1 else sizes[0]
    if largest == sizes[min(1, len(sizes) - 1)] and fits(ways(sizes[0])[-1]):
        largest = sizes[0]
    fitting = sizes[sizes.index(largest or sizes[-1]) :]
    found = [lightest(size) for size in fitting[:most]]
    yield from found
    is_dear = all(plan.checkpointed_blocks for plan in found)
    if is_dear and (smaller := largest_that_fits(fitting[most:], fits_once)) is not None:
        yield lightest(smaller)


def does_not_fit(profile: Profile, device: Device, forecasts: Forecasts, *, is_limited: bool = False) -> DoesNotFit:
    """The error for a device on which nothing fits, with what the least demanding plan needs."""
    least = least_demanding(profile, device, forecasts)
    if least is None:
        group, batch = profile.coupling.group, profile.batch
        return DoesNotFit(f"samples are coupled in groups of {group}, more than the batch of {batch}",
                          remedy="A smaller coupling_group, or a larger batch, is a change of Job.")  # fmt: skip
    needed = forecasts.needed_bytes(least)
    coupled = f" (samples are coupled in groups of {least.micro_batch})" if profile.coupling.group else ""
    count = least.checkpointed_blocks
    blocks = f" and {'its one block' if count == 1 else f'all {count} blocks'} checkpointed" if count else ""
    there = format_bytes(device.memory_bytes)
    room = f"of {device.model} {there} may be used" if is_limited else f"{device.model} has {there}"
    return DoesNotFit(
        f"a micro-batch of {least.micro_batch}{coupled}{blocks} needs about {format_bytes(needed)}; {room}",
        remedy=("Allow more of it (--memory), or take" if is_limited else "Take")
        + " a larger device (`--on all` finds "
        "the smallest that will do), or a smaller model; a smaller coupling_group or batch is a change of Job.",
    )


def least_demanding(profile: Profile, device: Device, forecasts: Forecasts) -> Plan | None:
    """The legal plan that needs the least memory; None where no micro-batch is legal.

    Of a model with many weights and few samples that is one in fp32: autocast keeps its weights in bf16 besides.
    """
    sizes = profile.coupling.legal_micro_batches(profile.batch)
    if not sizes:
        return None
    settings = (dataclasses.replace(one, micro_batch=sizes[-1]) for one in execution_settings(profile, device))
    return min((list(saving_memory(one, profile))[-1] for one in settings), key=forecasts.needed_bytes)


def _pace(candidate: Candidate) -> float:
    """Time of a sample with its share of compiling [s]."""
    forecast = candidate.forecast
    return 1 / forecast.samples_per_s.value + _once_s(forecast) / max(1, forecast.total_samples)


def _fastest(found: list[Candidate]) -> Candidate:
    return min(found, key=lambda c: c.forecast.seconds_per_sample)


_COPIES_OF_PARAMETERS = 4

_AS_A_RULE = {"fp32": 1.6, "contiguous": 1.1, "half the micro-batch": 1.05, "half the threads": 1.5,
              "checkpointed": 1.3, "default": 1.1, "mapped": 1.2, "inline": 1.2}  # fmt: skip
"""How much longer an update takes with each of these than without, for an order in which to try plans."""
_OPTIMIZERS_AS_A_RULE = {"fused": 1.0, "foreach": 1.05, "default": 1.1}

_PLENTY = 3.0
"""Times what a plan takes that is enough for any other of as many samples."""


def untraced_candidates(
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
