"""The legal plans of a job on a device: where to begin, and what one may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stoker.errors import DoesNotFit
from stoker.records import Device, Plan, Precision, Profile
from stoker.units import format_bytes

HOST_WORKERS = (8, 4)
"""Loader workers tried beside a GPU, whose record does not say how many cores the host has."""

SHARE_OF_MEMORY = 0.8
"""The most of a device's memory a plan may be expected to take: the rest is for what the estimate leaves out."""


def first_plan(profile: Profile, device: Device) -> Plan:
    """The plan most likely to be fast: the precision the device is fast in, the largest micro-batch that fits.

    Raises:
        DoesNotFit: not even the smallest legal micro-batch is expected to fit.
    """
    legal = profile.coupling.legal_micro_batches(profile.batch)
    fitting = [size for size in legal if expected_bytes(profile, size) <= SHARE_OF_MEMORY * device.memory_bytes]
    if not fitting:
        smallest = legal[-1] if legal else profile.coupling.group or 1
        needed, there = expected_bytes(profile, smallest), device.memory_bytes
        group = f" (samples are coupled in groups of {smallest})" if profile.coupling.group else ""
        raise DoesNotFit(
            f"a micro-batch of {smallest}{group} needs about {format_bytes(needed)}; {device.model} has "
            f"{format_bytes(there)}, of which a plan may take {SHARE_OF_MEMORY:.0%}",
            remedy="A smaller coupling_group or batch is a change of Job; a smaller model or a larger device will do.",
        )
    return Plan(
        device=device.torch_name,
        micro_batch=fitting[0],
        precision=precisions(device)[0],
        memory_format="channels_last" if profile.has_convolutions else "contiguous",
        optimizer_implementation=profile.optimizer_implementations[0],  # type: ignore[arg-type]  # they are its names
        # A GPU's cores are not the host's: one thread feeds it.
        threads=device.cores if device.kind == "cpu" else 1,
        loader="memory" if profile.is_in_memory else "inline",
    )


def precisions(device: Device) -> tuple[Precision, ...]:
    """Precisions a planner may choose on this device, the fastest first."""
    if "bf16" in device.fast_dtypes:
        return ("bf16", "fp32")
    return ("fp32",)


def expected_bytes(profile: Profile, micro_batch: int) -> float:
    """Rough memory of a plan: four copies of the parameters, and what the forward pass keeps."""
    return 4 * profile.parameter_bytes + profile.saved_bytes_per_sample * micro_batch


def neighbours(plan: Plan, profile: Profile, device: Device) -> Iterator[Plan]:
    """Legal plans that differ from `plan` in one setting, those that matter most first."""
    for precision in precisions(device):
        yield dataclasses.replace(plan, precision=precision)
    if not profile.is_in_memory:
        yield from _loaders(plan, device)
    sizes = [s for s in profile.coupling.legal_micro_batches(profile.batch) if s < plan.micro_batch]
    for micro_batch in sizes[:2]:
        yield dataclasses.replace(plan, micro_batch=micro_batch)
    if profile.has_convolutions:
        yield dataclasses.replace(plan, memory_format="channels_last")
        yield dataclasses.replace(plan, memory_format="contiguous")
    if device.kind == "cpu":
        for count in dict.fromkeys((max(1, device.cores // 2), 1)):
            yield dataclasses.replace(plan, threads=count)
    for implementation in profile.optimizer_implementations:
        yield dataclasses.replace(plan, optimizer_implementation=implementation)  # type: ignore[arg-type]


def _loaders(plan: Plan, device: Device) -> Iterator[Plan]:
    yield dataclasses.replace(plan, loader="inline", num_workers=0)
    counts = (device.cores, max(1, device.cores // 2)) if device.kind == "cpu" else HOST_WORKERS
    for workers in dict.fromkeys(counts):
        yield dataclasses.replace(plan, loader="workers", num_workers=workers)
