"""Commitments to a run: the state after each block as a link of a hash chain, and what makes it checkable.

What: a *block* is the stretch between two checkpoints that a run saves. Its *state* is all that the next update is
computed from: weights, optimiser, average, generators, plain values, how far data were read, what evaluations decided,
and the position. An agent that states `chain_head(before, state)` after each block cannot change later what it claims,
and whoever has the two checkpoints can make the block again and compare (`replay_check.py`).
Costs: the checkpoints are hashed as they are written anyway; a link is 200 bytes in the log.

Times are no part of a state (`_VOLATILE`): they differ between two equal runs. Which evaluation was the best is not
either: it decides nothing that is trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadRun
from stoker.pool.blob_tree import GetBlob, PutBlob, TreeIndex, TreeLimits, put_folder, put_index, write_tree
from stoker.records import CheckpointManifest
from stoker.records.codec import digest
from stoker.store import CheckpointStore
from stoker.store.checkpoint_store import MANIFEST, manifest_from
from stoker.store.foreign_files import read_below

_VOLATILE = frozenset({"wall_s", "save_every_s", "save_s", "best"})
_MOST_MANIFEST_BYTES = 64 << 20

RECORDS = ("run.json", "spec.json", "plan.json", "plans.jsonl", "environment.json", "device.json", "coupling.json")
"""What a run is continued, or replayed, from besides a checkpoint."""

LOG = "events.jsonl"

GENESIS = hashlib.sha256(b"stoker run").hexdigest()
"""The head of a chain without blocks."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that was committed: the body of the event `committed`, but for the lease.

    Attributes:
        block: its number, from 1.
        update: number of updates at its end [updates].
        state: head of the chain after it (hex).
        blob: SHA-256 of the index of its checkpoint, with the records of the run at its end (hex).
        previous: head of the chain before it (hex).
    """

    block: int
    update: int
    state: str
    blob: str
    previous: str


def state_digest(manifest: CheckpointManifest) -> str:
    """SHA-256 (hex) of the state that a checkpoint holds; equal for two runs that are equal bit for bit.

    The digests of its files are taken from the manifest: whoever relies on them has checked the files.
    """
    skeleton = dict(manifest.skeleton)
    progress = skeleton.pop("progress", None)
    return digest({
        "spec": manifest.spec_digest,
        "position": manifest.position,
        "files": {file.name: file.sha256 for file in manifest.files},
        "skeleton": skeleton,
        "progress": [] if progress is None else [item for item in progress["of"] if item[0] not in _VOLATILE],
    })  # fmt: skip


def chain_head(previous: str, update: int, state: str) -> str:
    """The head of the chain after a block (hex)."""
    return hashlib.sha256(f"{previous} {update} {state}".encode()).hexdigest()


def keep_block(
    run: Path, checkpoint: str, number: int, previous: str, *, put: PutBlob, limits: TreeLimits, aside: Path
) -> Block:
    """Store a checkpoint of a run that somebody else writes, with the run's records, and return the block.

    Args:
        run: the run's directory.
        checkpoint: name of the checkpoint.
        number: of the block, from 1.
        previous: head of the chain before it.
        put: stores blobs.
        limits: the most that is stored.
        aside: folder for copies.

    Raises:
        BadRun: the checkpoint is not whole, or larger than the limits.
    """
    manifest = _manifest_in(run, f"checkpoints/{checkpoint}/{MANIFEST}")
    files = [f"checkpoints/{checkpoint}/{file.name}" for file in manifest.files]
    names = [*RECORDS, LOG, f"checkpoints/{checkpoint}/{MANIFEST}", *files]
    index = put_folder(run, names, put, limits, aside)
    stored = {entry.path: entry.sha256 for entry in index.entries}
    for file in manifest.files:
        if stored.get(f"checkpoints/{checkpoint}/{file.name}") != file.sha256:
            raise BadRun(f"checkpoint {checkpoint} is not whole: {file.name} is not what its manifest says")
    update = manifest.position.updates
    head = chain_head(previous, update, state_digest(manifest))
    return Block(block=number, update=update, state=head, blob=put_index(index, put), previous=previous)


def _manifest_in(run: Path, name: str) -> CheckpointManifest:
    text = read_below(run, name, _MOST_MANIFEST_BYTES)
    if text is None:
        raise BadRun(f"{name} is not there any more")
    try:
        return manifest_from(text)
    except ValueError as problem:
        raise BadRun(f"{name} cannot be read: {problem}") from problem


def restore_block(index: TreeIndex, into: Path, get: GetBlob, limits: TreeLimits) -> CheckpointManifest:
    """Write what a block keeps as the run's directory `into`; the manifest of its checkpoint, whose files are checked.

    Raises:
        BadRun: the block is no checkpoint of a run.
    """
    write_tree(index, into, get, limits)
    found = CheckpointStore(into / "checkpoints").newest()
    if found is None:
        raise BadRun("the block holds no checkpoint")
    return found[1]
