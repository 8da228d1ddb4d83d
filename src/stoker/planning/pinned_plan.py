"""A plan that the user pins by words, and whether a pinned plan is legal for a job on a device.

Words are `key=value`: fields of a Plan, and of its Layout (`shards=8`), such as
`micro_batch=2 precision=bf16 checkpointed_blocks=32 shards=8`. What is left out is what a plan of that place usually
has: the optimiser fused, data on the device, bf16 where it is fast (for weights in fp64: fp64). Words of other programs
are understood too (`plan_words`).
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.devices import Place
from stoker.errors import BadJob, nearest
from stoker.planning.plan_words import plan_fields
from stoker.records import Device, Layout, Plan, Profile
from stoker.records.plan import precision_problem, states_problem

_PLAN = [one.name for one in dataclasses.fields(Plan) if one.name not in ("device", "layout", "device_mtbf_h")]
_LAYOUT = [one.name for one in dataclasses.fields(Layout) if one.name != "added"]


def words_of(texts: Sequence[str]) -> dict[str, str]:
    """`("micro_batch=2 shards=8",)` as a mapping.

    Raises:
        BadJob: a word is not KEY=VALUE.
    """
    fields: dict[str, str] = {}
    plain = " ".join(texts).translate({ord(","): " ", ord('"'): None, ord("'"): None})
    for word in re.sub(r"\s+auto_wrap\b", "_auto_wrap", plain).split():  # of fsdp="full_shard auto_wrap"
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise BadJob(f"--plan {word}: wanted KEY=VALUE, or one file", remedy="For example micro_batch=4 shards=8.")
        fields[key.removeprefix("layout.")] = value
    return fields


def plan_of(fields: Mapping[str, Any], place: Place, profile: Profile) -> Plan:
    """A plan of these fields, of a Plan and of its Layout, for `place`; values may be texts.

    Raises:
        BadJob: a key or a value cannot be.
    """
    try:
        given = plan_fields(fields, place.count, place.cluster.node_devices, profile)
    except ValueError as problem:
        raise BadJob(f"--plan: {problem}") from problem
    layout = {key: given.pop(key) for key in list(given) if key in _LAYOUT}
    for key in (*given, *layout):
        if key not in _PLAN and key not in _LAYOUT:
            raise BadJob(f"a plan has no {key!r}", remedy=nearest(key, [*_PLAN, *_LAYOUT]))
    device = place.device
    full = "fp64" if profile.is_double else "fp32"
    usual: dict[str, Any] = {
        "micro_batch": min(profile.batch, profile.num_train),
        "optimizer_implementation": "default",
        "precision": "bf16" if "bf16" in device.fast_dtypes and not profile.is_double else full,
        "threads": place.cores_each,
    }
    if device.kind == "cuda":
        usual |= {"optimizer_implementation": (*profile.optimizer_implementations, "default")[0], "threads": 1}
        if given.get("optimizer_states", "full") != "full":
            usual["optimizer_implementation"] = "default"
        usual["loader"] = "device" if profile.is_in_memory else "inline"
    if str(given.get("activation_offload")).lower() == "true":  # of inputs of checkpointed blocks
        usual["checkpointed_blocks"] = profile.num_blocks
    remedy = None
    try:
        made = Layout(**{key: _valued(key, value, Layout) for key, value in layout.items()})
        chosen = {key: _valued(key, value, Plan) for key, value in given.items()}
        if chosen.get("num_workers"):
            usual["loader"] = "workers"
        if made.world_size > 1 and "micro_batch" not in chosen:
            usual["micro_batch"] = max(1, usual["micro_batch"] // made.sample_parts)
        if made.world_size > 1 and chosen.get("optimizer_offload", "none") != "none":
            remedy = "Leave optimizer_offload out, and divide the state by shards; or plan one device."
        return Plan(device=device.torch_name, layout=made, device_mtbf_h=profile.device_mtbf_h, **usual | chosen)
    except (ValueError, TypeError) as problem:
        raise BadJob(f"--plan: {problem}", remedy=remedy) from problem


def _valued(key: str, value: Any, record: type) -> Any:
    """A value of the type of a field; raises ValueError with what it may be."""
    wanted = typing.get_type_hints(record)[key]
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is typing.Literal:
        if value not in choices:
            raise ValueError(f"{key} is one of {', '.join(choices)}, not {value!r}")
        return value
    if wanted is bool:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"{key} is true or false, not {value!r}")
        return str(value).lower() == "true"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is a number, not {value!r}") from None
    if wanted is int and not number.is_integer():
        raise ValueError(f"{key} is a whole number, not {value!r}")
    return int(number) if wanted is int else number


def problem_with(plan: Plan, profile: Profile, device: Device, local: Profile) -> str | None:
    """Why a pinned plan is not legal for the job, with the number and what would be; None if it is.

    Args:
        plan: the plan.
        profile: of the whole job.
        device: that it is to run on.
        local: of one process's part of the job.
    """
    batch = min(local.batch, profile.num_train)
    if (problem := local.coupling.problem_with(plan.micro_batch, batch)) is not None:
        legal = local.coupling.legal_micro_batches(batch)
        return f"{problem}. Legal are {', '.join(map(str, legal))}"
    if plan.checkpointed_blocks > profile.num_blocks:
        return f"checkpointed_blocks is {plan.checkpointed_blocks}; the model has {profile.num_blocks} equal blocks"
    if plan.precision not in ("fp32", "fp64") and device.kind == "cuda" and plan.precision not in device.fast_dtypes:
        allowed = ("tf32", "bf16", *(one for one in profile.numerics if one in ("fp16", "fp8")))
        have = ", ".join(("fp32", *(dtype for dtype in allowed if dtype in device.fast_dtypes)))
        since = " (compute capability 8.9 and newer have it: L4, RTX 40, H100)" if plan.precision == "fp8" else ""
        return f"{device.name} has no {plan.precision}{since}; precision may be {have}"
    if plan.precision == "fp8" and device.kind == "cpu":
        return "a CPU has no fp8 (GPUs of compute capability 8.9 and newer have it); precision may be fp32, bf16"
    if plan.is_offloaded and profile.offload_problem is not None:
        return f"the plan has optimizer_offload, and {profile.offload_problem}"
    if (states := states_problem(plan, profile.numerics)) is not None:
        return states
    if (precision := precision_problem(plan.precision, profile.numerics)) is not None:
        return precision
    if (plan.precision == "fp64") != profile.is_double:
        return (
            f"precision is {plan.precision}, and the model's weights are in {'fp64' if profile.is_double else 'fp32'}"
        )
    return None
