"""Forecasts of single operations on GPUs, against published measurements, by device and kind.

    python -m bench.forecast.gpu_operations --ops DIR [--points 24] [--json] [--out FILE]

Once from the datasheet, every constant fitted on the other devices, and once with `--points` random points of each
kind; the errors are those of points not drawn, of operations of at least 0.3 ms (shorter ones are mostly the time of
measuring them alone). `DIR` as for `gpu_latency`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.forecast.gpu_constants import Constants, fitted_without
from bench.forecast.gpu_points import Points, read_devices, read_points, with_points
from stoker.planning.model.gpu_times import GpuTimes
from stoker.records.hardware import Timing

_LEAST_S = 3e-4
_PER_KIND = 250
_QUANTILE = 1.2816


def errors_of(times: GpuTimes, timings: Sequence[Timing]) -> dict[str, float]:
    """How far forecasts are from the measured times of these operations."""
    errors = [times.seconds(one.operation) / one.seconds - 1 for one in timings]
    spreads = [times.relative_error(one.operation) for one in timings]
    held = [abs(np.log1p(error)) <= _QUANTILE * spread for error, spread in zip(errors, spreads, strict=True)]
    return {
        "operations": len(errors),
        "median_absolute_error": median(map(abs, errors)),
        "median_error": median(errors),
        "coverage": sum(held) / len(held),
    }


def rows(points: Points, folder: Path, num_points: int) -> Iterator[dict[str, Any]]:
    """One row for each device, kind and basis."""
    devices = read_devices(folder)
    for device in sorted(set(points.by_device) & set(devices)):
        drawn = points.drawn(device, num_points)
        models = {
            "datasheet": fitted_without(device, points, devices).times(devices[device]),
            f"{num_points} points": Constants().times(with_points(devices[device], drawn)),
        }
        models = {basis: dataclasses.replace(times, in_step=False) for basis, times in models.items()}
        known = {id(timing) for timing in drawn}
        for kind, timings in sorted(points.by_device[device].items()):
            unseen = [one for one in timings if id(one) not in known and one.seconds >= _LEAST_S]
            few = random.Random(kind).sample(unseen, min(_PER_KIND, len(unseen)))
            for basis, times in models.items() if few else ():
                yield {"device": device, "kind": kind, "basis": basis, **errors_of(times, few)}


def main() -> int:
    """Read points, forecast, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=Path, required=True)
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    document = {
        "what": "forecast of single operations on GPUs that were not here, against published measurements",
        "command": f"python -m bench.forecast.gpu_operations --ops DIR --points {options.points}",
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "rows": [*rows(read_points(options.ops), options.ops, options.points)],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(document))
    for row in () if options.json else document["rows"]:
        print(
            f"{row['device']:24} {row['kind']:8} {row['basis']:10} {row['operations']:4} "
            f"{row['median_absolute_error']:7.1%} {row['median_error']:+7.1%} covered {row['coverage']:.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
