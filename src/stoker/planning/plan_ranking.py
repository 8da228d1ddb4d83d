"""Rank the legal plans of one device by forecast, without running any; guess an order for untraced ones.

Dominated plans are skipped: for each way to execute and each micro-batch only the least memory saving that fits is
forecast; of micro-batches that fit, the largest few, and, if all of these checkpoint blocks, the largest that need not.
Compiled plans are kept only if compiling pays back within the run. Inputs of blocks are on the host only where no plan
fits otherwise, then the optimiser, then both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from stoker.errors import BadJob, DoesNotFit
from stoker.planning.model.memory import largest_that_fits
from stoker.planning.model.search_space import (
    OFFLOADED,
    allowed_states,
    execution_settings,
    offloaded_settings,
    saving_memory,
    saving_of,
)
from stoker.records import Candidate, Device, Estimate, Forecast, Plan, Profile
from stoker.units import format_bytes

SURE_ENOUGH = 0.9
"""A plan is used if it fits with at least this probability."""

LEAST_GAIN = 0.02
"""A plan must be faster than an earlier one by more than this share to be preferred: less is noise of a trial."""

MOST_SIZES, MOST_SIZES_ELSEWHERE = 4, 2
"""Largest fitting micro-batches that are forecast for each way to execute; fewer where no trials follow."""

LARGE_BYTES = 2**30
"""Weights [bytes] from which a model's time is dominated by its matrix products."""

MANY_SAMPLES = 16
"""Batch [samples] from which a large model is as fast in halves as in one pass."""

COMPILING_PAYS_BACK = 1.5
"""A compiled plan must save at least this many times the high end of its compile time: the saving is less certain."""

RANKING_SHARE = 0.02
LEAST_RANKING_S = 0.5
"""Ranking for a device that is here ends early after this long [s] and this share of the forecast run, with one plan of
each precision: of small updates fp32 may be the fastest, which only its forecast says."""


class Forecasts(Protocol):
    """Forecasts of plans on one device."""

    def probability_it_fits(self, plan: Plan) -> float:
        """Probability that the device's memory is enough [0 to 1]."""
        ...

    def fits(self, plan: Plan, probability: float) -> bool:
        """Whether `probability_it_fits` is at least so large."""
        ...

    def needed_bytes(self, plan: Plan) -> float:
        """Memory needed [bytes]."""
        ...

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the run."""
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
    """Plans that are forecast to fit, fastest first.

    Args:
        profile: the job's facts.
        device: where it is to run.
        forecasts: of plans there.
        name: of the device.
        is_here: it is attached to this machine.
        is_limited: its memory is a limit that the user set, not its capacity.
        can_compile: compiled plans can be run there.
        clock: reads seconds.

    Raises:
        DoesNotFit: not even the plan that needs the least fits.
    """
    started, candidates, is_late = clock(), list[Candidate](), False
    can_compile = can_compile and not profile.has_own_step
    is_large = profile.parameter_bytes > LARGE_BYTES
    for settings in execution_settings(profile, device, (False, True) if can_compile and is_here else (False,)):
        if not is_here:
            # fp32 has the tensors of tf32, and no faster products. Those bound large models, and a precision that was
            # looked at before, and fits, makes them faster.
            is_dominated = settings.precision == "fp32" and "tf32" in device.fast_dtypes
            has_fitted = any(c.plan.precision != settings.precision for c in candidates)
            if is_dominated or (settings.precision in ("tf32", "fp32") and has_fitted and is_large):
                continue
        if settings.optimizer_states != "full" and _need_not_save(settings, candidates):
            continue
        if is_late and settings.precision in {c.plan.precision for c in candidates}:
            continue
        # What fits without saving memory in one way most likely does in the others: that is looked at first then.
        has_plenty_of_memory = is_here or any(_saves_nothing(c.plan, profile) for c in candidates)
        most = MOST_SIZES if is_here else MOST_SIZES_ELSEWHERE
        fitting = _fitting(settings, profile, forecasts, most, has_plenty_of_memory=has_plenty_of_memory)
        for plan in itertools.islice(fitting, 1 if is_late else None):
            candidates.append(
                Candidate(
                    device=name,
                    plan=plan,
                    forecast=forecasts.forecast(plan),
                    memory_bytes=device.memory_bytes,
                    is_here=is_here,
                )
            )
        if is_here and candidates:
            run_s = min(candidates, key=_seconds_per_sample).forecast.total_s.value
            is_late = clock() - started > max(LEAST_RANKING_S, RANKING_SHARE * run_s)
    if not candidates:
        return _offloaded(profile, device, forecasts, name=name, is_here=is_here, is_limited=is_limited)
    uncompiled = [c for c in candidates if not c.plan.compile]
    if not uncompiled:  # only with fused intermediates does it fit, at whatever price
        return tuple(sorted(candidates, key=_seconds_per_sample_with_compiling))
    fastest = min(uncompiled, key=_seconds_per_sample)
    if can_compile and not is_here:  # without trials, forecasts decide whether compiling pays
        candidates += compiled(fastest, profile, forecasts)
    candidates += in_fp8(candidates, profile, device, forecasts)
    kept = [c for c in candidates if pays_back(c.forecast, fastest.forecast)]
    captured = [c for plain in kept if (c := _captured(plain, profile, forecasts)) is not None] if is_here else []
    return tuple(sorted((*kept, *captured), key=_seconds_per_sample_with_compiling))


def _offloaded(
    profile: Profile, device: Device, forecasts: Forecasts, *, name: str, is_here: bool, is_limited: bool
) -> tuple[Candidate, ...]:
    """Plans with activations, or else the optimiser, or else both on the host that fit, fastest first.

    Raises:
        DoesNotFit: none does.
    """
    weights_bytes = profile.parameter_bytes / (2 if "bf16" in device.fast_dtypes else 1)
    for what in OFFLOADED if weights_bytes < device.memory_bytes else ():
        candidates: list[Candidate] = []
        for settings in offloaded_settings(profile, device, what):
            try:
                fitting = list(_fitting(settings, profile, forecasts, MOST_SIZES_ELSEWHERE))
            except BadJob:  # weights of several dtypes cannot be bf16 alone
                continue
            for plan in fitting:
                forecast, memory_bytes = forecasts.forecast(plan), device.memory_bytes
                candidates.append(
                    Candidate(device=name, plan=plan, forecast=forecast, memory_bytes=memory_bytes, is_here=is_here)
                )
        if candidates:
            return tuple(sorted(candidates, key=_seconds_per_sample))
    raise does_not_fit(profile, device, forecasts, is_limited=is_limited)


def compiled(
    fastest: Candidate,
    profile: Profile,
    forecasts: Forecasts,
    may_compile: Callable[[Plan], bool] = lambda _plan: True,
) -> Iterator[Candidate]:
    """The fastest plan that is not compiled, compiled; then such with less saving and a larger micro-batch; all fit.

    Kernels keep no intermediates: memory that had to be saved may be there. What they keep is less certain: where the
    plan is not sure enough to fit, it is one with optimiser states of fewer bits, if it has few already, and one with
    more saving. A larger micro-batch is looked at where it needs no more saving, and only the next one: of what is
    kept, a half is of products, which stay.
    """
    plan = dataclasses.replace(fastest.plan, compile=True)
    plans, saving = [plan] if may_compile(plan) and forecasts.fits(plan, SURE_ENOUGH) else [], saving_of(plan)
    if not plans and plan.optimizer_states != "full" and may_compile(plan):
        allowed = allowed_states(profile.numerics)
        fewer = allowed[allowed.index(plan.optimizer_states) + 1 :]
        smaller = (dataclasses.replace(plan, optimizer_states=states) for states in fewer)
        yield from (_forecast_as(fastest, one, forecasts) for one in smaller if forecasts.fits(one, SURE_ENOUGH))
    sizes = [size for size in _sizes(profile) if size > plan.micro_batch] if plans else []
    for size in (plan.micro_batch, *sizes[-1:]):
        least = dataclasses.replace(plan.without_checkpointing(), micro_batch=size, loss_chunks=1)
        for way in saving_memory(least, profile):
            if way in plans:
                break
            if way != plan and may_compile(way) and forecasts.fits(way, SURE_ENOUGH):
                saving = saving_of(way)
                plans.append(way)
                break
            if plans and saving_of(way) == saving:
                break
    yield from (_forecast_as(fastest, one, forecasts) for one in plans)


def _forecast_as(candidate: Candidate, plan: Plan, forecasts: Forecasts) -> Candidate:
    """Another plan of the same place, with its forecast."""
    return dataclasses.replace(candidate, plan=plan, forecast=forecasts.forecast(plan))


def in_fp8(candidates: Sequence[Candidate], profile: Profile, device: Device, forecasts: Forecasts) -> list[Candidate]:
    """The fastest compiled plan in bf16, in fp8 where the job allows it, the device has it, and it fits.

    Not compiled, casts to fp8 take as long as its products save.
    """
    plans = [c for c in candidates if c.plan.compile and c.plan.precision == "bf16"]
    if not ("fp8" in profile.numerics and "fp8" in device.fast_dtypes and plans):
        return []
    fastest = min(plans, key=_seconds_per_sample)
    plan = dataclasses.replace(fastest.plan, precision="fp8")
    if not forecasts.fits(plan, SURE_ENOUGH):
        return []
    return [dataclasses.replace(fastest, plan=plan, forecast=forecasts.forecast(plan))]


def _sizes(profile: Profile) -> tuple[int, ...]:
    """Legal micro-batches elsewhere, the largest first [samples].

    Of a large model with many samples not the whole batch: products of half of it are as fast, and are traced anyway.
    """
    sizes = profile.coupling.legal_micro_batches(profile.batch)
    return sizes[-max(1, len(sizes) - 1) :] if _is_large(profile) else sizes


def _is_large(profile: Profile) -> bool:
    return profile.parameter_bytes > LARGE_BYTES and profile.batch >= MANY_SAMPLES


def _saves_nothing(plan: Plan, profile: Profile) -> bool:
    """Whether a plan passes the whole batch at once and saves no memory."""
    return plan.micro_batch == profile.batch and not plan.checkpointed_blocks and plan.loss_chunks == 1


def _need_not_save(settings: Plan, candidates: Sequence[Candidate]) -> bool:
    """Whether these settings fit with full optimiser states and no block checkpointed: fewer bits gain nothing then."""
    return any(
        one.plan.optimizer_states == "full"
        and one.plan.precision == settings.precision
        and not one.plan.checkpointed_blocks
        for one in candidates
    )


def _captured(candidate: Candidate, profile: Profile, forecasts: Forecasts) -> Candidate | None:
    """The same plan captured; None if its pass cannot be, or the forecast saving is within the noise of a trial."""
    plan, plain = candidate.plan, candidate.forecast
    saves_memory = plan.checkpointed_blocks > 0 or plan.loss_chunks > 1
    if plan.compile or saves_memory or plan.micro_batch < profile.batch or profile.has_own_step:
        return None
    if not profile.has_one_shape:  # a captured pass has one shape; batches of others would run eagerly
        return None
    forecast = forecasts.forecast(dataclasses.replace(plan, captured=True))
    if forecast.step_s.value > (1 - LEAST_GAIN) * plain.step_s.value or not pays_back(forecast, plain):
        return None
    return dataclasses.replace(candidate, plan=dataclasses.replace(plan, captured=True), forecast=forecast)


def pays_back(compiled: Forecast, plain: Forecast) -> bool:
    """True if compiling or capturing is forecast to save enough of the run, and for a plan that does neither."""
    if compiled.compile_s is None:
        return True
    return saved_s(compiled, plain) > COMPILING_PAYS_BACK * compiled.compile_s.high


def saved_s(compiled: Forecast, plain: Forecast) -> float:
    """Time that a compiled plan saves after compiling [s], for the same number of samples; negative if it is slower."""
    training_s = [forecast.total_s.value - _once_s(forecast) for forecast in (plain, compiled)]
    return training_s[0] * compiled.total_samples / plain.total_samples - training_s[1]


def _once_s(forecast: Forecast) -> float:
    """Time of compiling or capturing, once before training [s]."""
    return forecast.compile_s.value if forecast.compile_s is not None else 0.0


def _seconds_per_sample(candidate: Candidate) -> float:
    return candidate.forecast.seconds_per_sample


def _seconds_per_sample_with_compiling(candidate: Candidate) -> float:
    forecast = candidate.forecast
    return 1 / forecast.samples_per_s.value + _once_s(forecast) / max(1, forecast.total_samples)


def _fitting(
    settings: Plan, profile: Profile, forecasts: Forecasts, most: int, *, has_plenty_of_memory: bool = False
) -> Iterator[Plan]:
    """The `most` largest micro-batches that fit under `settings`, each with the least memory saving that it needs.

    Then the largest that fits without recomputation, often the fastest of all. Assumes that memory falls with fewer
    samples and with more saving: a size that does not fit with all savings rules out the larger ones. Where there is
    plenty of memory, what needs the most is traced first, and nothing else if it fits.
    """

    def ways(size: int) -> list[Plan]:
        return list(saving_memory(dataclasses.replace(settings, micro_batch=size), profile))

    def fits(plan: Plan) -> bool:
        return forecasts.fits(plan, SURE_ENOUGH)

    def lightest(size: int) -> Plan:
        return next(plan for plan in ways(size) if plan == ways(size)[-1] or fits(plan))

    def fits_once(size: int) -> bool:
        once = [plan for plan in ways(size) if not plan.checkpointed_blocks]
        return bool(once) and fits(once[-1])

    sizes = profile.coupling.legal_micro_batches(profile.batch)
    if most == MOST_SIZES_ELSEWHERE:
        sizes, most = _sizes(profile), 1 if _is_large(profile) else most  # smaller ones add nothing
    if has_plenty_of_memory and sizes and fits(ways(sizes[0])[0]):  # then so does all that needs less
        yield from (ways(size)[0] for size in sizes[:most])
        return
    if not sizes or not fits(ways(sizes[-1])[-1]):
        return
    # The whole batch at once comes last: it needs a trace of its own.
    largest = largest_that_fits(sizes[1:], lambda size: fits(ways(size)[-1])) if len(sizes) > 1 else sizes[0]
    if largest == sizes[min(1, len(sizes) - 1)] and fits(ways(sizes[0])[-1]):
        largest = sizes[0]
    fitting = sizes[sizes.index(largest or sizes[-1]) :]
    plans = [lightest(size) for size in fitting[:most]]
    yield from plans
    all_recompute = all(plan.checkpointed_blocks for plan in plans)
    if all_recompute and (smaller := largest_that_fits(fitting[most:], fits_once)) is not None:
        yield lightest(smaller)


def does_not_fit(profile: Profile, device: Device, forecasts: Forecasts, *, is_limited: bool = False) -> DoesNotFit:
    """The error for a device on which no plan fits, with the memory of the least demanding one."""
    least = least_demanding(profile, device, forecasts)
    if least is None:
        group, batch = profile.coupling.group, profile.batch
        return DoesNotFit(
            f"samples are coupled in groups of {group}, more than the batch of {batch}",
            remedy="A smaller coupling_group, or a larger batch, is a change of Job.",
        )
    needed = forecasts.needed_bytes(least)
    coupled = f" (samples are coupled in groups of {least.micro_batch})" if profile.coupling.group else ""
    count = least.checkpointed_blocks
    blocks = f" and {'its one block' if count == 1 else f'all {count} blocks'} checkpointed" if count else ""
    blocks += f", with {least.offload_in_words()}," if least.uses_host_memory else ""
    there = format_bytes(device.memory_bytes)
    room = f"of {device.model} {there} may be used" if is_limited else f"{device.model} has {there}"
    return DoesNotFit(
        f"a micro-batch of {least.micro_batch}{coupled}{blocks} needs about {format_bytes(needed)}; {room}",
        remedy=("Allow more of it (--memory), or take" if is_limited else "Take")
        + " a larger device (`--on all` finds "
        "the smallest that will do), or a smaller model; a smaller coupling_group or batch is a change of Job.",
    )


def least_demanding(
    profile: Profile, device: Device, forecasts: Forecasts, *, is_offloaded: bool = True
) -> Plan | None:
    """The legal plan that needs the least memory of the device; None if no micro-batch is legal.

    It may be one with activations or the optimiser on the host, if that saves much, unless `is_offloaded` is False.

    With many weights and few samples it computes in fp32: autocast keeps a copy of the weights in bf16.
    """
    sizes = profile.coupling.legal_micro_batches(profile.batch)
    if not sizes:
        return None

    def least(every: Iterable[Plan]) -> Plan | None:
        plans = (dataclasses.replace(plan, micro_batch=sizes[-1]) for plan in every)
        saving = (list(saving_memory(plan, profile))[-1] for plan in plans)
        return min(saving, key=forecasts.needed_bytes, default=None)

    found = least(execution_settings(profile, device))
    for what in OFFLOADED if is_offloaded and found is not None else ():
        with contextlib.suppress(BadJob):  # weights of several dtypes cannot be bf16 alone
            offloaded = least(offloaded_settings(profile, device, what))
            if offloaded is not None and found is not None:
                saves = forecasts.needed_bytes(offloaded) < _WORTH_OFFLOADING * forecasts.needed_bytes(found)
                found = offloaded if saves else found
    return found


_WORTH_OFFLOADING = 0.9
"""Share of the memory of the least demanding plan that one with more on the host needs at most to be it."""

_COPIES_OF_PARAMETERS = 4

_AS_A_RULE = {
    "fp32": 1.6,
    "contiguous": 1.1,
    "half the micro-batch": 1.05,
    "half the threads": 1.5,
    "full": 1.3,
    "selective": 1.1,
    "default": 1.1,
    "mapped": 1.2,
    "inline": 1.2,
}
"""Typical time ratio of an update with each of these to one without, for an order in which to try plans."""
_OPTIMIZERS_AS_A_RULE = {"fused": 1.0, "foreach": 1.05, "default": 1.1}

_PLENTY = 3.0
"""Memory of a traced plan, times this, is enough for any other plan of as many samples."""


def untraced_candidates(
    profile: Profile,
    device: Device,
    *,
    name: str,
    plans: Sequence[Plan] | None = None,
    after: Sequence[Candidate] = (),
) -> tuple[Candidate, ...]:
    """Legal plans, those first that are usually fast: reduced precision, large micro-batches, all cores.

    Their times are guesses, basis `unknown`; a search learns from trials which hold. A guess starts from the forecast
    of the most similar plan and scales it by the usual effect of the settings that differ.

    Args:
        profile: the job's facts.
        device: where it is to run.
        name: of the device.
        plans: only these; None: all legal plans.
        after: candidates that have a forecast; their plans are left out.
    """
    bases = [c for c in after if not (c.plan.captured or c.plan.compile)]
    known, states = {c.plan for c in after}, {"full", *(c.plan.optimizer_states for c in after)}
    candidates = []
    for plan in plans or _legal(profile, device):
        if plan not in known and (plans or plan.optimizer_states in states):
            forecast = _guess(plan, profile, _guessed_seconds_per_sample(plan, bases, profile, device))
            candidates.append(Candidate(device=name, plan=plan, forecast=forecast, memory_bytes=device.memory_bytes))
    return tuple(candidates)


def has_plenty(plan: Plan, candidates: Sequence[Candidate], device: Device) -> bool:
    """True if a plan fits for sure: a traced one with as large a micro-batch takes at most a third of the memory.

    Other settings of an untraced plan, such as fp32 for bf16, at most double its memory.
    """
    most = device.memory_bytes / _PLENTY
    return any(
        c.forecast.peak_bytes.basis != "unknown"
        and c.forecast.peak_bytes.value <= most
        and c.plan.micro_batch >= plan.micro_batch
        and saving_of(c.plan) == saving_of(plan)
        for c in candidates
    )


def last_resorts(plans: Sequence[Plan], traced: Sequence[Plan], profile: Profile) -> frozenset[Plan]:
    """The plans that save more memory than any traced one, or have a smaller micro-batch.

    By forecast the traced ones save just enough, and more costs time; these are left if the forecast is wrong.
    """
    if not traced:
        return frozenset()
    plain = dataclasses.replace(traced[0], captured=False)  # which goes with none of these settings
    ways = [saving_of(way) for way in saving_memory(plain, profile)]
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


def _guessed_seconds_per_sample(plan: Plan, bases: Sequence[Candidate], profile: Profile, device: Device) -> float:
    """Seconds per sample, from the base that shares most settings; without bases, 1 for the usually fastest plan."""

    def similarity(base: Candidate) -> tuple[int, float]:
        shared = sum(getattr(plan, f.name) == getattr(base.plan, f.name) for f in dataclasses.fields(Plan))
        return shared, base.forecast.samples_per_s.value

    slowness = _slowness(plan, profile, device)
    if not bases:
        return slowness
    nearest = max(bases, key=similarity)
    return slowness / _slowness(nearest.plan, profile, device) / nearest.forecast.samples_per_s.value


def _slowness(plan: Plan, profile: Profile, device: Device) -> float:
    """Typical time of a plan over the usually fastest one's [1]."""
    words: set[str] = {plan.precision, plan.memory_format, plan.malloc, plan.loader}
    words |= {plan.checkpointing} if plan.checkpointed_blocks else set()
    halvings = {
        "half the micro-batch": math.log2(profile.batch / plan.micro_batch),
        "half the threads": math.log2(device.cores / plan.threads) if device.kind == "cpu" else 0.0,
    }
    powers = {word: 1.0 for word in words if word in _AS_A_RULE} | halvings
    settings = math.exp(sum(math.log(_AS_A_RULE[word]) * power for word, power in powers.items()))
    return settings * _OPTIMIZERS_AS_A_RULE[plan.optimizer_implementation]


def _guess(plan: Plan, profile: Profile, pace_s: float) -> Forecast:
    """A forecast of basis `unknown`, whose memory grows with the micro-batch."""

    def unknown(value: float, unit: str) -> Estimate:
        return Estimate(value=value, low=0.0, high=10 * value, unit=unit, basis="unknown")

    saved = 1.0 / (1 + plan.checkpointed_blocks)
    needed = _COPIES_OF_PARAMETERS * profile.parameter_bytes * (1 + saved * plan.micro_batch / profile.batch)
    step = unknown(pace_s * profile.batch, "s")
    return Forecast(
        step_s=step,
        samples_per_s=unknown(1 / pace_s, "samples/s"),
        evaluate_s=step,
        checkpoint_s=step,
        total_s=step,
        peak_bytes=unknown(needed, "bytes"),
        total_samples=0,
        total_updates=0,
    )
