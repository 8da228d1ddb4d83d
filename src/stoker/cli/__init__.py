"""The command line. Modules that need more than a command's help does load on first use: `cli.runs.render_runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker import web as web
    from stoker.cli import devices as devices
    from stoker.cli import doctor as doctor
    from stoker.cli import place_table as place_table
    from stoker.cli import plan_table as plan_table
    from stoker.cli import runs as runs

__getattr__ = on_first_use(__name__, __file__)
