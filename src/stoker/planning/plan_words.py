"""The words that other programs have for a plan's settings, as fields of a Plan and of its Layout.

`tp=4 pp=2 ac=full dtype=bfloat16 zero_stage=3` are Megatron's, torchtitan's, DeepSpeed's and Transformers' for what
Stoker calls `tensor=4 stages=2 checkpointed_blocks=N precision=bf16 shards=N`. Case, hyphens and underscores do not
matter. Where one axis is given, processes that none divides hold replicas; under a word for shards they hold shards.

Not the same: ZeRO's stages 1 and 2 stand as shards that stay gathered between the two passes, whose messages are theirs
and whose gradients are divided as stage 2 does it; Stoker has no stage 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from stoker.records import Profile

_NAMES = {
    "tensor": "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size",
    "stages": "pp pp_size pp_degree pipeline pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size num_stages",
    "context": "cp cp_size cp_degree context_parallel context_parallel_size context_parallel_degree",
    "experts": "ep ep_size ep_degree moe_ep_size expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size",
    "replicas": "dp dp_size ddp data data_parallel data_parallel_size replicate dp_replicate "
    "data_parallel_replicate_degree",
    "shards": "fsdp fsdp_size shard dp_shard data_parallel_shard_degree sharding_group_size",
    "sequence": "sp sequence_parallel",
    "reshard": "reshard_after_forward",
    "chunks": "vpp vpp_size virtual_pipeline_parallel_size virtual_pipeline_model_parallel_size",
    "schedule": "pipeline_schedule pipeline_parallel_schedule",
    "micro_batch": "mbs micro_batch_size microbatch microbatch_size per_device_batch_size per_device_train_batch_size "
    "device_train_microbatch_size device_batch_size local_batch_size batch_per_gpu batch_per_device per_gpu_batch_size",
    "num_workers": "workers dataloader_num_workers",
    "precision": "dtype amp mixed_precision param_dtype compute_dtype",
    "compile": "compiled torch_compile compile_mode torch_compile_mode",
    "captured": "cuda_graph cuda_graphs",
    "memory_format": "format data_format channels_last nhwc",
    "optimizer_implementation": "optimizer optim fused fused_adam fused_adamw fused_optimizer foreach",
    "optimizer_states": "optimizer_bits",
    "optimizer_offload": "offload offload_optimizer cpu_offload",
    "checkpointing": "ac ac_mode activation_checkpointing activation_checkpoint gradient_checkpointing grad_ckpt "
    "recompute recompute_granularity recompute_activations activation_recomputation remat selective_checkpointing",
    "checkpointed_blocks": "checkpointed_layers num_checkpointed_blocks recompute_num_layers",
    "activation_offload": "offload_activations activation_offloading",
    "loss_chunks": "chunked_loss num_loss_chunks",
    "accumulation": "gas num_microbatches accumulation_steps grad_accum grad_accumulation gradient_accumulation "
    "gradient_accumulation_steps",
    "sharding": "sharding_strategy strategy parallelism zero zero_stage zero_optimization_stage deepspeed "
    "deepspeed_stage",
}
_FIELD_OF = {word: field for field, words in _NAMES.items() for word in (field, *words.split())}
_PRECISIONS = {
    "fp32": "32 float float32 32_true single no",
    "tf32": "tensorfloat32",
    "bf16": "bfloat16 bf16_mixed bfloat16_mixed mixed_bf16 bf16_true bf16_amp amp_bf16 bf16_autocast pure_bf16",
    "fp16": "16 half float16 16_mixed fp16_mixed mixed_fp16 fp16_amp amp_fp16 amp amp_16 16_amp",
    "fp8": "float8 amp_fp8 fp8_hybrid fp8_e4m3 float8_e4m3fn",
    "fp64": "64 double float64",
}
_PRECISION_OF = {word: precision for precision, words in _PRECISIONS.items() for word in (precision, *words.split())}
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0", "none", "null", "never", ""})
_COMPILED = frozenset({"inductor", "default", "max_autotune", "max_autotune_no_cudagraphs", "reduce_overhead"})
_SHARDINGS = {
    "shards": "3 zero3 zero_3 deepspeed_stage_3 full_shard fsdp fsdp1 fsdp2",
    "shards kept gathered": "1 2 zero1 zero2 zero_1 zero_2 deepspeed_stage_1 deepspeed_stage_2 shard_grad_op "
    "distributed_optimizer",
    "hybrid": "hsdp hybrid_shard _hybrid_shard hybrid_fsdp",
    "replicas": "0 zero0 zero_0 no_shard ddp dp data_parallel",
}
_SHARDING_OF = {word: how for how, words in _SHARDINGS.items() for word in (how, *words.split())}
_USUAL_CHUNKS = 2
"""Chunks of each process in an interleaved schedule of which no number is given, as in torchtitan."""
_AXES = ("tensor", "stages", "context", "experts", "replicas", "shards")
_IN_FP32 = frozenset({"reduce_dtype", "reduction_dtype", "grad_reduce_dtype", "master_dtype", "master_weights"})
_NOT_OF_PLANS = {
    "belongs to the job, not to its plan: set it there, or by a parameter of its function": (
        "batch batch_size global_batch_size gbs train_batch_size seq_len seq_length sequence_length max_length dropout "
        "lr learning_rate clip_norm grad_clip max_grad_norm gradient_clipping ema lora lora_r lora_rank peft qlora "
        "quantization load_in_4bit load_in_8bit attention attn attn_implementation flash_attn flash_attention "
        "use_flash_attention"
    ),
    "is given by the place, such as 8xh100 or 4x8xh100, not by the plan": (
        "world_size num_gpus ngpus gpus num_devices num_nodes nnodes nproc_per_node"
    ),
    "is no setting of Stoker's, whose weights stay on devices; shards divide them": "offload_param offload_params",
}
_WHY_NOT = {word: why for why, words in _NOT_OF_PLANS.items() for word in words.split()}


def plan_fields(given: Mapping[str, Any], count: int, node_devices: int, profile: Profile) -> dict[str, Any]:
    """The fields of a Plan and of its Layout that words mean; a word that is not known stays as it is.

    Args:
        given: words and their values, which may be texts; those of a mapping `layout` count as the others. None: not
            given.
        count: number of processes.
        node_devices: number of them in a machine, within which hybrid shards stand.
        profile: of the job.

    Raises:
        ValueError: two words say different things of one field, or a value of a word cannot be.
    """
    fields: dict[str, Any] = {}
    is_divided = False  # whether a word of others divides the processes of a batch among experts, too
    for word, value in _flat(given).items():
        is_word = isinstance(value, str | bool | int | float)
        if not is_word:
            raise ValueError(f"{word} is {value!r}, wanted a word or a number")
        key = _key(word)
        if key in _WHY_NOT:
            raise ValueError(f"{word} {_WHY_NOT[key]}")
        field = _FIELD_OF.get(key, word)
        is_divided |= field == "experts" != key
        for name, meant in _meant(key, field, value).items():
            if name in fields and str(fields[name]).lower() != str(meant).lower():
                raise ValueError(f"{word} says {name}={meant}, and another word says {name}={fields[name]}")
            fields[name] = meant
    if fields.pop("is_tf32_allowed", False):  # of what is left in fp32
        fields.setdefault("precision", "tf32")
    if not fields.pop("is_fused", True):
        fields.setdefault("optimizer_implementation", "default")
    if fields.get("schedule") == "interleaved":
        fields["schedule"] = "1f1b"
        fields.setdefault("chunks", _USUAL_CHUNKS)
    _count_blocks(fields, profile.num_blocks)
    _divide(fields, count, node_devices, is_divided=is_divided)
    accumulation = fields.pop("accumulation", None)
    if accumulation is not None and "micro_batch" not in fields:
        parts = math.prod(_size(fields, axis) for axis in ("replicas", "shards", "experts"))
        local = -(-min(profile.batch, profile.num_train) // parts)
        fields["micro_batch"] = -(-local // _whole(accumulation, "accumulation"))
    return fields


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The words outside and inside of `layout`, without those that are not given."""
    layout = given.get("layout")
    inside = layout if isinstance(layout, Mapping) else {} if layout in (None, "") else {"sharding": layout}
    words = {**{word: value for word, value in given.items() if word != "layout"}, **inside}
    return {word: value for word, value in words.items() if value is not None}


def _key(word: Any) -> str:
    """A word without case, hyphens and what stands before its last dot."""
    return re.sub(r"[\s\-/]+", "_", str(word).strip().lower()).rpartition(".")[2]


def _meant(key: str, field: str, value: Any) -> dict[str, Any]:
    """The fields that a word means."""
    text = _key(value)
    if isinstance(number := _number(value), float):  # which has no names in front of its dot
        text = str(int(number)) if number.is_integer() else str(number)
    if key in _IN_FP32:
        if _PRECISION_OF.get(text, text) != "fp32":
            raise ValueError(f"{key} is {value}: gradients are summed, and weights kept, in fp32; leave it out")
        return {}
    if field == key and text in _YES | _NO and key not in _NAMES:
        return _of_value_as_word(key, field, value, is_on=text in _YES)
    if field in _AXES:
        return _of_axis(field, text, value)
    if field == "optimizer_implementation":
        return _of_optimizer(key, text)
    if field == "optimizer_offload":
        return {field: "state" if text in _YES | {"cpu"} else "none" if text in _NO else text}
    if field == "checkpointing":
        return _of_checkpointing(text)
    if field == "sharding":
        how = text.removesuffix("_auto_wrap")
        return {field: _SHARDING_OF.get(how, _FIELD_OF.get(how, how))}
    return _of_setting(key, field, text, value)


def _of_setting(key: str, field: str, text: str, value: Any) -> dict[str, Any]:
    """What a value of any other field means."""
    if field == "precision":
        return {field: "fp32" if text in _NO - {"0", ""} else _PRECISION_OF.get(text, text)}
    if field == "compile":
        return {field: text in _YES | _COMPILED if text in _YES | _NO | _COMPILED | {"eager"} else value}
    if field == "memory_format":
        if key in ("channels_last", "nhwc"):
            text = "channels_last" if text in _YES else "contiguous" if text in _NO else text
        return {field: {"nhwc": "channels_last", "nchw": "contiguous"}.get(text, text)}
    if field == "schedule":
        return {field: "interleaved" if re.fullmatch(r"interleaved(_?1f1b)?", text) else text}
    return {field: value}


def _of_axis(field: str, text: str, value: Any) -> dict[str, Any]:
    """What a number of processes, a word for all of them, or Transformers' `fsdp="full_shard auto_wrap"` means."""
    if text == "-1":  # all that others leave
        return {"left": field}
    if text in (_YES | _NO) - {"0", "1"}:
        return {"sharding": field} if text in _YES else {}
    how = text.removesuffix("_auto_wrap")
    return {"sharding": _SHARDING_OF[how]} if how in _SHARDING_OF and not how.isdigit() else {field: value}


def _of_value_as_word(key: str, field: str, value: Any, *, is_on: bool) -> dict[str, Any]:
    """What a value that stands as a word means, such as `bf16=true` and `hsdp=true`."""
    if key in ("tf32", "allow_tf32"):
        return {"is_tf32_allowed": is_on}
    for name, values in (("precision", _PRECISION_OF), ("sharding", _SHARDING_OF)):
        if key in values:
            return {name: values[key]} if is_on else {}
    return {field: value}


def _number(value: Any) -> float | None:
    """The number that a value is, or says; None if it is none."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        return None


def _of_optimizer(key: str, text: str) -> dict[str, Any]:
    """The implementation, and the form of states, that an optimiser's name means; a plain name means neither."""
    key = "fused" if key.startswith("fused_") else key
    if key in ("fused", "foreach"):
        return {"optimizer_implementation": key} if text in _YES else {"is_fused": False} if key == "fused" else {}
    if "8bit" in text or "8_bit" in text:
        return {"optimizer_states": "8bit", "optimizer_implementation": "default"}
    for implementation in ("fused", "foreach"):
        if implementation in text:
            return {"optimizer_implementation": implementation}
    is_name = re.fullmatch(r"(adamw?|sgd|lamb|adafactor|lion|adagrad|rmsprop|muon)(_torch|_hf)?", text)
    return {} if is_name else {"optimizer_implementation": text}


def _of_checkpointing(text: str) -> dict[str, Any]:
    """What a mode of activation checkpointing means: no blocks, all, every n-th, or all by operation."""
    every = re.fullmatch(r"(?:every_|selective_)?([1-9]\d*)(?:nd|rd|th)?(?:_(?:block|layer)s?)?", text)
    if text in _NO:
        return {"checkpointed_blocks": 0}
    if 0 < (share := _number(text) or 0.0) < 1:
        return {"checkpointed_blocks": f"share_{share}"}
    if text in _YES | {"full", "all", "block", "uniform"}:
        return {"checkpointing": "full"}
    if text in ("selective", "selective_op", "op", "ops", "sac"):
        return {"checkpointing": "selective"}
    if every is not None:
        return {"checkpointed_blocks": f"every_{every.group(1)}"}
    return {"checkpointing": text}


def _count_blocks(fields: dict[str, Any], num_blocks: int) -> None:
    """Turn all blocks, and every n-th, into their number."""
    value = fields.get("checkpointed_blocks", "all" if "checkpointing" in fields else 0)
    given, share = _key(value), re.fullmatch(r"share_(.+)", str(value))
    every = re.fullmatch(r"every_(\d+)", given)
    if given not in ("all", "true") and every is None and share is None:
        return
    if not num_blocks:
        raise ValueError("activation checkpointing is for models with equal blocks, and this one has none")
    part = 1 / int(every[1]) if every else float(share[1]) if share else 1.0
    fields["checkpointed_blocks"] = math.floor(num_blocks * part + 1e-9)


def _divide(fields: dict[str, Any], count: int, node_devices: int, *, is_divided: bool) -> None:
    """Give the processes that no axis divides to replicas or shards, as `sharding` says."""
    how, left_to = fields.pop("sharding", ""), fields.pop("left", None)
    if how not in {*_SHARDINGS, *_AXES, ""}:
        raise ValueError(f"sharding is ddp, fsdp, hsdp, shard_grad_op, or a stage of ZeRO from 0 to 3, not {how!r}")
    if how == "replicas" and _size(fields, "shards") > 1:
        raise ValueError(f"shards is {fields['shards']}, and another word says that there are none")
    are_shards = how.startswith("shards")
    data = "shards" if "shards" in fields else "replicas"
    if is_divided and _product(fields) == count * _size(fields, "experts") and data in fields:
        fields[data] = _size(fields, data) // _size(fields, "experts")
    if how == "shards kept gathered":
        fields.setdefault("reshard", False)
    if left_to is not None:
        if count % _product(fields) == 0:
            fields[left_to] = _size(fields, left_to) * (count // _product(fields))
        return
    if are_shards and "shards" not in fields and "replicas" in fields:
        fields["shards"] = fields.pop("replicas")
    divided, is_data_given = _product(fields), "replicas" in fields or ("shards" in fields and how != "hybrid")
    if count % divided or is_data_given or not (how or any(axis in fields for axis in _AXES)):
        return
    left = count // divided
    if how == "hybrid" and "shards" not in fields:
        inside = max(1, node_devices // divided)
        fields["shards"] = inside if left % inside == 0 else left
        left //= _size(fields, "shards")
    if left > 1:
        axis = "shards" if are_shards else how if how in _AXES else "replicas"
        fields[axis] = _size(fields, axis) * left


def _product(fields: Mapping[str, Any]) -> int:
    """Number of processes of the axes."""
    return math.prod(_size(fields, axis) for axis in _AXES)


def _size(fields: Mapping[str, Any], axis: str) -> int:
    return _whole(fields.get(axis, 1), axis)


def _whole(value: Any, name: str) -> int:
    """A number of processes or passes; raises ValueError for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if isinstance(value, bool) or number < 1 or not number.is_integer():
        raise ValueError(f"{name} must be from 1 on, and whole, not {value!r}")
    return int(number)
