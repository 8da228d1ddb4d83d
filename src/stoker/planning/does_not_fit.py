"""A job that fits on none of the devices asked for: the smallest device, or the change of the job, that would do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from stoker.devices import Place, planned_devices
from stoker.errors import DoesNotFit
from stoker.planning.model.memory import largest_that_fits
from stoker.planning.plan_ranking import SURE_ENOUGH, least_demanding
from stoker.planning.planner import Planner
from stoker.records import Plan
from stoker.units import format_bytes

Misfit = tuple[Place, DoesNotFit]

_MOST_TOLD, _MOST_NAMED = 3, 10
_SAFE_SHARE = 0.9
"""A change of the job is proposed if what it then needs is at most this share of the device's memory."""


def fits_nowhere_error(planner: Planner, unfit: Sequence[Misfit]) -> DoesNotFit:
    """The error where none of these places is large enough, with what would be."""
    place, problem = max(unfit, key=lambda one: one[0].device.memory_bytes)
    least = _least(planner, place)
    if least is None:
        return problem  # its groups are larger than its batch, wherever it runs
    words = "; ".join(f"{one.name}: {error.message}" for one, error in unfit)
    if len(unfit) > _MOST_TOLD:
        words = f"none of the {len(unfit)} devices is large enough. The largest, {place.name}: {problem.message}"
    more = "Allow more memory (--memory). " if place.is_limited else ""
    return DoesNotFit(words, remedy=f"{more}{_larger_device(planner)} {_smaller_job(planner, place, least)}")


def describe_misfits(unfit: Sequence[Misfit]) -> tuple[str, ...]:
    """One line on the devices that are too small beside others that are not, with what the largest lacks; or none."""
    if not unfit:
        return ()
    largest, problem = max(unfit, key=lambda one: one[0].device.memory_bytes)
    names = ", ".join(place.name for place, _ in unfit)
    if len(unfit) > _MOST_NAMED:
        names = f"{len(unfit)} of these devices, the largest of them {largest.name}"
    return (f"it does not fit on {names}: {problem.message}",)


def _larger_device(planner: Planner) -> str:
    """The smallest GPU of the catalogue on which the job fits."""
    gpus = (place for place in planned_devices("all", ()) if place.device.kind == "cuda")
    places = sorted(gpus, key=lambda place: place.device.memory_bytes)
    for place in places:
        least = _least(planner, place)
        if least is not None and _fits(planner, place, least):
            return f"The smallest GPU that does it is {_in_words(place)}."
    return f"No one GPU of the catalogue does it; the largest is {_in_words(places[-1])}."


def _smaller_job(planner: Planner, place: Place, least: Plan) -> str:
    """The change of the job that makes it fit on `place`: smaller groups where samples are coupled, else fewer weights.

    Sizes tried are the group's halvings.
    """
    whole = least.micro_batch
    sizes = [whole // 2**k for k in range(1, whole.bit_length())] if planner.coupling.group is not None else []
    needed = functools.cache(lambda size: _with_groups(planner, size).forecasts(place).needed_bytes(
        dataclasses.replace(least, micro_batch=size)
    ))  # fmt: skip
    found = largest_that_fits(sizes, lambda size: needed(size) <= _SAFE_SHARE * place.device.memory_bytes)
    if found is None:
        return f"Or train a smaller model: a micro-batch of {whole} is the least that is legal."
    return (
        f"Or change what is learned: with Job(coupling_group={found}) it needs about {format_bytes(needed(found))} of "
        f"{place.name}."
    )


def _with_groups(planner: Planner, size: int) -> Planner:
    """The same job, its samples coupled in groups of `size`."""
    prepared = planner.prepared
    changed = Planner(dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, coupling_group=size)))
    changed.coupling = dataclasses.replace(planner.coupling, group=size)
    return changed


def _least(planner: Planner, place: Place) -> Plan | None:
    return least_demanding(planner.profile(place.device.kind), place.device, planner.forecasts(place))


def _fits(planner: Planner, place: Place, plan: Plan) -> bool:
    return planner.forecasts(place).probability_it_fits(plan) >= SURE_ENOUGH


def _in_words(place: Place) -> str:
    return f"{place.name} ({format_bytes(place.device.memory_bytes)})"
