"""The page of `stoker ui`: runs, plans, studies, places and services in a browser. It reads records.

Modules that the table of runs does without load on first use, `web.run_view.run_document`: with NumPy and the templates
they take as long as all the others together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.web import control as control
    from stoker.web import other_views as other_views
    from stoker.web import pool as pool
    from stoker.web import run_log as run_log
    from stoker.web import run_view as run_view
    from stoker.web import server as server
    from stoker.web import ui as ui

__getattr__ = on_first_use(__name__, __file__)
