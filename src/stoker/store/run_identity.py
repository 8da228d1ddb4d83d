"""Which directory a command means: the rules of run identity.

A run's identity is the digest of its JobSpec, and what it was forked from. The same command continues the newest
unfinished run of that identity; if all are finished it starts another one next to them, in `DIR-2`, `DIR-3`, ….
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from stoker.errors import BadRun, listed_in_part, nearest
from stoker.records import JobSpec, Run
from stoker.store.checkpoint_store import CheckpointStore
from stoker.store.disk_errors import read_errors
from stoker.store.locks import is_locked
from stoker.store.run_directory import RunDirectory
from stoker.store.run_files import RUN

T = TypeVar("T")

LATEST = "latest"
_MOST_DIFFERENCES = 12


@dataclass(frozen=True)
class RunChoice:
    """The directory to work in, whether a run there is continued, and what people should know about it, if anything."""

    directory: RunDirectory
    continues: bool
    because: str | None


def list_runs(root: Path) -> tuple[RunDirectory, ...]:
    """All runs directly in `root`, newest first; those whose record cannot be read too. No `root`, no runs.

    Raises:
        BadRun: `root` cannot be read.
    """
    with read_errors(root):
        directories = [RunDirectory(entry) for entry in root.iterdir() if entry.is_dir()] if root.exists() else []
        return tuple(sorted((d for d in directories if d.is_run), key=_age, reverse=True))


def find_run(root: Path, word: str) -> RunDirectory:
    """The run a user means: the name of one in `root`, the start of just one name, `latest`, or a path, also in `root`.

    Raises:
        BadRun: there is none, or the start of a name fits several; the near ones are named.
    """
    by_name = {directory.name: directory for directory in list_runs(root)}
    if word == LATEST and word not in by_name and by_name:
        return next(iter(by_name.values()))
    paths = [Path(word), root / word] if "/" in word else [Path(word)]
    at_path = next((directory for directory in map(RunDirectory, paths) if directory.is_run), None)
    if (directory := find_named(word, by_name, at_path)) is not None:
        return directory
    if word and Path(word).is_dir():
        raise BadRun(f"{word} is not a run: it has no run.json.", remedy=nearest(word, by_name))
    if not by_name:
        raise BadRun(f"There is no run {word!r}: there are no runs in {root}.", remedy="Make one with `stoker train`.")
    raise BadRun(
        f"There is no run {word!r} in {root}.", remedy=f"{nearest(word, [*by_name, LATEST])} `stoker runs` lists them."
    )


def find_named(word: str, by_name: Mapping[str, T], at_path: T | None, kind: str = "runs") -> T | None:
    """What a user means by a name, by a path, or by the start of just one name; None: nothing.

    Args:
        word: the user's.
        by_name: what there is.
        at_path: what the word means as a path, if anything.
        kind: of what there is, for errors.

    Raises:
        BadRun: the start of a name fits several.
    """
    if word in by_name or not word:
        return by_name.get(word)
    if at_path is not None:
        return at_path
    fitting = [name for name in by_name if name.startswith(word)]
    if len(fitting) > 1:
        several = f"{len(fitting)} {kind}: {listed_in_part(fitting, word)}"
        raise BadRun(f"{word!r} is the start of {several}.", remedy="Write more of it.")
    return by_name[fitting[0]] if fitting else None


def name_in(root: Path, directory: RunDirectory) -> str:
    """The word by which `find_run` finds a run again: its name, its path in `root`, or its whole path elsewhere."""
    path = directory.path.resolve()
    if path.is_relative_to(root.resolve()):
        return path.relative_to(root.resolve()).as_posix()
    return str(path)


def choose_directory(
    root: Path,
    spec: JobSpec,
    *,
    run_dir: Path | None = None,
    new: bool = False,
    job_name: str,
    forked_from: str | None = None,
) -> RunChoice:
    """Where to train `spec`; nothing is made yet.

    Args:
        root: Where runs are made; see `runs_root`.
        spec: What is to be learned.
        run_dir: The user's directory; by default `{job_name}-{first 6 of the digest}` in `root`.
        new: Start another run even if one could be continued.
        job_name: For the default directory's name.
        forked_from: Name of the run this one starts from; only a run with the same origin is continued.

    Raises:
        BadRun: `run_dir` holds a run of another spec (what differs is listed), or something that is no run; or a run
            that might have to be continued cannot be read.
    """
    base = run_dir if run_dir is not None else default_directory(root, job_name, spec)
    with read_errors(base):
        if run_dir is not None:
            _require_usable(RunDirectory(run_dir))
        members = _family(base)
        taken = [number for number, directory in members.items() if not directory.is_vacant]
        free = _member(base, taken[-1] + 1 if taken else 1)
    runs = [(directory, directory.read_run()) for directory in members.values() if directory.is_run]
    if new:
        return RunChoice(free, continues=False, because=None)
    digest = spec.digest()
    own = [pair for pair in runs if pair[1].spec_digest == digest and pair[1].forked_from == forked_from]
    unfinished = [pair for pair in own if pair[1].status != "finished"]
    if unfinished:
        directory, run = unfinished[-1]
        done = headway_of(directory.read_headway())
        because = f"{directory.name} is unfinished, {done}, and is continued."
        if run.status == "failed":
            failure = f" ({run.failure})" if run.failure else ""
            has_state = bool(CheckpointStore(directory.checkpoints).names())
            on = "is continued from its last checkpoint" if has_state else "begins again, for it has no checkpoint"
            because = f"{directory.name} failed {done}{failure} and {on}."
        return RunChoice(directory, continues=True, because=because)
    if run_dir is not None and runs and runs[0][0].path == base:
        require_same_spec(runs[0][0], spec)
    if own:
        return RunChoice(free, continues=False, because=f"{own[-1][0].name} is finished; {free.name} is a new run.")
    return RunChoice(free, continues=False, because=None)


def require_same_spec(directory: RunDirectory, spec: JobSpec) -> None:
    """Nothing if the run in `directory` is of `spec`.

    Raises:
        BadRun: it is of another one, with what changed since it began; or it cannot be read.
    """
    if directory.read_run().spec_digest == spec.digest():
        return
    raise BadRun(
        f"{directory.path} holds a run of another job; what changed since it began:\n  "
        + "\n  ".join(describe_changes(spec, directory.read_spec())),
        remedy=f"Undo that to continue it, go on from its last checkpoint under the job as it is now with "
        f"--fork {directory.name}, or start another run with --new or in another --run-dir.",
    )


def describe_changes(spec: JobSpec, before: JobSpec, most: int = _MOST_DIFFERENCES) -> list[str]:
    """The changes in a job since `before`, one line each, at most so many; at least one line."""
    lines = spec.changes(before) or ("its digest only",)
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def unfinished_before(root: Path, spec: JobSpec) -> list[tuple[RunDirectory, JobSpec]]:
    """Unfinished runs in `root` of the same job file as `spec` was, newest first, which no process works in.

    Without a file, those of a job that differs only in what its functions hold. Runs that cannot be read, and those
    without a checkpoint, are left out.
    """
    runs = []
    for directory in list_runs(root):
        with suppress(BadRun):
            run = directory.read_headway()
            if run.status != "unfinished" or not run.samples:
                continue
            theirs = directory.read_spec()
            is_like = theirs.entry == spec.entry if spec.entry is not None else spec.is_same_but_for_closures(theirs)
            if is_like and theirs.digest() != spec.digest() and not is_locked(directory.path):
                runs.append((directory, theirs))
    return runs


def default_directory(root: Path, job_name: str, spec: JobSpec) -> Path:
    """The directory of a job's first run in `root`: `{job_name}-{first 6 of the digest}`."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip("-.")[:60] or "job"
    return root / f"{slug}-{spec.digest()[:6]}"


def headway_of(run: Run) -> str:
    """`at 25,600 of 102,400 samples`."""
    return f"at {run.samples:,} of {run.total_samples:,} samples"


def _require_usable(directory: RunDirectory) -> None:
    """Nothing if the user's directory holds a run or is vacant."""
    if directory.is_run or directory.is_vacant:
        return
    if directory.path.is_dir() and directory.checkpoints.exists():
        raise BadRun(
            f"{directory.path} has checkpoints but no run.json.",
            remedy="Restore run.json from a copy, or choose another --run-dir.",
        )
    raise BadRun(
        f"{directory.path} is not a run: {directory.in_the_way()}.", remedy="Choose an empty or a new --run-dir."
    )


def _family(base: Path) -> dict[int, RunDirectory]:
    """The directories `base`, `base-2`, `base-3`, … that exist, by number, in that order."""
    numbers = {1} if base.exists() else set[int]()
    if base.parent.is_dir():
        matches = (re.fullmatch(rf"{re.escape(base.name)}-([1-9]\d*)", entry.name) for entry in base.parent.iterdir())
        numbers |= {int(match[1]) for match in matches if match is not None and int(match[1]) > 1}
    return {number: _member(base, number) for number in sorted(numbers)}


def _member(base: Path, number: int) -> RunDirectory:
    return RunDirectory(base if number == 1 else base.with_name(f"{base.name}-{number}"))


def _age(directory: RunDirectory) -> tuple[float, int, str]:
    """When the run was made [s since 1970]; among runs of one moment the higher number is the newer."""
    number = re.search(r"-(\d+)$", directory.name)
    try:
        made = datetime.fromisoformat(directory.read_run().created_at).timestamp()
    except (BadRun, ValueError):  # damaged: still listed, by the age of its file
        try:
            made = (directory.path / RUN.name).stat().st_mtime
        except OSError:  # removed just now
            made = 0.0
    return made, int(number[1]) if number else 1, directory.name
