"""The state of a step between two updates: named, copied, and put back.

Its parts are the model's weights and buffers, the optimiser's state, the average, plain values that the model and the
loss keep in Python, and the generators of Python and NumPy (PyTorch's are seeded before every pass). Of several
processes the first one's values and generators are kept, and all take them over, as all begin with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.errors import BadRun
from stoker.jobs import Optimizer
from stoker.loading import generator_states, restore_generators
from stoker.records.codec import JSON
from stoker.stepping import Step
from stoker.stepping.local_tensors import is_spread
from stoker.stepping.world import ALONE, World
from stoker.training.by_name import numbered, parameters_of, renamed, tree_of
from stoker.training.shards import filled_like, region
from stoker.training.state import Tensors, copied, entries, named, rebuilt
from stoker.training.stored import Give, InMemory, Source, whole_from


@dataclass(frozen=True)
class Snapshot:
    """A state that was copied: the skeletons of its parts, and their tensors."""

    skeletons: dict[str, JSON]
    tensors: Tensors


def parts_of(step: Step) -> dict[str, Any]:
    """The trees of what the step's state has of its own, by part; no copies."""
    trees: dict[str, Any] = {"model": dict(step.model.state_dict()), "optimizer": tree_of(step)}
    if step.average is not None:
        trees["average"] = step.average.weights
    return trees


def snapshot_of(step: Step) -> Snapshot:
    """A copy of all of the step's state, in a process that holds all of it; without what sites share."""
    trees = {**parts_of(step), "generators": generator_states()}
    parts = {name: named(tree, name) for name, tree in trees.items()}
    tensors = {name: copied(tensor) for _, own in parts.values() for name, tensor in own.items()}
    skeletons = {name: skeleton for name, (skeleton, _) in parts.items()}
    return Snapshot({**skeletons, "python": step.python_changes()}, tensors)


def restore_snapshot(step: Step, snapshot: Snapshot) -> None:
    """Put a copied state into a step of the same job.

    Raises:
        BadRun: it is of another model or optimiser.
    """
    put_back(step, snapshot.skeletons, InMemory(snapshot.tensors), "the state carried over")


def put_back(step: Step, skeletons: dict[str, JSON], source: Source, where: Path | str) -> None:
    """Put a state into `step`, in place: of each tensor what this process holds. `where` it is from, for messages.

    An average that was not kept begins at the weights.

    Raises:
        BadRun: it is of another model or optimiser.
    """
    _require_same_model(step, skeletons["model"], source, where)
    step.model.load_state_dict(_weights(step.model.state_dict(), skeletons["model"], source, step.world))
    try:
        _put_back_optimizer(step, renamed(skeletons["optimizer"], step), source)
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadRun(f"{where} does not fit this job's optimiser: {error}",
                     remedy="Was the optimiser changed? --new starts anew.") from error  # fmt: skip
    if step.average is not None:
        average = skeletons.get("average", skeletons["model"])
        step.average.load(_weights(step.average.weights, average, source, step.world))
    step.put_python(skeletons.get("python", {}))
    restore_generators(rebuilt(skeletons["generators"], whole_from(source)))


def load_weights(model: torch.nn.Module, weights: Tensors, source: Path, *, world: World = ALONE) -> None:
    """Copy weights into a model of the same architecture, of which a process may hold only parts.

    Args:
        model: where they go.
        weights: whole tensors by name, or ones that are spread as the model's.
        source: where they are from, for messages.
        world: of the processes that hold the model together, if it is spread over several.

    Raises:
        BadRun: names or shapes differ; the first differences are named.
    """
    here = model.state_dict()
    _require_same(
        {name: _shape(tensor) for name, tensor in here.items()},
        {name: _shape(tensor) for name, tensor in weights.items()},
        source, is_part=world.layout.stages > 1,
    )  # fmt: skip
    model.load_state_dict({name: _part_like(target, weights[name], world) for name, target in here.items()})


def _require_same_model(step: Step, skeleton: JSON, source: Source, where: Path | str) -> None:
    there = {name: str(list(source.shape(item["of"]))) if _is_tensor(item) else "no tensor"
             for name, item in entries(skeleton).items()}  # fmt: skip
    here = {name: _shape(tensor) for name, tensor in step.model.state_dict().items()}
    _require_same(here, there, where, is_part=step.world.layout.stages > 1)


def _require_same(here: dict[str, str], there: dict[str, str], where: Path | str, *, is_part: bool) -> None:
    """Refuse weights of other names or shapes; a part of a model has only some of the names."""
    differing = [f"{name} is {here.get(name, 'absent')} in the model, {there.get(name, 'absent')} in the file"
                 for name in dict.fromkeys([*here, *([] if is_part else there)])
                 if here.get(name) != there.get(name)]  # fmt: skip
    if differing:
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise BadRun(f"{where} holds another model: {'; '.join(differing[:3])}{more}")


def _weights(here: dict[str, torch.Tensor], skeleton: JSON, source: Source, world: World) -> dict[str, Any]:
    """The kept tensors of the names that are here, each as its namesake is spread."""
    kept = entries(skeleton)
    return {
        name: rebuilt(kept[name], _spread_like(target, source, world, whole_from(source)))
        for name, target in here.items()
    }


def _put_back_optimizer(step: Step, skeleton: JSON, source: Source) -> None:
    """Take over an optimiser's state; the settings of Stoker's own optimisers stay those of the job and the plan."""
    optimizer, kept = step.optimizer, entries(skeleton)
    of_name, whole = dict(step.model.named_parameters()), whole_from(source)
    tree = {key: rebuilt(item, whole) for key, item in kept.items() if key != "state"}
    names = {name for group in tree["groups"] for name in group["params"]}
    tree["state"] = {
        name: rebuilt(item, _spread_like(of_name[name], source, step.world, whole) if name in of_name else whole)
        for name, item in entries(kept["state"]).items()
        if name in names and (name in of_name or step.world.layout.stages == 1)
    }
    saved = numbered(step, tree)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    if isinstance(step.job.optimizer, Optimizer):
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
    # PyTorch turned state of another dtype than its parameter's into that; here it is put back as it was.
    for number, parameter in enumerate(parameters_of(optimizer)):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device)


def _spread_like(target: Any, source: Source, world: World, whole: Give) -> Give:
    """Gives of tensors that have the shape of `target` what this process holds of it; of others all."""
    if not is_spread(target):
        return whole

    def part(name: str, strides: list[int]) -> torch.Tensor:
        if source.shape(name) != tuple(target.shape):
            return whole(name, strides)
        return filled_like(target, lambda offsets, sizes: source.block(name, offsets, sizes), world)

    return part


def _part_like(target: torch.Tensor, weight: torch.Tensor, world: World) -> torch.Tensor:
    """Of a weight, whole or spread, what this process holds of `target`."""
    if is_spread(weight) or not is_spread(target):
        return weight
    return filled_like(target, lambda offsets, sizes: weight[region(offsets, sizes)], world)


def _is_tensor(item: JSON) -> bool:
    return isinstance(item, dict) and item["is"] == "tensor"


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else "no tensor"
