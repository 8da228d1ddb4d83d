"""Where runs and caches are kept unless the user says otherwise."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def runs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory runs are made in: `$STOKER_RUNS`, or `runs` in the working directory. It may not exist yet."""
    given = environ.get("STOKER_RUNS")
    return Path(given).expanduser() if given else Path("runs")


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of what may be deleted without loss of work. It may not exist yet.

    `$STOKER_CACHE`, or `stoker` in `$XDG_CACHE_HOME`, or `~/.cache/stoker`; for a user without a home, a directory of
    that user among the temporary files.

    Source: XDG Base Directory Specification 0.8: a relative `$XDG_CACHE_HOME` is ignored.
    """
    if given := environ.get("STOKER_CACHE"):
        return Path(given).expanduser()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "stoker"
    try:
        return Path.home() / ".cache" / "stoker"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"stoker-cache-{_user()}"


def _user() -> str:
    """The user's name, or number where the number has no name (containers started with a bare user number)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid()) if hasattr(os, "getuid") else "anyone"
