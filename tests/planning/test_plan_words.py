"""Words of other programs for a plan's settings: what they mean, and which are refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.devices import planned_devices
from stoker.errors import BadJob
from stoker.planning.pinned_plan import plan_of, words_of
from stoker.planning.plan_words import _FIELD_OF
from stoker.records import Plan, Profile
from tests.planning.trials import profile

PROFILE = profile(num_train=1000, has_convolutions=False, num_blocks=12)


def planned(fields: dict[str, Any], count: int = 1, facts: Profile = PROFILE) -> Plan:
    """The plan of these words on so many H100."""
    (place,) = planned_devices(f"{count}xh100" if count > 1 else "h100", ())
    return plan_of(fields, place, facts)


@pytest.mark.parametrize(
    ("fields", "count", "words"),
    [
        ({"fsdp": True}, 8, "8 shards"),
        ({"zero_stage": 3}, 8, "8 shards"),
        ({"zero_stage": 2}, 8, "8 shards kept gathered"),
        ({"zero-stage": 1, "dp": 8}, 8, "8 shards kept gathered"),
        ({"layout": "ddp"}, 8, "8 replicas"),
        ({"fsdp": True, "zero_stage": 3}, 8, "8 shards"),
        ({"fsdp": "full_shard auto_wrap"}, 8, "8 shards"),
        ({"deepspeed_stage": 3}, 8, "8 shards"),
        ({"parallelism": "tp"}, 8, "8-way tensor"),
        ({"hsdp": True}, 64, "8 replicas × 8 shards"),
        (
            {"param_dtype": "bf16", "reduce_dtype": "float32", "replicate": 2, "shard": 4},
            8,
            "2 replicas × 4 shards",
        ),
        ({"data_parallel_shard_degree": -1, "tp": 8}, 64, "8 shards × 8-way tensor"),
        ({"sharding_strategy": "HYBRID_SHARD"}, 64, "8 replicas × 8 shards"),
        ({"sharding_strategy": "HYBRID_SHARD"}, 8, "8 shards"),
        ({"sharding_strategy": "HYBRID_SHARD", "fsdp_size": 16}, 64, "4 replicas × 16 shards"),
        ({"layout": {"tp": 8, "fsdp": 8}}, 64, "8 shards × 8-way tensor"),
        ({"tp": 2}, 8, "4 replicas × 2-way tensor"),
        ({"TP": "4", "pipeline-parallel-size": 2, "sp": "true"}, 8, "2 stages (1f1b) × 4-way tensor with sequence"),
        ({"dp_replicate": 2, "dp_shard": -1}, 8, "2 replicas × 4 shards"),
        ({"dp_replicate": 1, "dp_shard": -1, "tp": 2, "cp": 2}, 8, "2 shards × 2-way context × 2-way tensor"),
        ({"zero_stage": 3.0}, 8, "8 shards"),
        ({"zero_stage": "1.0"}, 8, "8 shards kept gathered"),
        ({"pp": 4, "vpp": 3}, 4, "4 stages of 3 chunks (interleaved 1f1b)"),
        ({"pp": 4, "schedule": "Interleaved1F1B"}, 4, "4 stages of 2 chunks (interleaved 1f1b)"),
        ({"dp_shard": 32, "ep": 8}, 32, "4 shards × 8-way experts"),
        ({"shards": 4, "experts": 8}, 32, "4 shards × 8-way experts"),
    ],
)
def test_layouts_in_the_words_of_other_programs(fields: dict[str, Any], count: int, words: str) -> None:
    """Processes that no axis divides hold replicas, under a word for shards shards; experts divide data processes."""
    assert planned(fields, count).layout.in_words() == words


def test_layouts_that_do_not_fill_the_devices_stay_so() -> None:
    """A number of replicas or shards is what was asked for, and so is nothing at all: the caller refuses them."""
    assert planned({"replicas": 4}, 8).layout.world_size == 4
    assert planned({"tp": 3}, 8).layout.world_size == 3
    assert planned({"micro_batch": 4}, 8).layout.world_size == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ac": "full"}, {"checkpointed_blocks": 12, "checkpointing": "full"}),
        ({"ac": "selective"}, {"checkpointed_blocks": 12, "checkpointing": "selective"}),
        ({"checkpointing": "selective"}, {"checkpointed_blocks": 12, "checkpointing": "selective"}),
        ({"checkpointing": "full", "checkpointed_blocks": 4}, {"checkpointed_blocks": 4}),
        ({"activation_checkpointing": "every 2"}, {"checkpointed_blocks": 6}),
        ({"ac": 1.0}, {"checkpointed_blocks": 12}),
        ({"selective_checkpointing": 0.5}, {"checkpointed_blocks": 6}),
        ({"gradient_checkpointing": False}, {"checkpointed_blocks": 0}),
        ({"dtype": "bfloat16", "torch_compile": "max-autotune"}, {"precision": "bf16", "compile": True}),
        ({"precision": "16-mixed", "compile": "eager"}, {"precision": "fp16", "compile": False}),
        ({"precision": 32.0, "compile": 1.0}, {"precision": "fp32", "compile": True}),
        ({"amp": False}, {"precision": "fp32"}),
        ({"bf16": True, "tf32": True, "fp16": False}, {"precision": "bf16"}),
        ({"precision": "32", "allow_tf32": True}, {"precision": "fp32"}),
        ({"allow_tf32": True}, {"precision": "tf32"}),
        ({"recompute_activations": True, "cuda_graphs": False}, {"checkpointed_blocks": 12, "captured": False}),
        ({"offload_activations": True}, {"activation_offload": True, "checkpointed_blocks": 12}),
        ({"workers": 2}, {"num_workers": 2, "loader": "workers"}),
        ({"fused": False}, {"optimizer_implementation": "default"}),
        ({"fused_adam": True}, {"optimizer_implementation": "fused"}),
        ({"fused": False, "foreach": True}, {"optimizer_implementation": "foreach"}),
        ({"nhwc": True}, {"memory_format": "channels_last"}),
        ({"optim": "adamw_torch_fused"}, {"optimizer_implementation": "fused", "optimizer_states": "full"}),
        ({"optimizer": "AdamW"}, {"optimizer_implementation": "fused"}),
        ({"optimizer": "AdamW8bit"}, {"optimizer_implementation": "default", "optimizer_states": "8bit"}),
        ({"offload_optimizer": "cpu"}, {"optimizer_offload": "state"}),
        ({"gradient_accumulation_steps": 4}, {"micro_batch": 128}),
        ({"mbs": "16", "compile": None}, {"micro_batch": 16, "compile": False}),
    ],
)
def test_settings_in_the_words_of_other_programs(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Modes of checkpointing, dtypes, compilers, optimisers; null is not given."""
    plan = planned(fields)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    "texts",
    [
        ("fsdp=full_shard auto_wrap",),
        ('bf16=true fsdp="full_shard auto_wrap"',),
        ("fsdp='full_shard,auto_wrap'", "tf32=on"),
    ],
)
def test_a_value_of_two_words_is_understood_on_the_command_line(texts: tuple[str, ...]) -> None:
    """As Transformers has it, with or without the quotes that a shell takes away."""
    assert words_of(texts)["fsdp"] == "full_shard_auto_wrap"
    assert planned(words_of(texts), 8).layout.shards == 8


def test_accumulation_counts_the_samples_of_a_process() -> None:
    """512 samples over 64 processes are 8 for each, in two passes 4; tensor groups share theirs."""
    assert planned({"layout": "hsdp", "accumulation": 2}, 64).micro_batch == 4
    assert planned({"pp": 4, "num_microbatches": 8}, 8).micro_batch == 32
    assert planned({"tp": 8, "fsdp": -1, "accumulation": 2}, 64).micro_batch == 32


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tp": 2, "tensor": 4}, "tensor says tensor=4, and another word says tensor=2"),
        ({"fsdp": 8, "zero_stage": 0}, "shards is 8, and another word says that there are none"),
        ({"tp": 10**400}, "tensor must be from 1 on"),
        ({"micro_batch": 10**400}, "micro_batch is a number"),
        ({"ac": "every 0"}, "checkpointing is one of full, selective, not 'every_0'"),
        ({"ac": "half"}, "checkpointing is one of full, selective, not 'half'"),
        ({"zero_stage": 4}, "a stage of ZeRO from 0 to 3, not '4'"),
        ({"cp": "eight"}, "context must be from 1 on, and whole, not 'eight'"),
        ({"micro_batch": [1]}, r"micro_batch is \[1\], wanted a word or a number"),
        ({"grad_accum": 0}, "accumulation must be from 1 on"),
        ({"memory_format": "nhcw"}, "memory_format is one of contiguous, channels_last"),
        ({"teansor": 8}, "a plan has no 'teansor'"),
        ({"fsdp": 8, "reduce_dtype": "bf16"}, "gradients are summed, and weights kept, in fp32; leave it out"),
        ({"global_batch_size": 64}, "global_batch_size belongs to the job, not to its plan"),
        ({"zero_stage": 3, "offload_param": "cpu"}, "weights stay on devices; shards divide them"),
        ({"zero_stage": 3, "offload_optimizer": "cpu"}, "Leave optimizer_offload out, and divide the state by shards"),
        ({"num_gpus": 8}, "num_gpus is given by the place, such as 8xh100"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(fields: dict[str, Any], why: str) -> None:
    """Contradictions, unknown modes, and numbers that are none."""
    with pytest.raises(BadJob, match=why):
        planned(fields, 8)


def test_a_model_without_equal_blocks_has_nothing_to_checkpoint() -> None:
    """Rather than a plan that keeps everything."""
    with pytest.raises(BadJob, match="this one has none"):
        planned({"ac": "full"}, facts=dataclasses.replace(PROFILE, num_blocks=0))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 64),
    st.floats(allow_nan=True),
    st.sampled_from(
        ["full", "selective", "every 2", "bf16", "fp16 AMP", "hsdp", "3", "-1", "", "true", "adamw", "8bit"]
    ),
    st.text(max_size=6),
    st.lists(st.integers(), max_size=2),
)


@given(st.dictionaries(st.sampled_from(sorted(_FIELD_OF)), VALUES, max_size=4), st.sampled_from([1, 8, 64]))
def test_any_values_give_a_plan_or_a_sentence(fields: dict[str, Any], count: int) -> None:
    """No word raises anything but BadJob."""
    with contextlib.suppress(BadJob):
        assert planned(fields, count).layout.world_size >= 1
