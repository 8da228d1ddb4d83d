"""Doing it: the loop, evaluation, checkpoints, recovery, events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.training import run_handle as run_handle
    from stoker.training import train as train

__getattr__ = on_first_use(__name__, __file__)
