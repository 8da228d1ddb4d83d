"""What code does, as digests that are the same in every process, on every machine and under every version of Python.

What counts is what is executed: a file's statements, and the functions and classes that these and the function `job`
reach by name. Comments, formatting, docstrings, what stands under `if __name__ == "__main__":`, and functions and
classes that nothing names do not count. Names are looked up without regard to scope, so rather too much counts than too
little; where code is found by a name that is computed (`globals()[name]`, `getattr(module, name)`, `eval`), all of it
counts. Of a class all methods do.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
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


_by_text: ContextVar[bool] = ContextVar("_by_text", default=False)


@contextlib.contextmanager
def digests_by_text() -> Iterator[None]:
    """Within the block source digests are of the text, comments included, as they were before 2026-11-23."""
    token = _by_text.set(True)
    try:
        yield
    finally:
        _by_text.reset(token)


def executed_parts(sources: Mapping[str, str]) -> dict[str, str]:
    r"""What a job file and the modules beside it execute: digests (16 hex digits) by part.

    Args:
        sources: the texts, by name of the file.

    Returns:
        A digest for each part that counts, such as `function loss in train.py`, `class Net in nets.py`, `the statements
        of train.py`; of a file that does not parse, `the text of odd.py`.

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
        except (SyntaxError, ValueError, RecursionError):  # imported within `try`, or not at all: nothing is known
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
            is_heard_of = registers and isinstance(statement, ast.ClassDef) and statement.bases
            if bound[statement.name] > 1 or is_heard_of or not _only_defines(statement):
                statements[file].append(statement.name)  # its place counts too: it does something there
                uses |= {statement.name} | _uses(statement)
    uses.add("job")
    while reached := [key for key in waiting if key[1] in uses or _EVERYTHING in uses]:
        for file, name in reached:
            found = waiting.pop((file, name))
            kind = "class" if isinstance(found[0], ast.ClassDef) else "function"
            parts[f"{kind} {name} in {file}"] = _hex(repr([_plain(one) for one in found]))
            uses = uses.union(*map(_uses, found))
    for file, body_of in statements.items():
        parts[f"the statements of {file}"] = _hex(
            repr([one if isinstance(one, str) else _plain(one) for one in body_of])
        )
    return dict(sorted(parts.items()))


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_EVERYTHING = "*"
"""Among the names that are used: names are computed, so any may be."""
_COMPUTED = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__", "importlib", "__dict__", "modules",
                       "__subclasses__", "getmembers", "attrgetter", "methodcaller"})  # fmt: skip


def _parsed(text: str) -> list[ast.stmt]:
    """The statements of a module that run on import; raises what `ast.parse` does."""
    with warnings.catch_warnings(action="ignore"):  # the import itself warns
        body = ast.parse(text).body
    return [one for one in _without_docstring(body) if not _is_main_block(one)]


def _is_main_block(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test) in (
        "__name__ == '__main__'", "'__main__' == __name__",
    )  # fmt: skip


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module may bind."""
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
    """Whether a definition does nothing else where it stands, so that one that nothing names does not count."""
    if statement.decorator_list:
        return False
    if isinstance(statement, ast.ClassDef):
        inner = _without_docstring(statement.body)
        is_plain = all((isinstance(one, _Definition) and _only_defines(one)) or _is_constant(one) for one in inner)
        return is_plain and not statement.keywords and all(not _calls(base) for base in statement.bases)
    return not any(_calls(one) for one in (*statement.args.defaults, *statement.args.kw_defaults) if one is not None)


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.Pass | ast.Expr) and not _calls(statement)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Call | ast.NamedExpr | ast.Await) for one in ast.walk(node))


def _uses(tree: ast.AST) -> set[str]:
    """Names by which code reaches functions and classes; texts that could be names are taken for such."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        elif isinstance(node, ast.alias) and (node.asname is not None or node.name == "*"):
            found |= set(node.name.replace("*", "").split("."))
        elif isinstance(node, ast.Call) and _is_computed_getattr(node):
            found.add(_EVERYTHING)
    return found | ({_EVERYTHING} if found & _COMPUTED else set())


def _is_computed_getattr(call: ast.Call) -> bool:
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr"
    return is_getattr and not (len(call.args) > 1 and isinstance(call.args[1], ast.Constant))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _plain(node: Any) -> Any:
    """A piece of syntax as tuples: without comments, formatting and docstrings, and what versions of Python add."""
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
    return _hex(text)


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
        return _as_executed(inspect.getsource(function.__code__).strip())
    except (OSError, TypeError, IndexError, SyntaxError):  # typed at a prompt, or its file is gone
        return _code_text(function.__code__)


def _as_executed(text: str, framed: Callable[[str], str] = textwrap.dedent) -> str:
    """What a piece of source does; its text where it does not parse by itself."""
    if _by_text.get():
        return text
    try:
        return repr([_plain(statement) for statement in _parsed(framed(text))])
    except (SyntaxError, ValueError, RecursionError):
        return text


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
    names = ", ".join(function.__code__.co_varnames)
    return f"{names}: {_as_executed(b''.join(body).decode(), lambda text: f'({text})')}"


def _code_text(code: CodeType) -> str:
    """Compiled code without what differs between processes: addresses, and the order of sets."""
    return f"{code.co_code!r} {[_constant_text(item) for item in code.co_consts]} {code.co_names!r}"


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return repr(sorted(map(_constant_text, constant)))
    return repr(constant)
