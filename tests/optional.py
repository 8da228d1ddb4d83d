"""Libraries that few tests use: imported by the first one that does, not by every process that collects all tests."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


class _Library:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what collecting asks of every object
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def optional(name: str) -> Any:
    """The module of that name, imported on first use; where its package is missing, the tests of the file are skipped.

    That a package is there is not checked by importing it: one that cannot be imported fails in the test that uses it.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return _Library(name)
