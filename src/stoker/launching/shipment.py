"""A submission on its way over a line: what is missing there is sent, the environment made, the order written.

Use when: the place has a machine with a shell and a disk: hosts by SSH, a login node of Slurm. Each step leaves either
something whole, named by its digest, or nothing.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stoker.errors import PlaceFailed, first_line
from stoker.launching.at_place import LaunchOrder
from stoker.launching.bundle import Bundle, require_sendable, sending_text
from stoker.launching.environment_lock import EnvironmentLock, base_python_script, is_out_of_room
from stoker.launching.launcher import Submission
from stoker.launching.lines import Answer, Line
from stoker.records.codec import dumps, loads
from stoker.units import format_bytes

Read = TypeVar("Read")

INSTALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Where things are at the place, as absolute paths.

    Attributes:
        root: folder of everything of Stoker there.
        directory: of the run.
        code: the job's folder.
        stoker: for PYTHONPATH.
        python: of the environment.
        sent_bytes: what had to be sent [bytes].
    """

    root: str
    directory: str
    code: str
    stoker: str
    python: str
    sent_bytes: int = 0

    @classmethod
    def of(cls, submission: Submission, root: str, *, python: str = "", sent_bytes: int = 0) -> Shipped:
        """Where things of a submission are below `root`; without `python`, that of its environment once it is made."""
        environment = submission.environment
        if not python and isinstance(environment, EnvironmentLock):
            python = f"{root}/{environment.folder(environment.python)}/bin/python"
        return cls(
            root=root,
            directory=f"{root}/runs/{submission.run}",
            code=f"{root}/{submission.code.folder}",
            stoker=f"{root}/{submission.stoker.folder}",
            python=python or str(environment),
            sent_bytes=sent_bytes,
        )

    def program(self, command: str, *options: str) -> list[str]:
        """The command line of `at_place COMMAND DIR` there."""
        return program_at(self.python, self.stoker, command, self.directory, *options)


def program_at(python: str, stoker: str, command: str, directory: str, *options: str) -> list[str]:
    """The command line of `at_place COMMAND DIR` at a place."""
    return ["env", f"PYTHONPATH={stoker}", python, "-m", "stoker.launching.at_place", command, directory, *options]


@dataclass(frozen=True)
class Found:
    """What a place has already for a submission, and for the environment of the run.

    Attributes:
        root: folder of everything of Stoker there, absolute.
        records: content of `launch/handle.json`, `launch/order.json` and `run.json` of a run of that name, by name.
        bundles: folders that are there, absolute.
        missing: paths of the submission's `expected` that are not there.
        free_bytes: on the disk of `root` [bytes].
        python: whether the place's own Python can be used, and what it says; None: an environment is made.
        is_ready: whether the environment is made.
    """

    root: str
    records: dict[str, bytes]
    bundles: frozenset[str]
    missing: tuple[str, ...]
    free_bytes: int
    python: Answer | None
    is_ready: bool

    @property
    def order(self) -> bytes:
        """The order of a run of that name; b"" if there is none."""
        return self.records.get("launch/order.json", b"")


_LOOK = r"""
case $1 in /*) root=$1;; *) root=$(cd && pwd)/$1 || exit;; esac
run=$root/runs/$2 ready=$3 python=$4 expected=$5
shift 5
echo "root $root"
for f in launch/handle.json launch/order.json run.json; do
    [ ! -e "$run/$f" ] || echo "record $f $(base64 -w 0 -- "$run/$f")"
done
while [ "$expected" -gt 0 ]; do
    [ -e "$1" ] || printf 'missing %s
' "$1"
    shift; expected=$((expected - 1))
done
for f in "$@"; do [ ! -d "$root/$f" ] || [ -L "$root/$f" ] || echo "bundle $root/$f"; done  # a link may be out of date
[ -z "$ready" ] || [ ! -e "$root/$ready/complete" ] || echo "ready"
while [ ! -d "$root" ]; do root=$(dirname -- "$root"); done
echo "free $(df -Pk -- "$root" | awk 'END {print $4}')"
[ -z "$python" ] || {
    path=$(command -v "$python") && said=$("$path" -c "$THEIR" 2>&1) && code=0 || code=$?
    [ -n "$path" ] || said="there is no $python"
    echo "python $code $path"
    echo "said $(echo "$said" | tail -n 1)"
}
exit 0
"""
PYTHON_CHECK = (
    "import sys, importlib.util as u; m = [n for n in ('torch', 'numpy', 'safetensors', 'typer', 'rich', 'plotly', "
    "'jinja2') if u.find_spec(n) is None]; "
    "print('%s has no %s' % (sys.executable, ', '.join(m)), file=sys.stderr) if m else None; "
    "sys.exit(3 if m else 4 if sys.version_info < (3, 11) else 0)"
)
"""Program by which a Python says what it lacks of Stoker's requirements; exit code 3, or 4 if it is too old."""


def look(line: Line, submission: Submission) -> Found:
    """What the place has already, by one command that changes nothing."""
    environment, bundles = submission.environment, submission.bundles
    is_theirs = isinstance(environment, str)
    ready = "" if isinstance(environment, str) else environment.folder(environment.python)
    about = [submission.root.removeprefix("~/"), submission.run, ready, environment if is_theirs else ""]
    about += [str(len(submission.expected)), *submission.expected, *(bundle.folder for bundle in bundles)]
    script = f"THEIR={shlex.quote(PYTHON_CHECK)}\n{_LOOK}"
    rows = [
        row.partition(" ")[::2]
        for row in line.shell(script, *map(str, about)).stdout.decode(errors="surrogateescape").split("\n")
    ]
    said = dict(rows)
    code, _, path = said.get("python", "").partition(" ")
    return Found(
        root=said["root"],
        records={
            name: base64.b64decode(text)
            for name, _, text in (rest.partition(" ") for word, rest in rows if word == "record")
        },
        bundles=frozenset(rest for word, rest in rows if word == "bundle"),
        missing=tuple(rest for word, rest in rows if word == "missing"),
        free_bytes=int(said.get("free") or 0) * 1024,
        python=Answer(int(code or 1), path.encode(), said.get("said", "")) if is_theirs else None,
        is_ready="ready" in said,
    )


def ship(
    line: Line,
    submission: Submission,
    found: Found,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Shipped:
    """Send what is missing and make the environment; nothing is ordered or started.

    Args:
        line: to the machine whose disk the run uses.
        submission: what to run.
        found: what is there (`look`).
        tell: receives a line of text about each step that takes time.

    Raises:
        PlaceFailed: the place cannot take it (full disk, no Python, a version that cannot be installed, a run of that
            name with another owner).
        PlaceUnreachable: the line was cut; what is whole there is not sent again.
    """
    _require_own(line, found, submission)
    if found.missing:
        raise PlaceFailed(
            f"{line.name} has no {found.missing[0]}, which the job reads and which is outside of the folder that is "
            "rebuilt there",
            remedy="Put it there under that path; or start from a folder that holds both the job file and the data.",
        )
    environment = submission.environment
    stoker = f"{found.root}/{submission.stoker.folder}"
    python = _their_python(line, environment, found) if isinstance(environment, str) else ""
    sent = _send_missing(line, found, submission, tell)
    if not isinstance(environment, str) and not found.is_ready:
        python = environment_at(line, found.root, stoker, environment, tell)
    return Shipped.of(submission, found.root, python=python, sent_bytes=sent)


def order_file(submission: Submission, shipped: Shipped, *, is_requeued: bool, submitted_at: str) -> bytes:
    """The content of `launch/order.json`.

    Args:
        submission: what to run.
        shipped: where its files are.
        is_requeued: the place's scheduler starts the run again after a slice or a preemption.
        submitted_at: ISO 8601 in UTC.
    """
    order = LaunchOrder.of(submission, shipped.code, shipped.stoker, is_requeued=is_requeued, submitted_at=submitted_at)
    return dumps(order).encode()


def _require_own(line: Line, found: Found, submission: Submission) -> None:
    """Refuse a run of that name which has another owner, or is finished and not known here any more."""
    directory, text = f"{found.root}/runs/{submission.run}", found.order
    if text:
        other = record_there(line, f"{directory}/launch/order.json", lambda: loads(text, LaunchOrder).owner)
        if other != submission.owner:
            raise PlaceFailed(
                f"{line.name} has a run of that name already, in {directory}, sent from {other}",
                remedy="Give this one another name: --run-dir runs/NAME.",
            )
    run = found.records.get("run.json", b"")
    is_finished = bool(run) and record_there(
        line, f"{directory}/run.json", lambda: json.loads(run)["status"] == "finished"
    )
    if run and (not text or is_finished):
        raise PlaceFailed(
            f"{line.name} has a {'finished ' if text else ''}run of that name already, in {directory}",
            remedy="Give this one another name: --run-dir runs/NAME.",
        )


def record_there(line: Line, path: str, read: Callable[[], Read]) -> Read:
    """The result of `read` for a record at the place.

    Raises:
        PlaceFailed: it is damaged, or another version's.
    """
    try:
        return read()
    except (ValueError, KeyError, TypeError) as problem:
        raise PlaceFailed(
            f"{line.name} has {path}, which cannot be used: {first_line(problem)}",
            remedy="It is damaged, or of another version of Stoker: give this run another name, --run-dir runs/NAME.",
        ) from problem


def _send_missing(line: Line, found: Found, submission: Submission, tell: Callable[[str], None]) -> int:
    """Send the bundles that are not there; the number of bytes sent [bytes]."""
    data, root = submission.options.get("data", ""), found.root
    missing = [bundle for bundle in submission.bundles if f"{root}/{bundle.folder}" not in found.bundles]
    missing = [bundle for bundle in missing if not (bundle.kind == "data" and _found_there(line, root, bundle, data))]
    if not missing:
        return 0
    require_sendable(missing, submission.send_limit)
    total, free = sum(bundle.num_bytes for bundle in missing), found.free_bytes
    tell(sending_text(missing, line.name))
    if total > free:
        raise PlaceFailed(
            f"{format_bytes(total)} have to be sent, and {root} on {line.name} has {format_bytes(free)} free",
            remedy="Free some space there, or give another --place-option root=FOLDER.",
        )
    for bundle in missing:
        line.send_tree(bundle.files, f"{root}/{bundle.folder}")
    return total


_FIND_DATA = r"""
set -e
cd
for home in "$(readlink -- "$1" || :)" "$3" "$STOKER_DATA"; do
    [ -n "$home" ] && home=$(cd -- "$home" 2>/dev/null && pwd) || continue
    for place in "$home" "$home/$2"; do
        ( cd -- "$place" 2>/dev/null && sha256sum --check --strict --status - ) < "$1.sums" || continue
        if [ -n "$4" ]; then  # a folder that holds more is another one
            count=$(find -L "$place/" -type d -name __pycache__ -prune -o ! -name "*.pyc" -type f -printf . | wc -c)
            [ "$count" -eq "$4" ] || continue
        fi
        [ "$(readlink -- "$1" || :)" = "$place" ] || ln -sfT -- "$place" "$1"
        rm -f -- "$1.sums"; exit 0
    done
done
rm -f -- "$1.sums"; [ ! -L "$1" ] || rm -f -- "$1"
exit 1
"""


def _found_there(line: Line, root: str, bundle: Bundle, data: str) -> bool:
    """Whether the place has the data in `data` or its `$STOKER_DATA`, with equal digests; then it is linked.

    What was linked before is looked at again, and its link removed if it does not hold any more.
    """
    folder = f"{root}/{bundle.folder}"
    script = '[ -n "$1" ] || [ -n "$STOKER_DATA" ] || [ -L "$2" ]'
    if line.shell(script, data, folder, check=False).code != 0:
        return False
    files = [file for file in bundle.files if not file.link]
    sums = "".join(f"{file.digest}  {file.path}\n" for file in files)
    line.write(f"{folder}.sums", sums.encode(errors="surrogateescape"))
    count = "" if [file.path for file in files] == [bundle.name] else str(len(files))  # its folder may hold more
    arguments = (folder, bundle.name, data, count)
    return line.shell(_FIND_DATA, *arguments, timeout_s=INSTALL_TIMEOUT_S, check=False).code == 0


def environment_at(
    line: Line, root: str, stoker: str, environment: EnvironmentLock, tell: Callable[[str], None]
) -> str:
    """Absolute path of the Python there that has the environment, which is made if it is not there.

    Raises:
        PlaceFailed: there is no Python of at least 3.11, or a version cannot be installed.
    """
    ready = f"{root}/{environment.folder(environment.python)}"
    if line.exists(f"{ready}/complete"):
        return f"{ready}/bin/python"
    base = line.shell(*base_python_script(environment), check=False)
    if base.code != 0 or not base.text:
        raise PlaceFailed(
            f"{line.name} has no Python of at least 3.11",
            remedy="Install one there, or name it: --env /path/to/python.",
        )
    tell(f"making the environment on {line.name}: {len(environment.requirements)} packages, once")
    answer = line.run(
        ["env", f"PYTHONPATH={stoker}", base.text, "-m", "stoker.launching.environment_lock", root],
        stdin=dumps(environment).encode(),
        timeout_s=INSTALL_TIMEOUT_S,
        check=False,
    )
    if answer.code != 0:
        reason = answer.last_line()
        remedy = (
            "Free some space there, or give another --place-option root=FOLDER."
            if is_out_of_room(reason)
            else "Change the version here, put a wheel where the place's pip finds it (PIP_FIND_LINKS there), or use "
            "--env theirs."
        )
        raise PlaceFailed(f"{line.name}: {reason}", remedy=remedy)
    return answer.text.splitlines()[-1]


def _their_python(line: Line, python: str, found: Found) -> str:
    """Absolute path of the place's own Python, which has to have what Stoker needs."""
    answer = found.python
    assert answer is not None, "it was asked for"
    if answer.code == 0:
        return answer.text
    problem = f"its {python} is older than 3.11" if answer.code == 4 else answer.last_line()
    raise PlaceFailed(
        f"{line.name} cannot run Stoker in its own environment: {problem}",
        remedy="Install what is missing there, or leave --env out: the versions here are installed there once.",
    )


def secrets_input(values: dict[str, str]) -> bytes:
    """Secrets as `at_place --secrets` reads them on standard input."""
    return json.dumps(values).encode()
