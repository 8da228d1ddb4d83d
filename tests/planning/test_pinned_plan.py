"""Plans pinned by words: what they are, and which are refused with what would be legal."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.devices import attached_devices, planned_devices
from stoker.errors import BadJob
from stoker.planning.pinned_plan import plan_of, problem_with, words_of
from tests.planning.trials import profile

(PLACE,) = planned_devices("8xh100", ())
PROFILE = profile(num_train=1000, has_convolutions=False, batch=64, num_blocks=12)


def test_words_are_fields_of_a_plan_and_of_its_layout() -> None:
    """With or without `layout.`, between spaces or commas, in one text or several; the rest is what GPUs have."""
    fields = words_of(("micro_batch=4,layout.shards=8", "compile=true reshard=false"))
    plan = plan_of(fields, PLACE, PROFILE)
    assert (plan.micro_batch, plan.compile, plan.precision) == (4, True, "bf16")
    assert (plan.layout.shards, plan.layout.reshard, plan.layout.world_size) == (8, False, 8)
    assert (plan.device, plan.loader, plan.optimizer_implementation) == ("cuda:0", "device", "fused")


def test_without_a_micro_batch_each_process_takes_its_part_at_once() -> None:
    """64 samples over 8 shards."""
    assert plan_of({"shards": 8}, PLACE, PROFILE).micro_batch == 8
    assert plan_of({}, PLACE, PROFILE).micro_batch == 64


def test_weights_in_fp64_stay_so() -> None:
    """Also on a device that is fast in bf16, which would be refused."""
    facts = dataclasses.replace(PROFILE, is_double=True)
    plan = plan_of({}, PLACE, facts)
    assert plan.precision == "fp64"
    assert problem_with(plan, facts, PLACE.device, facts) is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("micro_bath=4", "a plan has no 'micro_bath'"),
        ("micro_batch", "wanted KEY=VALUE"),
        ("micro_batch=four", "micro_batch is a number"),
        ("micro_batch=2.5", "micro_batch is a whole number"),
        ("micro_batch=0", "micro_batch must be at least 1"),
        ("precision=fp4", "precision is one of fp32, tf32, bf16, fp16, fp8, fp64"),
        ("precision=fp8 tensor=8", "fp8 is for one process, replicas and shards so far, and the layout is"),
        ("compile=maybe", "compile is true or false"),
        ("shards=0", "shards must be from 1"),
        ("loader=workers", "does not go with num_workers=0"),
        ("optimizer_states=4bit", "optimizer_states is one of full, bf16, 8bit, not '4bit'"),
    ],
)
def test_words_that_cannot_be_say_what_could(words: str, why: str) -> None:
    """The key, and the values it takes."""
    with pytest.raises(BadJob, match=why):
        plan_of(words_of((words,)), PLACE, PROFILE)


@pytest.mark.parametrize(
    ("fields", "changed", "why"),
    [
        ({"micro_batch": 65}, {}, "1 to 64 samples, not 65. Legal are 64, 32, 16, 8, 4, 2, 1"),
        ({"checkpointed_blocks": 13}, {}, "checkpointed_blocks is 13; the model has 12 equal blocks"),
        ({"precision": "fp32"}, {"is_double": True}, "precision is fp32, and the model's weights are in fp64"),
    ],
)
def test_an_illegal_plan_is_named_with_what_would_be_legal(fields, changed, why: str) -> None:
    """The number, and the job's."""
    facts = dataclasses.replace(PROFILE, **changed)
    plan = plan_of(fields, PLACE, facts)
    assert why in (problem_with(plan, facts, PLACE.device, facts) or "")


def test_a_precision_that_a_device_lacks_is_named_with_those_it_has() -> None:
    """A V100 multiplies neither bf16 nor tf32."""
    (old,) = planned_devices("v100-16", ())
    plan = plan_of({"precision": "bf16"}, old, PROFILE)
    assert problem_with(plan, PROFILE, old.device, PROFILE) == "v100-16 has no bf16; precision may be fp32"
    assert problem_with(plan_of({}, old, PROFILE), PROFILE, old.device, PROFILE) is None


def test_fp8_is_for_devices_that_have_it_and_jobs_that_allow_it() -> None:
    """An A100 and a CPU have none; an H100 has, if the job allows it."""
    allowed = dataclasses.replace(PROFILE, numerics=("fp8",))
    (old,), (cpu,) = planned_devices("a100-80", ()), planned_devices("cpu", attached_devices())
    newer = "compute capability 8.9 and newer"
    for place, why in (
        (
            old,
            f"a100-80 has no fp8 ({newer} have it: L4, RTX 40, H100); precision may be fp32, tf32, bf16",
        ),
        (cpu, f"a CPU has no fp8 (GPUs of {newer} have it); precision may be fp32, bf16"),
    ):
        assert problem_with(plan_of({"precision": "fp8"}, place, allowed), allowed, place.device, allowed) == why
    plan = plan_of({"precision": "fp8", "shards": 8}, PLACE, allowed)
    assert problem_with(plan, allowed, PLACE.device, allowed) is None
    why = 'precision fp8 is for jobs that allow it: Job(numerics=["fp8"])'
    assert problem_with(plan, PROFILE, PLACE.device, PROFILE) == why


def test_states_of_fewer_bits_are_for_jobs_that_allow_them() -> None:
    """With the implementation that they have, and what allows them."""
    plan = plan_of({"optimizer_states": "8bit"}, PLACE, PROFILE)
    assert plan.optimizer_implementation == "default"
    assert problem_with(plan, PROFILE, PLACE.device, PROFILE) == (
        '8bit optimizer_states are for jobs that allow them: Job(numerics=["8bit-states"])'
    )
    allowed = dataclasses.replace(PROFILE, numerics=("8bit-states",))
    assert problem_with(plan, allowed, PLACE.device, allowed) is None
