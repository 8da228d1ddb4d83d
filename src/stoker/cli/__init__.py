"""The command line. Modules that need more than a command's help does load on first use: `cli.runs.render_runs`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.cli import devices as devices
    from stoker.cli import doctor as doctor
    from stoker.cli import place_table as place_table
    from stoker.cli import plan_table as plan_table
    from stoker.cli import runs as runs


def __getattr__(name: str) -> Any:
    """The module `stoker.cli.name`, imported now."""
    if name not in ("devices", "doctor", "place_table", "plan_table", "runs"):
        raise AttributeError(f"module 'stoker.cli' has no attribute {name!r}")
    return importlib.import_module(f"stoker.cli.{name}")
