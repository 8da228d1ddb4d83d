"""Confirming forecasts by trials, as long as they pay back."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import DoesNotFit
from stoker.planning.model.run_forecast import Extents
from stoker.planning.plan_search import LEAST_GAIN, PlanSearch
from stoker.records import LARGEST_GRADIENT_ERROR, Basis, Candidate, Measurement, Plan
from tests.planning.trials import CPU, extents, forecast_of, measurement, profile, run

FIRST = Plan(device="cpu", micro_batch=512, precision="bf16", threads=4, optimizer_implementation="fused")
FP32 = dataclasses.replace(FIRST, precision="fp32")
SMALL = dataclasses.replace(FIRST, micro_batch=256)


def candidates(paces: dict[Plan, float], basis: Basis = "calibrated", **forecast) -> list[Candidate]:
    """Plans with their forecast pace [s per sample], the fastest first."""
    return [
        Candidate(
            device="cpu",
            plan=plan,
            forecast=forecast_of(plan, pace_s=pace, basis=basis, **forecast),
            memory_bytes=2**33,
        )
        for plan, pace in sorted(paces.items(), key=lambda item: item[1])
    ]


def search_for(paces: dict[Plan, float], long: bool = True, **changes) -> PlanSearch:
    """A search among these plans, in a run of a day, or of ten seconds."""
    length = 10**9 if long else 100_000
    return PlanSearch(
        candidates(paces, **changes),
        profile(),
        CPU,
        lambda _rate: Extents(total_samples=length, total_updates=length // 512, evaluations=5),
    )


def at(pace: float, plan: Plan, **changes) -> Measurement:
    """A trial that found this pace [s per sample]."""
    return measurement(plan, pace * 512, evaluate_s_per_sample=0.0, took_s=1.0, **changes)


def test_a_last_resort_is_tried_where_nothing_else_works_and_only_there() -> None:
    """A guess of one sample at a time that promises half the time, and a plan that was traced."""
    guess = dataclasses.replace(FIRST, micro_batch=1)
    found = [*candidates({FIRST: 1e-3}), *candidates({guess: 5e-4}, basis="unknown", peak_bytes=1.0)]
    long = Extents(total_samples=10**9, total_updates=10**6, evaluations=5)
    works, fails = (PlanSearch(found, profile(), CPU, lambda _rate: long) for _ in range(2))
    assert works.next_plan() == fails.next_plan() == FIRST
    works.record(at(1e-3, FIRST))
    fails.reject(FIRST, "it took all memory", for_memory=True)
    assert works.next_plan() is None
    assert fails.next_plan() == guess


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[Plan, float], dict[Plan, float]]:
    """Forecast and true pace of plans, which err by a factor for each setting."""
    plans = [
        Plan(device="cpu", micro_batch=size, precision=precision, threads=threads)
        for size, precision, threads in itertools.product((64, 128), ("fp32", "bf16"), (1, 2))
    ]
    factor = st.floats(0.8, 1.25)
    wrong = {value: draw(factor) for value in (64, 128, "fp32", "bf16", 1, 2)}
    expected = {plan: draw(st.floats(1e-4, 1e-3)) for plan in plans}
    return expected, {
        plan: pace * wrong[plan.micro_batch] * wrong[plan.precision] * wrong[plan.threads]
        for plan, pace in expected.items()
    }


@settings(max_examples=60)
@given(tables())
def test_in_a_long_run_the_plan_found_is_nearly_the_best(table) -> None:
    """Where forecasts err by a factor for each setting, trials find out which."""
    expected, true = table
    search = search_for(expected, basis="roofline")
    run(search, lambda plan: at(true[plan], plan))
    assert true[search.chosen().plan] <= min(true.values()) * 1.05


@settings(max_examples=60)
@given(tables(), st.randoms(use_true_random=False))
def test_whatever_trials_find_no_plan_is_tried_twice_and_the_search_ends(table, chance) -> None:
    """Times, failures and gradient errors at random."""
    search = search_for(table[0])

    def trial(plan: Plan) -> Measurement | str:
        if chance.random() < 0.4:
            return "out of memory"
        error = None if plan.precision == "fp32" else chance.choice([0.01, 0.5, float("nan")])
        return at(chance.uniform(1e-4, 1e-2), plan, gradient_error=error)

    tried = run(search, trial)
    assert len(set(tried)) == len(tried)
    if search.measured:
        assert search.chosen().plan in [found.plan for found in search.measured]


def test_the_fastest_by_forecast_is_tried_first() -> None:
    """Whatever the order of trials after it."""
    assert search_for({FP32: 3e-4, FIRST: 1e-4}).next_plan() == FIRST


def test_a_plan_far_behind_is_not_tried() -> None:
    """A forecast from measured operations is not three times wrong."""
    search = search_for({FIRST: 1e-4, FP32: 3e-4})
    assert run(search, lambda plan: at(1e-4, plan)) == [FIRST]


def test_a_short_run_is_not_worth_a_second_trial_and_a_long_one_is() -> None:
    """The same forecasts: what a trial may save has to be more than it costs."""
    paces = {FIRST: 1.00e-4, SMALL: 1.02e-4}
    assert len(run(search_for(paces, long=False), lambda plan: at(1e-4, plan))) == 1
    assert len(run(search_for(paces, long=True), lambda plan: at(1e-4, plan))) == 2


def test_a_precision_that_bends_the_gradient_is_not_used() -> None:
    """However fast it is; and it is not tried again with other settings."""
    search = search_for({FIRST: 1e-4, SMALL: 1.1e-4, FP32: 3e-4})
    bent = 2 * LARGEST_GRADIENT_ERROR
    tried = run(search, lambda p: at(1e-4, p, gradient_error=bent if p.precision == "bf16" else None))
    assert [plan.precision for plan in tried] == ["bf16", "fp32"]
    assert search.chosen().plan == FP32
    (ruled_out,) = search.losers()
    assert ruled_out.reason == f"its gradient is {bent:.1%} from fp32's, more than {LARGEST_GRADIENT_ERROR:.0%}"


@pytest.mark.parametrize(("error", "is_used"), [(None, True), (LARGEST_GRADIENT_ERROR, True), (float("nan"), False)])
def test_the_threshold_itself_is_allowed_and_what_is_no_number_is_not(error: float | None, is_used: bool) -> None:
    """NaN is no small error, for all that it is not greater than the threshold."""
    search = search_for({FIRST: 1e-4, FP32: 3e-4})
    run(search, lambda plan: at(1e-4, plan, gradient_error=error if plan.precision == "bf16" else None))
    assert (search.chosen().plan == FIRST) is is_used
    assert search.chosen().forecast.gradient_error == (error if is_used else None)


def test_after_a_plan_that_ran_out_of_memory_only_those_that_need_less_are_tried() -> None:
    """By their forecast of memory."""
    lean = dataclasses.replace(FIRST, checkpointed_blocks=4)
    plans = [*candidates({FIRST: 1e-4, FP32: 2e-4}, peak_bytes=2**31), *candidates({lean: 3e-4}, peak_bytes=2**29)]
    search = PlanSearch(plans, profile(), CPU, extents)
    search.reject(FIRST, "out of memory", for_memory=True)
    assert search.next_plan() == lean


def test_a_plan_that_took_more_memory_than_may_be_used_is_ruled_out_with_those_that_need_as_much() -> None:
    """Its trial went through, on a machine that has more than is allowed; a checkpoint's copy counts."""
    lean = dataclasses.replace(FIRST, checkpointed_blocks=4)
    plans = [*candidates({FIRST: 1e-4, FP32: 2e-4}, peak_bytes=2**31), *candidates({lean: 3e-4}, peak_bytes=2**29)]
    search = PlanSearch(plans, profile(), CPU, extents)
    search.record(at(1e-4, FIRST, peak_bytes=CPU.memory_bytes - 2**20, state_bytes=2**21))
    assert search._untried() == [lean]
    search.record(at(3e-4, lean, peak_bytes=2**29))
    assert search.chosen().plan == lean
    (ruled_out,) = search.losers()
    assert ruled_out.reason == "it took 8.0 GiB of memory when it was tried, and may take 8.0 GiB"


def test_what_an_earlier_trial_left_in_memory_rules_nothing_out() -> None:
    """A plan that kept to its memory the first time does so the second time, whatever is in the heap by then."""
    search = search_for({FIRST: 1e-4, SMALL: 1.02e-4})
    search.record(at(1.3e-4, FIRST))
    search.record(at(1.05e-4, SMALL))
    search.record(at(1.0e-4, FIRST, peak_bytes=2 * CPU.memory_bytes))
    assert search.chosen().plan == FIRST


def test_a_guess_that_ran_out_of_memory_says_nothing_of_plans_that_were_traced() -> None:
    """Guesses of memory are in no proportion to forecasts: of a small model they are far below the process itself."""
    guessed = Candidate(device="cpu", plan=SMALL, forecast=forecast_of(SMALL, peak_bytes=2**20), memory_bytes=2**33)
    unknown = dataclasses.replace(guessed.forecast.peak_bytes, basis="unknown")
    guessed = dataclasses.replace(guessed, forecast=dataclasses.replace(guessed.forecast, peak_bytes=unknown))
    search = PlanSearch([*candidates({FIRST: 1e-4}), guessed], profile(), CPU, extents)
    search.reject(SMALL, "out of memory", for_memory=True)
    assert search._untried() == [FIRST]


def test_when_nothing_works_every_reason_is_told() -> None:
    """Plan by plan."""
    search = search_for({FIRST: 1e-4, FP32: 2e-4})
    run(search, lambda plan: f"needs {plan.precision}")
    with pytest.raises(DoesNotFit, match=r"no plan works on a CPU: bf16 · micro-batch 512 .*: needs bf16; fp32"):
        search.chosen()


def test_a_trial_whose_plan_is_ruled_out_was_spent_as_well() -> None:
    """Its time counts, though it is not among the plans to choose from."""
    search = search_for({FIRST: 1e-4, FP32: 2e-4})
    search.record(at(1e-4, FIRST, gradient_error=0.9))
    assert (search.spent_s, search.measured) == (1.0, [])


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """The plan tried first, the likeliest, stays unless another is faster by more than the noise of a trial."""
    search = search_for({FIRST: 1.00e-4, SMALL: 1.01e-4})
    run(search, lambda plan: at(1e-4 if plan == FIRST else 1e-4 * (1 - LEAST_GAIN / 2), plan))
    assert len(search.measured) == 2
    assert search.chosen().plan == FIRST
    assert all("within the noise of a trial" in rejection.reason for rejection in search.losers())


def test_losers_are_told_by_how_much() -> None:
    """In the time of an update, the nearest first."""
    search = search_for({FIRST: 1e-4, FP32: 1.1e-4, SMALL: 1.05e-4}, basis="roofline")
    times = {FIRST: 0.1, FP32: 0.3, SMALL: 0.2}
    for plan, seconds in times.items():
        search.record(measurement(plan, seconds))
    assert [r.reason for r in search.losers()] == [
        "200 ms an update, 2.00x the time",
        "300 ms an update, 3.00x the time",
    ]


def test_slow_outliers_of_a_trial_do_not_decide() -> None:
    """Noise only ever adds time: plans are compared by the faster half of their updates."""
    search = search_for({FIRST: 1e-4, FP32: 1.1e-4})
    search.record(measurement(FIRST, (0.1, 0.1, 0.1, 0.9, 0.9, 0.9)))
    search.record(measurement(FP32, (0.2,) * 6))
    assert search.chosen().plan == FIRST


COMPILED = dataclasses.replace(FIRST, compile=True)


def search_with_compiled(*more: Candidate, run_s: float, gain: float = 0.8) -> PlanSearch:
    """One plan, and the same compiled, which is forecast to take `gain` of the time; a run of about `run_s` seconds.

    Compiling is forecast to take 20 s.
    """
    samples = round(run_s / 1e-4)
    compiled = Candidate(
        device="cpu",
        plan=COMPILED,
        forecast=forecast_of(COMPILED, pace_s=gain * 1e-4, compile_s=20.0),
        memory_bytes=2**33,
    )
    return PlanSearch(
        [compiled, *candidates({FIRST: 1e-4}), *more],
        profile(),
        CPU,
        lambda _rate: Extents(total_samples=samples, total_updates=samples // 512, evaluations=0),
    )


def test_what_others_are_compared_with_is_not_compiled() -> None:
    """Though the compiled plan is forecast to be the fastest."""
    assert search_with_compiled(run_s=10_000).next_plan() == FIRST


@pytest.mark.parametrize(("run_s", "is_tried"), [(100.0, False), (390.0, False), (500.0, True), (10_000.0, True)])
def test_compiling_is_tried_if_it_takes_no_more_than_planning_may(run_s: float, is_tried: bool) -> None:
    """A twentieth of the run, with what was spent before: 20 s and a trial of one."""
    search = search_with_compiled(run_s=run_s)
    tried = run(search, lambda plan: at(1e-4 * (0.8 if plan.compile else 1.0), plan, compile_s=20.0 * plan.compile))
    assert (COMPILED in tried) is is_tried
    assert search.chosen().plan.compile is is_tried


def test_compiling_that_is_expected_to_save_less_than_it_costs_is_not_tried() -> None:
    """However long the run, if it is forecast to be much slower."""
    search = search_with_compiled(run_s=10_000, gain=2.0)
    assert run(search, lambda plan: at(1e-4, plan)) == [FIRST]


def test_the_run_does_not_pay_for_compiling_again() -> None:
    """What the trial compiled is there; the forecast says what it took, and the total leaves it out."""
    search = search_with_compiled(run_s=10_000)
    run(search, lambda plan: at(1e-4 * (0.8 if plan.compile else 1.0), plan, compile_s=30.0 * plan.compile))
    found = search.chosen().forecast
    assert found.compile_s is not None
    assert found.compile_s.value == 30.0
    assert found.total_s.value == pytest.approx(8000, rel=0.01)


def test_a_plan_that_ran_uncompiled_is_told_and_no_other_is_compiled() -> None:
    """With the line; the plan as it is stays."""
    other = dataclasses.replace(SMALL, compile=True)
    search = search_with_compiled(*candidates({other: 0.9e-4}, compile_s=20.0), run_s=10_000)
    why = "the model cannot be compiled and runs as it is: a branch, at model.py:7"
    tried = run(search, lambda plan: at(1e-4, plan, not_compiled=why if plan.compile else None))
    assert tried == [FIRST, COMPILED]
    assert search.chosen().plan == FIRST
    assert [(r.plan, r.reason) for r in search.losers()] == [(COMPILED, why)]


def test_a_compiled_plan_that_was_asked_for_is_taken_even_if_it_runs_uncompiled() -> None:
    """There is no other."""
    search = PlanSearch(candidates({COMPILED: 1e-4}), profile(), CPU, extents)
    run(search, lambda plan: at(1e-4, plan, not_compiled="a branch, at model.py:7"))
    assert search.chosen().plan == COMPILED


def test_a_bent_gradient_of_compiled_code_says_nothing_of_the_precision() -> None:
    """The precision is ruled out only where it is by itself."""
    small = dataclasses.replace(SMALL, compile=True)
    search = search_with_compiled(*candidates({SMALL: 0.9e-4, small: 0.8e-4}), run_s=10_000)
    search.record(at(1e-4, FIRST, gradient_error=0.01))
    search.record(at(0.8e-4, COMPILED, gradient_error=0.9))
    assert search._untried() == [SMALL]


def test_a_burst_of_other_work_in_the_first_trial_decides_nothing() -> None:
    """The first plan and the one that seemed faster are tried again, and of two trials the faster counts."""
    search = search_for({FIRST: 1e-4, SMALL: 1.02e-4})
    search.record(at(1.3e-4, FIRST))
    search.record(at(1.05e-4, SMALL))
    assert search.in_doubt() == (FIRST, SMALL)
    search.record(at(1.0e-4, FIRST))
    search.record(at(1.06e-4, SMALL))
    assert search.chosen().plan == FIRST
    assert [m.plan for m in search.measured] == [FIRST, SMALL]


def test_where_the_first_plan_is_the_fastest_nothing_is_tried_again() -> None:
    """What was forecast and what was found agree, by more than two trials of one plan differ."""
    search = search_for({FIRST: 1e-4, SMALL: 1.02e-4})
    assert search.in_doubt() == ()
    search.record(at(1.0e-4, FIRST))
    search.record(at(1.07e-4, SMALL))
    assert search.in_doubt() == ()


def test_plans_that_noise_does_not_tell_from_the_fastest_are_tried_again() -> None:
    """The fastest three, the first plan among them."""
    others = [dataclasses.replace(FIRST, threads=threads) for threads in (3, 2, 1)]
    search = search_for(dict.fromkeys((FIRST, *others), 1e-4))
    for plan, pace in zip((FIRST, *others), (1.0e-4, 1.05e-4, 1.02e-4, 1.03e-4), strict=True):
        search.record(at(pace, plan))
    assert search.in_doubt() == (FIRST, others[1], others[2])


def test_gradients_are_compared_once_for_each_arithmetic() -> None:
    """Precision and compilation decide how far a gradient is from fp32's; the rest of a plan does not."""
    search = search_for({FIRST: 1e-4, SMALL: 1.02e-4, FP32: 2e-4})
    assert search.known_gradient_error(FIRST) is None
    search.record(at(1.0e-4, FIRST, gradient_error=0.05))
    assert search.known_gradient_error(SMALL) == 0.05
    assert search.known_gradient_error(dataclasses.replace(SMALL, compile=True)) is None


def test_no_other_captured_plan_is_tried_after_one_that_cannot_be_captured() -> None:
    """What stands in the way is the model's, not the plan's."""
    captured = [dataclasses.replace(plan, captured=True) for plan in (FIRST, SMALL)]
    search = search_for({captured[0]: 0.8e-4, captured[1]: 0.9e-4, FIRST: 1e-4})
    assert search.next_plan() == captured[0]
    search.reject(captured[0], "a branch")
    assert search.next_plan() == FIRST


def test_a_captured_plan_that_does_not_fit_says_nothing_of_capturing() -> None:
    """Another one that needs less is still tried."""
    captured = [dataclasses.replace(plan, captured=True) for plan in (FIRST, SMALL)]
    plans = [*candidates({captured[0]: 0.8e-4}, peak_bytes=2**31), *candidates({captured[1]: 0.9e-4}, peak_bytes=2**30)]
    search = PlanSearch(plans, profile(), CPU, extents)
    search.reject(captured[0], "out of memory", for_memory=True)
    assert search.next_plan() == captured[1]
