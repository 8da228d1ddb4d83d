"""Start a run elsewhere: `stoker train JOB --on ssh:box`, `stoker.launch("job.py", on="ssh:box")`.

`launch` reads from the job file to the run that is started there; `prepare` makes the submission, which `--dry-run`
prints. The run has a directory here from the beginning, `runs/NAME` with `launch.json`: the same command finds the run by
it. What goes on there comes home by `follow.py`.

The name is the job file's with six digits of what identifies the run: its executed code and its settings. The place
works the plan out, since devices and data are there.
"""

from __future__ import annotations

import ast
import getpass
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from stoker import records
from stoker.errors import BadJob, BadRun, PlaceUnreachable, StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.launching import launcher_of, parse_target
from stoker.launching.bundle import (
    MOST_BYTES,
    Data,
    code_bundle,
    commit_of,
    data_of,
    require_sendable,
    secret_values,
    stoker_bundle,
    work_folder,
)
from stoker.launching.environment_lock import EnvironmentLock, lock_of
from stoker.launching.launcher import Launcher, Probe, Submission
from stoker.errors import PlaceFailed
from stoker.records import ENDED, Launch, LaunchState
from stoker.records.codec import digest
from stoker.store import RunDirectory, disk_errors, runs_root, write_atomic
from stoker.store.files import make_directories
from stoker.store.locks import RunLock
from stoker.training.run_handle import keep_sources

CHANGES = "changes.diff"
"""The uncommitted changes of the job's repository, in the run's directory here."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a run is executed elsewhere; nothing of it changes what is learned.

    Attributes:
        run_dir: the run's directory here; its name is the run's name there.
        new: start another run even where one could be continued.
        env: `lock`: the versions of this machine, installed there once; `theirs`: the place's own Python; or a path to one.
        image: container image, at places that run images.
        secrets: names of environment variables whose values are sent.
        send: further files and folders that the job reads.
        data: files and folders of data, found at the place by their digest or sent.
        variables: environment variables to set there.
        place: options of the place, by name: `root`, `data`, and what its kind knows.
        arguments: further arguments of `stoker train` at the place.
        send_limit: most bytes to send [bytes].
        max_cost: the run is saved and stopped before its cost exceeds this.
        time_limit_s: the longest it may take [s]; None: from the upper bound of the forecast, if there is one.
    """

    run_dir: Path | None = None
    new: bool = False
    env: str = "lock"
    image: str = ""
    secrets: tuple[str, ...] = ()
    send: tuple[Path, ...] = ()
    data: tuple[Path, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    place: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    send_limit: float = MOST_BYTES
    max_cost: float | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """A run elsewhere, and how this call left it.

    Attributes:
        directory: of the run here.
        launch: its record.
        is_new: False where the run was going on already, and nothing was sent.
        because: what people should know about the choice of the run; "" for nothing.
    """

    directory: RunDirectory
    launch: Launch
    is_new: bool = True
    because: str = ""


def launch(
    job_file: str | Path,
    *,
    on: str,
    settings: Mapping[str, str] | None = None,
    options: LaunchOptions | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> LaunchedRun:
    """Start the run of a job file elsewhere, or find it where it is going on.

    Args:
        job_file: the job file; it runs here too, so that its errors show before anything is sent.
        on: the place, such as `ssh:me@box/2xcpu`.
        settings: texts by name, as for `--set`.
        options: what travels, and how.
        tell: receives a line of text about each step that takes time.

    Returns:
        The run, started or going on; it does not wait for its end.

    Raises:
        BadJob, NoDevice: before anything was sent.
        BadRun: the run's directory here is in use, or of another run.
        PlaceFailed: the place refuses, or lacks what the run needs; nothing is left behind.
        PlaceUnreachable: it does not answer; nothing was started that the same command would not find.
    """
    options = options or LaunchOptions()
    path, target = Path(job_file), parse_target(on)
    launcher = launcher_of(target.kind)
    secret_values(options.secrets)
    job, entry = load_job(path, settings or {})
    identity = identity_of(entry, options)
    directory, before, because = choose_run(path, identity, on, options)
    if before is not None and (going := _going_on(launcher, before)) is not None:
        return LaunchedRun(directory=directory, launch=_with_state(directory, before, going), is_new=False,
                       because=f"{directory.name} is {going.phase} at {before.place}: {going.why}")  # fmt: skip
    with _own(directory):
        submission = prepare(path, job, entry, directory, launcher, on, options, tell=tell)
        probe = launcher.probe(submission.target, options.place)
        if probe.missing:
            raise PlaceFailed("; ".join(probe.missing))
        submission = replace(submission, time_limit_s=options.time_limit_s)
        handle = launcher.start(submission, tell)
        commit = commit_of(path.resolve().parent)
        record = Launch(
            run=directory.name, place=on, kind=target.kind, handle=handle, identity=identity,
            code_digest=submission.code.digest, environment_digest=_environment_digest(submission),
            arguments=submission.arguments, submitted_at=_now(), commit=commit.name, has_changes=bool(commit.diff),
            max_cost=options.max_cost, secrets=options.secrets, sent_bytes=int(handle.get("sent_bytes", 0)),
        )  # fmt: skip
        directory.write_launch(record)
        keep_sources(directory, entry)
        if commit.diff:
            write_atomic(directory.path / CHANGES, commit.diff, what="the uncommitted changes")
    return LaunchedRun(directory=directory, launch=record, because=because)


def describe(
    job_file: str | Path, *, on: str, settings: Mapping[str, str] | None = None, options: LaunchOptions | None = None
) -> str:
    """What `launch` would submit, as text: a batch script, a manifest, commands; nothing is sent or asked.

    Raises:
        BadJob, NoDevice: as for `launch`.
    """
    options = options or LaunchOptions()
    path, target = Path(job_file), parse_target(on)
    launcher = launcher_of(target.kind)
    job, entry = load_job(path, settings or {})
    directory, _, _ = choose_run(path, identity_of(entry, options), on, options)
    return launcher.script(prepare(path, job, entry, directory, launcher, on, options))


def prepare(
    job_file: Path, job: Job, entry: Entry, directory: RunDirectory, launcher: Launcher, on: str,
    options: LaunchOptions, *, tell: Callable[[str], None] = lambda text: None,
) -> Submission:  # fmt: skip
    """What a launcher needs to start the run; the files that would travel are read, and nothing is sent.

    Raises:
        BadJob: a file cannot travel, or it is too much.
        PlaceFailed: the environment cannot be had elsewhere.
    """
    root = work_folder(job_file)
    data = [data_of(path, root) for path in (*data_paths(job, root), *options.data)]
    code = code_bundle(job_file, entry.sources, data, options.send)
    bundles = [*(one.bundle for one in data), stoker_bundle(), code]
    require_sendable(bundles, options.send_limit)
    return Submission(
        run=directory.name,
        target=launcher.parse(on.partition(":")[2]),
        code=code,
        stoker=stoker_bundle(),
        data=tuple(one.bundle for one in data),
        job_file=job_file.resolve().relative_to(root).as_posix(),
        arguments=(*_settings(entry), *options.arguments),
        environment=_environment(entry, options),
        image=options.image,
        variables=options.variables,
        secrets=options.secrets,
        owner=f"{getpass.getuser()}@{platform.node()}:{directory.path.resolve()}",
        options=options.place,
    )


def identity_of(entry: Entry, options: LaunchOptions) -> str:
    """SHA-256 (hex) of what the same command finds its run by: executed code, settings, further arguments."""
    return digest({
        "file": entry.path.name, "functions": entry.functions, "parameters": entry.parameters,
        "arguments": options.arguments,
    })  # fmt: skip


def choose_run(
    job_file: Path, identity: str, on: str, options: LaunchOptions
) -> tuple[RunDirectory, Launch | None, str]:
    """The run's directory here; the launch that may be continued, if there is one; and what to say about the choice.

    The newest unfinished launch of this identity is continued. Otherwise the next free name is taken.

    Raises:
        BadRun: the unfinished run is at another place; or a record cannot be read.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", job_file.stem).strip("-.")[:50] or "job"
    base = options.run_dir or runs_root() / f"{slug}-{identity[:6]}"
    number, finished = 1, ""
    while True:
        directory = RunDirectory(base if number == 1 else base.with_name(f"{base.name}-{number}"))
        number += 1
        before = directory.read_launch()
        if before is None:
            if not directory.path.exists() or directory.is_vacant:
                return directory, None, f"{finished} is finished; {directory.name} is a new run" if finished else ""
            if number == 2 and options.run_dir is not None:
                raise BadRun(f"{directory.path} is no run elsewhere: {directory.in_the_way()}.",
                             remedy="Choose an empty or a new --run-dir.")  # fmt: skip
            continue
        if before.identity != identity:
            if options.run_dir is not None:
                raise BadRun(f"{directory.path} holds a run of another job or other settings.",
                             remedy="Choose another --run-dir, or --new.")  # fmt: skip
            continue
        if _is_finished(directory, before):
            finished = directory.name
            continue
        if options.new:
            continue
        if before.place != on:
            raise BadRun(
                f"{directory.name} is unfinished at {before.place}, and {on} is another place.",
                remedy=f"Go on there with --on {before.place}; or start another run here with --new.",
            )
        return directory, before, f"{directory.name} is continued"


def _is_finished(directory: RunDirectory, launch: Launch) -> bool:
    if launch.states and launch.states[-1].phase == "finished":
        return True
    with suppress(StokerError):
        return directory.is_run and directory.read_run().status == "finished"
    return False


def _going_on(launcher: Launcher, before: Launch) -> LaunchState | None:
    """The state of a run that is going on there, or has finished; None if it has ended and may be started again.

    Raises:
        PlaceUnreachable: the place does not answer: what is unknown is not started a second time.
    """
    state = launcher.state(before.handle)
    if state.phase == "unknown":
        raise PlaceUnreachable(
            f"{before.run} is at {before.place}, which does not answer: {state.evidence or state.why}",
            remedy="It may be going on; nothing was started. The same command asks again.",
        )
    return None if state.phase in ENDED and state.phase != "finished" else state


def _with_state(directory: RunDirectory, launch: Launch, state: LaunchState) -> Launch:
    """The record with the state added if its phase is another one."""
    if launch.states and launch.states[-1].phase == state.phase:
        return launch
    launch = replace(launch, states=(*launch.states, state))
    directory.write_launch(launch)
    return launch


class _own:  # noqa: N801 - reads as the statement it is
    """Hold the run's directory here; what a launch that failed made of it is removed."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._lock = RunLock(directory.path)

    def __enter__(self) -> None:
        """Take the lock, which makes the directory."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Give it back; a directory that holds nothing else is removed with it."""
        self._lock.release()


def data_paths(job: Job, root: Path) -> tuple[Path, ...]:
    """Files and folders that the job's data sources read, as far as they state them."""
    return ()


def _settings(entry: Entry) -> tuple[str, ...]:
    return tuple(word for name, text in entry.settings.items() for word in ("--set", f"{name}={text}"))


def _environment(entry: Entry, options: LaunchOptions) -> EnvironmentLock | str:
    if options.env == "lock":
        return lock_of(imported_modules(entry.sources.values()))
    return "python3" if options.env == "theirs" else options.env


def _environment_digest(submission: Submission) -> str:
    environment = submission.environment
    return "" if isinstance(environment, str) else environment.digest


def imported_modules(texts: Sequence[str] | object) -> set[str]:
    """Top-level names of the modules that Python texts import."""
    names: set[str] = set()
    for text in texts:  # type: ignore[attr-defined]
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
