"""What this machine is, and what it really reaches."""

from __future__ import annotations

import torch

from stoker import records
from stoker.devices import attached_devices, cache_key
from stoker.profiling.ceilings import measure_ceilings
from stoker.records import Device
from stoker.store import CeilingsCache, cache_root


def doctor(*, fresh: bool = False) -> tuple[tuple[Device, ...], tuple[records.Ceilings, ...]]:
    """The devices attached to this machine and what each really reaches; measured once, then cached.

    With `fresh`, measured again.
    """
    cache = CeilingsCache(cache_root() / "ceilings")
    devices = attached_devices()
    found = []
    for device in devices:
        key = cache_key(device, torch.__version__)
        ceilings = None if fresh else cache.read(key)
        if ceilings is None:
            ceilings = measure_ceilings(device)
            cache.write(key, ceilings)
        found.append(ceilings)
    return devices, tuple(found)
