"""The state of a step between two updates: named, copied, and put back.

Its parts are the model's weights and buffers, the optimiser's state, the average, and the generators of Python and
NumPy (PyTorch's are seeded before every pass). Of several processes the first one's generators are kept, and all take
them over, as all begin with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.errors import BadRun
from stoker.jobs import Optimizer
from stoker.loading import generator_states, restore_generators
from stoker.records.codec import JSON
from stoker.stepping import Step
from stoker.stepping.world import ALONE, World
from stoker.training.by_name import numbered, parameters_of, renamed, tree_of
from stoker.training.shards import block_of, is_spread, like, part_like
from stoker.training.state import Tensors, copied, entries, laid_out, named, rebuilt
from stoker.training.stored import InMemory, Source

_Give = Callable[[str, list[int]], torch.Tensor]
"""Gives the tensor of this name, with these strides."""


@dataclass(frozen=True)
class Snapshot:
    """A state that was copied: the skeletons of its parts, and their tensors."""

    skeletons: dict[str, JSON]
    tensors: Tensors


def named_parts(step: Step) -> dict[str, tuple[JSON, Tensors]]:
    """Skeleton and tensors of each part of the step's state, not copied."""
    trees: dict[str, Any] = {"model": dict(step.model.state_dict()), "optimizer": tree_of(step)}
    if step.average is not None:
        trees["average"] = step.average.weights
    if step.world.is_first:
        trees["generators"] = generator_states()
    return {name: named(tree, name) for name, tree in trees.items()}


def snapshot_of(step: Step) -> Snapshot:
    """A copy of all of the step's state, in a process that holds all of it."""
    parts = named_parts(step)
    parts.setdefault("generators", named(generator_states(), "generators"))
    tensors = {name: copied(tensor) for _, own in parts.values() for name, tensor in own.items()}
    return Snapshot({name: skeleton for name, (skeleton, _) in parts.items()}, tensors)


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
    restore_generators(rebuilt(skeletons["generators"], _whole_from(source)))


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
    model.load_state_dict({name: part_like(target, weights[name], world) for name, target in here.items()})


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
        name: rebuilt(kept[name], _spread_like(target, source, world, _whole_from(source)))
        for name, target in here.items()
    }


def _put_back_optimizer(step: Step, skeleton: JSON, source: Source) -> None:
    """Take over an optimiser's state; the settings of Stoker's own optimisers stay those of the job and the plan."""
    optimizer, kept = step.optimizer, entries(skeleton)
    of_name, whole = dict(step.model.named_parameters()), _whole_from(source)
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


def _whole_from(source: Source) -> _Give:
    """Gives whole tensors, laid out as they were; one that is there twice is one."""
    known: Tensors = {}

    def whole(name: str, strides: list[int]) -> torch.Tensor:
        if name not in known:
            shape = source.shape(name)
            known[name] = source.block(name, (0,) * len(shape), shape)
        return laid_out(known[name], strides)

    return whole


def _spread_like(target: Any, source: Source, world: World, whole: _Give) -> _Give:
    """Gives of tensors that have the shape of `target` what this process holds of it; of others all."""
    if not is_spread(target):
        return whole
    block = block_of(target, world)

    def part(name: str, strides: list[int]) -> torch.Tensor:
        if source.shape(name) != block.shape:
            return whole(name, strides)
        return like(target, source.block(name, block.offsets, block.sizes))

    return part


def _is_tensor(item: JSON) -> bool:
    return isinstance(item, dict) and item["is"] == "tensor"


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else "no tensor"
