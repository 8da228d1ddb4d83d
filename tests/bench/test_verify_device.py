"""Forecasts against a device: without one, and rehearsed on a CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.forecast.expecting import Expected
from bench.forecast.measuring import Kernel, Measured, MeasuringFailed, Request
from bench.forecast.registration import register
from bench.forecast.verify_cases import Case, cases
from bench.forecast.verify_device import NO_DEVICE, Trial, fit_trials, main, measure_all, residuals_of
from stoker.records import Coupling, Estimate, Forecast, Plan, digest, from_json, to_json

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")
CASE = Case(job="mlp", size="tiny", plan=Plan(device="cuda:0", micro_batch=32, precision="bf16"))


def estimate(value: float, unit: str = "s") -> Estimate:
    """A value within a tenth."""
    return Estimate(value=value, low=0.9 * value, high=1.1 * value, unit=unit, basis="calibrated")


def forecast(step_s: float) -> Forecast:
    """Of 1000 updates."""
    return Forecast(
        step_s=estimate(step_s),
        samples_per_s=estimate(32 / step_s),
        evaluate_s=estimate(1),
        checkpoint_s=estimate(1),
        total_s=estimate(1000 * step_s),
        peak_bytes=estimate(1000, "bytes"),
        reserved_bytes=estimate(2000, "bytes"),
        total_samples=32_000,
        total_updates=1000,
    )


def registered(path: Path) -> dict[str, object]:
    """One case with forecasts, one without, and two trials near the limit."""
    expected = [
        Expected(
            case=CASE, coupling=SEPARABLE, calibrated=forecast(1.0), datasheet=forecast(1.2), energy_j=estimate(2, "J")
        ),
        Expected(case=CASE, coupling=SEPARABLE, error="it cannot be traced"),
    ]
    trials = [Trial(case=CASE, coupling=SEPARABLE, cap_bytes=cap, probability_it_fits=0.95) for cap in (2000, 2100)]
    return register(path, "a test", "nothing", {"expected": to_json(expected), "trials": to_json(trials)})


def made_up(request: Request, _timeout_s: float) -> list[Measured]:
    """A device with 2050 bytes, on which an update takes one second and 2.5 J."""
    energy_j = 2.5 if request.with_energy else None
    fits = [not request.caps_bytes or request.caps_bytes[at] >= 2050 for at in range(len(request.plans))]
    return [
        Measured(plan=at, round=0, update_s=(1.0, 1.0, 5.0), peak_bytes=1000, reserved_bytes=1900, energy_j=energy_j)
        if has_fit
        else Measured(plan=at, round=0, error="no memory", is_out_of_memory=True)
        for at, has_fit in enumerate(fits)
    ]


def test_each_quantity_is_compared_with_what_was_measured(tmp_path: Path) -> None:
    """The median update, memory, and the energy of one update; what has no forecast is not measured."""
    path = tmp_path / "device.json"
    document = registered(path)
    assert measure_all(document, path, updates=3, limit_s=100, ask=made_up)
    errors = {one.quantity: one.error for one in residuals_of(document)}
    assert errors == {
        "peak_bytes": 0.0,
        "reserved_bytes": pytest.approx(2000 / 1900 - 1),
        "step_s": 0.0,
        "step_s from the datasheet": pytest.approx(0.2),
        "energy_j": pytest.approx(2 / 2.5 - 1),
    }
    assert list(json.loads(path.read_text())["measured"]) == ["0"]


def test_trials_near_the_limit_say_whether_it_fit(tmp_path: Path) -> None:
    """Both were promised to fit; the smaller did not."""
    path = tmp_path / "device.json"
    document = registered(path)
    measure_all(document, path, updates=3, limit_s=100, ask=made_up)
    assert [(one.cap_bytes, one.has_fit) for one in fit_trials(document)] == [(2000, False), (2100, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """An exit code of its own, and what to do instead."""
    assert main([]) == NO_DEVICE
    said = capsys.readouterr()
    assert "no CUDA device" in said.err
    assert "--rehearse" in said.err


def test_a_gpu_is_tried_with_every_setting() -> None:
    """At least 20 pairs, each once; bf16, tf32, compiled, checkpointed, cut, channels-last and each optimiser."""
    found = [case.plan for case in cases("tiny", "cuda:0")]
    pairs = {(case.job, case.plan) for case in cases("tiny", "cuda:0")}
    assert len(pairs) == len(found) >= 20
    assert {plan.precision for plan in found} == {"fp32", "tf32", "bf16"}
    assert {plan.optimizer_implementation for plan in found} == {"default", "foreach", "fused"}
    assert {plan.memory_format for plan in found} == {"contiguous", "channels_last"}
    assert {plan.compile for plan in found} == {True, False}
    assert any(plan.checkpointed_blocks for plan in found)


def test_what_was_cut_short_goes_on(tmp_path: Path) -> None:
    """With no time left nothing is measured; continued, what was not measured is, and nothing twice."""
    path, asked = tmp_path / "device.json", []
    document = registered(path)

    def noted(request: Request, timeout_s: float) -> list[Measured]:
        asked.append(request)
        return made_up(request, timeout_s)

    assert not measure_all(document, path, updates=3, limit_s=-1, ask=noted)
    assert not asked
    assert measure_all(document, path, updates=3, limit_s=100, ask=noted)
    assert measure_all(json.loads(path.read_text()), path, updates=3, limit_s=100, ask=noted)
    assert [len(request.plans) for request in asked] == [1, 2]


def test_what_a_failed_process_had_not_answered_is_tried_alone(tmp_path: Path) -> None:
    """The first trial's answer is kept; the second has a process of its own, fails there too, and the run goes on."""
    path, asked = tmp_path / "device.json", []
    document = registered(path)

    def failing(request: Request, timeout_s: float) -> list[Measured]:
        asked.append(request.caps_bytes)
        if not request.caps_bytes:
            return made_up(request, timeout_s)
        found = made_up(request, timeout_s)[: len(request.plans) - 1]
        raise MeasuringFailed("an illegal memory access", found, is_late=False)

    assert measure_all(document, path, updates=3, limit_s=100, ask=failing)
    assert asked == [(), (2000, 2100), (2100,)]
    tried = json.loads(path.read_text())["tried"]
    assert tried["0"]["is_out_of_memory"]
    assert tried["1"]["error"] == "an illegal memory access"


def test_what_a_late_process_had_not_answered_is_left_for_later(tmp_path: Path) -> None:
    """Its answers so far are written; the rest is still to be done, and is no error."""
    path = tmp_path / "device.json"
    document = registered(path)

    def late(request: Request, timeout_s: float) -> list[Measured]:
        if not request.caps_bytes:
            return made_up(request, timeout_s)
        time.sleep(timeout_s)
        raise MeasuringFailed("took longer", made_up(request, timeout_s)[:1], is_late=True)

    assert not measure_all(document, path, updates=3, limit_s=0.2, ask=late)
    assert list(json.loads(path.read_text())["tried"]) == ["0"]


@pytest.mark.slow
def test_the_rehearsal_forecasts_then_measures_then_concludes(tmp_path: Path) -> None:
    """One case on the CPU: what was forecast has its digest, and there are residuals of memory and time."""
    path = tmp_path / "rehearsal.json"
    assert main(["--rehearse", "--jobs", "mlp", "--cases", "1", "--without-points", "--out", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [one["error"] for one in document["registered"]["expected"]] == [None]
    assert document["registered_digest"] == digest(document["registered"])
    assert document["conclusion"]["summary"]["step_s"]["cases"] == 1
    assert document["conclusion"]["summary"]["peak_bytes"]["cases"] == 1


def test_what_tells_most_is_measured_first(tmp_path: Path) -> None:
    """Each job's fast plan, a compiled one, others, trials, compiled ones, fp32; continued, in the same order."""
    found = [case for case in cases("tiny", "cuda:0") if case.job in ("cnn", "gpt")]
    expected = [
        Expected(case=case, coupling=SEPARABLE, calibrated=forecast(1.0), datasheet=forecast(1.2)) for case in found
    ]
    trial = Trial(case=found[1], coupling=SEPARABLE, cap_bytes=2100, probability_it_fits=0.95)
    path, asked = tmp_path / "device.json", []
    document = register(path, "a test", "nothing", {"expected": to_json(expected), "trials": to_json([trial])})

    def noted(request: Request, timeout_s: float) -> list[Measured]:
        asked.append(request)
        return made_up(request, timeout_s)

    measure_all(document, path, updates=3, limit_s=100, ask=noted)
    assert [(one.job, one.plans[0].precision, one.plans[0].compile, bool(one.caps_bytes)) for one in asked] == [
        ("cnn", "bf16", False, False),
        ("gpt", "bf16", False, False),
        ("gpt", "bf16", True, False),
        ("cnn", "bf16", False, False),
        ("gpt", "bf16", False, False),
        ("cnn", "bf16", False, True),
        ("cnn", "bf16", True, False),
        ("cnn", "fp32", False, False),
        ("gpt", "fp32", False, False),
    ]
    assert [len(one.plans) for one in asked[:3]] == [1, 1, 1]
    quarter = asked[3].plans[0]
    assert (asked[0].plans[0].micro_batch, quarter.micro_batch) == (16, 4)
    del document["measured"][str([case.plan for case in found].index(quarter))]
    measure_all(document, path, updates=3, limit_s=100, ask=noted)
    assert asked[-1].plans == (quarter,)


def test_kernels_are_kept_of_the_jobs_asked_for(tmp_path: Path) -> None:
    """A second answer has them with what was measured; trials near the limit list none."""
    path, kernels = tmp_path / "device.json", (Kernel(name="gemm", seconds=0.5, count=2),)

    def twice(request: Request, timeout_s: float) -> list[Measured]:
        found = made_up(request, timeout_s)
        return found + [replace(one, kernels=kernels) for one in found if request.with_kernels]

    for jobs, expected in ((("mlp",), kernels), (("cnn",), ())):
        document = registered(path)
        measure_all(document, path, updates=3, limit_s=100, with_kernels=jobs, ask=twice)
        measured = from_json(document["measured"]["0"], Measured)
        assert (measured.kernels, measured.peak_bytes) == (expected, 1000)
        assert not document["tried"]["0"]["kernels"]
        path.unlink()
