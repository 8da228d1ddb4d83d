"""`stoker doctor`: the devices of this machine and their measured rates, kept in a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.devices import CpuLoad, cache_key, load_between, sample_cpu, survey
from stoker.profiling.ceilings import measure_ceilings
from stoker.profiling.micro_benchmark import measure_operations
from stoker.records import Ceilings, Device, MicroBenchmark
from stoker.store import cache_root, ceilings_cache, operations_cache, operations_key

_CEILINGS_S = 7.0
_OPERATIONS_S = 50.0
"""Budget for the operation times of all devices together [s]: with the ceilings of one, a minute."""
_LEAST_S = 5.0
"""Least time limit of each measurement of operations, however long those before it took [s]."""


@dataclass(frozen=True)
class Diagnosis:
    """The devices, best first, and the measured rates of those PyTorch can use.

    `load` is the use of the CPUs by other processes during the measurement (None if nothing was measured); `problems`
    say why a device cannot be used. `operations` are the times of single operations, on a CPU with one thread and with
    all cores.
    """

    devices: tuple[Device, ...]
    ceilings: tuple[Ceilings, ...]
    load: CpuLoad | None
    problems: tuple[str, ...]
    operations: tuple[MicroBenchmark, ...] = ()


def doctor(*, fresh: bool = False) -> Diagnosis:
    """Survey this machine and measure its devices; results are cached if no other process disturbed them.

    With `fresh`, measure cached devices again.

    Args:
        fresh: measure devices again whose results are cached.
    """
    diagnosis = survey()
    before = sample_cpu()
    ceilings_kept, operations_kept = ceilings_cache(cache_root()), operations_cache(cache_root())
    ceilings: dict[Device, Ceilings] = {}
    operations: dict[Device, list[MicroBenchmark]] = {device: [] for device in diagnosis.usable}
    for device in () if fresh else diagnosis.usable:
        key = cache_key(device, torch.__version__)
        cached = ceilings_kept.read(key)
        benchmarks = [operations_kept.read(*operations_key(key, threads)) for threads in _threads(device)]
        if cached is not None and None not in benchmarks:
            ceilings[device] = cached
            operations[device] = [benchmark for benchmark in benchmarks if benchmark is not None]
    missing = [device for device in diagnosis.usable if device not in ceilings]
    left, left_s = sum(len(_threads(device)) for device in missing), _OPERATIONS_S
    for device in missing:
        ceilings[device] = measure_ceilings(device, budget_s=_CEILINGS_S)
        for threads in _threads(device):  # each leaves its unused time to the following ones
            budget_s = max(left_s / left, _LEAST_S)
            # On a GPU the host alone: the shapes timed are a CPU's, too small to tell what a GPU reaches.
            calls = None if device.kind == "cpu" else ()
            operations[device].append(measure_operations(device, threads=threads, budget_s=budget_s, calls=calls))
            left, left_s = left - 1, left_s - operations[device][-1].took_s
    after = sample_cpu()
    load = None if not missing or before is None or after is None else load_between(before, after)
    if load is None or load.is_quiet:
        for device in missing:
            key = cache_key(device, torch.__version__)
            ceilings_kept.write(ceilings[device], key)
            for threads, benchmark in zip(_threads(device), operations[device], strict=True):
                operations_kept.write(benchmark, *operations_key(key, threads))
    return Diagnosis(
        diagnosis.devices,
        tuple(ceilings[device] for device in diagnosis.usable),
        load,
        tuple(diagnosis.problems),
        tuple(benchmark for device in diagnosis.usable for benchmark in operations[device]),
    )


def _threads(device: Device) -> tuple[int | None, ...]:
    """Numbers of threads to time operations with: all of a CPU and one, unchanged on a GPU."""
    return (None,) if device.kind != "cpu" or device.cores <= 1 else (None, 1)
