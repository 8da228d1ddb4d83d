"""An `ssh` that runs commands on this machine, for tests without a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_PROGRAM = """#!{python}
import os, sys
words, options = sys.argv[1:], []
while words and words[0].startswith("-"):
    option = words.pop(0)
    if option in ("-o", "-l", "-p", "-F", "-O"):
        options.append((option, words.pop(0)))
host = words.pop(0)
with open({log!r}, "a") as log:
    log.write(host + " " + " ".join(words) + "\\n")
if host == "gone":
    sys.stderr.write("ssh: connect to host gone port 22: Connection timed out\\n")
    sys.exit(255)
if host == "closed":
    sys.stderr.write("me@closed: Permission denied (publickey).\\n")
    sys.exit(255)
if host == "nologin":
    sys.stderr.write("Could not chdir to home directory /nonexistent: No such file or directory\\n")
    sys.stdout.write("This account is currently not available.\\n")
    sys.exit(1)
if host == "loud":
    sys.stdout.write("Welcome to loud!\\n")
    sys.stdout.flush()
if words:
    os.execvp("sh", ["sh", "-c", " ".join(words)])
"""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log of the commands that were sent; `gone` does not answer, `closed` refuses the login.

    `nologin` lets it in and runs nothing, and `loud` greets.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    program, log = folder / "ssh", tmp_path / "ssh.log"
    program.write_text(_PROGRAM.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin:/usr/local/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    return log
