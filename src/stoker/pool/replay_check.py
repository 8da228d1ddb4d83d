"""Whether a block of a run was made as claimed: it is made again, in isolation, and the states are compared.

What: the block's start is restored from the commitment before it, the updates are made again from the order's code and
data under the run's schedule of plans, and the state at the end is compared with the one that was committed.

- In one determinism class (device model, versions, threads, flags): bit for bit. A difference is a proof.
- Across classes, by the relative difference of the update, |claimed - made| / |made - start| over all weights, with
  thresholds that were measured (`TOLERANCES`): in fp32 below 1e-3 for at most 40 updates; in bf16 only single updates,
  since over several honest noise (4.7e-2) exceeds the smallest cheat (a skipped update of 40: 2.2e-2). Cases
  outside of the table are not decided.

A cheat smaller than the tolerance stays unseen across classes; in one class there is no tolerance.

A difference is narrowed down to one update: both sides give the states after each (`trace`), and `first_difference`
names the first that differs; a third agent makes that update alone.

Costs: the time of the block, and the start of a process. Source: the table of measurements in docs/pool-owners.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from stoker.errors import BadRun, PlaceFailed
from stoker.pool.blob_tree import TreeLimits, unpack
from stoker.pool.commitment import RECORDS, Block, chain_head
from stoker.pool.isolation import Host, remove_tree
from stoker.pool.job_box import JobBox
from stoker.records import CheckpointManifest, Plan, from_json
from stoker.records.codec import parsed
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.foreign_files import open_below

TOLERANCES: dict[str, tuple[float, int]] = {
    "fp32": (1e-3, 40),
    "fp64": (1e-3, 40),
    "bf16": (1e-1, 1),
    "tf32": (1e-1, 1),
}
"""Largest relative difference of an honest update across classes [1], and the most updates measured.

fp32: honest at most 5.5e-5 over 40 updates, the smallest cheat 2.2e-2. bf16: honest at most 2.2e-2 for one update, and
a skipped or half one differs by 0.4 and more.
"""


@dataclass(frozen=True, kw_only=True)
class ReplayVerdict:
    """What a replay says of a block.

    Attributes:
        equal: True, False, or None where it cannot be decided here.
        why: in a sentence, with the numbers.
        trace: digests of the states after each update, where they were asked for.
        made: digest of the state that the replay came to, where bits were compared.
    """

    equal: bool | None
    why: str
    trace: tuple[str, ...] = ()
    made: str = ""


def check_block(
    box: JobBox,
    before: Block | None,
    block: Block,
    *,
    fetch: Callable[[str], Path],
    host: Host,
    is_same_class: bool,
    trace: bool = False,
) -> ReplayVerdict:
    """Make a block again and compare.

    Args:
        box: of the order.
        before: the block before, or the one that the order goes on from; None at the beginning of the run.
        block: what was committed.
        fetch: the file with a blob.
        host: where it is made.
        is_same_class: whether this machine is of the determinism class in which it was made.
        trace: note the state after each update.

    Raises:
        PlaceFailed: it could not be made here, for a reason that says nothing about the block.
    """
    taken = TreeLimits(num_bytes=2 * host.limits.disk_bytes)
    folder = box.aside / f"check-{block.block}"
    remove_tree(folder)
    folder.mkdir(parents=True)
    try:
        try:
            claimed = _claimed(block, folder / "claimed", fetch, taken, is_same_class=is_same_class)
            start = None
            if before is not None:
                start = _claimed(before, folder / "start", fetch, taken, is_same_class=is_same_class)
        except BadRun as problem:
            return ReplayVerdict(equal=False, why=f"what was committed cannot be used: {problem.message}")
        if sentence := _chain_problem(before, block, claimed):
            return ReplayVerdict(equal=False, why=sentence)
        run = _start_of(folder, None if start is None else start[0])
        program = box.replay(run, block.update, host, each=trace)
        code, out, err = host.run(program)
        answer = _answer_in(out)
        if answer.get("kind") == "NotTheRun":
            return ReplayVerdict(equal=False, why=f"the block cannot be made: {answer['problem']}")
        if code != 0 or "manifest" not in answer:
            said = answer.get("problem") or " ".join(err.decode(errors="replace").strip().splitlines()[-2:])
            raise PlaceFailed(f"the replay ended with exit code {code}: {said}")
        try:
            manifest = from_json(answer["manifest"], CheckpointManifest)
            states = tuple(map(str, answer["states"]))
        except (ValueError, KeyError, TypeError) as problem:
            raise PlaceFailed(f"the replay gave an answer that cannot be read: {problem}") from problem
        if manifest.position.updates != block.update:
            raise PlaceFailed("the replay left no checkpoint at the end of the block")
        plans = _plans_of(folder / "claimed")
        num_updates = block.update - (0 if before is None else before.update)
        made = _Made(manifest, run, folder / "made.safetensors", host.limits.disk_bytes)
        verdict = _compare(claimed, made, start, plans, num_updates, is_same_class=is_same_class)
        return replace(verdict, trace=states if trace else (), made=manifest.state_digest() if is_same_class else "")
    finally:
        remove_tree(folder)


def _answer_in(out: bytes) -> dict[str, Any]:
    """What a replay printed last, which the job may have printed in its place; {} if it is no object of JSON."""
    with suppress(ValueError, IndexError):
        answer = parsed(out.strip().splitlines()[-1])
        return answer if isinstance(answer, dict) else {}
    return {}


def first_difference(claimed: Sequence[str], made: Sequence[str]) -> int | None:
    """Index of the first state that differs in two traces of one block; None if none does.

    >>> first_difference(["a", "b", "c"], ["a", "x", "y"]), first_difference(["a"], ["a"])
    (1, None)
    """
    for index, (one, other) in enumerate(zip(claimed, made, strict=False)):
        if one != other:
            return index
    return None if len(claimed) == len(made) else min(len(claimed), len(made))


WEIGHTS = "model.safetensors"

_Checkpoint = tuple[Path, CheckpointManifest]


@dataclass(frozen=True)
class _Made:
    """What a replay made, in a directory that the job could write to: files are copied before they are read."""

    manifest: CheckpointManifest
    run: Path
    copy: Path
    most_bytes: int

    def weights(self) -> Path:
        """The weights, copied out without following a link.

        Raises:
            ValueError: they are not there.
        """
        stores = CheckpointStore(self.run / "checkpoints").names()
        try:
            descriptor = open_below(self.run, f"checkpoints/{stores[-1] if stores else ''}/{WEIGHTS}")
        except OSError as problem:
            raise ValueError(f"the replay left no weights: {problem.strerror}") from problem
        with os.fdopen(descriptor, "rb") as found, self.copy.open("wb") as copy:
            if os.fstat(descriptor).st_size > self.most_bytes:
                raise ValueError("the replay left more weights than may be on the disk")
            shutil.copyfileobj(found, copy)
        return self.copy


def _claimed(
    block: Block, into: Path, fetch: Callable[[str], Path], limits: TreeLimits, *, is_same_class: bool
) -> _Checkpoint:
    """A checkpoint that was committed.

    Raises:
        BadRun: it is none, by its own digests.
        PlaceFailed: it is too large for this machine, or of a version that this one may not read.
    """
    path = fetch(block.blob)
    if (size := path.stat().st_size) > limits.num_bytes:
        raise PlaceFailed(f"block {block.block} has {size:,} bytes, and at most {limits.num_bytes:,} are taken here")
    unpack(path, into, limits)
    try:
        found = CheckpointStore(into / "checkpoints").newest()
    except BadRun as problem:
        if is_same_class:  # with the same versions
            raise
        raise PlaceFailed(f"the checkpoint of block {block.block} cannot be read here: {problem.message}") from problem
    if found is None:
        raise BadRun("there is no checkpoint in it")
    return found


def _chain_problem(before: Block | None, block: Block, claimed: _Checkpoint) -> str:
    """What is wrong with the links themselves, as a sentence; "" for nothing."""
    manifest = claimed[1]
    if manifest.position.updates != block.update:
        return f"update {block.update:,} was committed, and the checkpoint is of update {manifest.position.updates:,}"
    if before is not None and before.update >= block.update:
        return f"update {block.update:,} comes after update {before.update:,}"
    if before is not None and block.previous != before.state:
        return "the link does not follow the one before"
    if block.state != chain_head(block.previous, block.update, manifest.state_digest()):
        return "the state that was committed is not the one of its checkpoint"
    return ""


def _start_of(folder: Path, start: Path | None) -> Path:
    """The run's directory as it was at the start of the block, with the records that it had at the end."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in RECORDS:
        if (folder / "claimed" / name).exists():
            shutil.copyfile(folder / "claimed" / name, run / name)
    if start is not None:
        shutil.copytree(start, run / "checkpoints" / start.name)
    return run


def _plans_of(folder: Path) -> list[Plan]:
    schedule = RunDirectory(folder).read_schedule()
    return [] if schedule is None else [schedule.began, *(switch.plan for switch in schedule.switches)]


def _compare(
    claimed: _Checkpoint,
    made: _Made,
    start: _Checkpoint | None,
    plans: Sequence[Plan],
    num_updates: int,
    *,
    is_same_class: bool,
) -> ReplayVerdict:
    """Compare the state that was claimed with the one that was made."""
    updates = f"{num_updates:,} update{'' if num_updates == 1 else 's'}"
    if claimed[1].state_digest() == made.manifest.state_digest():
        return ReplayVerdict(equal=True, why=f"{updates} made again, equal bit for bit")
    if is_same_class:
        names = _differing_files(claimed[1], made.manifest)
        return ReplayVerdict(equal=False, why=f"{updates} made again in the same class differ in {names}")
    precisions = {plan.precision for plan in plans} or {"fp32"}
    loosest = max(precisions, key=lambda precision: TOLERANCES.get(precision, (1.0, 0))[0])
    tolerance, most = TOLERANCES.get(loosest, (0.0, 0))
    if num_updates > most or start is None:
        why = f"the first {updates}" if start is None else updates
        return ReplayVerdict(
            equal=None, why=f"{why} in {loosest} in another class cannot be decided: at most {most} can"
        )
    try:
        made_weights = made.weights()
    except ValueError as problem:
        raise PlaceFailed(str(problem)) from problem
    try:
        difference = update_difference(start[0] / WEIGHTS, claimed[0] / WEIGHTS, made_weights)
    except (SafetensorError, ValueError, TypeError) as problem:
        return ReplayVerdict(equal=False, why=f"the weights that were claimed cannot be compared: {problem}")
    words = f"relative difference {difference:.2g} of {updates} in {loosest}, tolerance {tolerance:g}"
    return ReplayVerdict(equal=difference <= tolerance, why=words)


def _differing_files(one: CheckpointManifest, other: CheckpointManifest) -> str:
    mine, theirs = ({file.name: file.sha256 for file in manifest.files} for manifest in (one, other))
    names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    return ", ".join(names) or "values that are no tensors"


def update_difference(start: Path, claimed: Path, made: Path) -> float:
    """|claimed - made| / |made - start| over all floating weights of three files of one model's weights [1].

    Raises:
        ValueError: the checkpoints are of different models.
    """
    off = moved = 0.0
    with safe_open(start, "numpy") as before, safe_open(claimed, "numpy") as theirs, safe_open(made, "numpy") as ours:
        if set(theirs.keys()) != set(ours.keys()) or set(before.keys()) != set(ours.keys()):
            raise ValueError("they have other tensors")
        for name in ours.keys():  # noqa: SIM118 - no mapping
            a, b, c = (np.asarray(one.get_tensor(name)) for one in (before, theirs, ours))
            if not (a.shape == b.shape == c.shape):
                raise ValueError(f"{name} has another shape")
            if np.issubdtype(c.dtype, np.floating):
                a, b, c = (one.astype(np.float64) for one in (a, b, c))
                off += float(np.sum((b - c) ** 2))
                moved += float(np.sum((c - a) ** 2))
    if not np.isfinite(off):
        return float("inf")
    return float(np.sqrt(off / moved)) if moved else (0.0 if off == 0 else float("inf"))
