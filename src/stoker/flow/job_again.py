"""A run's job, made again where the run was first started: from its job file, or from the run's own copy of it.

Paths in a job are relative to the working directory, or to the job file (`Path(__file__).parent`). So `job()` runs in
the folder of the first start; and it is the job file itself that runs, as long as it and the modules beside it are what
the run has copies of.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker import records
from stoker.errors import BadJob
from stoker.jobs import Entry, Job, load_job
from stoker.records.codec import JSON
from stoker.records.started import Started
from stoker.store import RunDirectory, disk_errors, write_atomic
from stoker.store.files import make_directories

JOB_COPY = "job"
"""The run's copy of its job file and local imports, in its directory."""

STARTED = "started.json"
"""Where the run was first started, in its directory; runs of before 2026-11-22 have none."""


def keep_sources(directory: RunDirectory, entry: Entry | None) -> None:
    """Put the job file, its local imports and where they were into the run, as far as they are not there."""
    if entry is None:
        return
    for name, text in entry.sources.items():
        copy = directory.path / JOB_COPY / name
        if not copy.exists():
            with disk_errors(copy, "the copy of the job file"):
                make_directories(copy.parent)
                write_atomic(copy, text)
    if not (directory.path / STARTED).exists():
        started = Started(folder=str(Path.cwd()), job_file=str(entry.path))
        write_atomic(directory.path / STARTED, records.dumps(started) + "\n", what="where the run was started")


def job_again(directory: RunDirectory, entry: str, parameters: Mapping[str, JSON]) -> Job:
    """The job that a run was trained with; its code runs.

    Args:
        directory: the run's.
        entry: the job file's name.
        parameters: what `job` was called with.

    Raises:
        BadJob: the job cannot be made, as when it reads data that are gone.
    """
    path = _job_file(directory, entry)
    settings = {name: _as_text(value) for name, value in parameters.items()}
    with where_started(directory):
        try:
            return load_job(path, settings)[0]
        except BadJob as error:
            name = directory.name
            raise BadJob(
                f"the job of {name} cannot be made again: {error.message}",
                remedy="If it reads data, put them back where it looks for them; or give the job: "
                f"stoker.load({name!r}, job=…). The weights need neither: stoker.load({name!r}).weights().",
            ) from error


@contextlib.contextmanager
def where_started(directory: RunDirectory) -> Iterator[None]:
    """Work in the folder of the run's first start, if it is known and there; relative paths of one's own change too."""
    started = _started(directory)
    if started is None or not Path(started.folder).is_dir():
        yield
        return
    with contextlib.chdir(started.folder):
        yield


def _job_file(directory: RunDirectory, entry: str) -> Path:
    """The job file where it was, if all that it consists of is still what was copied; else the copy."""
    copies = (directory.path / JOB_COPY).absolute()
    started = _started(directory)
    if started is None:
        return copies / entry
    original = Path(started.job_file)
    names = [copy.relative_to(copies) for copy in copies.rglob("*.py")]
    are_same = names and all(_is_same(copies / name, original.parent / name) for name in names)
    return original if are_same and original.name == entry else copies / entry


def _is_same(copy: Path, original: Path) -> bool:
    try:
        return copy.read_text(encoding="utf-8") == original.read_text(encoding="utf-8")
    except (OSError, UnicodeError):  # it is gone, or not what it was
        return False


def _started(directory: RunDirectory) -> Started | None:
    try:
        return records.loads((directory.path / STARTED).read_text(encoding="utf-8"), Started)
    except (OSError, ValueError):  # an older run, or one that was damaged: its job runs here, then
        return None


def _as_text(value: JSON) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
