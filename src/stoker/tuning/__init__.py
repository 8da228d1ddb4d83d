"""Tuning: which settings of a job are best, by trials that are real runs. It is handed what runs a trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.tuning import conductor as conductor
    from stoker.tuning import study_database as study_database

__getattr__ = on_first_use(__name__, __file__)
