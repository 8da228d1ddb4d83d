"""Events of runs as text for the terminal, and reports as pages for the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.reporting import figures as figures
    from stoker.reporting import run_page as run_page
    from stoker.reporting import study_page as study_page

__getattr__ = on_first_use(__name__, __file__)
