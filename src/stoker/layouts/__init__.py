"""Layouts as all but their execution knows them: one file per axis, found by listing this folder.

A file with an object `AXIS` is an axis: its rules, messages, memory, trace and text. Its execution is `EXECUTION` of
the file of the same name in `stoker.stepping.layouts`.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from stoker.errors import BadJob
from stoker.layouts.base import LayoutAxis
from stoker.records import Layout

_RECORD = "\nAXIS = "


def all_axes() -> tuple[LayoutAxis, ...]:
    """The axes that layouts may have, the simplest first."""
    return _axes_in(tuple(__path__))


@functools.cache
def _axes_in(paths: tuple[str, ...]) -> tuple[LayoutAxis, ...]:
    files = [file for path in paths for file in Path(path).glob("*.py")]
    names = [file.stem for file in files if _RECORD in file.read_text(encoding="utf-8")]
    axes: list[LayoutAxis] = [importlib.import_module(f"{__name__}.{name}").AXIS for name in names]
    return tuple(sorted(axes, key=lambda axis: (axis.complexity, axis.name)))


def axes_of(layout: Layout) -> tuple[LayoutAxis, ...]:
    """The axes along which a layout divides an update, the one whose execution contains the others first.

    Those that divide the model come first, in the order of the mesh; those that share the batch follow, the closest
    together first.

    Raises:
        BadJob: there is no such axis here.
    """
    return _axes_of(layout, all_axes())


@functools.lru_cache(maxsize=256)
def _axes_of(layout: Layout, axes: tuple[LayoutAxis, ...]) -> tuple[LayoutAxis, ...]:
    known = {axis.name: axis for axis in axes}
    divided = layout.divided
    for one in divided:
        if one.name not in known:
            kinds = "; ".join(f"{axis.name}: {axis.explanation}" for axis in axes)
            raise BadJob(
                f"there is no layout of {one.name} here, only of {', '.join(known)}",
                remedy=f"Use another plan. {kinds}.",
            )
    model = [one for one in divided if not one.shares_batch]
    data = [one for one in divided if one.shares_batch]
    return tuple(known[one.name] for one in (*model, *reversed(data)))
