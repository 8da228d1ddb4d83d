"""Hashes of the packages that constraints.txt pins, in requirements-hashes.txt.

    python -m bench.locking            writes it anew: pip says what it would install here
    python -m bench.locking --check    fails where a pin has no hash, or a hash no pin; needs no network

The hashes are of the wheels for one platform, which the file names. torch has none: there is a build for each of CPU
and CUDA under one version, from different indices.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS, HASHES = ROOT / "constraints.txt", ROOT / "requirements-hashes.txt"
WITHOUT = frozenset({"torch"})
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
_HASH = re.compile(r"^([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", re.MULTILINE)
_HEAD = """\
# SHA-256 of what constraints.txt pins: wheels for {platform}. Written by `make lock`, held against the pins by
# `make audit`. torch has none, since its CPU and CUDA builds share a version. Install torch first, then
#   pip install --no-deps --require-hashes -r requirements-hashes.txt
"""


def name_of(given: str) -> str:
    """A package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", given).lower()


def pins() -> dict[str, str]:
    """Versions by name that need a hash."""
    found = {name_of(name): version for name, version in _PIN.findall(PINS.read_text(encoding="utf-8"))}
    return {name: version for name, version in found.items() if name not in WITHOUT}


def problems() -> list[str]:
    """What pins and hashes do not agree about."""
    lines = [line for line in HASHES.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    known = dict(_HASH.findall("\n".join(lines)))
    apart = {name for name in {*known, *pins()} if known.get(name) != pins().get(name)}
    odd = [f"{line!r} is no pin with a hash" for line in lines if not _HASH.match(line)]
    return odd + [f"{name}: pinned {pins().get(name)}, hashed {known.get(name)}" for name in sorted(apart)]


def written() -> str:
    """The file, of what pip would install for the pins here."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins().items()), encoding="utf-8")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--ignore-installed",
                "--no-deps",
                "--only-binary=:all:",
                "--report",
                str(report),
                "-r",
                str(wanted),
            ],
            check=True,
        )
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    rows = [
        f"{name_of(one['metadata']['name'])}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}"
        for one in installs
    ]
    where = f"Python {platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}, {platform.system()}"
    return _HEAD.format(platform=f"{where} {platform.machine()}") + "\n".join(sorted(rows)) + "\n"


def main() -> None:
    """Write or check the file."""
    if "--check" not in sys.argv:
        HASHES.write_text(written(), encoding="utf-8")
    if found := problems():
        sys.exit("requirements-hashes.txt and constraints.txt differ; `make lock` writes it anew:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
