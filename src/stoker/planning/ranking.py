"""Ranking the legal plans of one device by their forecasts, without running any.

What cannot be better than another is not looked at: for each way to execute and each micro-batch, only what saves just
enough memory to fit (saving more costs time and gives nothing); of micro-batches that fit, the largest few, and, where
all of these compute blocks twice, the largest that need not. Of compiled plans only those are kept whose compilation
pays back within the run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from stoker.errors import DoesNotFit
from stoker.planning.memory import largest_that_fits
from stoker.planning.space import execution_settings, saving_memory
from stoker.records import Candidate, Device, Forecast, Plan, Profile
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
