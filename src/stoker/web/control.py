"""What `stoker ui --control` may do to a run: stop, resume, fork, and annotate it.

Stopping is the signal that Ctrl-C's SIGTERM is: the run saves and ends, and the same command continues it. Resuming and
forking start `stoker train` as the user would, from the folder of the first start.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from stoker.errors import BadRun
from stoker.records import dumps, to_json
from stoker.records.codec import JSON
from stoker.reporting.event_text import exact_setting
from stoker.store import cache_root, make_directories, write_atomic
from stoker.store.locks import is_alive
from stoker.store.run_files import SPEC, STARTED
from stoker.web.run_index import ANNOTATIONS, Row, checked_tags, holder_of, read_json

_LONGEST_NOTE, _MOST_BYTES = 10_000, 256 * 1024


def stop(row: Row) -> str:
    """Ask the run's process to save and end; what was done, in words.

    Raises:
        BadRun: no process of this machine trains it.
    """
    holder = holder_of(row.root, row.name)
    if holder is None or holder[1] != platform.node() or not is_alive(holder[0]):
        raise BadRun("no process of this machine trains that run", remedy="Stop it where it is.")
    if not _is_stoker(holder[0]):
        raise BadRun(
            f"process {holder[0]}, which signed the run's lock, is not Stoker's",
            remedy="The run was killed, and its number given to another process: nothing to stop.",
        )
    os.kill(holder[0], signal.SIGTERM)
    return f"process {holder[0]} was asked to save and stop"


def _is_stoker(pid: int) -> bool:
    """Whether a process of this user runs Python: a number in a lock file may be anyone's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        is_own = Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False
    return is_own and (b"stoker" in command or b"python" in command)


def restart(row: Row, *, is_fork: bool) -> str:
    """Begin to train the run on, or a new one from its last checkpoint; what was done, in words.

    Raises:
        BadRun: it trains, or was not started from a job file, or that is gone.
    """
    if not is_fork and row.is_live:
        raise BadRun("the run is being trained")
    started, spec = row.files.read(STARTED), row.files.read(SPEC)
    if started is None or spec is None:
        raise BadRun("the run does not say which job file it was started from", remedy="Resume it from a shell.")
    if Path(started.job_file).resolve().is_relative_to(row.path.resolve()):
        raise BadRun(
            f"its job file {started.job_file} is in the run's own directory: it may have come with it from elsewhere",
            remedy="Read it, then resume the run from a shell.",
        )
    if not Path(started.job_file).is_file() or not Path(started.folder).is_dir():
        raise BadRun(f"{started.job_file} is gone", remedy="Resume it from a shell.")
    settings = [word for name, value in spec.parameters.items() for word in ("--set", f"{name}={exact_setting(value)}")]
    run = str(row.path.resolve())
    begin = "--fork" if is_fork else "--resume"
    command = [sys.executable, "-m", "stoker", "train", started.job_file, *settings, begin, run]
    folder = cache_root() / "ui"
    make_directories(folder)
    output = folder / f"{row.path.name[:80]}-{os.getpid()}.log"
    with output.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=started.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "STOKER_RUNS": str(row.root.resolve())},
        )
    threading.Thread(target=process.wait, daemon=True).start()  # else it would stay, ended, and count as alive
    return f"process {process.pid} {'forks' if is_fork else 'continues'} it; what it says is in {output}"


def annotate(row: Row, given: Mapping[str, JSON]) -> None:
    """Keep tags, a note and whether it is archived with the run; what `given` does not name stays as it is.

    Raises:
        BadRun: a tag is none, the note is too long, or they cannot be written.
    """
    if row.path.is_symlink():
        raise BadRun("that run's directory is a link")
    document = read_json(row.root, f"{row.name}/{ANNOTATIONS}", _MOST_BYTES)
    if "tags" in given:
        tags = given["tags"]
        document["tags"] = list(checked_tags([str(tag) for tag in tags] if isinstance(tags, list) else []))
    if "note" in given:
        document["note"] = note = str(given["note"])
        if len(note) > _LONGEST_NOTE:
            raise BadRun(f"a note of {len(note):,} characters; at most {_LONGEST_NOTE:,} are kept")
    if "is_archived" in given:
        document["is_archived"] = given["is_archived"] is True
    write_atomic(row.path / ANNOTATIONS, dumps(to_json(document)) + "\n", what="tags and note", error=BadRun)
