"""Forecasts that take account of what ran out of memory."""

from __future__ import annotations

import dataclasses

from stoker.planning.plan_history import OomAwareForecasts, not_ruled_out, relevant_failures
from stoker.planning.plan_ranking import rank
from stoker.records import Plan
from stoker.records.plan import OutOfMemory
from tests.planning.test_ranking import Known
from tests.planning.trials import GPU, profile

FAILED = Plan(device="cuda:1", micro_batch=256, precision="bf16")


def failure(plan: Plan = FAILED, reachable_bytes: int | None = None) -> OutOfMemory:
    """Memory that ran out under that plan."""
    return OutOfMemory(
        device_model=GPU.model,
        torch_version="2",
        job="j",
        plan=plan,
        run="r",
        at="2025-03-01",
        reachable_bytes=reachable_bytes,
    )


def test_what_ran_out_is_not_proposed_again_nor_what_needs_as_much() -> None:
    """By forecast bytes and on any account by the plan itself; what needs less is."""
    facts = profile()
    known = Known(GPU, facts)
    heeding = OomAwareForecasts(known, [failure()], GPU.torch_name)
    plans = [candidate.plan for candidate in rank(facts, GPU, heeding, name="it")]
    assert plans
    failed = dataclasses.replace(FAILED, device=GPU.torch_name)
    assert all(known.needed_bytes(plan) < known.needed_bytes(failed) for plan in plans)
    assert not any(failure().rules_out(plan) for plan in plans)
    assert max(plan.micro_batch for plan in plans) < 256
    small = dataclasses.replace(failed, micro_batch=16)
    assert heeding.probability_it_fits(small) == known.probability_it_fits(small) == 1.0
    assert heeding.forecast(failed).probability_it_fits == 0.0


def test_a_plan_is_ruled_out_by_one_that_saves_more() -> None:
    """Of as many samples or more, with no more blocks checkpointed, in the same or a wider precision."""
    one = failure(dataclasses.replace(FAILED, checkpointed_blocks=4))
    cases = {
        (256, "bf16", 4): True,
        (512, "bf16", 0): True,
        (256, "fp32", 4): True,
        (128, "bf16", 0): False,
        (256, "bf16", 8): False,
    }
    for (size, precision, blocks), expected in cases.items():
        plan = Plan(device="cuda:0", micro_batch=size, precision=precision, checkpointed_blocks=blocks)
        assert one.rules_out(plan) == expected, plan
    wide = failure(dataclasses.replace(FAILED, precision="fp32"))
    assert not wide.rules_out(FAILED)


def test_a_plan_that_saves_memory_in_another_way_is_not_ruled_out() -> None:
    """Blocks in full, the loss in more chunks, the host's memory given back sooner; the other way round it is."""
    thrifty = dataclasses.replace(FAILED, checkpointed_blocks=4, loss_chunks=8, malloc="default")
    for wasteful in (
        dataclasses.replace(thrifty, loss_chunks=1),
        dataclasses.replace(thrifty, malloc="retained"),
        dataclasses.replace(thrifty, checkpointing="selective"),
    ):
        assert failure(thrifty).rules_out(wasteful), wasteful
        assert not failure(wasteful).rules_out(thrifty), wasteful
    assert not failure(thrifty).rules_out(dataclasses.replace(thrifty, malloc="mapped"))


def test_candidates_without_a_forecast_are_left_out_by_the_plan_alone() -> None:
    """There are no bytes to compare."""
    candidates = rank(profile(), GPU, Known(GPU, profile()), name="it")
    left = not_ruled_out(candidates, [failure()])
    assert {c.plan.micro_batch >= 256 and c.plan.precision == "bf16" for c in candidates} == {True, False}
    assert {c.plan.micro_batch >= 256 for c in left} == {False}


def test_what_ran_out_beside_others_says_nothing_of_the_device() -> None:
    """A process that had less than half of it; where it is unknown, it counts."""
    failures = [failure(reachable_bytes=given) for given in (None, 4, 5, 10)]
    assert [one.reachable_bytes for one in relevant_failures(failures, 10)] == [None, 5, 10]
