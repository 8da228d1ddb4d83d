from __future__ import annotations

import dataclasses

import pytest

from stoker.planning.explanation import explain, why_not_compiled
from stoker.planning.model.search_space import execution_settings
from stoker.planning.plan_ranking import untraced_candidates
from stoker.planning.plan_search import PlanSearch
from stoker.records import Candidate, Coupling, Device, Plan
from tests.planning.trials import CPU, GPU, NORMS, OLD_CPU, extents, forecast_of, measurement, profile


def explained(trial, device: Device = CPU, most: int = 1000, **facts) -> tuple[str, ...]:
    """What is said after trials of every plan that comes to mind."""
    about = profile(**facts)
    settings = list(execution_settings(about, device))
    sizes = about.coupling.legal_micro_batches(about.batch)[:2]
    plans = [dataclasses.replace(plan, micro_batch=size) for size in sizes for plan in settings]
    search = PlanSearch(untraced_candidates(about, device, name="it", plans=plans), about, device, extents)
    for plan in plans[:most]:
        found = trial(plan)
        if isinstance(found, str):
            search.reject(plan, found)
        else:
            search.record(found)
    return explain(search.chosen(), about, device, search.measured, search.rejected)


def test_five_lines_say_why() -> None:
    """Hardware and plan; what the contract allows; what each setting gave; memory; time, with its interval."""
    lines = explained(lambda plan: measurement(plan, {"bf16": 0.1, "fp32": 0.21}[plan.precision], gradient_error=0.004))
    assert lines[0].startswith("a CPU, 4 cores: bf16 · micro-batch 512 · channels-last · 4 threads")
    assert lines[1] == "samples are separable: any micro-batch up to the batch of 512 learns the same"
    assert lines[2].startswith("speed: 4 threads 1.00x 2 threads; 4 threads 1.00x 1 thread; fused optimiser 1.00x")
    assert "bf16 2.10x fp32; micro-batch 512 1.00x micro-batch 256" in lines[2]
    assert lines[2].endswith("; gradient 0.4% from fp32's")
    assert lines[3] == "memory: 1.0 GiB at the peak (measured here), of 8.0 GiB"
    assert lines[4].startswith(
        "to finish: 56.8 s (51.1 s to 1 min 2 s, measured here) for 270.0 k samples in 530 updates"
    )
    assert len(lines) == 5


def test_a_line_says_how_large_a_batch_was_tried() -> None:
    """Where it was smaller than the job's: what shows in larger ones alone was not looked for."""
    coupling = Coupling(kind="separable", group=None, causes=(), evidence="", tried=64)
    lines = explained(lambda plan: measurement(plan, 0.1, gradient_error=0.0), coupling=coupling)
    assert lines[1].endswith("learns the same, as far as batches of 64 show; `stoker verify` trains on larger ones")


def test_a_run_of_evaluations_says_so() -> None:
    """Where updates are not most of the time, a sixth line says what is, and how to have less of it."""
    lines = explained(lambda plan: measurement(plan, 0.001, evaluate_s_per_sample=5e-3, gradient_error=0.0))
    assert lines[5] == (
        "of that: 5 evaluations 3 min 20 s; evaluate less often with stoker.Evaluation(every=…), or fewer samples"
    )
    lines = explained(lambda plan: measurement(plan, 0.1, evaluate_s_per_sample=5e-3, gradient_error=0.0))
    assert lines[5].startswith("of that: updates 52.7 s · 5 evaluations 3 min 20 s; evaluate less")


def test_the_ratio_is_the_one_that_decided() -> None:
    """By the faster half of the updates, as plans are compared: a chosen setting is never said to be slower."""
    noisy = {"bf16": (0.1, 0.1, 0.9, 0.9, 0.9), "fp32": (0.2,) * 5}
    lines = explained(lambda plan: measurement(plan, noisy[plan.precision], gradient_error=0.0))
    assert "bf16 2.00x fp32" in lines[2]


def test_loaders_and_workers_are_told_apart() -> None:
    """A change of the loader, and a change of the number of workers alone."""
    times = {0: 0.4, 4: 0.1, 2: 0.2}
    lines = explained(lambda plan: measurement(plan, times[plan.num_workers]), is_in_memory=False)
    assert "workers loader 4.00x inline loader" in lines[2]
    assert "4 loader workers 2.00x 2 loader workers" in lines[2]


def test_what_couples_samples_is_named() -> None:
    """And the rule that follows from it."""
    lines = explained(lambda plan: measurement(plan, 0.1), coupling=NORMS)
    assert lines[1] == "samples are coupled by 5 BatchNorm2d: a micro-batch is whole groups of 64 samples"
    whole = dataclasses.replace(NORMS, kind="whole_group", causes=("the loss",))
    lines = explained(lambda plan: measurement(plan, 0.1), coupling=whole)
    assert lines[1] == "samples are coupled by the loss: a micro-batch is exactly one group of 64 samples"


def test_what_was_ruled_out_is_named_with_its_micro_batch() -> None:
    """bf16 itself is not ruled out because it did not fit with 512 samples."""
    lines = explained(
        lambda plan: "out of memory" if plan.micro_batch == 512 else measurement(plan, 0.1, gradient_error=0.0)
    )
    assert "bf16 at micro-batch 512 ruled out: out of memory" in lines[2]


def test_a_short_run_is_not_worth_a_second_trial() -> None:
    """Then the line says so."""
    lines = explained(lambda plan: measurement(plan, 0.001, took_s=5.0), most=1)
    assert lines[2] == "speed: nothing else was tried, it would not have paid back"


def test_a_plan_that_was_given_is_not_said_to_be_the_best_found() -> None:
    """Others were not tried because they were not asked for."""
    plan, about = Plan(device="cpu", micro_batch=512), profile()
    search = PlanSearch(untraced_candidates(about, CPU, name="it", plans=[plan]), about, CPU, extents)
    search.record(measurement(plan, 0.1))
    lines = explain(search.chosen(), about, CPU, search.measured, search.rejected, is_given=True)
    assert lines[2] == "speed: the plan that was given was tried, and no other"


def test_plans_that_differ_in_many_settings_are_counted() -> None:
    """Where no trial isolates a setting's gain, the line says how many plans the fastest was found among."""
    plans = [
        Plan(device="cpu", micro_batch=512, precision="bf16", threads=4),
        Plan(device="cpu", micro_batch=256, precision="fp32", threads=1),
    ]
    about = profile()
    search = PlanSearch(untraced_candidates(about, CPU, name="it", plans=plans), about, CPU, extents)
    for plan, pace_s in zip(plans, (0.1, 0.3), strict=True):
        search.record(measurement(plan, pace_s, gradient_error=0.0))
    lines = explain(search.chosen(), about, CPU, search.measured, search.rejected)
    assert lines[2] == "speed: the fastest of 2 plans that were tried; gradient 0.0% from fp32's"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (OLD_CPU, "an old CPU, 1 core: fp32"),
        (GPU, "H200, 132 multiprocessors: bf16"),
        (dataclasses.replace(GPU, cores=0), "H200: bf16"),
    ],
)
def test_hardware_is_named_for_what_it_has(device: Device, words: str) -> None:
    """Cores of a CPU, multiprocessors of a GPU, nothing where it is not known."""

    def trial(plan: Plan):
        return measurement(plan, 0.1, peak_bytes=2**20)

    assert explained(trial, device)[0].startswith(words)


@pytest.mark.parametrize(
    ("plain_s", "pace", "likely", "words"),
    [
        (1000.0, 1.1, None, "1.10x the time of an update (0.99 to 1.21) by forecast: nothing saved, and compiling"),
        (100.0, 0.8, None, "which saves 20.0 s of the run; compiling takes 20.0 s, 22.0 s at most, and is done where"),
        (
            1000.0,
            0.8,
            0.95,
            "which saves 3 min 20 s of the run; compiling takes 20.0 s, 22.0 s at most: not tried, since",
        ),
        (1000.0, 0.8, 0.84, "at most: not taken, since it fits with 84% probability, and 90% are asked for"),
    ],
)
def test_why_a_plan_is_not_compiled(plain_s: float, pace: float, likely: float | None, words: str) -> None:
    """What it would give by forecast, what it costs, and which rule it fails."""
    plan = Plan(device="cpu", micro_batch=64)
    per_sample = plain_s / 270_000
    chosen = Candidate(
        device="cpu", plan=plan, forecast=forecast_of(plan, total_s=plain_s, pace_s=per_sample), memory_bytes=2**33
    )
    compiled = dataclasses.replace(
        forecast_of(plan, total_s=plain_s * pace + 20, pace_s=per_sample * pace, compile_s=20.0),
        probability_it_fits=likely,
    )
    assert words in why_not_compiled(chosen, compiled)
