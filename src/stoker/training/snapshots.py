"""The state of a step between two updates: copied, written as this process's share of a checkpoint, and put back.

Its parts are the model's weights and buffers, the optimiser's state, the average, plain values that the model and the
loss keep in Python, and the generators of Python and NumPy (PyTorch's are seeded before every pass). Of several
processes the values and generators of rank 0 are kept, and all processes restore them.

A process writes the blocks that are its turn (`stoker.training.sharded_tensors`) into files of its own:
`model.safetensors` of one process, `model.0-of-4.safetensors` of several. It sends rank 0 the names of the files and
the places of the blocks; the first process of each stage adds the skeletons, which are equal within a stage.

Replicas with updates of their own (`Job.sync`) each have a state of their own, and share weights. The parts of replica
0 have the usual names, those of replica 1 begin with `site1-`, and `shared` holds the shared weights, which are the
ones worth keeping. The same number of replicas go on each from its own state; another number, or processes in lockstep,
go on from the shared weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from stoker.errors import BadRun
from stoker.jobs import Optimizer
from stoker.loading.order import generator_states, restore_generators
from stoker.records import FileDigest, Position, StoredPiece, StoredTensor, from_json, to_json
from stoker.records.codec import JSON
from stoker.stepping.distributed_tensors import is_spread
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.torch_optimizers import LISTS, load_state
from stoker.stepping.world import ALONE, World
from stoker.training.named_state import (
    Tensors,
    copied,
    entries,
    named,
    numbered,
    pack,
    rebuilt,
    tree_of,
    united,
)
from stoker.training.sharded_tensors import (
    Give,
    InMemory,
    OnDisk,
    TensorSource,
    filled_like,
    shards_to_write,
    whole_from,
)


@dataclass(frozen=True)
class StepSnapshot:
    """A copied state: the skeletons of its parts, and their tensors."""

    skeletons: dict[str, JSON]
    tensors: Tensors


def state_parts_of(step: Step) -> dict[str, Any]:
    """The trees of a step's own state, by part; no copies."""
    trees: dict[str, Any] = {"model": dict(step.model_state()), "optimizer": tree_of(step)}
    if step.average is not None:
        trees["average"] = step.average.weights
    return trees


def snapshot_of(step: Step) -> StepSnapshot:
    """A copy of the whole state, in a process that holds all of it; without what replicas share."""
    trees = {**state_parts_of(step), "generators": generator_states()}
    parts = {name: named(tree, name) for name, tree in trees.items()}
    tensors = {name: copied(tensor) for _, own in parts.values() for name, tensor in own.items()}
    skeletons = {name: skeleton for name, (skeleton, _) in parts.items()}
    return StepSnapshot({**skeletons, "python": step.python_changes()}, tensors)


def restore_snapshot(step: Step, snapshot: StepSnapshot) -> None:
    """Put a copied state into a step of the same job.

    Raises:
        BadRun: the state is of another model or optimiser.
    """
    put_back(step, snapshot.skeletons, InMemory(snapshot.tensors), "the state carried over")


def put_back(step: Step, skeletons: dict[str, JSON], source: TensorSource, where: Path | str) -> None:
    """Put a state into `step`, in place: of each tensor the part that this process holds.

    `where` names the source in messages. An average that the state lacks begins at the weights.

    Raises:
        BadRun: the state is of another model or optimiser.
    """
    there = {
        name: str(list(source.shape(item["of"]))) if isinstance(item, dict) and item["is"] == "tensor" else "no tensor"
        for name, item in entries(skeletons["model"]).items()
    }
    here = {name: _shape(tensor) for name, tensor in step.model_state().items()}
    _require_same(here, there, where, is_part=step.world.layout.cuts_model)
    step.load_model_state(_weights(step.model_state(), skeletons["model"], source, step.world))
    try:
        _put_back_optimizer(step, skeletons["optimizer"], source)
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadRun(
            f"{where} does not fit this job's optimiser: {error}",
            remedy="Was the optimiser changed? --new starts a new run.",
        ) from error
    if step.average is not None:
        average = skeletons.get("average", skeletons["model"])
        step.average.load(_weights(step.average.weights, average, source, step.world))
    step.put_python(skeletons.get("python", {}))
    restore_generators(rebuilt(skeletons["generators"], whole_from(source)))


def load_weights(model: torch.nn.Module, weights: Tensors, source: Path) -> None:
    """Copy whole weights into a model of the same architecture.

    Raises:
        BadRun: as `matching_weights`.
    """
    model.load_state_dict(matching_weights(model.state_dict(), weights, source))


def matching_weights(here: Tensors, weights: Tensors, source: Path, *, world: World = ALONE) -> Tensors:
    """Weights for a model of the same architecture, of which a process may hold only parts.

    Args:
        here: the model's present weights by name.
        weights: whole tensors by name, or DTensors with the model's placements.
        source: the file of the weights, for messages.
        world: the processes that hold the model together, if there are several.

    Raises:
        BadRun: names or shapes differ; the first differences are named.
    """
    _require_same(
        {name: _shape(tensor) for name, tensor in here.items()},
        {name: _shape(tensor) for name, tensor in weights.items()},
        source,
        is_part=world.layout.cuts_model,
    )
    whole = InMemory(weights)
    parts = {}
    for name, target in here.items():
        parts[name] = weights[name]
        if is_spread(target) and not is_spread(weights[name]):
            parts[name] = filled_like(target, functools.partial(whole.block, name), world)
    return parts


def _require_same(here: dict[str, str], there: dict[str, str], where: Path | str, *, is_part: bool) -> None:
    """Refuse weights of other names or shapes; a part of a model has only some of the names."""
    differing = [
        f"{name} is {here.get(name, 'absent')} in the model, {there.get(name, 'absent')} in the file"
        for name in dict.fromkeys([*here, *([] if is_part else there)])
        if here.get(name) != there.get(name)
    ]
    if differing:
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise BadRun(f"{where} holds another model: {'; '.join(differing[:3])}{more}")


def _weights(here: dict[str, torch.Tensor], skeleton: JSON, source: TensorSource, world: World) -> dict[str, Any]:
    """The kept tensors of the names in `here`, each with the placements of its namesake."""
    kept = entries(skeleton)
    return {
        name: rebuilt(kept[name], _spread_like(target, source, world, whole_from(source)))
        for name, target in here.items()
    }


def _put_back_optimizer(step: Step, skeleton: JSON, source: TensorSource) -> None:
    """Put an optimiser's state back; of its settings stay the implementation, and those of Stoker's own optimisers."""
    optimizer, kept = step.optimizer, entries(skeleton)
    of_name, whole = step.named_parameters(), whole_from(source)
    tree = {key: rebuilt(item, whole) for key, item in kept.items() if key != "state"}
    names = {name for group in tree["groups"] for name in group["params"]}
    tree["state"] = {
        name: rebuilt(item, _spread_like(of_name[name], source, step.world, whole) if name in of_name else whole)
        for name, item in entries(kept["state"]).items()
        if name in names and (name in of_name or not step.world.layout.cuts_model)
    }
    saved, is_ours = numbered(step, tree), isinstance(step.job.optimizer, Optimizer)
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group.update({name: own[name] for name in own if name != "params" and (is_ours or name in LISTS)})
    load_state(optimizer, saved)


def _spread_like(target: Any, source: TensorSource, world: World, whole: Give) -> Give:
    """Returns this process's part of tensors with the shape of `target`, and other tensors whole."""
    if not is_spread(target):
        return whole

    def part(name: str, strides: list[int]) -> torch.Tensor:
        if source.shape(name) != tuple(target.shape):
            return whole(name, strides)
        return filled_like(target, lambda offsets, sizes: source.block(name, offsets, sizes), world)

    return part


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else "no tensor"


SHARED, OUTER = "shared", "outer"


def prefix_of(step: Step) -> str:
    """The prefix of the names of this process's parts."""
    return f"site{step.world.rank}-" if step.outer is not None and step.world.rank else ""


def replica_parts_of(step: Step) -> dict[str, Any]:
    """The parts that only replicas with updates of their own have, as trees by part."""
    if step.outer is None:
        return {}
    shared = {SHARED: step.outer.weights()} if step.world.is_first else {}
    return {f"{prefix_of(step)}{OUTER}": step.outer.state(), **shared}


def prefix_in(step: Step, skeletons: dict[str, JSON]) -> str:
    """The prefix of the names of the parts that this process goes on from."""
    return prefix_of(step) if _num_replicas(skeletons) == step.world.layout.replicas else ""


def weights_part(step: Step, skeletons: dict[str, JSON]) -> str:
    """The name of the part that this process's weights come from."""
    if step.outer is None and SHARED in skeletons:
        return SHARED
    return f"{prefix_in(step, skeletons)}model"


def restore_outer(step: Step, skeletons: dict[str, JSON], source: OnDisk) -> None:
    """Put back what replicas keep, after model and optimiser; each of them calls this.

    Raises:
        BadRun: the checkpoint is of processes in lockstep, or of other fragments.
    """
    if step.outer is None:
        return
    if OUTER not in skeletons:
        raise BadRun(
            "this checkpoint is of processes that trained in lockstep; sites cannot go on from it",
            remedy="Leave out Job(sync=…), or start a new run with --new.",
        )
    state = rebuilt(skeletons[f"{prefix_in(step, skeletons)}{OUTER}"], whole_from(source))
    if _num_replicas(skeletons) != step.world.layout.replicas:
        del state["site"]
    try:
        step.outer.load(state)
    except ValueError as error:
        raise BadRun(
            f"this checkpoint does not fit the job's sync: {error}", remedy="Was sync changed? --new starts a new run."
        ) from error


def _num_replicas(skeletons: dict[str, JSON]) -> int:
    """Number of replicas with updates of their own that wrote a checkpoint [replicas]; 0 without."""
    return sum(part == OUTER or part.endswith(f"-{OUTER}") for part in skeletons)


@dataclass(frozen=True)
class CheckpointShare:
    """A process's share of a checkpoint: copied tensors by part, and their description.

    `stored` has the places of each tensor's blocks; `skeletons` are empty where another process sends them; `trained`
    are the names of the trained weights, which belong to the part `model`.
    """

    rank: int
    size: int
    tensors: dict[str, Tensors]
    stored: dict[str, StoredTensor]
    skeletons: dict[str, JSON]
    trained: tuple[str, ...]
    model: str

    def write(self, folder: Path) -> list[str]:
        """Write the files; returns their names."""
        names = []
        for part, tensors in self.tensors.items():
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            names.append(_file_name(part, self.rank, self.size))
            safetensors.torch.save_file(contiguous, folder / names[-1])
        return names

    def letter(self, files: tuple[FileDigest, ...]) -> JSON:
        """The message to the process that completes the checkpoint."""
        return {"files": to_json(files), "tensors": to_json(self.stored), "skeletons": self.skeletons}

    def require_finite(self, position: Position) -> None:
        """Refuse trained weights that are not finite; a buffer may hold an infinity, such as an attention mask.

        Raises:
            NotFinite: a trained weight is not finite.
        """
        # Weights that another process writes are absent; a tied weight is stored under the other one's name.
        names = {f"{self.model}.{name}": name for name in self.trained}
        for key, tensor in self.tensors.get(self.model, {}).items():
            name = names.get(key) or names.get(key.rpartition("#")[0])
            if name is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NotFinite(
                    f"{name} is not finite after {position.samples} samples; the checkpoint was not written",
                    remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
                )


def share_of(step: Step, progress: dict[str, JSON]) -> CheckpointShare:
    """Copy this process's share of the step's state; `progress` is kept with it.

    Raises:
        RunFailed: the state holds something that a checkpoint cannot keep.
    """
    world = step.world
    prefix, is_separate = prefix_of(step), step.outer is not None
    trees = {f"{prefix}{part}": tree for part, tree in state_parts_of(step).items()} | replica_parts_of(step)
    if world.is_first:
        trees["generators"] = generator_states()
    tensors: dict[str, Tensors] = {}
    stored: dict[str, StoredTensor] = {}
    skeletons: dict[str, JSON] = {}
    for part, tree in trees.items():
        skeletons[part], live = named(tree, part)
        is_own = is_separate or part == "generators"  # no other process has it
        mine = shards_to_write(live, ALONE if is_own else world)
        file = _file_name(part, world.rank, world.layout.world_size)
        if mine or world.layout.world_size == 1:
            tensors[part] = {}
        for name, shard in mine.items():
            pieces = []
            for number, (offsets, sizes, index) in enumerate(shard.blocks()):
                pieces.append(StoredPiece(file=file, offsets=offsets, sizes=sizes, number=number))
                tensors[part][pieces[-1].key(name)] = copied(shard.local[index])
            dtype = str(shard.local.dtype).removeprefix("torch.")
            stored[name] = StoredTensor(shape=shard.shape, dtype=dtype, pieces=tuple(pieces))
    if world.is_first:
        if python := step.python_changes():
            skeletons["python"] = python
        skeletons["progress"] = pack(progress, "progress")[0]
    trained = tuple(name for name, parameter in step.model.named_parameters() if parameter.requires_grad)
    if not is_separate and world.rank != world.layout.with_same_modules(world.rank)[0]:
        skeletons = {}
    return CheckpointShare(world.rank, world.layout.world_size, tensors, stored, skeletons, trained, f"{prefix}model")


def merged(letters: list[JSON]) -> dict[str, Any]:
    """The manifest's files, skeleton and tensors, from the letters of all processes, by rank."""
    files = tuple(from_json(file, FileDigest) for letter in letters for file in letter["files"])
    tensors: dict[str, StoredTensor] = {}
    for letter in letters:
        for name, value in letter["tensors"].items():
            tensor = from_json(value, StoredTensor)
            known = tensors.get(name)
            pieces = tensor.pieces if known is None else known.pieces + tensor.pieces
            tensors[name] = StoredTensor(shape=tensor.shape, dtype=tensor.dtype, pieces=pieces)
    given = [letter["skeletons"] for letter in letters if letter["skeletons"]]
    skeleton: dict[str, JSON] = {}
    for part in dict.fromkeys(part for skeletons in given for part in skeletons):
        unite = united if part == "optimizer" else _united_skeletons
        of_stages = [skeletons[part] for skeletons in given if part in skeletons]
        skeleton[part] = of_stages[0] if len(of_stages) == 1 else unite(of_stages)
    return {"files": files, "skeleton": skeleton, "tensors": tensors}


def _united_skeletons(skeletons: list[JSON]) -> JSON:
    """One packed dict from those of all stages."""
    items: dict[str, JSON] = {}
    for skeleton in skeletons:
        for name, item in entries(skeleton).items():
            items.setdefault(name, item)
    return {"is": "dict", "of": [[name, item] for name, item in items.items()]}


def _file_name(part: str, rank: int, size: int) -> str:
    return f"{part}.safetensors" if size == 1 else f"{part}.{rank}-of-{size}.safetensors"
