from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning import unforecast
from stoker.records import Plan
from tests.planning.trials import CPU, GPU, candidate, profile


def paces(**facts: object) -> list[float]:
    """Guessed seconds for each sample, in the order of the candidates."""
    return [1 / one.forecast.samples_per_s.value for one in unforecast(profile(**facts), CPU, name="cpu")]


def test_every_legal_plan_is_there_once() -> None:
    """Each size with each way to execute it, and those that save memory."""
    plans = [one.plan for one in unforecast(profile(batch=8, num_blocks=2), CPU, name="cpu")]
    assert len(set(plans)) == len(plans)
    assert {plan.micro_batch for plan in plans} == {8, 4, 2, 1}
    assert {plan.checkpointed_blocks for plan in plans} == {0, 1, 2}
    assert {plan.precision for plan in plans} == {"fp32", "bf16"}
    assert {plan.threads for plan in plans} == {4, 2, 1}


def test_what_is_fast_as_a_rule_is_guessed_to_be_the_fastest() -> None:
    """Reduced precision, the whole batch, all cores, channels last, nothing computed twice."""
    found = unforecast(profile(num_blocks=4), CPU, name="cpu")
    best = max(found, key=lambda one: one.forecast.samples_per_s.value).plan
    assert (best.precision, best.micro_batch, best.threads) == ("bf16", 512, 4)
    assert (best.memory_format, best.checkpointed_blocks, best.malloc) == ("channels_last", 0, "retained")


def test_nothing_that_is_guessed_is_taken_for_known() -> None:
    """The basis is `unknown`, and the interval reaches from nothing to ten times the value."""
    for one in unforecast(profile(), GPU, name="h100")[:20]:
        assert one.device == "h100"
        for estimate in (one.forecast.step_s, one.forecast.samples_per_s, one.forecast.peak_bytes):
            assert estimate.basis == "unknown"
            assert (estimate.low, estimate.high) == (0.0, 10 * estimate.value)


def test_smaller_micro_batches_and_saved_blocks_take_less_memory() -> None:
    """So that a search which runs out of memory knows where to look next."""
    found = {one.plan: one.forecast.peak_bytes.value for one in unforecast(profile(num_blocks=4), CPU, name="cpu")}
    for plan, needed in found.items():
        half = dataclasses.replace(plan, micro_batch=max(1, plan.micro_batch // 2))
        assert found[half] <= needed
        if not plan.checkpointed_blocks:
            assert found[dataclasses.replace(plan, checkpointed_blocks=4)] < needed


def test_plans_that_were_forecast_come_before_those_that_were_not() -> None:
    """The rest is guessed to be slower than any of them, and none is there twice."""
    known = candidate("cpu", total_s=10.0, cost=None, is_here=True)
    first = unforecast(profile(), CPU, name="cpu")[3].plan
    after = [dataclasses.replace(known, plan=first)]
    rest = unforecast(profile(), CPU, name="cpu", after=after)
    slowest = 1 / known.forecast.samples_per_s.value
    assert first not in {one.plan for one in rest}
    assert len(rest) == len(unforecast(profile(), CPU, name="cpu")) - 1
    assert all(1 / one.forecast.samples_per_s.value >= slowest for one in rest)


def test_a_plan_that_was_given_is_the_only_one() -> None:
    """Whatever else would be legal."""
    plan = Plan(device="cpu", micro_batch=37)
    assert [one.plan for one in unforecast(profile(), CPU, name="cpu", plans=(plan,))] == [plan]


@settings(max_examples=30)
@given(st.integers(1, 4096), st.integers(0, 12))
def test_no_guess_is_faster_than_what_is_fast_as_a_rule(batch: int, blocks: int) -> None:
    """Factors only slow down: no pace is below the one that all are measured against."""
    assert min(paces(batch=batch, num_blocks=blocks)) >= 1.0 - 1e-9
