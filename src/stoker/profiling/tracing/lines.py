"""Which line of whose code an operation comes from."""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_STOKER = f"{Path(__file__).parents[2]}/"
_TRACING = f"{Path(__file__).parent}/"

_Owner = Literal["user", "library", "hidden"]


class SourceLines:
    """Numbers the lines that operations come from; `names` are written as `train_me.py:42`.

    The line is that of the nearest frame of the user's own code below the frame of the tracer; where there is none, of
    the nearest one outside PyTorch.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._places: dict[tuple[CodeType, int], int] = {}

    def here(self) -> int:
        """The place in `names` of the line that is running."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack as it is, without making a copy
        fallback: FrameType | None = None
        while frame is not None:
            owner = _owner(frame.f_code)
            if owner == "user":
                return self._place(frame)
            if owner == "library" and fallback is None:
                fallback = frame
            if frame.f_code.co_name == TRACED and frame.f_code.co_filename.startswith(_TRACING):
                break
            frame = frame.f_back
        return 0 if fallback is None else self._place(fallback)

    def name_here(self) -> str:
        """As `here`, the name itself."""
        return self.names[self.here()]

    def of_error(self, error: BaseException) -> str:
        """The innermost line of the user's code that `error` came through; empty if none."""
        lines = [
            f"{_file_name(frame.f_code.co_filename)}:{number}"
            for frame, number in traceback.walk_tb(error.__traceback__)
            if _owner(frame.f_code) == "user"
        ]
        return lines[-1] if lines else ""

    def _place(self, frame: FrameType) -> int:
        key = frame.f_code, frame.f_lineno
        place = self._places.get(key)
        if place is None:
            name = f"{_file_name(frame.f_code.co_filename)}:{frame.f_lineno}"
            if name not in self.names:
                self.names.append(name)
            place = self._places[key] = self.names.index(name)
        return place


TRACED = "run_traced"
"""Name of the tracer's function that calls the step: beyond it lies who asked for the trace, not what is traced."""


@functools.lru_cache(maxsize=4096)
def _owner(code: CodeType) -> _Owner:
    return _owner_of_file(code.co_filename)


def _owner_of_file(name: str) -> _Owner:
    if name.startswith((_TORCH, _TRACING, "<")):
        return "hidden"
    is_installed = "/site-packages/" in name or "/dist-packages/" in name or name.startswith(_STOKER)
    return "library" if is_installed or name.startswith(_STANDARD_LIBRARY) else "user"


def is_users_file(path: str) -> bool:
    """Whether a file is neither PyTorch's, nor of an installed library, nor of Stoker."""
    return _owner_of_file(path) == "user"


def is_users_code(code: CodeType) -> bool:
    """Whether a function is neither PyTorch's, nor of an installed library, nor of Stoker."""
    return _owner(code) == "user"


_STANDARD_LIBRARY = f"{Path(functools.__file__).parent}/"


def _file_name(path: str) -> str:
    """A file of ours or of a library by its place in it, the user's by its name."""
    if path.startswith(_STOKER):
        return f"stoker/{path.removeprefix(_STOKER)}"
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return Path(path).name
