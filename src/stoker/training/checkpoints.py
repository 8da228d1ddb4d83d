"""Checkpoints of a run: copied between two updates, written in the background, restored exactly.

Each of several processes writes its share (`stoker.training.snapshots`), and rank 0 completes the checkpoint once all
shares are durable. The next save, and the end, agree on whether writing failed. A checkpoint is restored into a step in
any layout, whichever processes wrote it.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from stoker.errors import RunFailed, StokerError
from stoker.jobs.run_length import Extent
from stoker.records import CheckpointManifest, Position
from stoker.records.codec import JSON
from stoker.stepping.python_state import own_values
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.store import CheckpointStore, Draft, checkpoint_name, make_directories, write_atomic
from stoker.training.named_state import Tensors, rebuilt, unpack
from stoker.training.rank_messages import (
    RankMailbox,
    becomes_visible,
    decode_error,
    encode_error,
    gather_from_ranks,
    process_group_store,
    raise_first_error,
    raise_on_all_ranks,
    require_seen_by_each_rank,
)
from stoker.training.sharded_tensors import opened, whole_from
from stoker.training.snapshots import (
    SHARED,
    CheckpointShare,
    merged,
    prefix_in,
    put_back,
    restore_outer,
    share_of,
    weights_part,
)

GRACE_S = 0.5
"""How long rank 0 waits for the other shares of a checkpoint once training has failed [s]."""
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: its position, size [bytes], and how long it blocked training and took to write [s]."""

    path: Path
    position: Position
    num_bytes: int
    blocked_s: float
    write_s: float
    best: bool


@dataclass(frozen=True)
class _Order:
    """A checkpoint for the writing thread."""

    share: CheckpointShare
    world: World
    position: Position
    started: float
    blocked_s: float
    best: bool
    kept: dict[str, JSON] | None


class Checkpointer:
    """Writes a run's checkpoints, one at a time, in a thread of its own.

    Every process has one, and all save after the same updates; the one of rank 0 returns what was written.
    """

    def __init__(self, store: CheckpointStore, *, spec_digest: str, version: str, kept_in: Path | None = None) -> None:
        self._store = store
        self._kept_in = kept_in
        self._spec_digest = spec_digest
        self._version = version
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stoker-checkpoint")
        self._pending: Future[Written | None] | None = None
        self._world = ALONE
        self._waits_until = float("inf")

    def save(
        self,
        step: Step,
        position: Position,
        progress: dict[str, JSON],
        *,
        best: bool,
        kept: dict[str, JSON] | None = None,
    ) -> list[Written]:
        """Copy the state and start writing it, with `progress`; returns the checkpoints finished since the last call.

        With `kept` (see `kept_at`) the weights are also written to a file of their own that stays.

        Raises:
            RunFailed: an earlier checkpoint could not be written, or a weight is not finite.
            BadRun: the processes do not see one directory.
        """
        started = time.perf_counter()
        self._world = step.world
        finished = self.collect(wait=True)
        if self._is_alone:
            share = share_of(step, progress)
            order = _Order(share, ALONE, position, started, time.perf_counter() - started, best, kept)
            self._pending = self._writer.submit(self._write, order)
        else:
            draft, share = self._begin(step, position, progress)
            order = _Order(share, step.world, position, started, time.perf_counter() - started, best, kept)
            mailbox = RankMailbox(process_group_store(), draft.aside.name, share.size)
            self._pending = self._writer.submit(self._write_share, order, draft, mailbox)
        return finished

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        pending = self._pending
        return pending is not None and not pending.done()

    def collect(self, *, wait: bool = False) -> list[Written]:
        """The checkpoint that was being written, once it is on disk; raises the error of its writing.

        All processes have to wait, or none. Errors are raised only by those that wait, in every process.
        """
        if not self._is_alone and wait:
            return self._collect_together()
        pending = self._pending
        if pending is None or not (wait or pending.done()):
            return []
        if not self._is_alone and pending.exception() is not None:
            return []  # the other processes have to learn of it first
        self._pending = None
        return _finished(pending)

    def close(self) -> list[Written]:
        """Wait for the last checkpoint."""
        try:
            return self.collect(wait=True)
        finally:
            self._writer.shutdown()

    def abandon(self, grace_s: float = GRACE_S) -> list[Written]:
        """Close without the other processes, which may be lost, and without raising anything.

        A checkpoint that is being written is completed if all shares arrive within `grace_s` [s]; else the one before
        it stays the last. A process alone waits until it is written.
        """
        pending, self._pending = self._pending, None
        self._waits_until = time.monotonic() + grace_s
        self._writer.shutdown(wait=self._is_alone)
        if pending is None:
            return []
        concurrent.futures.wait([pending], timeout=None if self._is_alone else 2 * grace_s)
        is_written = pending.done() and pending.exception() is None
        return _finished(pending) if is_written else []

    @property
    def _is_alone(self) -> bool:
        return self._world.layout.world_size == 1

    def _write(self, order: _Order) -> Written:
        """Write the checkpoint of a process alone."""
        started = time.perf_counter()
        order.share.require_finite(order.position)

        def files(folder: Path) -> None:
            order.share.write(folder)

        path = self._store.write(
            checkpoint_name(order.position),
            files,
            lambda digests: self._manifest(order, [order.share.letter(digests)]),
        )
        return self._done(order, path, started)

    def _begin(self, step: Step, position: Position, progress: dict[str, JSON]) -> tuple[Draft, CheckpointShare]:
        """Make the directory that all processes write to, and copy this process's share.

        Raises:
            StokerError: one of the processes failed; raised in all of them.
        """
        world, draft, share, problem = step.world, None, None, None
        if world.is_first:
            try:
                draft = self._store.begin(checkpoint_name(position))
            except StokerError as error:
                problem = encode_error(error)
        names = None if draft is None else (draft.target.name, draft.aside.name)
        answers = gather_from_ranks(world, (names, problem))
        raise_first_error([error for _, error in answers])
        draft = Draft(*(self._store.directory / name for name in answers[0][0]))
        try:
            try:
                share = share_of(step, progress)
            except StokerError as error:
                problem = encode_error(error)
            answers = gather_from_ranks(world, (becomes_visible(draft.aside), problem))
            require_seen_by_each_rank(self._store.directory, [sees for sees, _ in answers])
            raise_first_error([error for _, error in answers])
        except BaseException:
            if world.is_first:
                self._store.discard(draft)
            raise
        assert share is not None
        return draft, share

    def _write_share(self, order: _Order, draft: Draft, mailbox: RankMailbox) -> Written | None:
        """Write this process's share; rank 0 completes the checkpoint once all shares are written."""
        started = time.perf_counter()
        try:
            order.share.require_finite(order.position)
            files = self._store.seal(draft, order.share.write)
        except Exception as error:
            kind, message, remedy = encode_error(_as_stoker_error(error))
            problem = kind, f"{message} (process {order.share.rank})", remedy
            mailbox.post(order.share.rank, {"problem": problem})
            if order.world.is_first:
                self._store.discard(draft)
            raise decode_error(problem) from error
        mailbox.post(order.share.rank, order.share.letter(files))
        if not order.world.is_first:
            return None
        letters = mailbox.letters(lambda: time.monotonic() > self._waits_until, lambda letter: "problem" in letter)
        problems = [letter["problem"] for letter in letters or [] if "problem" in letter]
        if problems or letters is None:
            self._store.discard(draft)
        if problems:
            raise decode_error(problems[0])
        if letters is None:
            raise RunFailed(
                f"checkpoint {draft.target.name} was given up: not every process wrote its share",
                remedy="The last checkpoint is intact.",
            )
        return self._done(order, self._store.complete(draft, self._manifest(order, letters)), started)

    def _manifest(self, order: _Order, letters: list[JSON]) -> CheckpointManifest:
        layout = order.world.layout
        whole = merged(letters)
        if layout.world_size == 1:
            del whole["tensors"]  # the headers of the files have them
        return CheckpointManifest(
            spec_digest=self._spec_digest,
            position=order.position,
            stoker_version=self._version,
            torch_version=torch.__version__,
            layout=layout,
            **whole,
        )

    def _done(self, order: _Order, path: Path, started: float) -> Written:
        if order.best:
            self._store.mark_best(path.name)
        if order.kept is not None and self._kept_in is not None:
            keep_weights(self._kept_in, *self._store.named(path.name), order.kept)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return Written(path, order.position, num_bytes, order.blocked_s, time.perf_counter() - started, order.best)

    def _collect_together(self) -> list[Written]:
        """Wait until all processes have written; an error of one is raised by all.

        The processes exchange their states at short intervals, so that a lost one is noticed.
        """
        pending = self._pending
        while True:
            if pending is not None:
                concurrent.futures.wait([pending], timeout=_LOOK_EVERY_S)
            is_done = pending is None or pending.done()
            error = pending.exception() if pending is not None and is_done else None
            encoded = None if error is None else encode_error(_as_stoker_error(error))
            answers = gather_from_ranks(self._world, (is_done, encoded))
            if all(done for done, _ in answers):
                break
        self._pending = None
        raise_first_error([problem for _, problem in answers], error)
        return [] if pending is None else _finished(pending)


KEPT_AT = "stoker"
"""The one metadata entry of a file of weights; the order of several entries would not be fixed. Of kept weights it has
their position; of any, under `PYTHON`, the plain Python values that training changed in the model."""
PYTHON = "python"


def kept_at(extent: Extent, position: Position) -> dict[str, JSON]:
    """The position of weights, as it is written into their file.

    `since_…` is the end of the update before: these are the first weights for every point in between.
    """
    before = extent.position(position.updates - 1)
    return {
        "updates": position.updates,
        "samples": position.samples,
        "since_samples": before.samples,
        "epochs": position.epoch + position.cursor / extent.num_train,
        "since_epochs": before.epoch + before.cursor / extent.num_train,
    }


def keep_weights(folder: Path, checkpoint: Path, manifest: CheckpointManifest, kept: dict[str, JSON]) -> Path:
    """Write a checkpoint's weights worth keeping to a file in `folder`, durably; returns its path.

    Raises:
        RunFailed: it cannot be written; earlier files are intact.
    """
    weights = {name: tensor.contiguous().clone() for name, tensor in kept_weights(checkpoint, manifest).items()}
    path = kept_path(folder, manifest.position)
    make_directories(folder)
    metadata = weights_metadata(kept, manifest.skeleton.get("python", {}))
    write_atomic(path, safetensors.torch.save(weights, metadata=metadata), what="the weights that are kept")
    return path


def weights_metadata(kept: dict[str, JSON], python: Mapping[str, JSON]) -> dict[str, str] | None:
    """The metadata of a file of weights: their position, if they were kept, and the model's `Step.python_changes`."""
    own = own_values(python)
    entry = {**kept, **({PYTHON: own} if own else {})}
    return {KEPT_AT: json.dumps(entry)} if entry else None


def kept_path(folder: Path, position: Position) -> Path:
    """The file of the weights of `position`."""
    return folder / f"{checkpoint_name(position)}.safetensors"


def _finished(pending: Future[Written | None]) -> list[Written]:
    written = pending.result()
    return [] if written is None else [written]


def _as_stoker_error(error: BaseException) -> StokerError:
    """The error in a form that other processes can receive."""
    if isinstance(error, StokerError):
        return error
    return RunFailed(f"a checkpoint could not be written: {type(error).__name__}: {error}")


def newest_together(world: World, store: CheckpointStore) -> tuple[Path, CheckpointManifest] | None:
    """The newest usable checkpoint, found by rank 0 for all; every process calls this.

    Raises:
        BadRun: none of the checkpoints is usable, or not every process sees it; raised in all of them.
    """
    newest, problem = None, None
    if world.is_first:
        try:
            newest = store.newest()
        except StokerError as error:
            problem = error
    name = gather_from_ranks(world, None if newest is None else newest[0].name)[0]
    raise_on_all_ranks(world, problem)
    if name is None:
        return None
    try:
        if not world.is_first:
            becomes_visible(store.directory / name)
            newest = store.named(name)
    except StokerError as error:
        problem = error
    raise_on_all_ranks(world, problem)
    return newest


def restore(step: Step, path: Path, manifest: CheckpointManifest) -> dict[str, JSON]:
    """Put the checkpoint's state into `step`, in place; returns the progress kept with it.

    The layout that wrote it does not matter: each process reads what it holds. An average that the checkpoint lacks
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
    """The trained weights of a checkpoint, whole; of replicas with updates of their own those that they share."""
    return _weights(path, manifest, (SHARED, "model"))


def kept_weights(path: Path, manifest: CheckpointManifest) -> Tensors:
    """The weights of a checkpoint worth keeping, whole: the average's if there is one."""
    return _weights(path, manifest, (SHARED, "average", "model"))


def _weights(path: Path, manifest: CheckpointManifest, parts: tuple[str, ...]) -> Tensors:
    """The weights of the first of these parts that the checkpoint has."""
    part = next(part for part in parts if part in manifest.skeleton)
    with opened(path, manifest) as source:
        weights: Tensors = rebuilt(manifest.skeleton[part], whole_from(source))
    return weights
