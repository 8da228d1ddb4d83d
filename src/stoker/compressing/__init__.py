"""Making an exported model smaller and faster, with proof of accuracy and speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.compressing import pruning as pruning
    from stoker.compressing import source_job as source_job

__getattr__ = on_first_use(__name__, __file__)
