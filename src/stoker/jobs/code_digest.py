"""Digests of what code does: the same in every process, on every machine and under every version of Python.

Executed code counts: a file's statements, and the functions and classes that these and the function `job` reach by
name. Comments, formatting, docstrings, blocks under `if __name__ == "__main__":`, and functions and classes that
nothing names do not. Names are looked up without regard to scope, so too much counts rather than too little; if code is
found by a computed name (`globals()[name]`, `getattr(module, name)`, `eval`), all of it counts. All methods of a class
do.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import linecache
import re
import sys
import textwrap
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

JOB_MODULE = "stoker_job_"
"""Prefix of the names of modules made from job files; a digest of the file's path follows."""

_MADE = {
    "__delattr__",
    "__eq__",
    "__ge__",
    "__getstate__",
    "__gt__",
    "__hash__",
    "__init__",
    "__le__",
    "__lt__",
    "__replace__",
    "__repr__",
    "__setattr__",
    "__setstate__",
}
"""Methods that `dataclass` generates."""


def is_installed(file: PurePath) -> bool:
    """Whether a file is where packages are installed."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def name_of(value: Any) -> str:
    """The dotted name of a function or class; without its module if that may change (job files, Stoker itself)."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    module = getattr(value, "__module__", None) or ""
    is_short = not module or module.startswith(JOB_MODULE) or module.partition(".")[0] == "stoker"
    return str(name) if is_short else f"{module}.{name}"


def executed_parts(sources: Mapping[str, str]) -> dict[str, str]:
    r"""Digests (16 hex digits) of what a job file and its local modules execute, by part.

    Args:
        sources: the texts, by file name.

    Returns:
        A digest for each part that counts, such as `function loss in train.py`, `class Net in nets.py`, `the statements
        of train.py`; for a file that does not parse, `the text of odd.py`.

    >>> before = executed_parts({"a.py": "def job(): return net()\ndef net(): return 1\ndef old(): return 2"})
    >>> after = executed_parts({"a.py": "def job():  # makes it\n    return net()\ndef net(): return 1"})
    >>> list(before), before == after
    (['function job in a.py', 'function net in a.py', 'the statements of a.py'], True)
    """
    parts: dict[str, str] = {}
    statements: dict[str, list[ast.stmt | str]] = {}
    waiting: dict[tuple[str, str], list[_Definition]] = {}
    uses: set[str] = set()
    registers = any(word in text for word in ("__init_subclass__", "metaclass") for text in sources.values())
    for file, text in sources.items():
        try:
            body = _parsed(text)
        except (SyntaxError, ValueError, RecursionError):  # imported within `try`, or not at all
            parts[f"the text of {file}"] = _hex(text)
            uses.add(_EVERYTHING)
            continue
        statements[file] = []
        bound = Counter(name for statement in body for name in _bound(statement))
        for statement in body:
            if not isinstance(statement, _Definition):
                statements[file].append(statement)
                uses |= _uses(statement)
                continue
            waiting.setdefault((file, statement.name), []).append(statement)
            is_registered = registers and isinstance(statement, ast.ClassDef) and statement.bases
            if bound[statement.name] > 1 or is_registered or not _only_defines(statement):
                statements[file].append(statement.name)  # its position counts too: it does something there
                uses |= {statement.name} | _uses(statement)
    uses.add("job")
    while reached := [key for key in waiting if key[1] in uses or _EVERYTHING in uses]:
        for file, name in reached:
            definitions = waiting.pop((file, name))
            kind = "class" if isinstance(definitions[0], ast.ClassDef) else "function"
            parts[f"{kind} {name} in {file}"] = _hex(repr(list(map(_plain, definitions))))
            uses = uses.union(*map(_uses, definitions))
    for file, items in statements.items():
        parts[f"the statements of {file}"] = _hex(repr(list(map(_plain, items))))
    return dict(sorted(parts.items()))


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_EVERYTHING = "*"
"""A used name that stands for all: names are computed, so any may be used."""
_COMPUTED = frozenset(
    {
        "globals",
        "locals",
        "vars",
        "eval",
        "exec",
        "__import__",
        "importlib",
        "__dict__",
        "modules",
        "__subclasses__",
        "getmembers",
        "attrgetter",
        "methodcaller",
    }
)


def _parsed(text: str) -> list[ast.stmt]:
    """The statements of a module that run on import; raises what `ast.parse` does."""
    with warnings.catch_warnings(action="ignore"):  # the import itself warns
        body = ast.parse(text).body
    statements = []
    for statement in _without_docstring(body):
        test = ast.unparse(statement.test) if isinstance(statement, ast.If) and not statement.orelse else ""
        if test not in ("__name__ == '__main__'", "'__main__' == __name__"):
            statements.append(statement)
    return statements


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a module's statement may bind."""
    if isinstance(statement, _Definition):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, _Definition):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _only_defines(statement: _Definition) -> bool:
    """Whether a definition does nothing else where it stands, so that it does not count if nothing names it."""
    if statement.decorator_list:
        return False
    if isinstance(statement, ast.ClassDef):
        for item in _without_docstring(statement.body):
            if isinstance(item, _Definition):
                is_plain = _only_defines(item)
            else:
                is_plain = isinstance(item, ast.Assign | ast.AnnAssign | ast.Pass | ast.Expr) and not _calls(item)
            if not is_plain:
                return False
        return not statement.keywords and not any(map(_calls, statement.bases))
    defaults = (*statement.args.defaults, *statement.args.kw_defaults)
    return not any(_calls(default) for default in defaults if default is not None)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call | ast.NamedExpr | ast.Await) for inner in ast.walk(node))


def _uses(tree: ast.AST) -> set[str]:
    """Names by which code reaches functions and classes; a text that could be a name counts as one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
        elif isinstance(node, ast.alias) and (node.asname is not None or node.name == "*"):
            names |= set(node.name.replace("*", "").split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            is_computed = len(node.args) < 2 or not isinstance(node.args[1], ast.Constant)
            names |= {_EVERYTHING} if is_computed else set()
    return names | ({_EVERYTHING} if names & _COMPUTED else set())


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _plain(node: Any) -> Any:
    """Syntax as tuples, without comments, formatting, docstrings, and fields that differ between Python versions."""
    if isinstance(node, ast.Constant):
        return type(node.value).__name__, repr(node.value)
    if isinstance(node, list):
        return tuple(_plain(item) for item in node)
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, given in ast.iter_fields(node):
        value = _without_docstring(given) if name == "body" and isinstance(node, _Definition) else given
        if name not in ("ctx", "kind", "type_comment") and value is not None and value != []:
            fields.append((name, _plain(value)))
    return type(node).__name__, *fields


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def source_digest(value: Any) -> str | None:
    """SHA-256 (16 hex digits) of what a function or class does; None for those of Stoker, Python and packages.

    Of a class: its methods and plain attributes, inherited ones included. Without source, as for code given with
    `python -c`, the compiled code is used, which differs between Python versions.
    """
    if _is_named_enough(value):
        return None
    if isinstance(value, type):
        text = "\n".join(line for base in value.__mro__ if not _is_named_enough(base) for line in _class_lines(base))
    elif isinstance(value, FunctionType):
        text = _text(value)
    else:
        return None
    return _hex(text)


def reached_digest(values: Iterable[Any]) -> str:
    """SHA-256 (16 hex digits) of what functions and classes do, with all they reach by name, as for code of a notebook.

    Followed are names of their modules and of local modules, closures, and base classes; numbers and texts count by
    value. Not followed: names that are computed, and what tables and objects hold.
    """
    waiting, seen, parts = list(values), set[int](), set[str]()
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value.func if isinstance(value, functools.partial) else value)
        if id(value) in seen or (found := source_digest(value)) is None:
            continue
        seen.add(id(value))
        parts.add(f"{name_of(value)} {found}")
        items = [item for base in value.__mro__ for item in vars(base).values()] if isinstance(value, type) else [value]
        for item in (getattr(item, "__func__", getattr(item, "fget", item)) for item in items):
            if not isinstance(item, FunctionType) or _is_named_enough(item):
                continue
            names = _names(item.__code__)
            known = {name: item.__globals__[name] for name in names if name in item.__globals__}
            known |= {name: cell.cell_contents for name, cell in _cells(item) if name not in known}
            for module in [other for other in known.values() if isinstance(other, ModuleType)]:
                if not _is_named_enough_module(module.__name__):
                    known |= {
                        f"{module.__name__}.{name}": getattr(module, name) for name in names if hasattr(module, name)
                    }
            parts |= {
                f"{name} {other!r}" for name, other in known.items() if isinstance(other, bool | int | float | str)
            }
            waiting += known.values()
    return _hex("\n".join(sorted(parts)))


def _names(code: CodeType) -> set[str]:
    """Names that code looks up, that of inner functions included."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            cell.cell_contents  # noqa: B018 - raises where it is empty
            yield name, cell


def _is_named_enough(value: Any) -> bool:
    """Whether the name identifies the code: Stoker's, Python's own, or an installed package's."""
    return _is_named_enough_module(getattr(value, "__module__", None) or "builtins")


def _is_named_enough_module(module: str) -> bool:
    package = module.partition(".")[0]
    if package == "stoker" or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    # A notebook's own code is in `__main__`, whatever was started to run it.
    return module != "__main__" and isinstance(file, str) and is_installed(PurePath(file))


def _class_lines(cls: type) -> Iterator[str]:
    for name, item in sorted(vars(cls).items()):
        function = getattr(item, "__func__", getattr(item, "fget", item))
        if isinstance(function, FunctionType):
            # A dataclass's generated methods have no text, and their bytecode differs between versions of Python.
            is_made = name in _MADE and dataclasses.is_dataclass(cls) and function.__code__.co_filename == "<string>"
            if not is_made:
                yield f"{name}: {_text(function)}"
        elif isinstance(item, bool | int | float | str) and not name.startswith("__"):
            yield f"{name}: {item!r}"


def _text(function: FunctionType) -> str:
    try:
        if function.__name__ == "<lambda>":
            return _lambda_text(function)
        code = function.__code__
        text = "".join(inspect.getblock(_lines(function)[code.co_firstlineno - 1 :])).strip()
        definition = rf"(?s)(@.*\n\s*)?(async\s+)?def\s+{re.escape(code.co_name)}\b"
        if code.co_name != "<lambda>" and not re.match(definition, text):
            raise OSError("other code is at its line now")
        return _as_executed(text)
    except (OSError, TypeError, IndexError, SyntaxError, ValueError, tokenize.TokenError):
        # Typed at a prompt, or its file is gone or was edited.
        return _code_text(function.__code__)


def _lines(function: FunctionType) -> list[str]:
    """All lines of the function's file; `inspect` would ask every module that is loaded whether the file is its own."""
    file, module = function.__code__.co_filename, function.__globals__
    linecache.checkcache(file)
    lines = linecache.getlines(file, module if module.get("__file__") == file else None)
    if len(lines) < function.__code__.co_firstlineno:
        raise OSError("the file cannot be read, or has changed")
    return lines


def _as_executed(text: str, framed: Callable[[str], str] = textwrap.dedent) -> str:
    """The meaning of a piece of source; its text if it does not parse by itself."""
    try:
        return repr([_plain(statement) for statement in _parsed(framed(text))])
    except (SyntaxError, ValueError, RecursionError):
        return text


def _lambda_text(function: FunctionType) -> str:
    """Parameters and body, cut out of the lambda's lines, which may hold other code too."""
    lines = _lines(function)
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
    names = ", ".join(function.__code__.co_varnames)
    return f"{names}: {_as_executed(b''.join(body).decode(), lambda text: f'({text})')}"


def _code_text(code: CodeType) -> str:
    """Compiled code without addresses and the order of sets, which differ between processes."""
    return f"{code.co_code!r} {[_constant_text(item) for item in code.co_consts]} {code.co_names!r}"


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return repr(sorted(map(_constant_text, constant)))
    return repr(constant)
