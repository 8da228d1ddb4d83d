from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning.plan_ranking import has_plenty, last_resorts, untraced_candidates
from stoker.records import Candidate, Estimate, Plan
from tests.planning.trials import CPU, GPU, candidate, profile


def paces(**facts: object) -> list[float]:
    """Guessed seconds for each sample, in the order of the candidates."""
    return [1 / one.forecast.samples_per_s.value for one in untraced_candidates(profile(**facts), CPU, name="cpu")]


def test_every_legal_plan_is_there_once() -> None:
    """Each size with each way to execute it, and those that save memory."""
    plans = [one.plan for one in untraced_candidates(profile(batch=8, num_blocks=2), CPU, name="cpu")]
    assert len(set(plans)) == len(plans)
    assert {plan.micro_batch for plan in plans} == {8, 4, 2, 1}
    assert {plan.checkpointed_blocks for plan in plans} == {0, 1, 2}
    assert {plan.precision for plan in plans} == {"fp32", "bf16"}
    assert {plan.threads for plan in plans} == {4, 2, 1}


def test_what_is_fast_as_a_rule_is_guessed_to_be_the_fastest() -> None:
    """Reduced precision, the whole batch, all cores, channels last, nothing computed twice."""
    found = untraced_candidates(profile(num_blocks=4), CPU, name="cpu")
    best = max(found, key=lambda one: one.forecast.samples_per_s.value).plan
    assert (best.precision, best.micro_batch, best.threads) == ("bf16", 512, 4)
    assert (best.memory_format, best.checkpointed_blocks, best.malloc) == ("channels_last", 0, "retained")


def test_nothing_that_is_guessed_is_taken_for_known() -> None:
    """The basis is `unknown`, and the interval reaches from nothing to ten times the value."""
    for one in untraced_candidates(profile(), GPU, name="h100")[:20]:
        assert one.device == "h100"
        for estimate in (one.forecast.step_s, one.forecast.samples_per_s, one.forecast.peak_bytes):
            assert estimate.basis == "unknown"
            assert (estimate.low, estimate.high) == (0.0, 10 * estimate.value)


def test_smaller_micro_batches_and_saved_blocks_take_less_memory() -> None:
    """So that a search which runs out of memory knows where to look next."""
    found = {
        one.plan: one.forecast.peak_bytes.value for one in untraced_candidates(profile(num_blocks=4), CPU, name="cpu")
    }
    for plan, needed in found.items():
        half = dataclasses.replace(plan, micro_batch=max(1, plan.micro_batch // 2))
        assert found[half] <= needed
        if not plan.checkpointed_blocks:
            assert found[dataclasses.replace(plan, checkpointed_blocks=4)] < needed


def forecast_as(plan: Plan, *, pace_s: float, peak_bytes: float = 2.0**30) -> Candidate:
    """A plan that was traced: its time for each sample [s], and its peak [bytes]."""
    known = candidate("cpu", total_s=10.0, cost=None, is_here=True)
    forecast = dataclasses.replace(
        known.forecast,
        samples_per_s=Estimate(value=1 / pace_s, low=1 / pace_s, high=1 / pace_s, unit="samples/s", basis="calibrated"),
        peak_bytes=Estimate(value=peak_bytes, low=peak_bytes, high=peak_bytes, unit="bytes", basis="calibrated"),
    )
    return dataclasses.replace(known, plan=plan, forecast=forecast)


BF16 = Plan(
    device="cpu",
    micro_batch=512,
    precision="bf16",
    threads=4,
    malloc="retained",
    optimizer_implementation="fused",
    memory_format="channels_last",
    device_mtbf_h=24.0,
)


def test_a_guess_is_that_of_the_plan_most_like_it() -> None:
    """With half the micro-batch it is the forecast of that one which counts; none is there twice."""
    half = dataclasses.replace(BF16, micro_batch=256)
    after = [forecast_as(BF16, pace_s=1.0), forecast_as(half, pace_s=7.0)]
    rest = untraced_candidates(profile(), CPU, name="cpu", after=after)
    found = {one.plan: 1 / one.forecast.samples_per_s.value for one in rest}
    assert len(found) == len(rest)
    assert not {BF16, half} & found.keys()
    assert found[dataclasses.replace(BF16, precision="fp32")] == pytest.approx(1.6)
    assert found[dataclasses.replace(half, precision="fp32")] == pytest.approx(7.0 * 1.6)
    assert found[dataclasses.replace(BF16, optimizer_implementation="default")] > found.get(BF16, 1.0)


@pytest.mark.parametrize(
    ("traced", "others"),
    [
        ((BF16,), {("retained", 512)}),
        (
            (dataclasses.replace(BF16, malloc="mapped", micro_batch=256),),
            {(malloc, size) for malloc in ("retained", "default", "mapped") for size in (512, 256)},
        ),
    ],
)
def test_what_saves_more_memory_than_any_forecast_is_a_last_resort(
    traced: tuple[Plan, ...], others: set[tuple[str, int]]
) -> None:
    """What was forecast saves just enough to fit, and saving more costs time; nothing is left out for good."""
    about = profile(num_blocks=4)
    plans = [
        one.plan
        for one in untraced_candidates(about, CPU, name="cpu", after=[forecast_as(p, pace_s=1.0) for p in traced])
    ]
    spare = last_resorts(plans, traced, about)
    assert {(plan.malloc, plan.micro_batch) for plan in plans if plan not in spare} == others
    assert {plan.checkpointed_blocks for plan in plans if plan not in spare} == {0}
    assert {plan.checkpointed_blocks for plan in spare} >= {2, 4}
    assert last_resorts(plans, (), about) == frozenset()
    captured = (dataclasses.replace(traced[0], captured=True), *traced[1:])  # goes with no setting that saves memory
    assert last_resorts(plans, captured, about) == spare


@pytest.mark.parametrize(
    ("traced", "peak_share", "is_plenty"),
    [
        (BF16, 0.3, True),
        (BF16, 0.4, False),
        (dataclasses.replace(BF16, micro_batch=256), 0.1, False),
        (dataclasses.replace(BF16, malloc="mapped"), 0.1, False),
    ],
)
def test_memory_is_plenty_where_a_plan_like_it_takes_a_third(traced: Plan, peak_share: float, is_plenty: bool) -> None:
    """fp32 takes twice as much as bf16 at most; a smaller micro-batch, or one that saves more, says nothing."""
    guess = dataclasses.replace(BF16, precision="fp32")
    known = forecast_as(traced, pace_s=1.0, peak_bytes=peak_share * CPU.memory_bytes)
    candidates = [known, *untraced_candidates(profile(), CPU, name="cpu", after=[known])]
    assert has_plenty(guess, candidates, CPU) == is_plenty


def test_a_plan_that_was_given_is_the_only_one() -> None:
    """Whatever else would be legal."""
    plan = Plan(device="cpu", micro_batch=37)
    assert [one.plan for one in untraced_candidates(profile(), CPU, name="cpu", plans=(plan,))] == [plan]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(1, 4096), st.integers(0, 12))
def test_no_guess_is_faster_than_what_is_fast_as_a_rule(batch: int, blocks: int) -> None:
    """Factors only slow down: no pace is below the one that all are measured against."""
    assert min(paces(batch=batch, num_blocks=blocks)) >= 1.0 - 1e-9
