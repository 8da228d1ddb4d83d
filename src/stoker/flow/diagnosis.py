"""What this machine is, and what it really reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.devices import CpuLoad, cache_key, load_between, sample_cpu, survey
from stoker.profiling.ceilings import measure_ceilings
from stoker.records import Ceilings, Device
from stoker.store import CeilingsCache, cache_root


@dataclass(frozen=True)
class Diagnosis:
    """The devices, best first, and the measured rates of those PyTorch can use.

    `load` is what others used of the CPUs meanwhile (None if nothing was measured now); `problems` say why a device
    cannot be used.
    """

    devices: tuple[Device, ...]
    ceilings: tuple[Ceilings, ...]
    load: CpuLoad | None
    problems: tuple[str, ...]


def doctor(*, fresh: bool = False) -> Diagnosis:
    """Look at this machine and measure what its devices really reach; kept for the next time if nobody disturbed it.

    With `fresh`, measure even what is kept.
    """
    cache = CeilingsCache(cache_root() / "ceilings")
    found, load = survey(), None
    ceilings = []
    for device in found.usable:
        key = cache_key(device, torch.__version__)
        measured = None if fresh else cache.read(key)
        if measured is None:
            before = sample_cpu()
            measured = measure_ceilings(device)
            after = sample_cpu()
            load = None if before is None or after is None else load_between(before, after)
            if load is None or load.is_quiet:
                cache.write(key, measured)
        ceilings.append(measured)
    return Diagnosis(found.devices, tuple(ceilings), load, tuple(found.problems))
