"""The source of functions and classes, as a digest that is the same in every process and on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

JOB_MODULE = "stoker_job_"
"""What the names of modules made of job files begin with; a digest of the file's path follows."""

_INSTALLED = {"site-packages", "dist-packages"}

_MADE = {
    "__delattr__", "__eq__", "__ge__", "__getstate__", "__gt__", "__hash__", "__init__", "__le__", "__lt__",
    "__replace__", "__repr__", "__setattr__", "__setstate__",
}  # fmt: skip
"""Methods that a dataclass is given."""


def is_installed(file: PurePath) -> bool:
    """Whether a file is where packages are installed."""
    return not _INSTALLED.isdisjoint(file.parts)


def name_of(value: Any) -> str:
    """The dotted name of a function or class; without its module where that may change: a job file's, Stoker's own."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    module = getattr(value, "__module__", None) or ""
    is_short = not module or module.startswith(JOB_MODULE) or module.partition(".")[0] == "stoker"
    return str(name) if is_short else f"{module}.{name}"


def source_digest(value: Any) -> str | None:
    """SHA-256 (16 hex digits) of the source of a function or class; None for those of Stoker, Python and packages.

    Of a class: of its methods and plain attributes, inherited ones included. Where there is no source, as for code
    given with `python -c`, the compiled code stands for it, which another Python version compiles differently.
    """
    if _is_named_enough(value):
        return None
    if isinstance(value, type):
        text = "\n".join(line for base in value.__mro__ if not _is_named_enough(base) for line in _class_lines(base))
    elif isinstance(value, FunctionType):
        text = _text(value)
    else:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_named_enough(value: Any) -> bool:
    """Whether the name says which code it is: that of Stoker, of Python itself, or of an installed package."""
    module = getattr(value, "__module__", None) or "builtins"
    package = module.partition(".")[0]
    if package == "stoker" or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and is_installed(PurePath(file))


def _class_lines(cls: type) -> Iterator[str]:
    for name, item in sorted(vars(cls).items()):
        function = getattr(item, "__func__", getattr(item, "fget", item))
        if isinstance(function, FunctionType):
            # What a dataclass makes of its fields has no text, and its bytecode differs between versions of Python.
            is_made = name in _MADE and dataclasses.is_dataclass(cls) and function.__code__.co_filename == "<string>"
            if not is_made:
                yield f"{name}: {_text(function)}"
        elif isinstance(item, bool | int | float | str) and not name.startswith("__"):
            yield f"{name}: {item!r}"


def _text(function: FunctionType) -> str:
    try:
        if function.__name__ == "<lambda>":
            return _lambda_text(function)
        return inspect.getsource(function.__code__).strip()
    except (OSError, TypeError, IndexError, SyntaxError):  # typed at a prompt, or its file is gone
        return _code_text(function.__code__)


def _lambda_text(function: FunctionType) -> str:
    """Parameters and body: the lines of a lambda may hold several of them, and much else."""
    lines = inspect.findsource(function.__code__)[0]
    starts: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for line, last, start, end in function.__code__.co_positions():
        if line is None or last is None or start is None or end is None or (line, start) == (last, end):
            continue  # what the compiler adds
        starts.append((line, start))
        ends.append((last, end))
    if not starts:
        raise OSError("compiled without positions")
    (line, start), (last, end) = min(starts), max(ends)
    body = [text.encode() for text in lines[line - 1 : last]]
    body[-1] = body[-1][:end]
    body[0] = body[0][start:]
    return f"{', '.join(function.__code__.co_varnames)}: {b''.join(body).decode()}"


def _code_text(code: CodeType) -> str:
    """Compiled code without what differs between processes: addresses, and the order of sets."""
    return f"{code.co_code!r} {[_constant_text(item) for item in code.co_consts]} {code.co_names!r}"


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return repr(sorted(map(_constant_text, constant)))
    return repr(constant)
