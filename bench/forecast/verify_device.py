"""Forecasts for this machine's GPU against what it does: memory, step time, energy, and whether plans fit.

    python -m bench.forecast.verify_device                  # a minute for the device's operations first
    python -m bench.forecast.verify_device --continue bench/results/verify_device_….json
    python -m bench.forecast.verify_device --rehearse       # tiny jobs on the CPU: shows that all of this works

Forecasts of all job x plan pairs are written to the results with their digest; only then is anything of them measured,
what tells most first: each job's fast plan in bf16, a compiled one, other plans, plans with less and less memory near
what is forecast to be reserved, then compiled and fp32 ones. What a job has in one of these turns shares a process.
Results are written after each: what was cut short goes on with --continue. Exit code 3 without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

from bench.forecast.expecting import Expected, expected, probability_it_fits
from bench.forecast.jobs import JOBS
from bench.forecast.measuring import Measured, MeasuringFailed, Request, ask
from bench.forecast.registration import dated, register, write
from bench.forecast.residuals import FitTrial, Residual, fits, residual, summary
from bench.forecast.verify_cases import COMPILED_FIRST, NEAR_THE_LIMIT, SHARES_OF_RESERVED, Case, cases
from stoker.devices import attached_devices, planned_devices
from stoker.devices.malloc import resident_bytes
from stoker.planning.plan_ranking import SURE_ENOUGH
from stoker.profiling.micro_benchmark import measure_operations
from stoker.records import Coupling, Estimate, Hardware, from_json, to_json
from stoker.records.codec import JSON

NO_DEVICE = 3

BARS = {"peak_bytes": 0.01, "step_s": 0.05, "false_fits": 0.01}
"""Medians of absolute errors, and the share of wrong verdicts, that are aimed at."""

WITH_KERNELS = ("cnn",)
"""Jobs whose kernels are listed: which ones compute a convolution is a choice of cuDNN's."""

_LONGEST_S = 1200.0
"""A process that measures longer than that hangs [s]."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan to be tried with so much memory, and how sure the planner is that it fits."""

    schema: ClassVar[int] = 1
    case: Case
    coupling: Coupling
    cap_bytes: int
    probability_it_fits: float


def forecast_all(chosen: Sequence[Case], hardware: Hardware, held_bytes: int) -> dict[str, JSON]:
    """Forecasts of the cases, and of trials near the limit of memory: what is written before anything is measured."""
    found: list[Expected] = []
    for one in expected(chosen, hardware, held_bytes):
        found.append(one)
        print(f"  {one.case.in_words()}: {one.error or _foretold(one)}", flush=True)
    trials = [] if hardware.device.kind == "cpu" else [to_json(trial) for trial in near_the_limit(found, hardware)]
    return {"hardware": to_json(hardware), "expected": to_json(found), "trials": trials}


def near_the_limit(found: Sequence[Expected], hardware: Hardware) -> list[Trial]:
    """Fast plans of a few jobs with shares of the memory they are forecast to reserve."""
    trials: list[Trial] = []
    for job in NEAR_THE_LIMIT:
        of_job = [one for one in found if one.case.job == job and one.case.plan.precision == "bf16"]
        whole = next((one for one in of_job if one.calibrated and one.calibrated.reserved_bytes), None)
        if whole is None or whole.calibrated is None or whole.calibrated.reserved_bytes is None:
            continue
        reserved = whole.calibrated.reserved_bytes.value
        caps = [int(share * reserved) for share in SHARES_OF_RESERVED]
        for cap, sure in zip(caps, probability_it_fits(whole.case, hardware, caps), strict=True):
            trials.append(Trial(case=whole.case, coupling=whole.coupling, cap_bytes=cap, probability_it_fits=sure))
    return trials


_Turn = Literal["fast", "compiled first", "others", "near the limit", "compiled", "fp32"]
"""When a plan is measured: the sooner, the more it tells in a short time."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """What is to be measured: when, under which heading of the document, and for which entry of what was registered."""

    turn: _Turn
    heading: str
    at: int
    case: Case
    coupling: Coupling
    cap_bytes: int | None = None

    @property
    def process(self) -> tuple[int, str]:
        """What shares a process: a job's plans of a turn; those of the least number come first."""
        return get_args(_Turn).index(self.turn), self.case.job


def measure_all(
    document: dict[str, JSON],
    path: Path,
    *,
    updates: int,
    limit_s: float,
    with_energy: bool = True,
    with_kernels: Sequence[str] = WITH_KERNELS,
    ask: Callable[[Request, float], list[Measured]] = ask,
) -> bool:
    """Measure what is not measured yet; whether all was done within the seconds given, after which nothing runs.

    Entries of a process share its start, which takes longer than they do. If it fails, those without an answer have
    a process each, and one that fails alone has failed.
    """
    started = time.perf_counter()
    to_do = sorted(_to_do(document), key=lambda one: one.process)
    groups = [list(same) for _, same in itertools.groupby(to_do, key=lambda one: one.process)]
    while groups:
        left_s = limit_s - (time.perf_counter() - started)
        if left_s <= 0:
            return False
        group, problem = groups.pop(0), None
        try:
            request = _request(group, updates, with_energy=with_energy, with_kernels=with_kernels)
            found = ask(request, min(left_s, _LONGEST_S))
        except MeasuringFailed as failed:
            found, problem = failed.measured, failed
        answers = {one.plan: one for one in found}
        missing = [entry for number, entry in enumerate(group) if number not in answers]
        if problem is not None and len(group) == 1 and missing and not (problem.is_late and left_s < _LONGEST_S):
            answers, missing = {0: Measured(plan=0, round=0, error=str(problem))}, []
        for number, one in answers.items():
            entry = group[number]
            document[entry.heading][str(entry.at)] = to_json(replace(one, plan=0))
            print(f"  {entry.case.in_words()}: {_measured_in_words(one)}", flush=True)
        write(path, document)
        groups[:0] = [[entry] for entry in missing]
    return True


def _to_do(document: dict[str, JSON]) -> Iterator[_Entry]:
    """What is left to measure."""
    measured, tried = document.setdefault("measured", {}), document.setdefault("tried", {})
    begun: set[str] = set()  # jobs whose fast plan has been met
    for at, one in enumerate(document["registered"]["expected"]):
        expectation = from_json(one, Expected)
        turn = _turn(expectation.case, begun)
        if str(at) not in measured and expectation.error is None:
            yield _Entry(turn=turn, heading="measured", at=at, case=expectation.case, coupling=expectation.coupling)
    for at, one in enumerate(document["registered"]["trials"]):
        if str(at) not in tried:
            trial = from_json(one, Trial)
            yield _Entry(
                turn="near the limit",
                heading="tried",
                at=at,
                case=trial.case,
                coupling=trial.coupling,
                cap_bytes=trial.cap_bytes,
            )


def _turn(case: Case, begun: set[str]) -> _Turn:
    """When a case is measured; the first plan in bf16 is a job's fast one."""
    if case.plan.compile:
        return "compiled first" if case.job == COMPILED_FIRST else "compiled"
    if case.plan.precision == "bf16" and case.job not in begun:
        begun.add(case.job)
        return "fast"
    return "fp32" if case.plan.precision == "fp32" else "others"


def _request(group: Sequence[_Entry], updates: int, *, with_energy: bool, with_kernels: Sequence[str]) -> Request:
    caps = tuple(one.cap_bytes for one in group if one.cap_bytes is not None)
    return Request(
        job=group[0].case.job,
        size=group[0].case.size,
        plans=tuple(one.case.plan for one in group),
        coupling=group[0].coupling,
        warm_up=4,
        updates=updates,
        caps_bytes=caps,
        with_energy=with_energy and not caps,
        with_kernels=group[0].case.job in with_kernels and not caps,
    )


def residuals_of(document: dict[str, JSON]) -> list[Residual]:
    """What the forecasts of all cases measured so far were off by."""
    found: list[Residual] = []
    for at, one in document.get("measured", {}).items():
        measured = from_json(one, Measured)
        expectation = from_json(document["registered"]["expected"][int(at)], Expected)
        calibrated, datasheet = expectation.calibrated, expectation.datasheet
        if measured.error is not None or calibrated is None or datasheet is None:
            continue
        step_s = statistics.median(measured.update_s)
        pairs: list[tuple[str, Estimate | None, float | None]] = [
            ("peak_bytes", calibrated.peak_bytes, measured.peak_bytes),
            ("reserved_bytes", calibrated.reserved_bytes, measured.reserved_bytes),
            ("step_s", calibrated.step_s, step_s),
            ("step_s from the datasheet", datasheet.step_s, step_s),
            ("energy_j", expectation.energy_j, measured.energy_j),
        ]
        words = expectation.case.in_words()
        found.extend(residual(name, words, forecast, value) for name, forecast, value in pairs if forecast and value)
    return found


def fit_trials(document: dict[str, JSON]) -> list[FitTrial]:
    """The verdicts near the limit, and how they turned out."""
    pairs = [
        (from_json(document["registered"]["trials"][int(at)], Trial), from_json(one, Measured))
        for at, one in document["tried"].items()
    ]
    return [
        FitTrial(
            case=trial.case.in_words(),
            cap_bytes=trial.cap_bytes,
            probability_it_fits=trial.probability_it_fits,
            has_fit=not measured.is_out_of_memory,
        )
        for trial, measured in pairs
        if measured.is_out_of_memory or measured.error is None
    ]


def conclude(document: dict[str, JSON], path: Path) -> dict[str, JSON]:
    """Residuals and their summary, written and printed."""
    residuals = residuals_of(document)
    told: dict[str, JSON] = {
        "bars": BARS,
        "summary": summary(residuals),
        "fits": fits(fit_trials(document), SURE_ENOUGH),
    }
    document["residuals"], document["conclusion"] = to_json(residuals), told
    write(path, document)
    print(f"\n{'':28}cases  median     95 %    worst     bias  in and above the interval")
    for name, row in told["summary"].items():
        shown = "".join(f"{row[key]:9.1%}" for key in ("median", "p95", "worst", "bias"))
        print(f"{name:28}{row['cases']:5}{shown}{row['coverage']:9.0%}{row['above']:9.0%}")
    verdicts = told["fits"]
    print(
        f"near the limit: {verdicts['trials']} trials, {verdicts['promised']} promised to fit, of which "
        f"{verdicts['false_fits']:.1%} did not; {verdicts['missed']:.1%} of the others would have"
    )
    print(f"written to {path}")
    return told


def _foretold(one: Expected) -> str:
    forecast = one.calibrated
    assert forecast is not None, "a case has a forecast or an error"
    return f"{forecast.peak_bytes.value / 2**30:.3f} GiB, {forecast.step_s.value * 1e3:.2f} ms ({one.took_s:.1f} s)"


def _measured_in_words(measured: Measured) -> str:
    if measured.error is not None or measured.peak_bytes is None:
        return measured.error or "nothing"
    return f"{measured.peak_bytes / 2**30:.3f} GiB, {statistics.median(measured.update_s) * 1e3:.2f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Forecast, measure, conclude; 3 without a GPU, 1 if something is still to be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny jobs on the CPU")
    parser.add_argument("--continue", dest="file", type=Path, help="measure what a file of results still lacks")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS["gpu"]), choices=list(JOBS["gpu"]))
    parser.add_argument("--cases", type=int, help="the first so many cases only")
    parser.add_argument("--without-points", action="store_true", help="forecast from the datasheet alone")
    parser.add_argument("--limit-s", type=float, default=1e9, help="end measuring after so many seconds")
    parser.add_argument("--benchmark-s", type=float, default=60.0, help="seconds for the device's operations")
    parser.add_argument("--without-energy", action="store_true", help="three seconds less for each case")
    parser.add_argument("--kernels", nargs="*", default=list(WITH_KERNELS), help="jobs whose kernels are listed")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print(
            f"PyTorch {torch.__version__} finds no CUDA device here. Run this where one is; --rehearse runs the same "
            "on the CPU with tiny jobs.",
            file=sys.stderr,
        )
        return NO_DEVICE
    if given.file is not None:
        path, document = given.file, json.loads(given.file.read_text(encoding="utf-8"))
    else:
        path = given.out or dated("verify_device_rehearsal" if given.rehearse else "verify_device")
        document = _registered(path, given)
    is_done = measure_all(
        document,
        path,
        updates=3 if given.rehearse else 12,
        limit_s=given.limit_s,
        with_energy=not given.without_energy,
        with_kernels=given.kernels,
    )
    conclude(document, path)
    return 0 if is_done else 1


def _registered(path: Path, given: argparse.Namespace) -> dict[str, JSON]:
    place = planned_devices("cpu" if given.rehearse else "cuda:0", attached_devices())[0]
    held_bytes, benchmark = resident_bytes(), None  # what is held before the benchmark leaves its traces
    if not given.without_points:
        budget_s, threads = (3.0, 1) if given.rehearse else (given.benchmark_s, None)
        print(f"measuring operations on {place.device.model} for about {budget_s:.0f} s", flush=True)
        benchmark = measure_operations(place.device, threads=threads, budget_s=budget_s)
    if not given.rehearse:
        torch.cuda.empty_cache()  # the memory is for those who are measured
    found = cases("tiny" if given.rehearse else "gpu", place.device.torch_name)
    chosen = [case for case in found if case.job in given.jobs][: given.cases]
    print(f"forecasting {len(chosen)} cases", flush=True)
    command = f"python -m bench.forecast.verify_device{' --rehearse' if given.rehearse else ''}"
    if given.without_points:
        command += " --without-points"
    if given.jobs != list(JOBS["gpu"]):
        command += f" --jobs {' '.join(given.jobs)}"
    forecasts = forecast_all(chosen, replace(place.hardware, benchmark=benchmark), held_bytes)
    document = register(path, "forecasts against a device", command, forecasts)
    print(f"forecasts written to {path}, digest {document['registered_digest'][:16]}; measuring", flush=True)
    return document


if __name__ == "__main__":
    sys.exit(main())
