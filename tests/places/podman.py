"""Rootless Podman, also where the tests run as root and where cgroups are of both versions."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PURE_CGROUPS = (
    "umount -R /sys/fs/cgroup 2>/dev/null; mount -t cgroup2 none /sys/fs/cgroup; exec "
    'runuser -u "$0" -- env HOME="$1/home" TMPDIR="$1/home" XDG_CONFIG_HOME="$1/home/.config" '
    'XDG_RUNTIME_DIR="$1/runtime" "${@:2}"'
)
"""In a mount namespace of its own: crun refuses both versions of cgroups at once. Then as the user `$0`."""


def reason_against() -> str | None:
    """Why a container cannot be run here; None if it can."""
    missing = [program for program in ("podman", "newuidmap", "unshare") if shutil.which(program) is None]
    if missing:
        return f"there is no {', '.join(missing)}: apt-get install podman crun uidmap"
    if os.getuid() == 0 and _user() is None:
        return "rootless Podman needs a user with subordinate ids, and there is none: useradd NAME"
    return None


def _user() -> str | None:
    """A user who may have a range of ids of his own."""
    try:
        names = [line.partition(":")[0] for line in Path("/etc/subuid").read_text().splitlines()]
    except OSError:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in names if name in known and name != "root"), None)


class Podman:
    """Podman with images and containers in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str | Path, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command, without network and cgroups."""
        command = [
            "podman",
            "--root",
            f"{self.folder}/store",
            "--runroot",
            f"{self.folder}/run",
            "--storage-driver",
            "vfs",
            *map(str, words),
        ]
        if os.getuid() == 0:
            command = ["unshare", "-m", "bash", "-c", _PURE_CGROUPS, str(_user()), str(self.folder), *command]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd="/")


@contextmanager
def podman() -> Iterator[Podman]:
    """Podman in a folder that goes with the block; its files belong to ids of the user's range."""
    folder = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))
    folder.chmod(0o755)
    for name in ("home", "runtime", "store", "run", "runs"):
        (folder / name).mkdir(mode=0o700)
        if os.getuid() == 0:
            shutil.chown(folder / name, _user())
    program = Podman(folder)
    try:
        yield program
    finally:
        program("unshare", "rm", "-rf", folder / "store", folder / "runs")
        with suppress(OSError, ValueError):  # the process that keeps the user's namespace
            os.kill(int((folder / "runtime" / "libpod" / "tmp" / "pause.pid").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)
