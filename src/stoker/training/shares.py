"""What each process writes of a checkpoint, and how a manifest comes of all of it.

A process writes the blocks that are its turn (`stoker.training.shards`), into files of its own: `model.safetensors` of
one process, `model.0-of-4.safetensors` of several. Of several it tells the first one which files those are and which
block of which tensor lies where; the first one in each stage adds the skeletons, which are alike within a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from stoker.loading import generator_states
from stoker.records import FileDigest, Position, StoredPiece, StoredTensor, from_json, to_json
from stoker.records.codec import JSON
from stoker.stepping import NotFinite, Step
from stoker.stepping.world import ALONE
from stoker.training import sites
from stoker.training.by_name import united
from stoker.training.shards import Index, Part, to_write
from stoker.training.sites import prefix_of
from stoker.training.snapshots import parts_of
from stoker.training.state import Tensors, copied, entries, named, pack


@dataclass(frozen=True)
class Share:
    """What a process writes, copied: tensors by part, and what is told of them.

    `stored` says of each tensor's blocks where they are; `skeletons` are empty where another process gives them;
    `trained` names the weights that are trained, which are of the part `model`.
    """

    rank: int
    size: int
    tensors: dict[str, Tensors]
    stored: dict[str, StoredTensor]
    skeletons: dict[str, JSON]
    trained: tuple[str, ...]
    model: str

    def write(self, folder: Path) -> list[str]:
        """Write the files; their names."""
        names = []
        for part, tensors in self.tensors.items():
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            names.append(_file_name(part, self.rank, self.size))
            safetensors.torch.save_file(contiguous, folder / names[-1])
        return names

    def letter(self, files: tuple[FileDigest, ...]) -> JSON:
        """What the process that completes the checkpoint has to know of the files."""
        return {"files": to_json(files), "tensors": to_json(self.stored), "skeletons": self.skeletons}

    def require_finite(self, position: Position) -> None:
        """Refuse weights that training broke; a buffer may well hold an infinity, such as a mask of attention.

        Raises:
            NotFinite: a trained weight is not finite.
        """
        # What another process writes is absent, and what is another weight is stored under that one's name.
        names = {f"{self.model}.{name}": name for name in self.trained}
        for key, tensor in self.tensors.get(self.model, {}).items():
            name = names.get(key) or names.get(key.rpartition("#")[0])
            if name is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NotFinite(
                    f"{name} is not finite after {position.samples} samples; the checkpoint was not written",
                    remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
                )


def share_of(step: Step, progress: dict[str, JSON]) -> Share:
    """Copy what this process writes of the step's state; `progress` is kept with it.

    Raises:
        RunFailed: the state holds something that a checkpoint cannot keep.
    """
    world = step.world
    prefix, is_apart = prefix_of(step), step.outer is not None
    trees = {f"{prefix}{part}": tree for part, tree in parts_of(step).items()} | sites.parts_of(step)
    if world.is_first:
        trees["generators"] = generator_states()
    tensors: dict[str, Tensors] = {}
    stored: dict[str, StoredTensor] = {}
    skeletons: dict[str, JSON] = {}
    for part, tree in trees.items():
        skeletons[part], live = named(tree, part)
        is_own = is_apart or part == "generators"  # what only this process has
        mine = to_write(live, ALONE if is_own else world)
        file = _file_name(part, world.rank, world.layout.world_size)
        if mine or world.layout.world_size == 1:
            tensors[part] = {}
        for name, one in mine.items():
            pieces = _pieces(one, file)
            tensors[part] |= {piece.key(name): copied(one.local[index]) for piece, index in pieces}
            dtype = str(one.local.dtype).removeprefix("torch.")
            stored[name] = StoredTensor(shape=one.shape, dtype=dtype, pieces=tuple(piece for piece, _ in pieces))
    if world.is_first:
        if python := step.python_changes():
            skeletons["python"] = python
        skeletons["progress"] = pack(progress, "progress")[0]
    trained = tuple(name for name, parameter in step.model.named_parameters() if parameter.requires_grad)
    if not is_apart and world.layout.coordinates(world.rank)[1:] != (0, 0, 0):
        skeletons = {}
    return Share(world.rank, world.layout.world_size, tensors, stored, skeletons, trained, f"{prefix}model")


def merged(letters: list[JSON]) -> dict[str, Any]:
    """The manifest's files, skeleton and tensors, from what all processes told, by rank."""
    files = tuple(from_json(file, FileDigest) for letter in letters for file in letter["files"])
    tensors: dict[str, StoredTensor] = {}
    for letter in letters:
        for name, value in letter["tensors"].items():
            one = from_json(value, StoredTensor)
            known = tensors.get(name)
            pieces = one.pieces if known is None else known.pieces + one.pieces
            tensors[name] = StoredTensor(shape=one.shape, dtype=one.dtype, pieces=pieces)
    given = [letter["skeletons"] for letter in letters if letter["skeletons"]]
    skeleton: dict[str, JSON] = {}
    for part in dict.fromkeys(part for one in given for part in one):
        unite = united if part == "optimizer" else _united
        alike = [one[part] for one in given if part in one]
        skeleton[part] = alike[0] if len(alike) == 1 else unite(alike)
    return {"files": files, "skeleton": skeleton, "tensors": tensors}


def _pieces(part: Part, file: str) -> list[tuple[StoredPiece, Index]]:
    """The blocks that a process holds, as they are stored, and where each of them lies in its tensor."""
    return [
        (StoredPiece(file=file, offsets=offsets, sizes=sizes, number=number), index)
        for number, (offsets, sizes, index) in enumerate(part.blocks())
    ]


def _united(skeletons: list[JSON]) -> JSON:
    """One dict of the dicts of all stages."""
    items: dict[str, JSON] = {}
    for skeleton in skeletons:
        for name, item in entries(skeleton).items():
            items.setdefault(name, item)
    return {"is": "dict", "of": [[name, item] for name, item in items.items()]}


def _file_name(part: str, rank: int, size: int) -> str:
    return f"{part}.safetensors" if size == 1 else f"{part}.{rank}-of-{size}.safetensors"
