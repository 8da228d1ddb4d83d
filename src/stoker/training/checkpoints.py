"""Checkpoints of a run: copied between two updates, written in the background, restored exactly."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from stoker.errors import BadRun
from stoker.jobs import Optimizer
from stoker.loading import generator_states, restore_generators
from stoker.records import CheckpointManifest, Position
from stoker.records.codec import JSON
from stoker.stepping import NotFinite, Step
from stoker.store import CheckpointStore, checkpoint_name
from stoker.training.state import Tensors, pack, unpack

_PARTS = ("model", "optimizer", "average", "generators")


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: where training was, its size, how long training waited and how long writing took [s]."""

    path: Path
    position: Position
    num_bytes: int
    blocked_s: float
    write_s: float
    best: bool


@dataclass(frozen=True)
class _Snapshot:
    """A state between two updates, copied: each part as `pack` made it, and the names of the trained weights."""

    skeletons: dict[str, JSON]
    parts: dict[str, Tensors]
    trained: tuple[str, ...]


class Checkpointer:
    """Writes a run's checkpoints, one at a time, in a thread of its own."""

    def __init__(self, store: CheckpointStore, *, spec_digest: str, version: str) -> None:
        self._store = store
        self._spec_digest = spec_digest
        self._version = version
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stoker-checkpoint")
        self._pending: Future[Written] | None = None

    def save(self, step: Step, position: Position, progress: dict[str, JSON], *, best: bool) -> list[Written]:
        """Copy the state and start writing it; `progress` is kept with it. Returns what was finished meanwhile.

        Raises:
            RunFailed: an earlier checkpoint could not be written, or a weight is not finite.
        """
        started = time.perf_counter()
        finished = self.collect(wait=True)
        snapshot = _snapshot(step, progress)
        blocked_s = time.perf_counter() - started
        self._pending = self._writer.submit(self._write, snapshot, position, blocked_s, best=best)
        return finished

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk."""
        pending = self._pending
        return pending is not None and not pending.done()

    def collect(self, *, wait: bool = False) -> list[Written]:
        """The checkpoint that was being written, once it is on disk; raises what its writing raised."""
        if self._pending is None or not (wait or self._pending.done()):
            return []
        try:
            return [self._pending.result()]
        finally:
            self._pending = None

    def close(self) -> list[Written]:
        """Wait for the last checkpoint."""
        try:
            return self.collect(wait=True)
        finally:
            self._writer.shutdown()

    def _write(self, snapshot: _Snapshot, position: Position, blocked_s: float, *, best: bool) -> Written:
        started = time.perf_counter()
        _check_finite(snapshot, position)

        def files(folder: Path) -> None:
            for name, tensors in snapshot.parts.items():
                contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
                safetensors.torch.save_file(contiguous, folder / f"{name}.safetensors")

        path = self._store.write(
            checkpoint_name(position),
            files,
            lambda digests: CheckpointManifest(
                spec_digest=self._spec_digest,
                position=position,
                stoker_version=self._version,
                torch_version=torch.__version__,
                files=digests,
                skeleton=snapshot.skeletons,
            ),
        )
        if best:
            self._store.mark_best(path.name)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return Written(path, position, num_bytes, blocked_s, time.perf_counter() - started, best)


def restore(step: Step, path: Path, manifest: CheckpointManifest) -> dict[str, JSON]:
    """Put the checkpoint's state into `step`, in place; returns the progress that was kept with it.

    An average that the checkpoint lacks begins at its weights.

    Raises:
        BadRun: the checkpoint is of another model or optimiser.
    """
    trees = {name: unpack(manifest.skeleton[name], _read(path / f"{name}.safetensors"))
             for name in _PARTS if name in manifest.skeleton}  # fmt: skip
    load_weights(step.model, trees["model"], path)
    try:
        _load_optimizer(step, trees["optimizer"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadRun(f"{path} does not fit this job's optimiser: {error}",
                     remedy="Was the optimiser changed? --new starts anew.") from error  # fmt: skip
    if step.average is not None:
        step.average.load(trees.get("average", trees["model"]))
    restore_generators(trees["generators"])
    progress: dict[str, JSON] = unpack(manifest.skeleton["progress"], {})
    return progress


def model_weights(path: Path, manifest: CheckpointManifest) -> Tensors:
    """The model's weights in a checkpoint, as they were trained on."""
    weights: Tensors = unpack(manifest.skeleton["model"], _read(path / "model.safetensors"))
    return weights


def kept_weights(path: Path, manifest: CheckpointManifest) -> Tensors:
    """The weights of a checkpoint worth keeping: the average's if there is one."""
    part = "average" if "average" in manifest.skeleton else "model"
    weights: Tensors = unpack(manifest.skeleton[part], _read(path / f"{part}.safetensors"))
    return weights


def load_weights(model: torch.nn.Module, weights: Tensors, source: Path) -> None:
    """Copy weights into a model of the same architecture.

    Raises:
        BadRun: names or shapes differ; the first differences are named.
    """
    here = model.state_dict()
    differing = [f"{name} is {_shape(here.get(name))} in the model, {_shape(weights.get(name))} in the file"
                 for name in dict.fromkeys([*here, *weights])
                 if _shape(here.get(name)) != _shape(weights.get(name))]  # fmt: skip
    if differing:
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise BadRun(f"{source} holds another model: {'; '.join(differing[:3])}{more}")
    model.load_state_dict(weights)


def _load_optimizer(step: Step, saved: dict[str, Any]) -> None:
    """Take over an optimiser's state; the settings of Stoker's own optimisers stay those of the job and the plan."""
    optimizer = step.optimizer
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    if isinstance(step.job.optimizer, Optimizer):
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
    # PyTorch turned state of another dtype than its parameter's into that; here it is put back as it was.
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device)


def _snapshot(step: Step, progress: dict[str, JSON]) -> _Snapshot:
    trees: dict[str, Any] = {"model": dict(step.model.state_dict()), "optimizer": step.optimizer.state_dict()}
    if step.average is not None:
        trees["average"] = step.average.weights
    trees["generators"] = generator_states()
    packed = {name: pack(tree, name) for name, tree in trees.items()}
    skeletons = {name: skeleton for name, (skeleton, _) in packed.items()}
    return _Snapshot(
        skeletons={**skeletons, "progress": pack(progress, "progress")[0]},
        parts={name: tensors for name, (_, tensors) in packed.items()},
        trained=tuple(name for name, parameter in step.model.named_parameters() if parameter.requires_grad),
    )


def _check_finite(snapshot: _Snapshot, position: Position) -> None:
    """Refuse weights that training broke; a buffer may well hold an infinity, such as a mask of attention."""
    tensors = snapshot.parts["model"]
    for name in snapshot.trained:
        tensor = tensors.get(f"model.{name}")  # absent where it is another one, stored under that one's name
        if tensor is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise NotFinite(
                f"{name} is not finite after {position.samples} samples; the checkpoint was not written",
                remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
            )


def _read(path: Path) -> Tensors:
    """The tensors of a file, each in memory that PyTorch allocated.

    As they are read they lie at any address; kernels add in another order there, which showed as other bits in L-BFGS.
    """
    try:
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise BadRun(f"{path} cannot be read: {error}") from error


def _shape(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
