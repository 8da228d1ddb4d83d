"""Whether a block of a run was made as claimed: it is made again, in isolation, and the states are compared.

What: the block's start is restored from the commitment before it, the updates are made again from the order's code and
data under the run's schedule of plans, and the state at the end is compared with the one that was committed.

- In one determinism class (device model, versions, threads, flags): bit for bit. A difference is a proof.
- Across classes, by the relative difference of the update, |claimed - made| / |made - start| over all weights, with
  thresholds that were measured (`TOLERANCES`): in fp32 2e-2 for at most 40 updates; in bf16 only single updates, since
  over several honest noise (up to 0.11) exceeds the smallest cheat (a skipped update of 40: 2.2e-2). Cases outside of
  the table are not decided.

A cheat smaller than the tolerance stays unseen across classes; in one class there is no tolerance.

A difference is narrowed down to one update: agent and verifier give their states inside the block (`traced_block`),
supply those around the first update on which they differ (`supplied_states`), and an arbiter makes that update alone
(`check_update`): bit for bit in the agent's class, else by the tolerance of a single update, where noise is smallest.

Costs: the time of the block, and the start of a process. Source: the table of measurements in docs/pool-owners.md.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from stoker.errors import BadRun, PlaceFailed
from stoker.pool.bisection import Bisection, Side
from stoker.pool.blob_tree import TreeLimits, pack_folder, same_files, unpack
from stoker.pool.commitment import RECORDS, Block, chain_head
from stoker.pool.events import Refused
from stoker.pool.isolation import Host, remove_tree
from stoker.pool.job_box import JobBox
from stoker.pool.message_carrier import KnownMessage, differing_messages, needed_from, require_signed
from stoker.records import CheckpointManifest, Plan, from_json
from stoker.records.codec import read_object
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.checkpoint_store import MANIFEST
from stoker.store.foreign_files import open_below

TOLERANCES: dict[str, tuple[float, int]] = {
    "fp32": (2e-2, 40),
    "fp64": (2e-2, 40),
    "bf16": (1e-1, 1),
    "tf32": (1e-1, 1),
}
"""Largest relative difference of an honest update across classes [1], and the most updates measured.

fp32: honest at most 1.9e-3 for one update and 6.1e-3 over 40, the smallest cheat 2.2e-2. Nearly all of that noise is in
weights whose true gradient is 0, such as biases of attention's keys: AdamW makes updates of full size of what rounding
leaves there. Without such weights it is 5.5e-5. bf16: honest at most 2.2e-2 for one update, and a skipped or half one
differs by 0.24 and more.
"""


@dataclass(frozen=True, kw_only=True)
class ReplayVerdict:
    """What a replay says of a block, or of one update of it.

    Attributes:
        equal: whether the agent's state is right; None where it cannot be decided here.
        why: in a sentence, with the numbers.
        trace: digests of the states after the updates that were asked for.
        made: digest of the state that the replay came to, where bits were compared.
        begins: updates before the first block of a lease [updates].
    """

    equal: bool | None
    why: str
    trace: tuple[str, ...] = ()
    made: str = ""
    begins: int = 0


class FetchBlob(Protocol):
    """Fetches blobs, as `BlobCache.fetch` does."""

    def __call__(self, sha256: str, /, *, seal: str = "") -> Path:
        """The file with a blob; decrypted with `seal`, where there is one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Making:
    """A block that is made again, and where.

    Attributes:
        box: of the order.
        before: the block before, or the one that the order goes on from; None at the beginning of the run.
        block: what was committed.
        fetch: the file with a blob.
        host: where it is made.
        messages: of a site, all messages of its gang; see `message_carrier`.
        agent: whose block it is: it answers for messages that it sent itself, and not for those of the site's agents
            before.
        is_same_class: whether this machine is of the determinism class in which it was made.
    """

    box: JobBox
    before: Block | None
    block: Block
    fetch: FetchBlob
    host: Host
    messages: tuple[KnownMessage, ...] = ()
    agent: str = ""
    is_same_class: bool = False

    @property
    def begin(self) -> int:
        """Updates before the block [updates]."""
        return 0 if self.before is None else self.before.update

    @property
    def taken(self) -> TreeLimits:
        """The most that is unpacked of a checkpoint."""
        return TreeLimits(num_bytes=2 * self.host.limits.disk_bytes)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder, which is removed after the block."""
        folder = self.box.aside / f"check-{self.block.block}"
        remove_tree(folder)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def run(self, run: Path, until: int, at: Sequence[int] = ()) -> tuple[CheckpointManifest, tuple[str, ...]]:
        """Make updates in a run's directory; the last state, and the digests of those that were asked for.

        Raises:
            NotOfTheJob: the updates cannot come from the order's job, on any machine.
            PlaceFailed: they could not be made here.
        """
        site = self.box.order.site
        exchanges = {one.exchange for one in self.messages if one.site == site and one.update < until}
        others = [one for one in self.messages if one.site != site and one.exchange in exchanges]
        for message in needed_from(others, self.begin):
            path = self.fetch(message.blob)
            try:
                require_signed(path, message)
            except BadRun:  # no job has gone on from it: where this block needs one, the replay says so
                continue
            self.box.write_message(message.name, path, run)
        code, out, err = self.host.run(self.box.replay(run, until, self.host, at=at))
        answer = read_object(out.strip().rpartition(b"\n")[2])  # the job may have printed it in the place of the replay
        if answer.get("kind") == "NotTheRun":
            raise NotOfTheJob(f"the block cannot be made: {answer['problem']}")
        if code != 0 or "manifest" not in answer:
            said = answer.get("problem") or " ".join(err.decode(errors="replace").strip().splitlines()[-2:])
            raise PlaceFailed(f"the replay ended with exit code {code}: {said}")
        try:
            manifest = from_json(answer["manifest"], CheckpointManifest)
            states = tuple(map(str, answer["states"]))
        except (ValueError, KeyError, TypeError) as problem:
            raise PlaceFailed(f"the replay gave an answer that cannot be read: {problem}") from problem
        if manifest.position.updates != until:
            raise PlaceFailed("the replay left no checkpoint at the end of the block")
        own = [one for one in self.messages if one.site == site and one.agent == self.agent and one.update < until]
        if self.is_same_class and (wrong := next(differing_messages(run, own), None)):
            raise NotOfTheJob(
                f"the message after update {wrong.update + 1:,} that site {site} has sent is not the one that it made"
            )
        return manifest, states


class NotOfTheJob(BadRun):
    """What was committed cannot come from the order's job."""


def check_block(making: Making, at: Sequence[int] = ()) -> ReplayVerdict:
    """Make a block again and compare.

    Args:
        making: the block.
        at: updates after which the state is noted [updates].

    Raises:
        PlaceFailed: it could not be made here, for a reason that says nothing about the block.
    """
    before, block = making.before, making.block
    with making.folder() as folder:
        try:
            claimed = _claimed(making, block, folder / "claimed", is_same_class=making.is_same_class)
            start = None
            if before is not None:
                start = _claimed(making, before, folder / "start", is_same_class=making.is_same_class)
        except BadRun as problem:
            return ReplayVerdict(equal=False, why=f"what was committed cannot be used: {problem.message}")
        if sentence := _chain_problem(before, block, claimed):
            return ReplayVerdict(equal=False, why=sentence)
        run = _start_of(folder, None if start is None else start[0])
        try:
            manifest, states = making.run(run, block.update, at)
        except NotOfTheJob as problem:
            return ReplayVerdict(equal=False, why=problem.message)
        plans = _plans_of(folder / "claimed")
        made = _Made(manifest, run, folder / "made.safetensors", making.host.limits.disk_bytes)
        verdict = _compare(making, claimed, made, start, plans)
        return replace(
            verdict, trace=states if at else (), made=manifest.state_digest() if making.is_same_class else ""
        )


def traced_block(making: Making, at: Sequence[int]) -> tuple[str, ...]:
    """Digests of the states after some updates of a block, as this machine makes it.

    Raises:
        BadRun: what was committed cannot be used.
        PlaceFailed: it could not be made here.
    """
    with making.folder() as folder:
        run = _begun(making, folder)
        _, states = making.run(run, at[-1], at)
        if len(states) != len(at):
            raise PlaceFailed(f"the replay gave {len(states)} states, {len(at)} were asked for")
        return states


def supplied_states(making: Making, update: int, put: Callable[[Path], str]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The states before and after update number `update`, as this machine makes them: digest, and blob of each.

    The state before the block's first update is committed: ("", "").

    Raises:
        BadRun, PlaceFailed: as with `traced_block`.
    """
    with making.folder() as folder:
        run, found = _begun(making, folder), [("", "")]
        for until in (update - 1, update):
            if until > making.begin:
                manifest, _ = making.run(run, until)
                found.append((manifest.state_digest(), put(_packed(making, run, manifest, folder / f"state-{until}"))))
        return found[-2], found[-1]


def check_update(making: Making, search: Bisection) -> ReplayVerdict:
    """Make the one update on which an agent and a verifier differ first, from the state on which they agree.

    Raises:
        PlaceFailed: it could not be made or compared here.
    """
    with making.folder() as folder:
        try:
            start = _agreed_state(making, search, folder)
            run = _start_of(folder, None if start is None else start[0])
            manifest, _ = making.run(run, search.update)
        except BadRun as problem:
            raise PlaceFailed(f"update {search.update:,} cannot be made alone: {problem.message}") from problem
        made = manifest.state_digest()
        what = f"update {search.update:,} made again alone"
        for whose, side in (("agent", search.agent), ("verifier", search.verifier)):
            if made == side.end:
                return ReplayVerdict(equal=whose == "agent", why=f"{what}: the state of the {whose}", made=made)
        if making.is_same_class:
            return ReplayVerdict(equal=False, why=f"{what}: the state of neither", made=made)
        if start is None:
            raise PlaceFailed("the first update of a run in another class cannot be decided")
        weights = _Made(manifest, run, folder / "made.safetensors", making.host.limits.disk_bytes).weights()
        tolerance = _tolerance(_plans_of(folder / "claimed"))[1]
        differences = [
            _difference(making, side, start[0], weights, folder / f"side-{number}")
            for number, side in enumerate((search.agent, search.verifier))
        ]
        words = "{:.2g} of the agent, {:.2g} of the verifier".format(*differences)
        is_right = [one <= tolerance for one in differences]
        if is_right[0] == is_right[1]:
            return ReplayVerdict(equal=None, why=f"{what}: relative differences of {words} decide nothing")
        return ReplayVerdict(equal=is_right[0], why=f"{what}: relative difference {words}, tolerance {tolerance:g}")


def _begun(making: Making, folder: Path) -> Path:
    """The run's directory at the start of a block, of which only records are taken that its end has."""
    _unpacked(making, making.block.blob, folder / "claimed", making.block.seal)
    start = None
    if making.before is not None:
        start = _claimed(making, making.before, folder / "start", is_same_class=True)[0]
    return _start_of(folder, start)


def _packed(making: Making, run: Path, manifest: CheckpointManifest, target: Path) -> Path:
    """A file with one checkpoint of a run's directory that a job could write to."""
    name = CheckpointStore(run / "checkpoints").names()[-1]
    below = f"checkpoints/{name}"
    names = [f"{below}/{MANIFEST}", *(f"{below}/{file.name}" for file in manifest.files)]
    index = pack_folder(run, names, target, making.taken)
    if wrong := same_files(index, {file.name: file.sha256 for file in manifest.files}, below):
        raise PlaceFailed(f"the replay left a checkpoint whose {wrong} is not what it says")
    return target


def _agreed_state(making: Making, search: Bisection, folder: Path) -> _Checkpoint | None:
    """The state before the update that was found, from whichever side supplied it right; None: the run's beginning."""
    _unpacked(making, making.block.blob, folder / "claimed", making.block.seal)
    if search.low == making.begin:
        return None if making.before is None else _claimed(making, making.before, folder / "start", is_same_class=True)
    for number, side in enumerate((search.agent, search.verifier)):
        with suppress(BadRun, PlaceFailed, Refused):  # a blob too large for this machine, or that the pool has not
            return _supplied(making, side.before, search.low_state, folder / f"start-{number}")
    raise PlaceFailed(f"neither side supplied the state after update {search.low:,} on which both agree")


def _supplied(making: Making, blob: str, state: str, into: Path) -> _Checkpoint:
    """A checkpoint that a side supplied.

    Raises:
        BadRun: it is none, or not of the state that the side stated.
    """
    _unpacked(making, blob, into)
    found = CheckpointStore(into / "checkpoints").newest()
    if found is None or found[1].state_digest() != state:
        raise BadRun("what was supplied is not the state that was stated")
    return found


def _difference(making: Making, side: Side, start: Path, made: Path, into: Path) -> float:
    """Relative difference of a side's update from the one made here [1]; infinite where it supplied no such state."""
    try:
        claimed = _supplied(making, side.after, side.end, into)
        return update_difference(start / WEIGHTS, claimed[0] / WEIGHTS, made)
    except (BadRun, SafetensorError, ValueError, TypeError):
        return math.inf


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


def _unpacked(making: Making, blob: str, into: Path, seal: str = "") -> None:
    """Unpack a blob.

    Raises:
        BadRun: it is no tree of files.
        PlaceFailed: it is too large for this machine.
    """
    path = making.fetch(blob, seal=seal)
    if (size := path.stat().st_size) > making.taken.num_bytes:
        raise PlaceFailed(
            f"the blob {blob[:12]}… of block {making.block.block} has {size:,} bytes, and at most "
            f"{making.taken.num_bytes:,} are taken here"
        )
    unpack(path, into, making.taken)


def _claimed(making: Making, block: Block, into: Path, *, is_same_class: bool) -> _Checkpoint:
    """A checkpoint that was committed.

    Raises:
        BadRun: it is none, by its own digests.
        PlaceFailed: it is too large for this machine, or of a version that this one may not read.
    """
    _unpacked(making, block.blob, into, block.seal)
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
    making: Making, claimed: _Checkpoint, made: _Made, start: _Checkpoint | None, plans: Sequence[Plan]
) -> ReplayVerdict:
    """Compare the state that was claimed with the one that was made."""
    num_updates = making.block.update - making.begin
    updates = f"{num_updates:,} update{'' if num_updates == 1 else 's'}"
    if claimed[1].state_digest() == made.manifest.state_digest():
        return ReplayVerdict(equal=True, why=f"{updates} made again, equal bit for bit")
    if making.is_same_class:
        names = _differing_files(claimed[1], made.manifest)
        return ReplayVerdict(equal=False, why=f"{updates} made again in the same class differ in {names}")
    loosest, tolerance, most = _tolerance(plans)
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


def _tolerance(plans: Sequence[Plan]) -> tuple[str, float, int]:
    """The loosest precision of some plans, with its tolerance [1], and the most updates that it holds for."""
    precisions = {plan.precision for plan in plans} or {"fp32"}
    loosest = max(precisions, key=lambda precision: TOLERANCES.get(precision, (1.0, 0))[0])
    return loosest, *TOLERANCES.get(loosest, (0.0, 0))


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
