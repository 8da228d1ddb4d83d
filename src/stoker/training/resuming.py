"""From a checkpoint on disk back into a step, or into whole weights, whichever processes wrote it."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import StokerError
from stoker.records import CheckpointManifest
from stoker.records.codec import JSON
from stoker.stepping import Step
from stoker.stepping.world import World
from stoker.store import CheckpointStore
from stoker.training.agreement import appears, gathered, raise_together
from stoker.training.sites import SHARED, prefix_in, restore_outer, weights_part
from stoker.training.snapshots import put_back
from stoker.training.state import Tensors, rebuilt, unpack
from stoker.training.stored import opened, whole_from


def newest_together(world: World, store: CheckpointStore) -> tuple[Path, CheckpointManifest] | None:
    """The newest usable checkpoint, the same in every process; each of them calls this, and the first one looks.

    Raises:
        BadRun: in all of them: there are some and none is usable, or not every process sees it.
    """
    found, problem = None, None
    if world.is_first:
        try:
            found = store.newest()
        except StokerError as error:
            problem = error
    name = gathered(world, None if found is None else found[0].name)[0]
    raise_together(world, problem)
    if name is None:
        return None
    try:
        if not world.is_first:
            appears(store.directory / name)
            found = store.named(name)
    except StokerError as error:
        problem = error
    raise_together(world, problem)
    return found


def restore(step: Step, path: Path, manifest: CheckpointManifest) -> dict[str, JSON]:
    """Put the checkpoint's state into `step`, in place; returns the progress that was kept with it.

    Whichever processes wrote it, in whichever layout: each reads what it holds. An average that the checkpoint lacks
    begins at its weights.

    Raises:
        BadRun: the checkpoint is of another model or optimiser.
    """
    kept = manifest.skeleton
    prefix = prefix_in(step, kept)
    mine = {part: kept[f"{prefix}{part}"] for part in ("optimizer", "average") if f"{prefix}{part}" in kept}
    mine |= {"model": kept[weights_part(step, kept)], "generators": kept["generators"]}
    mine["python"] = kept.get("python", {})
    with opened(path, manifest) as source:
        put_back(step, mine, source, path)
        restore_outer(step, kept, source)
    progress: dict[str, JSON] = unpack(manifest.skeleton["progress"], {})
    return progress


def model_weights(path: Path, manifest: CheckpointManifest) -> Tensors:
    """The model's weights in a checkpoint, whole, as they were trained on; of several sites those that they share."""
    return _weights(path, manifest, (SHARED, "model"))


def kept_weights(path: Path, manifest: CheckpointManifest) -> Tensors:
    """The weights of a checkpoint worth keeping, whole: the average's if there is one."""
    return _weights(path, manifest, (SHARED, "average", "model"))


def _weights(path: Path, manifest: CheckpointManifest, parts: tuple[str, ...]) -> Tensors:
    """The weights of the first of these parts that is there."""
    part = next(part for part in parts if part in manifest.skeleton)
    with opened(path, manifest) as source:
        weights: Tensors = rebuilt(manifest.skeleton[part], whole_from(source))
    return weights
