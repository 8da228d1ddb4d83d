"""An optimiser's state under the names of its parameters, so that it fits whatever part of a model a process holds.

```
state     name of a parameter -> its state
beside    what an optimiser keeps that is of no parameter
groups    its groups: names of parameters, and settings
```
The name is the parameter's in the whole model; one that is not the model's goes by its number, and one that several
optimisers of a job's own step keep a state for gets a prime for each further one.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.errors import RunFailed
from stoker.records.codec import JSON
from stoker.stepping import Step
from stoker.stepping.local_tensors import is_spread, local
from stoker.training.state import entries

_STANDARD = ("state", "param_groups")


def names_of(step: Step) -> list[str | int]:
    """The name of each parameter of the step's optimiser, in its order."""
    known = {id(parameter): name for name, parameter in step.model.named_parameters()}
    names: dict[str | int, None] = {}
    for number, parameter in enumerate(parameters_of(step.optimizer)):
        name: str | int = known.get(id(parameter), number)
        while name in names:
            name = f"{name}'"
        names[name] = None
    return list(names)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimiser's parameters in the order in which it counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tree_of(step: Step) -> dict[str, Any]:
    """The optimiser's state under names.

    Raises:
        RunFailed: it keeps parts of tensors as if they were whole ones.
    """
    names, saved = names_of(step), step.optimizer.state_dict()
    state: dict[Any, Any] = saved["state"]
    for number, parameter in enumerate(parameters_of(step.optimizer)):
        _require_spread_alike(names[number], parameter, state.get(number, {}))
    return {
        "state": {names[key]: value for key, value in state.items() if isinstance(key, int)},
        "beside": {key: value for key, value in state.items() if not isinstance(key, int)},
        "groups": [{**group, "params": [names[number] for number in group["params"]]}
                   for group in saved["param_groups"]],
        **{key: value for key, value in saved.items() if key not in _STANDARD},
    }  # fmt: skip


def _require_spread_alike(name: str | int, parameter: torch.Tensor, state: Any) -> None:
    """Refuse a part of a tensor that does not say which part it is, as an optimiser of a user's may keep it."""
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
    """A state under names as the step's optimiser loads it.

    Raises:
        ValueError: it is of other groups of parameters.
    """
    names = names_of(step)
    groups = _lined_up(step, names, tree["groups"])
    state = {number: tree["state"][name] for number, name in enumerate(names) if name in tree["state"]}
    others = {key: value for key, value in tree.items() if key not in ("state", "beside", "groups")}
    return {"state": {**tree["beside"], **state}, "param_groups": groups, **others}


def renamed(skeleton: JSON, step: Step) -> JSON:
    """The skeleton of a state under names, also of one that was kept under numbers (version 1 of manifests).

    Raises:
        ValueError: it was kept under numbers, and is of other parameters, or this process has only some of them.
    """
    kept = entries(skeleton)
    if "groups" in kept:
        return skeleton
    names, groups = names_of(step), [entries(group) for group in kept["param_groups"]["of"]]
    numbers = [number for group in groups for number in group["params"]["of"]]
    if step.world.layout.stages > 1:
        raise ValueError("it was written by an earlier Stoker, and a stage cannot tell which of it is its own; "
                         "resume it once without stages")  # fmt: skip
    if sorted(set(numbers)) != list(range(len(names))):
        raise ValueError(f"it is of {len(set(numbers))} parameters, the job's is of {len(names)}")
    state: list[tuple[Any, JSON]] = [(key, value) for key, value in kept["state"]["of"]]
    by_name = [[names[key], value] for key, value in state if isinstance(key, int)]
    beside = [[key, value] for key, value in state if not isinstance(key, int)]
    for group in groups:
        group["params"] = {"is": "list", "of": [names[number] for number in group["params"]["of"]]}
    return _dict({
        "state": {"is": "dict", "of": by_name},
        "beside": {"is": "dict", "of": beside},
        "groups": {"is": "list", "of": [_dict(group) for group in groups]},
        **{key: value for key, value in kept.items() if key not in _STANDARD},
    })  # fmt: skip


def united(skeletons: list[JSON]) -> JSON:
    """One skeleton of the optimisers' of several stages.

    Groups of different stages that have the same settings are one.
    """
    trees = [entries(skeleton) for skeleton in skeletons]
    groups: list[tuple[dict[str, JSON], list[JSON]]] = []
    for tree in trees:
        free = list(groups)
        for group in map(entries, tree["groups"]["of"]):
            names = group.pop("params")["of"]
            twin = next((one for one in free if one[0] == group), None)
            if twin is None:
                groups.append((group, list(names)))
            else:
                free.remove(twin)
                twin[1].extend(names)
    whole = [_dict({**settings, "params": {"is": "list", "of": names}}) for settings, names in groups]
    state = [item for tree in trees for item in tree["state"]["of"]]
    return _dict({**trees[0], "state": {"is": "dict", "of": state}, "groups": {"is": "list", "of": whole}})


def _lined_up(step: Step, names: list[str | int], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved settings of each of the optimiser's groups, with the numbers of its parameters."""
    own = step.optimizer.param_groups
    is_part = step.world.layout.stages > 1
    if len(own) > len(saved) or (len(own) < len(saved) and not is_part):
        raise ValueError(f"it has {len(saved)} groups of parameters, the job's {len(own)}")
    found, first, left = [], 0, list(saved)
    for group in own:
        size = len(group["params"])
        mine = names[first : first + size]
        if not mine:
            found.append({**group, "params": []})
            continue
        twin = next((one for one in left if set(mine) <= set(one["params"])), None)
        if twin is None or not (is_part or len(mine) == len(twin["params"])):
            raise ValueError(f"its groups are of other parameters: no group of it is that of {mine[0]!r} "
                             f"and {len(mine) - 1} more")  # fmt: skip
        left.remove(twin)
        found.append({**twin, "params": list(range(first, first + size))})
        first += size
    return found


def _dict(values: dict[str, JSON]) -> JSON:
    return {"is": "dict", "of": [[key, value] for key, value in values.items()]}
