"""Imports that cost little: names that load at their first use, and large packages without garbage collection.

A module that offers names of others without loading them lists them as imports below `if TYPE_CHECKING`: type checkers
read those as they stand, and at run time `__getattr__` imports a name from where the list says when it is first used.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal


def listed_imports(file: str) -> tuple[dict[str, str], ...]:
    """For each `if` block of a Python file, the names that it imports and the module of each."""
    blocks = [block for block in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(block, ast.If)]
    return tuple(
        {
            alias.name: str(statement.module)
            for statement in block.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }
        for block in blocks
    )


def import_name(module: str, name: str) -> Any:
    """The object that `from module import name` binds: a value, or a module of the package."""
    home = importlib.import_module(module)
    return vars(home)[name] if name in vars(home) else importlib.import_module(f"{module}.{name}")


def on_first_use(package: str, file: str) -> Callable[[str], Any]:
    """`__getattr__` of a package whose `__init__.py` is `file`, for the names that it lists."""

    @functools.cache
    def modules_by_name() -> dict[str, str]:
        return {name: module for block in listed_imports(file) for name, module in block.items()}

    def load(name: str) -> Any:
        if name.startswith("__") or name not in modules_by_name():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_name(modules_by_name()[name], name)

    return load


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block cyclic garbage is not looked for.

    Importing PyTorch and transformers makes a million objects that stay. The collector visits them again and again as
    they grow in number: 1.0 s of 7 (docs/log.md). What is there at the end counts as old, as if it had been visited.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)  # not gc.disable(): what is imported may call it, for good
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            is_worth_it = gc.get_count()[0] > before[0]  # new objects than a collection of them waits for
            if is_worth_it and not _are_frozen():  # else the program keeps objects from being visited for good
                gc.freeze()  # into a generation of their own, without visiting them,
                gc.unfreeze()  # and into the oldest
            gc.set_threshold(*before)


@contextlib.contextmanager
def older_objects_kept() -> Iterator[None]:
    """Within the block cyclic garbage is looked for among objects that are made within it alone."""
    is_outermost = not _are_frozen()
    if is_outermost:
        gc.freeze()
        _FROZEN_BY.add("a block")
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()
            _FROZEN_BY.remove("a block")


_FROZEN_BY = set[Literal["a block", "the program"]]()
"""Who keeps objects from being visited: `older_objects_kept`, for a while, or the program, which does so for good."""


def _are_frozen() -> bool:
    """Whether objects are kept from being visited; they are counted, one by one, until the program's are found."""
    if not _FROZEN_BY and gc.get_freeze_count():
        _FROZEN_BY.add("the program")
    return bool(_FROZEN_BY)
