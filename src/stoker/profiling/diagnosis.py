"""What this machine is, and what it really reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.devices import CpuLoad, cache_key, load_between, sample_cpu, survey
from stoker.profiling.ceilings import measure_ceilings
from stoker.profiling.micro_benchmark import measure_operations
from stoker.records import Ceilings, Device, MicroBenchmark
from stoker.store import cache_root, ceilings_cache, operations_cache

_CEILINGS_S = 7.0
_OPERATIONS_S = 50.0
"""For the times of operations of all devices together [s]: with the ceilings of one, a minute."""


@dataclass(frozen=True)
class Diagnosis:
    """The devices, best first, and the measured rates of those PyTorch can use.

    `load` is what others used of the CPUs meanwhile (None if nothing was measured now); `problems` say why a device
    cannot be used. `operations` are the times of single operations, of a CPU on one thread and on all cores.
    """

    devices: tuple[Device, ...]
    ceilings: tuple[Ceilings, ...]
    load: CpuLoad | None
    problems: tuple[str, ...]
    operations: tuple[MicroBenchmark, ...] = ()


def doctor(*, fresh: bool = False) -> Diagnosis:
    """Look at this machine and measure what its devices really reach; kept for the next time if nobody disturbed it.

    With `fresh`, measure even what is kept.
    """
    found = survey()
    before = sample_cpu()
    kept = {device: _kept(device) for device in found.usable} if not fresh else {}
    missing = [device for device in found.usable if not _is_whole(kept.get(device))]
    left, left_s = sum(len(_threads(device)) for device in missing), _OPERATIONS_S
    for device in missing:
        ceilings, timed = measure_ceilings(device, budget_s=_CEILINGS_S), list[MicroBenchmark]()
        for threads in _threads(device):  # each leaves what it does not need to those that follow
            timed.append(measure_operations(device, threads=threads, budget_s=left_s / left))
            left, left_s = left - 1, left_s - timed[-1].took_s
        kept[device] = ceilings, tuple(timed)
    after = sample_cpu()
    load = None if not missing or before is None or after is None else load_between(before, after)
    if load is None or load.is_quiet:
        for device in missing:
            _keep(device, *kept[device])
    measured = [kept[device] for device in found.usable]
    return Diagnosis(
        found.devices,
        tuple(ceilings for ceilings, _ in measured if ceilings is not None),
        load,
        tuple(found.problems),
        tuple(benchmark for _, timed in measured for benchmark in timed),
    )


_Measured = tuple[Ceilings | None, tuple[MicroBenchmark, ...]]


def _threads(device: Device) -> tuple[int | None, ...]:
    """Numbers of threads to time operations with: a CPU's all and one, a GPU's as they are."""
    return (None,) if device.kind != "cpu" or device.cores <= 1 else (None, 1)


def _threads_key(threads: int | None) -> tuple[str, ...]:
    return () if threads is None else (f"{threads} threads",)


def _kept(device: Device) -> _Measured:
    """What was measured before."""
    operations, key = operations_cache(cache_root()), cache_key(device, torch.__version__)
    timed = (operations.read(key, *_threads_key(threads)) for threads in _threads(device))
    return ceilings_cache(cache_root()).read(key), tuple(benchmark for benchmark in timed if benchmark is not None)


def _is_whole(measured: _Measured | None) -> bool:
    return measured is not None and measured[0] is not None and len(measured[1]) == len(_threads(measured[0].device))


def _keep(device: Device, ceilings: Ceilings | None, timed: tuple[MicroBenchmark, ...]) -> None:
    operations, key = operations_cache(cache_root()), cache_key(device, torch.__version__)
    if ceilings is not None:
        ceilings_cache(cache_root()).write(ceilings, key)
    for threads, benchmark in zip(_threads(device), timed, strict=True):
        operations.write(benchmark, key, *_threads_key(threads))
