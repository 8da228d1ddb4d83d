"""What tests leave in the system's temporary directory: nothing, however their processes end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = """
import os, signal, subprocess, sys, tempfile

def test_a_process_is_killed():
    tempfile.mkdtemp(prefix="stoker-ranks-")
    code = "import os, tempfile; tempfile.mkdtemp(prefix='torchelastic_'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def session(tmp_path: Path, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a session of its own, and what it left in its system's temporary directory."""
    system = tmp_path / "system"
    system.mkdir(exist_ok=True)
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*words, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_leaves.py")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        check=False,
        timeout=100,
        env=mine | environment | {"TMPDIR": str(system), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
    )
    return done.returncode, [path.name for path in system.iterdir()]


@pytest.mark.slow
def test_nothing_is_left_in_the_systems_temporary_directory(tmp_path: Path) -> None:
    """Neither by a process that a test killed; nor, once there was another session, by a session that was killed."""
    code, left = session(tmp_path, KILLED="1")
    assert code < 0
    assert len(left) == 1
    assert left[0].startswith("stoker-tests-")
    assert session(tmp_path) == (0, [])
