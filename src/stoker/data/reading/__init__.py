"""Readers of files, shared by training, `stoker data check` and `stoker predict`, so that all find the same faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.data.reading import array_files as array_files
    from stoker.data.reading import image_decoding as image_decoding

__getattr__ = on_first_use(__name__, __file__)
