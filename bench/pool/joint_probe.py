"""One device that is offered twice, and honest neighbours: how often the control plane's probes mark each of them.

Processes of this machine are the devices, with the shares of its CPUs that agents lend, and are asked as the control
plane does (`stoker.pool.probing`): pairs in three rounds. *Twice*: both programs have the same cores. *Neighbours*:
each has half of the cores to itself. Other load of the machine is part of the measurement, and is noted.

`python -m bench.pool.joint_probe [--probes N] [--mib M]` writes bench/results/pool_joint_probe_DATE.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from bench.pool.result_file import write_result
from stoker.pool.events import Probed, ProbeTimes
from stoker.pool.hardware_proof import LocalDevice, prove_hardware
from stoker.pool.joint_probe import ROUNDS, clashes, is_late

NAMES = ("box", "twin")


def probed(cores: float, memory_bytes: int, shared: set[int] | None) -> Probed:
    """Probe two devices, each with so many cores; `shared`: CPUs that both are held to, None: each has its own."""
    alone: dict[str, list[float]] = {name: [] for name in NAMES}
    together: dict[str, list[float]] = {name: [] for name in NAMES}
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    with ExitStack() as stack:
        devices = [stack.enter_context(LocalDevice(cores)) for _ in NAMES]
        for number, device in enumerate(devices):
            os.sched_setaffinity(device.pid, shared or cpus[number * half : (number + 1) * half])
            device({"ask": "multiply", "device": "cpu", "seed": 1, "n": 64, "k": 64})

        def time_s(number: int) -> float:
            proof = prove_hardware(devices[number], memory_bytes=memory_bytes, num_rows=8)
            return round(proof.product_s, 3) if proof.is_passed else 0.0

        for _ in range(ROUNDS):
            for number, name in enumerate(NAMES):
                alone[name].append(time_s(number))
            with ThreadPoolExecutor(2) as threads:
                for name, took_s in zip(NAMES, threads.map(time_s, range(2)), strict=True):
                    together[name].append(took_s)
    return Probed(
        offers=tuple(
            ProbeTimes(
                offer_id=name, agent=str(number) * 64, alone_s=tuple(alone[name]), together_s=tuple(together[name])
            )
            for number, name in enumerate(NAMES)
        )
    )


def summary(probes: list[Probed]) -> dict[str, Any]:
    """Ratios of the times together to the best alone, and what follows from them."""
    ratios = [
        time_s / min(times.alone_s) for one in probes for times in one.offers for time_s in times.together_s if time_s
    ]
    late = [is_late(times, number) for one in probes for times in one.offers for number in range(ROUNDS)]
    return {
        "probes": len(probes),
        "clashes": sum(any(clashes(one).values()) for one in probes),
        "late_samples": sum(late),
        "samples": len(late),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probes", type=int, default=10, help="of each kind")
    parser.add_argument("--mib", type=int, default=64, help="memory that each device fills")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    kinds = {
        "twice": {"cores": float(len(cpus)), "memory_bytes": options.mib << 20, "shared": set(cpus)},
        "neighbours": {"cores": float(half), "memory_bytes": options.mib << 20, "shared": None},
    }
    found: dict[str, list[Probed]] = {name: [] for name in kinds}
    loads = []
    for _ in range(options.probes):  # in turns: other load meets both
        for name, arguments in kinds.items():
            began = time.monotonic()
            found[name].append(probed(**arguments))  # type: ignore[arg-type]
            loads.append(round(os.getloadavg()[0], 1))
            print(name, round(time.monotonic() - began), "s", summary(found[name][-1:]), flush=True)
    write_result(
        "joint_probe",
        __doc__,
        {
            "mib": options.mib,
            **{name: summary(probes) for name, probes in found.items()},
            "load_least": min(loads),
            "load_most": max(loads),
            "rows": {
                name: [[[*times.alone_s], [*times.together_s]] for one in probes for times in one.offers]
                for name, probes in found.items()
            },
        },
    )


if __name__ == "__main__":
    main()
