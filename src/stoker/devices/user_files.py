"""Where a user's own rows are looked for: of the catalogue, of prices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_file(variable: str, *names: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file a user keeps own rows in; None where there is none.

    Args:
        variable: the environment variable that may name it; a file it names need not exist.
        names: what it is called in the configuration directory (`stoker` in `$XDG_CONFIG_HOME` or in `~/.config`), in
            the order in which they are looked for.
        environ: the environment.

    Source: XDG Base Directory Specification 0.8: a relative `$XDG_CONFIG_HOME` is ignored.
    """
    if given := environ.get(variable):
        return Path(given).expanduser()
    root = _configuration_root(environ)
    return None if root is None else next((root / name for name in names if (root / name).is_file()), None)


def _configuration_root(environ: Mapping[str, str]) -> Path | None:
    """Stoker's configuration directory; None for a user without a home."""
    xdg = Path(environ.get("XDG_CONFIG_HOME", ""))
    if xdg.is_absolute():
        return xdg / "stoker"
    home = environ.get("HOME")
    return Path(home) / ".config" / "stoker" if home else None
