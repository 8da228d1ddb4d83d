"""A training state as named tensors and a JSON skeleton, and back: what makes checkpoints free of pickle.

The skeleton is the nested state with every tensor replaced by its name; a tensor that is there several times is stored
once, and strides are kept, so that what comes back is laid out like what was saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stoker.errors import RunFailed
from stoker.records.codec import JSON
from stoker.stepping.local_tensors import local

Tensors = dict[str, torch.Tensor]


def pack(tree: Any, prefix: str) -> tuple[JSON, Tensors]:
    """The skeleton of `tree` and its tensors, copied to the CPU under names that begin with `prefix`.

    Raises:
        RunFailed: the tree holds something that is neither a tensor, a number, a text, nor a dict, list or tuple.
    """
    skeleton, tensors = named(tree, prefix)
    return skeleton, {name: copied(tensor) for name, tensor in tensors.items()}


def named(tree: Any, prefix: str) -> tuple[JSON, Tensors]:
    """As `pack`, with the tensors that are in the tree, not copies."""
    tensors: Tensors = {}
    seen: dict[tuple[Any, ...], str] = {}
    return _pack(tree, prefix, tensors, seen), tensors


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, laid out alike, that training does not change."""
    return tensor.detach().to("cpu", copy=True)


def unpack(skeleton: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack` was given; KeyError if a tensor is missing."""
    return rebuilt(skeleton, lambda name, strides: laid_out(tensors[name], strides))


def rebuilt(skeleton: JSON, tensor: Callable[[str, list[int]], torch.Tensor]) -> Any:
    """What `pack` was given, with `tensor(name, strides)` in the place of tensors."""
    if not isinstance(skeleton, dict):
        return skeleton
    kind, content = skeleton["is"], skeleton["of"]
    if kind == "tensor":
        return tensor(content, skeleton["strides"])
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: rebuilt(item, tensor) for key, item in content}
    items = [rebuilt(item, tensor) for item in content]
    return tuple(items) if kind == "tuple" else items


def entries(skeleton: JSON) -> dict[str, JSON]:
    """The skeletons of a packed dict's values, by key."""
    return dict(skeleton["of"])


def _pack(value: Any, path: str, tensors: Tensors, seen: dict[tuple[Any, ...], str]) -> JSON:
    if isinstance(value, torch.Tensor):
        return {"is": "tensor", "of": _name(value, path, tensors, seen), "strides": list(value.stride())}
    if isinstance(value, dict):
        items = [[_key(key, path), _pack(item, f"{path}.{key}", tensors, seen)] for key, item in value.items()]
        return {"is": "dict", "of": items}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"is": kind, "of": [_pack(item, f"{path}.{at}", tensors, seen) for at, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"is": "float", "of": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunFailed(f"the state holds a {type(value).__name__} at {path}, which a checkpoint cannot keep")


def _name(tensor: torch.Tensor, path: str, tensors: Tensors, seen: dict[tuple[Any, ...], str]) -> str:
    """What `tensor` is stored under: the name it has already, or a new one like `path`."""
    here = local(tensor.detach())
    memory = (here.device, here.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if here.numel() and memory in seen:
        return seen[memory]
    name = path
    while name in tensors:  # {"a": {"b": …}} and {"a.b": …} have one path
        name += "'"
    seen[memory] = name
    tensors[name] = tensor
    return name


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise RunFailed(f"the state has a {type(key).__name__} as a key at {path}, which a checkpoint cannot keep")


def laid_out(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """The tensor with these strides, where each of its elements then has memory of its own."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if list(tensor.stride()) == strides or reach < tensor.numel():  # expanded: comes back with memory for each element
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
