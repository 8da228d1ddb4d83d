from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import DoesNotFit
from stoker.planning import Search
from stoker.planning.search import LEAST_GAIN
from stoker.records import LARGEST_GRADIENT_ERROR, Coupling, Measurement, Plan
from tests.planning.trials import CPU, GPU, NORMS, OLD_CPU, SEPARABLE, extents, measurement, profile, run

FACTORS = st.floats(0.25, 4.0)


def search_for(device=CPU, **facts) -> Search:
    """A search over plans of the usual job on `device`."""
    return Search(profile(**facts), device, extents)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict[object, float]]:
    """A factor of the time for every value of every setting; micro-batches have one best size, worse away from it."""
    best, slope = draw(st.sampled_from(range(10))), draw(st.floats(1.1, 2.0))
    return {
        "precision": {value: draw(FACTORS) for value in ("fp32", "bf16")},
        "memory_format": {value: draw(FACTORS) for value in ("contiguous", "channels_last")},
        "threads": {value: draw(FACTORS) for value in (1, 2, 4)},
        "optimizer_implementation": {value: draw(FACTORS) for value in ("fused", "default")},
        "micro_batch": {512 // 2**power: slope ** abs(power - best) for power in range(10)},
    }


def time_by(table: dict[str, dict[object, float]], plan: Plan) -> float:
    """Seconds of an update: a tenth, times the factor of every setting."""
    seconds = 0.1
    for name, factors in table.items():
        seconds *= factors[getattr(plan, name)]
    return seconds


@settings(max_examples=60)
@given(tables())
def test_the_best_plan_of_a_separable_table_is_found(table: dict[str, dict[object, float]]) -> None:
    """Where each setting has its own factor, changing one at a time ends at the best, up to the least gain of each."""
    search = search_for()
    run(search, lambda plan: measurement(plan, time_by(table, plan)))
    best = min(
        time_by(table, Plan(device="cpu", **dict(zip(table, values, strict=True))))
        for values in itertools.product(*table.values())
    )
    assert time_by(table, search.decision().chosen.plan) <= best / (1 - LEAST_GAIN) ** len(table) * (1 + 1e-9)


@st.composite
def jobs(draw: st.DrawFn) -> dict:
    """Facts of a job coupled in any way."""
    batch = draw(st.integers(1, 600))
    kind = draw(st.sampled_from(["separable", "batch_norm", "whole_group"]))
    group = None if kind == "separable" else draw(st.integers(1, batch))
    coupling = Coupling(kind=kind, group=group, causes=("something",), evidence="probed")
    flags = {name: draw(st.booleans()) for name in ("is_in_memory", "has_convolutions")}
    return {"batch": batch, "coupling": coupling, **flags}


@settings(max_examples=150)
@given(jobs(), st.sampled_from([CPU, OLD_CPU, GPU]), st.randoms(use_true_random=False))
def test_whatever_trials_find_only_legal_plans_are_proposed_and_none_twice(facts: dict, device, chance) -> None:
    """Times, failures and gradient errors at random: no group is ever cut, and the search ends."""
    search = search_for(device, **facts)

    def trial(plan: Plan) -> Measurement | str:
        if chance.random() < 0.4:
            return "out of memory"
        error = None if plan.precision == "fp32" else chance.choice([0.01, 0.5, float("nan")])
        return measurement(plan, chance.uniform(0.01, 1.0), gradient_error=error)

    tried = run(search, trial)
    assert len(set(tried)) == len(tried)
    batch, coupling = facts["batch"], facts["coupling"]
    assert [coupling.problem_with(plan.micro_batch, batch) for plan in tried] == [None] * len(tried)
    if search.measured:
        chosen = search.decision().chosen
        assert chosen.plan in [found.plan for found in search.measured]


def test_a_precision_that_bends_the_gradient_is_not_used() -> None:
    """However fast it is; and it is not tried again beside other settings."""
    search = search_for()

    def trial(plan: Plan) -> Measurement:
        is_reduced = plan.precision == "bf16"
        return measurement(plan, (0.1 if is_reduced else 0.3) * plan.micro_batch / 512,
                           gradient_error=2 * LARGEST_GRADIENT_ERROR if is_reduced else None)  # fmt: skip

    tried = run(search, trial)
    assert [plan.precision for plan in tried].count("bf16") == 1
    decision = search.decision()
    assert decision.chosen.plan.precision == "fp32"
    (ruled_out,) = [rejection for rejection in decision.rejected if rejection.plan.precision == "bf16"]
    bend, threshold = f"{2 * LARGEST_GRADIENT_ERROR:.1%}", f"{LARGEST_GRADIENT_ERROR:.0%}"
    assert ruled_out.reason == f"its gradient is {bend} from fp32's, more than {threshold}"


@pytest.mark.parametrize("error", [None, 0.0, LARGEST_GRADIENT_ERROR])
def test_a_precision_within_the_threshold_may_be_used(error: float | None) -> None:
    """The threshold itself is allowed."""
    search = search_for()
    run(search, lambda plan: measurement(plan, 0.1 if plan.precision == "bf16" else 0.3, gradient_error=error))
    assert search.decision().chosen.plan.precision == "bf16"
    assert search.decision().chosen.forecast.gradient_error == error


def test_a_gradient_that_is_not_finite_is_not_used() -> None:
    """It is no small error, for all that it is not greater than the threshold."""
    search = search_for()
    run(search, lambda p: measurement(p, 0.1, gradient_error=None if p.precision == "fp32" else float("nan")))
    assert search.decision().chosen.plan.precision == "fp32"


def test_after_a_plan_that_does_not_fit_smaller_ones_are_tried_first() -> None:
    """The same in fp32, then smaller micro-batches; loaders, threads and formats do not make room."""
    search = search_for(is_in_memory=False)
    tried = run(search, lambda plan: "out of memory" if plan.micro_batch > 128 else measurement(plan, 0.1))
    sizes = [(plan.micro_batch, plan.precision) for plan in tried[:6]]
    assert sizes == [(512, "bf16"), (512, "fp32"), (256, "fp32"), (256, "bf16"), (128, "bf16"), (128, "fp32")]
    assert search.decision().chosen.plan.micro_batch <= 128


def test_when_nothing_works_every_reason_is_told() -> None:
    """One micro-batch of one group: nothing smaller is legal."""
    search = search_for(coupling=dataclasses.replace(NORMS, kind="whole_group", group=512))
    tried = run(search, lambda plan: f"needs {plan.threads} GiB")
    assert {plan.micro_batch for plan in tried} == {512}
    with pytest.raises(DoesNotFit, match=r"no plan works on a CPU: bf16 · micro-batch 512 .*: needs 4 GiB; fp32"):
        search.decision()


@pytest.mark.parametrize(("took_s", "num_trials"), [(1.0, 3), (0.5, 5), (3.0, 1)])
def test_trials_end_when_the_budget_is_spent(took_s: float, num_trials: int) -> None:
    """Two seconds, or a twentieth of the run where that is more; the trial under way is finished."""
    search = search_for()
    tried = run(search, lambda plan: measurement(plan, 0.01, took_s=took_s, evaluate_s_per_sample=0.0))
    assert len(tried) == num_trials
    assert search.decision().took_s == search.spent_s == took_s * num_trials


def test_a_long_run_is_worth_more_trials() -> None:
    """Five minutes of training allow fifteen seconds of planning."""
    search = search_for()
    tried = run(search, lambda plan: measurement(plan, 0.6, took_s=1.0))
    assert len(tried) > 6


def test_a_trial_whose_plan_is_ruled_out_was_spent_as_well() -> None:
    """Its time counts, though it is not among the plans to choose from."""
    search = search_for()
    search.record(
        measurement(Plan(device="cpu", micro_batch=512, precision="bf16"), 0.1, gradient_error=0.9, took_s=4.0)
    )
    assert (search.spent_s, search.measured) == (4.0, [])


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """The plan tried first, the likeliest, stays unless another is faster by more than the noise of a trial."""
    search = search_for()
    first = search.next_plan()
    run(search, lambda plan: measurement(plan, 0.1 if plan == first else 0.1 * (1 - LEAST_GAIN / 2)))
    decision = search.decision()
    assert decision.chosen.plan == first
    assert all("within the noise of a trial" in rejection.reason for rejection in decision.rejected)


def test_losers_are_told_by_how_much() -> None:
    """In the time of an update, the nearest first."""
    search = search_for(has_convolutions=False, optimizer_implementations=("fused",))
    times = {"fp32": 0.3, "bf16": 0.1}
    run(search, lambda plan: measurement(plan, times[plan.precision] * (512 / plan.micro_batch) * 4 / plan.threads))
    reasons = [rejection.reason for rejection in search.decision().rejected]
    assert reasons[0] == "200 ms an update, 2.00x the time"
    assert "300 ms an update, 3.00x the time" in reasons
    assert search.decision().device == "cpu"


def test_slow_outliers_of_a_trial_do_not_decide() -> None:
    """Noise only ever adds time: plans are compared by the faster half of their updates."""
    search = search_for()
    first = search.next_plan()
    noisy, steady = (0.1, 0.1, 0.1, 0.9, 0.9, 0.9), (0.2,) * 6
    run(search, lambda plan: measurement(plan, noisy if plan == first else steady))
    assert search.decision().chosen.plan == first


def test_separable_jobs_go_down_to_one_sample() -> None:
    """If smaller is always faster, the smallest is reached though two sizes are looked at from each."""
    search = search_for(coupling=SEPARABLE)
    run(search, lambda plan: measurement(plan, 0.1 * plan.micro_batch / 512))
    assert search.decision().chosen.plan.micro_batch == 1
