"""How many trials run at once, and where: by cores on a CPU, by forecast memory on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.errors import BadJob
from stoker.records import Device
from stoker.tuning.messages import Slot
from stoker.units import format_bytes

_USABLE = 0.9
"""The share of memory that trials may have together; the rest is the system's, and what forecasts are off by."""

_CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU before it has a tensor: its context and its kernels; a judgement."""


@dataclass(frozen=True)
class Packing:
    """Places for trials, and why there are so many."""

    slots: tuple[Slot, ...]
    why: str


def by_cores(device: Device, cpus: Sequence[int], asked: int | None) -> int:
    """How many trials can each have a core [trials]; for a GPU, which they share anyhow, as many as are asked for.

    Raises:
        BadJob: `asked` is no positive number.
    """
    if asked is not None and asked < 1:
        raise BadJob(f"--parallel {asked}: wanted auto, or a number of trials from 1 on")
    if device.kind != "cpu":
        return asked or len(cpus)
    return max(1, min(device.cores, len(cpus), asked or device.cores))


def packed(devices: Sequence[Device], cpus: Sequence[int], peak_bytes: float | None, asked: int | None) -> Packing:
    """Places for trials.

    Args:
        devices: of one kind, those that trials may run on: one CPU, or GPUs.
        cpus: numbers of the logical CPUs that may be used.
        peak_bytes: the most that one trial is forecast to need; None where it is not known.
        asked: how many at once, at most; None for as many as fit.
    """
    first = devices[0]
    if asked == 1:
        return Packing((Slot(on=first.torch_name),), "one trial at a time, as asked")
    if first.kind == "cpu":
        return _on_cpu(first, cpus, peak_bytes, asked)
    return _on_gpus(devices, peak_bytes, asked)


def _on_cpu(device: Device, cpus: Sequence[int], peak_bytes: float | None, asked: int | None) -> Packing:
    cores = by_cores(device, cpus, asked)
    fitting = _fitting(device.memory_bytes, peak_bytes, 0)
    count = max(1, min(cores, fitting))
    parts = [tuple(sorted(cpus)[index::count]) for index in range(count)]
    share = device.memory_bytes * _USABLE / count if device.memory_bytes and count > 1 else None
    slots = tuple(Slot(on="cpu", memory_bytes=share, cpus=part if count > 1 else None) for part in parts)
    limit = f"{asked} asked for" if asked is not None else f"{device.cores} cores"
    return Packing(slots, _reason(count, limit, device, peak_bytes, is_memory_short=fitting < cores))


def _on_gpus(devices: Sequence[Device], peak_bytes: float | None, asked: int | None) -> Packing:
    """As many as fit into the memory of each, dealt out so that all GPUs have work before one has two."""
    most = asked if asked is not None else math.inf
    each = [
        _fitting(device.memory_bytes, peak_bytes, _CONTEXT_BYTES) if peak_bytes and device.memory_bytes else 1
        for device in devices
    ]
    places = [
        device
        for round_ in range(max(1, *each))
        for device, count in zip(devices, (max(1, one) for one in each), strict=True)
        if round_ < count
    ]
    chosen = places[: int(min(len(places), most))]
    trials = Counter(device.torch_name for device in chosen)
    slots = tuple(_on_gpu(device, trials[device.torch_name]) for device in chosen)
    limit = f"{asked} asked for" if asked is not None else f"{len(devices)} GPUs"
    is_short = sum(max(1, one) for one in each) <= len(slots)
    return Packing(slots, _reason(len(slots), limit, devices[0], peak_bytes, is_memory_short=is_short))


def _on_gpu(device: Device, trials: int) -> Slot:
    """A place for one of so many trials on a GPU, which share its memory; one alone may have all of it."""
    share = device.memory_bytes * _USABLE / trials - _CONTEXT_BYTES if trials > 1 else None
    return Slot(on=device.torch_name, memory_bytes=share)


def _fitting(memory_bytes: int, peak_bytes: float | None, context_bytes: int) -> int:
    if not memory_bytes or not peak_bytes:
        return 10**6  # nothing is known against it
    return int(_USABLE * memory_bytes / (peak_bytes + context_bytes))


def _reason(count: int, limit: str, device: Device, peak_bytes: float | None, *, is_memory_short: bool) -> str:
    trials = "1 trial at a time" if count == 1 else f"{count} trials at once"
    if peak_bytes is None:
        return f"{trials}: {limit}; the memory they need is unknown"
    need = f"each is forecast to need at most {format_bytes(peak_bytes)} of {format_bytes(device.memory_bytes)}"
    return f"{trials}: {need}" if is_memory_short else f"{trials}: {limit}; {need}"
