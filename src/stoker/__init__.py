"""Stoker: work out what a training job needs, train it at the limit of the device, and prove that it learned the same.

Names are loaded on first use, so that `import stoker` costs next to nothing; `stoker.api` lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.api import *  # noqa: F403 - the names themselves, for type checkers


def __getattr__(name: str) -> Any:
    """The public name `name`, loaded now."""
    if name.startswith("_") and name != "__all__":  # tools ask every module for such names
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    api = importlib.import_module("stoker.api")
    if name == "__all__":
        return api.public_names()
    if name in api.public_names():
        return api.load_name(name)
    nearest = importlib.import_module("stoker.errors").nearest
    raise AttributeError(f"module 'stoker' has no attribute {name!r}. {nearest(name, api.public_names())}")


def __dir__() -> list[str]:
    """The public names."""
    return list(__getattr__("__all__"))
