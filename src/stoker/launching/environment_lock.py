"""The environment at a place: exact versions of what the job uses here, installed once there, keyed by their digest.

What: the versions of Stoker's requirements, of the packages that the job imports, and of all that these require. At the
place they become `ROOT/environments/DIGEST-pyX.Y`, a virtual environment of the place's own Python and pip, whose
indexes and settings count. Two at once wait for each other; a failed one leaves nothing.
Use when: `--env lock`, the default; `--env theirs` or `--env PYTHON` takes one that exists, and `--image` an image.
Costs: minutes the first time (PyTorch is large), milliseconds after that.
Portable are versions, not builds: `2.13.0+cpu` is asked for as `2.13.0`, so that a place with GPUs gets its own build
of PyTorch, and one without takes the build that its index has. NVIDIA's libraries and Triton are left to PyTorch, which
pins them, but for what the job imports and PyTorch does not bring. The contract's bit-equality is for one kind of
machine anyway; `environment.json` records what ran.
Does not carry: packages installed from folders or Git (named, with a remedy), system libraries, drivers.

`python -m stoker.launching.environment_lock ROOT < LOCK` makes the environment; only the standard library is needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from stoker.errors import PlaceFailed, StokerError
from stoker.records.codec import dumps, loads

_LEFT_TO_TORCH = re.compile(r"nvidia-|triton|pytorch-triton|cuda-|intel-|tbb|mkl|setuptools$|pip$")
_NO_ROOM = "the disk is full, or its quota is used up"
_COMPLETE = "complete"
_BASE_SCRIPT = (
    'for p in "$@"; do command -v "$p" >/dev/null 2>&1 && "$p" -c "import sys; sys.exit(sys.version_info < (3, 11))" '
    '2>/dev/null && { command -v "$p"; exit 0; }; done; exit 3'
)
"""Prints the first Python of at least 3.11; a shell script whose arguments are the candidates."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentLock:
    """Exact versions that a job's environment has.

    Attributes:
        python: version of Python here, `3.11`; there the same is taken if there is one.
        requirements: `numpy==2.3.1`, sorted by name.
    """

    schema: ClassVar[int] = 1

    python: str
    requirements: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the requirements."""
        return hashlib.sha256("\n".join(self.requirements).encode()).hexdigest()

    def folder(self, python: str) -> str:
        """Folder below the place's root, for its version of Python."""
        return f"environments/{self.digest[:32]}-py{python}"


def lock_of(modules: Iterable[str]) -> EnvironmentLock:
    """The lock of Stoker's requirements and of what the top-level `modules` belong to, as installed here.

    Modules that no installed distribution has (the standard library, the job's own) do not count.

    Raises:
        PlaceFailed: a package was installed from a folder, or from version control, and cannot be had elsewhere.
    """
    from packaging.utils import canonicalize_name  # noqa: PLC0415 - not needed where the environment is made

    owners = importlib.metadata.packages_distributions()
    imported = {canonicalize_name(name) for module in modules for name in owners.get(module, ())}
    versions = installed_closure({"stoker", *imported})
    versions.pop("stoker", None)
    own = imported - installed_closure({"torch"}).keys()  # no matter what they are called, nothing else brings them
    requirements = tuple(
        f"{name}=={version.partition('+')[0]}"
        for name, version in sorted(versions.items())
        if name in own or not _LEFT_TO_TORCH.match(name)
    )
    return EnvironmentLock(python=f"{sys.version_info.major}.{sys.version_info.minor}", requirements=requirements)


def installed_closure(roots: Iterable[str]) -> dict[str, str]:
    """Versions of the distributions and of all that they require here, by normalised name."""
    from packaging.requirements import Requirement  # noqa: PLC0415 - not needed where the environment is made
    from packaging.utils import canonicalize_name  # noqa: PLC0415 - likewise

    versions: dict[str, str] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(canonicalize_name(name), frozenset()) for name in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional one
        if name != "stoker":
            _require_from_index(distribution)
        versions[name] = distribution.version
        for text in distribution.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return versions


def _require_from_index(distribution: importlib.metadata.Distribution) -> None:
    origin = distribution.read_text("direct_url.json") or ""
    if '"dir_info"' in origin or '"vcs_info"' in origin:
        name = distribution.metadata["Name"]
        raise PlaceFailed(
            f"{name} {distribution.version} was installed from a folder or from version control, and no index has it",
            remedy=f"Install {name} there and use --env theirs; or put its modules into the job file's folder.",
        )


def base_python_script(lock: EnvironmentLock) -> tuple[str, ...]:
    """Shell script, and its arguments, that prints the Python there from which the environment is made."""
    return (_BASE_SCRIPT, f"python{lock.python}", "python3", "python")


def make(root: Path, lock: EnvironmentLock, *, log: IO[str] = sys.stderr) -> Path:
    """Make the environment of `lock` with this Python below `root`, unless it is there; the path of its Python.

    Raises:
        PlaceFailed: a version cannot be installed here (named), or the disk is full; nothing is left.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = root / lock.folder(version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as held:
        _wait_for(held)
        if (folder / _COMPLETE).exists():
            return folder / "bin" / "python"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            _install(folder, lock, log)
            (folder / _COMPLETE).write_text(dumps(lock))
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError | subprocess.CalledProcessError):
                output = getattr(error, "output", None) or b""
                if is_out_of_room(f"{error} {output.decode(errors='replace')}"):
                    raise PlaceFailed(_no_room(lock)) from error
                needs = f"{sys.executable} needs the modules venv and ensurepip (Debian: python3-venv)"
                raise PlaceFailed(
                    f"the environment {folder} cannot be made: {error}; {needs}, and the disk a few GB"
                ) from error
            raise
    return folder / "bin" / "python"


def _wait_for(file: IO[str]) -> None:
    import fcntl  # noqa: PLC0415 - places are Unix; this file is also imported where they are not

    with suppress(OSError):  # a file system without locks: two at once would do the work twice
        fcntl.flock(file, fcntl.LOCK_EX)


def _install(folder: Path, lock: EnvironmentLock, log: IO[str]) -> None:
    print(f"making {folder} of {len(lock.requirements)} packages", file=log, flush=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(lock.requirements) + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    quietly = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
    pip = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", *quietly, "--only-binary", ":all:", "-r", requirements],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        check=False,
        text=True,
        errors="replace",
    )
    if pip.returncode != 0:
        raise PlaceFailed(pip_problem(pip.stdout, lock))


def pip_problem(output: str, lock: EnvironmentLock) -> str:
    """A sentence on what pip could not install, from its output.

    >>> lock = EnvironmentLock(python="3.11", requirements=("torch==9.9",))
    >>> pip_problem("ERROR: No matching distribution found for torch==9.9", lock)
    'torch==9.9 cannot be installed there: no such wheel for its Python and platform'
    """
    if missing := re.search(r"No matching distribution found for (\S+)", output):
        return f"{missing[1]} cannot be installed there: no such wheel for its Python and platform"
    if is_out_of_room(output):
        return _no_room(lock)
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.strip().splitlines()
    said = errors[0].removeprefix("ERROR: ") if errors else "pip said nothing"
    return f"the packages cannot be installed there: {said}"


def is_out_of_room(text: str) -> bool:
    """Whether what a program said is that the disk, or a quota of it, is used up."""
    return any(sign in text for sign in ("No space left on device", "Disk quota exceeded", _NO_ROOM))


def _no_room(lock: EnvironmentLock) -> str:
    return f"{_NO_ROOM}: {len(lock.requirements)} packages do not fit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make an environment from the lock on standard input below the folder that is named; prints its Python."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    try:
        lock = loads(sys.stdin.buffer.read(), EnvironmentLock)
        print(make(Path(argv[0]), lock))  # noqa: T201 - the answer to the other end of the line
    except StokerError as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - likewise
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
