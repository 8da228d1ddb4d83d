"""A training state as named tensors and a JSON skeleton, and back: checkpoints without pickle.

The skeleton is the nested state with a name in the place of every tensor. A tensor that occurs several times is stored
once, and strides are kept, so that a restored state has the layout in memory of the saved one.

An optimiser's state goes under the names of its parameters, so that it fits whatever part of a model a process holds:

```
state     name of a parameter -> its state
unnamed   what an optimiser keeps that belongs to no parameter
groups    its groups: names of parameters, and settings
```
Which of PyTorch's implementations computes an update is the plan's, and no part of a state: it may differ between a run
and one that goes on from its checkpoint.
The name is the parameter's in the whole model. A parameter that is not the model's goes by its number. One that several
optimisers of a job's own step hold gets a prime for each further one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stoker.errors import RunFailed
from stoker.records.codec import JSON
from stoker.stepping.distributed_tensors import is_spread, local
from stoker.stepping.own_step import parameters_of
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import LISTS

Tensors = dict[str, torch.Tensor]


def pack(tree: Any, prefix: str) -> tuple[JSON, Tensors]:
    """The skeleton of `tree` and its tensors, copied to the CPU under names that begin with `prefix`.

    Raises:
        RunFailed: the tree holds something other than tensors, numbers, texts, dicts, lists and tuples.
    """
    skeleton, tensors = named(tree, prefix)
    return skeleton, {name: copied(tensor) for name, tensor in tensors.items()}


def named(tree: Any, prefix: str) -> tuple[JSON, Tensors]:
    """As `pack`, with the tensors themselves instead of copies."""
    tensors: Tensors = {}
    seen: dict[tuple[Any, ...], str] = {}
    return _pack(tree, prefix, tensors, seen), tensors


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, with the same strides."""
    return tensor.detach().to("cpu", copy=True)


def unpack(skeleton: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `pack` took; KeyError if a tensor is missing."""
    return rebuilt(skeleton, lambda name, strides: laid_out(tensors[name], strides))


def rebuilt(skeleton: JSON, tensor: Callable[[str, list[int]], torch.Tensor]) -> Any:
    """The tree that `pack` took, with `tensor(name, strides)` in the place of tensors."""
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
        if value.layout is not torch.strided:
            raise RunFailed(
                f"the state has a sparse tensor at {path}, which a checkpoint cannot keep",
                remedy="Use an optimiser whose state is dense, as torch.optim.SparseAdam's is, or dense gradients.",
            )
        return {"is": "tensor", "of": _name(value, path, tensors, seen), "strides": list(value.stride())}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise RunFailed(
                    f"the state has a {type(key).__name__} as a key at {path}, which a checkpoint cannot keep"
                )
        items = [[key, _pack(item, f"{path}.{key}", tensors, seen)] for key, item in value.items()]
        return {"is": "dict", "of": items}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"is": kind, "of": [_pack(item, f"{path}.{index}", tensors, seen) for index, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"is": "float", "of": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunFailed(f"the state holds a {type(value).__name__} at {path}, which a checkpoint cannot keep")


def _name(tensor: torch.Tensor, path: str, tensors: Tensors, seen: dict[tuple[Any, ...], str]) -> str:
    """The name of `tensor`: the one it has already, or a new one like `path`."""
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


def laid_out(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """The tensor with these strides, unless elements would share memory."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if list(tensor.stride()) == strides or reach < tensor.numel():  # expanded: restored with memory for each element
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


_STANDARD = ("state", "param_groups")


def names_of(step: Step) -> list[str | int]:
    """The name of each parameter of the step's optimiser, in its order."""
    known = {id(parameter): name for name, parameter in step.named_parameters().items()}
    names: dict[str | int, None] = {}
    for number, parameter in enumerate(parameters_of(step.optimizer)):
        name: str | int = known.get(id(parameter), number)
        while name in names:
            name = f"{name}'"
        names[name] = None
    return list(names)


def tree_of(step: Step) -> dict[str, Any]:
    """The optimiser's state under names.

    Raises:
        RunFailed: it keeps a part of a tensor as an ordinary tensor.
    """
    names, saved = names_of(step), step.optimizer.state_dict()
    state: dict[Any, Any] = saved["state"]
    elsewhere = step.names_kept_elsewhere
    for number, parameter in enumerate(parameters_of(step.optimizer)):
        _require_same_placements(names[number], parameter, state.get(number, {}))
    return {
        "state": {
            names[key]: value for key, value in state.items() if isinstance(key, int) and names[key] not in elsewhere
        },
        "unnamed": {key: value for key, value in state.items() if not isinstance(key, int)},
        "groups": [
            {
                **{key: value for key, value in group.items() if key not in LISTS},
                "params": [names[number] for number in group["params"]],
            }
            for group in saved["param_groups"]
        ],
        **{key: value for key, value in saved.items() if key not in _STANDARD},
    }


def _require_same_placements(name: str | int, parameter: torch.Tensor, state: Any) -> None:
    """Refuse a part of a tensor without placements, as a user's optimiser may keep it."""
    if not is_spread(parameter) or not isinstance(state, dict):
        return
    sizes = local(parameter).shape
    for key, value in state.items():
        is_whole = not isinstance(value, torch.Tensor) or is_spread(value) or value.shape != sizes
        if not is_whole and sizes != parameter.shape:
            raise RunFailed(
                f"the optimiser keeps {key!r} of {name}, of which this process holds a part, as a tensor of its own "
                f"of shape {list(sizes)}; a checkpoint could not tell which part it is",
                remedy="Make it by torch.zeros_like(parameter), or train with replicas.",
            )


def numbered(step: Step, tree: dict[str, Any]) -> dict[str, Any]:
    """A state under names in the form that the step's optimiser loads.

    Raises:
        ValueError: its groups have other parameters.
    """
    names = names_of(step)
    groups = _matching_groups(step, names, tree["groups"])
    state = {number: tree["state"][name] for number, name in enumerate(names) if name in tree["state"]}
    others = {key: value for key, value in tree.items() if key not in ("state", "unnamed", "groups")}
    return {"state": {**tree["unnamed"], **state}, "param_groups": groups, **others}


def united(skeletons: list[JSON]) -> JSON:
    """One skeleton from those of the optimisers of several stages; groups with the same settings become one."""
    trees = [entries(skeleton) for skeleton in skeletons]
    groups: list[tuple[dict[str, JSON], list[JSON]]] = []
    for tree in trees:
        free = list(groups)
        for group in map(entries, tree["groups"]["of"]):
            names = group.pop("params")["of"]
            twin = next((known for known in free if known[0] == group), None)
            if twin is None:
                groups.append((group, list(names)))
            else:
                free.remove(twin)
                twin[1].extend(name for name in names if name not in twin[1])  # two stages hold a tied parameter
    whole = [_dict({**settings, "params": {"is": "list", "of": names}}) for settings, names in groups]
    state = [item for tree in trees for item in tree["state"]["of"]]
    return _dict({**trees[0], "state": {"is": "dict", "of": state}, "groups": {"is": "list", "of": whole}})


def _matching_groups(step: Step, names: list[str | int], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved settings of each of the optimiser's groups, with the numbers of its parameters."""
    own = step.optimizer.param_groups
    is_part = step.world.layout.cuts_model
    if len(own) > len(saved) or (len(own) < len(saved) and not is_part):
        raise ValueError(f"it has {len(saved)} groups of parameters, the job's {len(own)}")
    groups, first, left = [], 0, list(saved)
    for group in own:
        size = len(group["params"])
        mine = names[first : first + size]
        if not mine:
            groups.append({**group, "params": []})
            continue
        twin = next((group for group in left if set(mine) <= set(group["params"])), None)
        if twin is None or not (is_part or len(mine) == len(twin["params"])):
            raise ValueError(
                f"its groups are of other parameters: no group of it is that of {mine[0]!r} and {len(mine) - 1} more"
            )
        left.remove(twin)
        groups.append({**twin, "params": list(range(first, first + size))})
        first += size
    return groups


def _dict(values: dict[str, JSON]) -> JSON:
    return {"is": "dict", "of": [[key, value] for key, value in values.items()]}
