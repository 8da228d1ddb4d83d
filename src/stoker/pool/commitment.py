"""Commitments to a run: the state after each block as a link of a hash chain, and what makes it checkable.

What: a *block* is the stretch between two checkpoints that a run saves. Its *state* is all that the next update is
computed from: weights, optimiser, average, generators, plain values, how far data were read, what evaluations decided,
and the position. An agent that states `chain_head(before, state)` after each block cannot change later what it claims,
and anyone with the two checkpoints can replay the block and compare (`replay_check.py`).
Costs: the checkpoints are hashed as they are written anyway; a link is 200 bytes in the log.

Times are no part of a state (`CheckpointManifest.state_digest`): they differ between two equal runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadRun
from stoker.pool.blob_tree import TreeLimits, pack_folder, same_files
from stoker.pool.sealing import seal
from stoker.records import CheckpointManifest
from stoker.store.checkpoint_store import MANIFEST, manifest_from
from stoker.store.foreign_files import read_below
from stoker.store.run_files import COUPLING, DEVICE, ENVIRONMENT, EVENTS, PLAN, RUN, SPEC, SWITCHES

_MOST_MANIFEST_BYTES = 64 << 20

RECORDS = (SWITCHES, *(file.name for file in (RUN, SPEC, PLAN, ENVIRONMENT, DEVICE, COUPLING)))
"""What a run is continued, or replayed, from besides a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that was committed: the body of the event `committed`, but for the lease.

    Attributes:
        block: its number in the lease, from 0.
        update: number of updates at its end [updates].
        state: head of the chain after it (hex).
        blob: SHA-256 of the tree of its checkpoint, with the records of the run at its end (hex).
        previous: head of the chain before it (hex); "" at the beginning of a run.
        seal: key of the blob's file (`sealing`, hex); "": it is not encrypted.
    """

    block: int
    update: int
    state: str
    blob: str
    previous: str
    seal: str = ""


def chain_head(previous: str, update: int, state: str) -> str:
    """The head of the chain after a block (hex)."""
    return hashlib.sha256(f"{previous} {update} {state}".encode()).hexdigest()


def keep_block(
    run: Path,
    checkpoint: str,
    number: int,
    previous: str,
    *,
    put: Callable[[Path], str],
    limits: TreeLimits,
    aside: Path,
    is_sealed: bool = False,
) -> Block:
    """Store a checkpoint of a run that another process writes, with the run's records, and return the block.

    Args:
        run: the run's directory.
        checkpoint: name of the checkpoint.
        number: of the block, from 0.
        previous: head of the chain before it.
        put: stores a file as a blob; its SHA-256.
        limits: the most that is stored.
        aside: folder for copies.
        is_sealed: whether the blob can be read only with the block's `seal`.

    Raises:
        BadRun: the checkpoint is not whole, or larger than the limits.
    """
    below = f"checkpoints/{checkpoint}"
    manifest = _manifest_in(run, f"{below}/{MANIFEST}")
    names = [*RECORDS, EVENTS, f"{below}/{MANIFEST}", *(f"{below}/{file.name}" for file in manifest.files)]
    copy = aside / f"block-{number}"
    try:
        index = pack_folder(run, names, copy, limits)
        if name := same_files(index, {file.name: file.sha256 for file in manifest.files}, below):
            raise BadRun(f"checkpoint {checkpoint} is not whole: {name} is not what its manifest says")
        update = manifest.position.updates
        head = chain_head(previous, update, manifest.state_digest())
        key = seal(copy) if is_sealed else ""
        return Block(block=number, update=update, state=head, blob=put(copy), previous=previous, seal=key)
    finally:
        copy.unlink(missing_ok=True)


def _manifest_in(run: Path, name: str) -> CheckpointManifest:
    text = read_below(run, name, _MOST_MANIFEST_BYTES)
    if text is None:
        raise BadRun(f"{name} is not there any more")
    try:
        return manifest_from(text)
    except ValueError as problem:
        raise BadRun(f"{name} cannot be read: {problem}") from problem
