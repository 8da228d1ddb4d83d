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

from stoker.records import FileDigest, Position, StoredPiece, StoredTensor, from_json, to_json
from stoker.records.codec import JSON
from stoker.stepping import NotFinite, Step
from stoker.stepping.world import World
from stoker.training.by_name import united
from stoker.training.shards import to_write
from stoker.training.snapshots import named_parts
from stoker.training.state import Tensors, copied, entries, pack


@dataclass(frozen=True)
class Share:
    """What a process writes, copied: tensors by part, and what is told of them.

    `stored` says of each tensor's block where it is; `skeletons` are empty where another process gives them; `trained`
    names the weights that are trained.
    """

    rank: int
    size: int
    tensors: dict[str, Tensors]
    stored: dict[str, StoredTensor]
    skeletons: dict[str, JSON]
    trained: tuple[str, ...]

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
        for name in self.trained:
            # Absent where another process writes it, or where it is another one, stored under that one's name.
            tensor = self.tensors.get("model", {}).get(f"model.{name}")
            if tensor is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NotFinite(
                    f"{name} is not finite after {position.samples} samples; the checkpoint was not written",
                    remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
                )


def share_of(step: Step, progress: dict[str, JSON]) -> Share:
    """Copy what this process writes of the step's state; `progress` is kept with it.

    Raises:
        RunFailed: the state holds something that a checkpoint cannot keep.
    """
    world, tensors, stored = step.world, {}, {}
    skeletons: dict[str, JSON] = {}
    for part, (skeleton, live) in named_parts(step).items():
        skeletons[part] = skeleton
        size = 1 if part == "generators" else world.layout.world_size
        blocks = to_write(live, world if size > 1 else World())
        if not blocks and size > 1:
            continue
        tensors[part] = {name: copied(block.local) for name, block in blocks.items()}
        file = _file_name(part, world.rank, world.layout.world_size)
        stored |= {
            name: StoredTensor(
                shape=block.shape,
                dtype=str(block.local.dtype).removeprefix("torch."),
                pieces=(StoredPiece(file=file, offsets=block.offsets, sizes=block.sizes),),
            )
            for name, block in blocks.items()
        }
    if world.is_first:
        skeletons["progress"] = pack(progress, "progress")[0]
    trained = tuple(name for name, parameter in step.model.named_parameters() if parameter.requires_grad)
    is_first_of_stage = world.layout.coordinates(world.rank)[1:] == (0, 0, 0)
    return Share(world.rank, world.layout.world_size, tensors, stored, skeletons if is_first_of_stage else {}, trained)


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
    skeleton = dict(given[0])
    for part in set(skeleton) - {"generators", "progress"}:
        unite = united if part == "optimizer" else _united
        skeleton[part] = unite([one[part] for one in given])
    return {"files": files, "skeleton": skeleton, "tensors": tensors}


def _united(skeletons: list[JSON]) -> JSON:
    """One dict of the dicts of all stages."""
    items: dict[str, JSON] = {}
    for skeleton in skeletons:
        for name, item in entries(skeleton).items():
            items.setdefault(name, item)
    return {"is": "dict", "of": [[name, item] for name, item in items.items()]}


def _file_name(part: str, rank: int, size: int) -> str:
    return f"{part}.safetensors" if size == 1 else f"{part}.{rank}-of-{size}.safetensors"
