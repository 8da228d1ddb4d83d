"""Runs at places that give no shell and no files, but a job's log: Ray, SkyPilot's managed jobs.

What: one folder is sent, with the job, this Stoker and an order. At the place `run` watches the run as on any host
(`at_place.py`) and repeats the run's log and state on its standard output, line by line with a mark. The other end
finds the marked lines in whatever the platform adds to them. Use when: there is no line to the machine.
Costs: the platform keeps the run's log a second time, and each look reads all of it.
Does not do: secrets (such platforms show a job's variables); several hosts (of Ray: `ray_nodes.py`).

`python -m stoker.launching.logged_run COMMAND …`, in the folder that was sent:

- `run ROOT [SECONDS SUBMITTED]`: run the order, below ROOT; the exit code is the run's. From SUBMITTED on (ISO 8601) it
  holds devices for so many seconds at most, also where a machine follows another one.
- `list DIR`, `send DIR FILE…`: print the files of a run with their digests, or their contents, as marked lines.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from stoker.errors import PlaceFailed, StokerError
from stoker.launching.at_place import HostSupervisor, LaunchOrder, state_of
from stoker.launching.launcher import LEFT_THERE, HostRanks, Submission
from stoker.records.codec import dumps, loads, to_json
from stoker.records.launch import LaunchState
from stoker.store.files import read_lines, written_aside

ONE_NODE = (
    "A run has one node there, since several would need a shared disk for its directory: take the devices of one node, "
    "or several nodes of Slurm, Kubernetes, Ray, or hosts by SSH."
)
ORDER, LINKS, EXPECTED = "order.json", "links.json", "expected.json"
EVENT, STATE, FILE, DATA = b"STOKER event ", b"STOKER state ", b"STOKER file ", b"STOKER data "
"""Marks of lines: an event of the run's log, its state, a file of its directory, a part of a file."""

_LOOK_S = 0.5
_CHUNK_BYTES = 48 * 1024
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*){0,5}")


def sent_files(submission: Submission) -> Iterator[tuple[str, bytes | Path]]:
    """Paths and contents of the folder that is sent; links are in a file of their own, since archives lose them."""
    links = {}
    for bundle in submission.bundles:
        for file in bundle.files:
            if file.link:
                links[f"{bundle.folder}/{file.path}"] = file.link
            else:
                yield f"{bundle.folder}/{file.path}", file.content
    yield LINKS, json.dumps(links).encode()
    yield EXPECTED, json.dumps(submission.expected).encode()
    order = LaunchOrder.of(submission, submission.code.folder, submission.stoker.folder)  # relative to what is sent
    yield ORDER, dumps(order).encode()


def entrypoint(
    submission: Submission, python: str, submitted_at: str, program: Sequence[str] = ("stoker.launching.logged_run",)
) -> str:
    """The shell command that runs the order, in the folder that was sent: a limit is not in it, so it is sent once.

    `program`: the module, and words before those of `logged_run`.
    """
    command = [*program, "run", below_home(submission.root)]
    if submission.most_held_s is not None:
        command += [f"{submission.most_held_s:.0f}", submitted_at]
    return f'PYTHONPATH="$PWD/{submission.stoker.folder}" {python} -m {shlex.join(command)}'


def below_home(root: str) -> str:
    """A root at a place: a relative one is below the home directory there."""
    return root if root.startswith(("/", "~")) else f"~/{root}"


def marked(log: bytes, mark: bytes) -> list[bytes]:
    """The rest of each line after the mark, whatever the platform has put before it."""
    lines = (line.partition(mark) for line in log.split(b"\n")[:-1])
    return [rest.rstrip(b"\r") for _, fields, rest in lines if fields]


def events_in(log: bytes, offset: int) -> bytes:
    """Bytes of the run's log from `offset` on, out of a job's log."""
    return b"".join(line + b"\n" for line in marked(log, EVENT))[offset:]


def state_in(log: bytes) -> LaunchState | None:
    """The last state that the run itself has printed; None if there is none."""
    for line in reversed(marked(log, STATE)):
        with suppress(ValueError):
            return loads(line, LaunchState)
    return None


def run_order(sent: Path, root: Path, most_held_s: float | None = None, submitted_at: str = "") -> int:
    """Run the order in the folder `sent`, and repeat its log and state; the exit code of the run.

    Raises:
        PlaceFailed: as for `placed_order`.
    """
    directory = placed_order(sent, root, most_held_s, submitted_at)
    with repeated(directory):
        return HostSupervisor(directory, HostRanks(), {}).run()


def placed_order(sent: Path, root: Path, most_held_s: float | None = None, submitted_at: str = "") -> Path:
    """The directory of the run below `root`, in which the order of the folder `sent` is.

    Raises:
        PlaceFailed: the order cannot be read, data that the job reads are not there, or there is a run of that name
            with another owner.
    """
    try:
        order = loads((sent / ORDER).read_bytes(), LaunchOrder)
        links: dict[str, str] = json.loads((sent / LINKS).read_bytes())
        expected: list[str] = json.loads((sent / EXPECTED).read_bytes())
    except (OSError, ValueError) as error:
        raise PlaceFailed(f"what was sent cannot be read: {error}") from error
    if missing := [path for path in expected if not Path(path).exists()]:
        raise PlaceFailed(
            f"{platform.node()} has no {missing[0]}, which the job reads and which was not sent",
            remedy="Put it there under that path; or move it below the job's folder.",
        )
    for path, target in links.items():
        with suppress(FileExistsError):
            (sent / path).parent.mkdir(parents=True, exist_ok=True)
            (sent / path).symlink_to(target)
    directory = root.expanduser().absolute() / "runs" / order.run
    launch = directory / "launch"
    before = launch / ORDER
    if before.exists() and loads(before.read_bytes(), LaunchOrder).owner != order.owner:
        raise PlaceFailed(
            f"there is a run of that name already, in {directory}, with another owner",
            remedy="Give this one another name: --run-dir runs/NAME.",
        )
    launch.mkdir(parents=True, exist_ok=True)
    for left in (launch / "stop", *launch.glob("host-*.json")):
        left.unlink(missing_ok=True)
    order = replace(
        order,
        code=str(sent / order.code),
        pythonpath=str(sent / order.pythonpath),
        most_held_s=most_held_s,
        submitted_at=submitted_at,
    )
    before.write_text(dumps(order))
    return directory


@contextmanager
def repeated(directory: Path) -> Iterator[None]:
    """Within the block, and once more at its end, the run's log and state are repeated on standard output."""
    done = threading.Event()
    position, shown = 0, b""

    def look() -> None:
        nonlocal position, shown
        with suppress(OSError):
            lines = read_lines(directory / "events.jsonl", position)
            position += sum(len(line) + 1 for line in lines)
            _print(EVENT + line for line in lines)
        with suppress(PlaceFailed, OSError):
            state = state_of(directory)
            line = json.dumps(to_json(replace(state, at=""))).encode()
            if line != shown:
                shown = line
                print_state(state)

    def work() -> None:
        while not done.wait(_LOOK_S):
            look()

    thread = threading.Thread(target=work, name="stoker-repeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look()


def print_state(state: LaunchState) -> None:
    """Print a state as a marked line."""
    _print([STATE + json.dumps(to_json(state)).encode()])


def _print(lines: Iterable[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def print_files(directory: Path, names: Sequence[str] | None) -> None:
    """Print the files of a run with size and digest; or the contents of those in `names`."""
    if names is None:
        for path in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
            name = path.relative_to(directory).as_posix()
            if _SAFE.fullmatch(name) and name not in LEFT_THERE and not name.startswith("launch/"):
                with suppress(FileNotFoundError), path.open("rb") as file:
                    about = {
                        "name": name,
                        "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                        "num_bytes": path.stat().st_size,
                    }
                    _print([FILE + json.dumps(about).encode()])
        return
    for name in names:
        with suppress(FileNotFoundError), (directory / name).open("rb") as file:
            _print([FILE + json.dumps({"name": name}).encode()])
            while part := file.read(_CHUNK_BYTES):
                _print([DATA + base64.b64encode(part)])


def files_in(log: bytes) -> dict[str, tuple[str, int]]:
    """Digest and size [bytes] of the files that `list` printed, by name; names that leave the run are left out."""
    files = {}
    for line in marked(log, FILE):
        with suppress(ValueError, KeyError, TypeError):  # a platform that cut the line: the next call brings the file
            about = json.loads(line)
            if _SAFE.fullmatch(str(about["name"])):
                files[str(about["name"])] = str(about["sha256"]), int(about["num_bytes"])
    return files


def write_files(log: bytes, into: Path, expected: Mapping[str, tuple[str, int]]) -> list[str]:
    """Write the files that `send` printed into `into`, those whose content is as expected; the names of the others."""
    contents: dict[str, list[bytes]] = {}
    parts: list[bytes] = []
    for line in log.split(b"\n"):
        _, is_file, about = line.partition(FILE)
        _, is_data, data = line.partition(DATA)
        with suppress(ValueError, KeyError, TypeError):  # what is missing shows by the digest
            if is_file:
                parts = contents.setdefault(str(json.loads(about)["name"]), [])
            elif is_data:
                parts.append(base64.b64decode(data))
    missing = []
    for name, (digest, _size) in expected.items():
        content = b"".join(contents.get(name, []))
        if hashlib.sha256(content).hexdigest() != digest:
            missing.append(name)
            continue
        path = into / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            aside.write_bytes(content)
    return missing


def main(arguments: Sequence[str]) -> int:
    """The command line at the place."""
    command, folder, *rest = arguments
    try:
        if command == "run":
            return run_order(Path.cwd(), Path(folder), float(rest[0]) if rest else None, *rest[1:])
        print_files(Path(folder).expanduser(), None if command == "list" else rest)
    except StokerError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the job's log
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
