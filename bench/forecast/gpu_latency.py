"""Forecasts of whole training and inference steps on GPUs that are not here, against published measurements.

    python -m bench.forecast.gpu_latency --labels labels.csv --ops DIR --json
        [--points 24 | --without-points] [--leave-one-out]

`labels.csv` has columns device, model, mode (`inf`, `train`), seqlen, batch, option (empty, or `fusion` for compiled),
e2e_ms and, where known, num_layer; `DIR` holds `devices.json`, `models.json` and the points of single operations (see
`gpu_points`). By default a device's own points, all of them, stand for its micro-benchmark; `--points 24` draws as many
of each kind as `stoker doctor` would measure; `--without-points` forecasts from the datasheet. With the latter, or
`--leave-one-out`, the constants in `gpu_constants.REFITTED` are fitted again on the points of the other devices; those
in `NOT_REFITTED` stay, though the device's points were at hand when they were chosen. Inference is fitted to no whole
model. Of training the constants in `JUDGED_ON_LABELS` are; the labels they were judged from are marked `is_judged_on`,
and means are given with and without them. `--out FILE` also writes the document with hardware and versions. Labels that
cannot be modelled are named on standard error, and are no failure.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.forecast.gpu_constants import JUDGED_ON_LABELS, NOT_REFITTED, REFITTED, Constants, fitted_without
from bench.forecast.gpu_forecast import SlowAllocator, StepForecast, forecast_step
from bench.forecast.gpu_labels import Label
from bench.forecast.gpu_points import Points, read_devices, read_points, with_points
from bench.forecast.gpu_steps import Step, step_of
from stoker.errors import StokerError
from stoker.planning.model.gpu_times import GpuTimes
from stoker.records.hardware import Hardware


class Forecaster:
    """Devices, models and points of one folder; what was read, traced or fitted is kept."""

    def __init__(self, folder: Path, *, num_points: int | None, uses_points: bool, leaves_out: bool) -> None:
        self.points: Points = read_points(folder)
        self.devices: Mapping[str, Hardware] = read_devices(folder)
        self.models: Mapping[str, Any] = json.loads((folder / "models.json").read_text(encoding="utf-8"))
        self.num_points, self.uses_points, self.leaves_out = num_points, uses_points, leaves_out
        self._times: dict[str, GpuTimes] = {}
        self._steps: dict[tuple[object, ...], Step] = {}

    @property
    def constants(self) -> dict[str, Any]:
        """Which constants know the device that is forecast, or its whole models."""
        refits = self.leaves_out or not self.uses_points
        return {
            "refitted": [*REFITTED] if refits else [],
            "not_refitted": [*NOT_REFITTED] if refits else [*REFITTED, *NOT_REFITTED],
            "constants_judged_on_labels": [*JUDGED_ON_LABELS],
        }

    def forecast(self, label: Label) -> StepForecast:
        """The forecast of one label.

        Raises:
            LookupError: its device or model is unknown; the text says which.
            StokerError: it cannot be modelled; the text says why.
        """
        if label.model not in self.models:
            raise LookupError(f"model {label.model!r} is not in models.json")
        times = self._times_of(label.device)
        step = self._step_of(label, times.sustained.hardware.compute_capability or "8.0")
        return forecast_step(step, times, is_compiled=label.is_compiled, allocator=SlowAllocator())

    def _times_of(self, device: str) -> GpuTimes:
        if device not in self._times:
            if device not in self.devices:
                raise LookupError(f"device {device!r} is not in devices.json")
            hardware = self.devices[device]
            if self.uses_points:
                hardware = with_points(hardware, self.points.drawn(device, self.num_points))
            constants = Constants()
            if self.leaves_out or not self.uses_points:
                constants = fitted_without(device, self.points, self.devices)
            self._times[device] = constants.times(hardware)
        return self._times[device]

    def _step_of(self, label: Label, capability: str) -> Step:
        key = (label.model, label.is_training, label.tokens, label.batch, label.layers, capability)
        if key not in self._steps:
            self._steps[key] = step_of(
                self.models[label.model],
                is_training=label.is_training,
                tokens=label.tokens,
                batch=label.batch,
                capability=capability,
                layers=label.layers,
            )
        return self._steps[key]


def forecast_all(rows: Sequence[Mapping[str, str]], forecaster: Forecaster) -> dict[str, Any]:
    """The document: cases, means by device and mode, and what was left out with the reason.

    Means stand there twice, the second time without the labels that a constant was judged from.
    """
    cases, skipped = [], []
    for row in rows:
        try:
            label = Label.of(row)
            made = forecaster.forecast(label)
        except (LookupError, ValueError, TypeError, RuntimeError, StokerError) as problem:
            skipped.append({**row, "reason": f"{type(problem).__name__}: {problem}"})
            continue
        cases.append({**row, **_case(made, label)})
    unseen = [case for case in cases if not case["is_judged_on"]]
    return {
        **forecaster.constants,
        "cases": cases,
        "means": _means(cases),
        "overall": _summary(cases),
        "means_without_judged_on": _means(unseen),
        "overall_without_judged_on": _summary(unseen),
        "skipped": skipped,
    }


def _case(made: StepForecast, label: Label) -> dict[str, Any]:
    case = {
        "predicted_ms": made.seconds * 1e3,
        "low_ms": made.low_s * 1e3,
        "high_ms": made.high_s * 1e3,
        "measured_ms": label.seconds * 1e3,
        "error": made.seconds / label.seconds - 1,
        "covered": made.low_s <= label.seconds <= made.high_s,
        "is_judged_on": label.is_judged_on,
        "shares": {kind: round(share, 4) for kind, share in made.shares.items()},
    }
    phases = {"forward": (made.forward_s, label.forward_s), "backward": (made.backward_s, label.backward_s)}
    for phase, (seconds, measured) in phases.items():
        if label.is_training and measured is not None:
            case[f"{phase}_error"] = seconds / measured - 1
    return case


def _means(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for case in cases:
        grouped[case["device"], case["mode"]].append(case)
    return [{"device": device, "mode": mode, **_summary(group)} for (device, mode), group in sorted(grouped.items())]


def _summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not cases:
        return {"cases": 0}
    errors = [case["error"] for case in cases]
    return {
        "cases": len(cases),
        "mean_absolute_error": sum(map(abs, errors)) / len(errors),
        "mean_error": sum(errors) / len(errors),
        "worst": max(errors, key=abs),
        "coverage": sum(case["covered"] for case in cases) / len(cases),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Read labels, forecast, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--ops", type=Path, required=True)
    parser.add_argument("--points", type=int, default=None, metavar="N", help="at most N of each kind (default: all)")
    parser.add_argument("--without-points", action="store_true", help="from the datasheet only")
    parser.add_argument("--leave-one-out", action="store_true", help="fit every constant without the device")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--out", type=Path, default=None, help="also write it here, with versions")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    forecaster = Forecaster(
        options.ops,
        num_points=options.points,
        uses_points=not options.without_points,
        leaves_out=options.leave_one_out,
    )
    with options.labels.open(encoding="utf-8", newline="") as file:
        document = forecast_all(list(csv.DictReader(file)), forecaster)
    if options.out is not None:
        about = {
            "what": "forecast of whole steps on GPUs that were not here, against published measurements",
            "command": "python -m bench.forecast.gpu_latency --labels LABELS --ops DIR" + _flags(options),
            "labels": options.labels.name,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({**about, **document}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document) if options.json else _in_words(document))
    for one in document["skipped"]:
        named = " ".join(str(one.get(key)) for key in ("device", "model", "mode", "seqlen", "batch", "option"))
        print(f"skipped: {named}: {one['reason']}", file=sys.stderr)
    return 0


def _flags(options: argparse.Namespace) -> str:
    """The options that change a forecast."""
    points = "" if options.points is None else f" --points {options.points}"
    switches = {" --without-points": options.without_points, " --leave-one-out": options.leave_one_out}
    return points + "".join(flag for flag, is_set in switches.items() if is_set)


def _in_words(document: Mapping[str, Any]) -> str:
    lines = [
        f"{case['device']:24} {case['model']:11} {case['mode']:5} {case['seqlen']:>5} x {case['batch']:>3} "
        f"{case.get('option') or '':6} {case['measured_ms']:9.1f} {case['predicted_ms']:9.1f} {case['error']:+7.1%}"
        for case in document["cases"]
    ]
    means = [
        *document["means"],
        {"device": "all", "mode": "", **document["overall"]},
        {"device": "all not judged on", "mode": "", **document["overall_without_judged_on"]},
    ]
    lines += [
        f"{mean['device']:24} {mean['mode']:5} {mean['cases']:3} cases: mean |error| "
        f"{mean['mean_absolute_error']:.1%}, mean {mean['mean_error']:+.1%}, covered {mean['coverage']:.0%}"
        for mean in means
        if mean["cases"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
