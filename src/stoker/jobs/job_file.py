"""Job files: a Python file with a function `job`, whose parameters become settings on the command line."""

from __future__ import annotations

import collections.abc
import contextlib
import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stoker.errors import BadJob, BadSetting, StokerError, nearest
from stoker.imports import collector_paused
from stoker.jobs.code_digest import JOB_MODULE, executed_parts
from stoker.jobs.job import Job
from stoker.jobs.local_imports import FreshLoader, install_finder, is_in_folder, local_sources, require_unmixed
from stoker.records import digest
from stoker.records.codec import JSON

_IMPORT = "import"


@dataclass(frozen=True)
class Entry:
    """Origin of a Job: its file, the local modules that this imports, and the values of its parameters.

    `settings` are the parameters as texts. `sources` maps paths relative to the job file's folder to their text.
    `functions` are digests of the executed parts of these.
    """

    path: Path
    parameters: dict[str, JSON]
    sources: dict[str, str]
    functions: dict[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the executed code of the job file and its local modules."""
        return digest(self.functions)

    @property
    def setting_words(self) -> tuple[str, ...]:
        """The settings as words of a command: `--set NAME=VALUE`."""
        return tuple(word for name, text in self.settings.items() for word in ("--set", f"{name}={text}"))


def load_job(path: Path, settings: Mapping[str, str]) -> tuple[Job, Entry]:
    """The Job that the file's function `job` returns for these settings (texts, as typed on the command line).

    The file runs in this process. It finds modules in its own folder; the working directory does not change.

    Raises:
        BadJob: the file is absent, does not parse, raises, or has no function `job` that returns a Job; a setting is
            unknown or of the wrong type.
    """
    with contextlib.chdir("."):  # restored in case the file changes it
        with collector_paused():
            function = _import_job_function(path)
        arguments = parse_settings(function, settings, path.name)
        job = _call(path, "job(…)", lambda: function(**arguments))
    if not isinstance(job, Job):
        result = "nothing (None)" if job is None else f"a {type(job).__name__}"
        raise BadJob(
            f"{path}: job(…) returned {result}, wanted a stoker.Job",
            remedy="End the function with `return stoker.Job(model=…, data=…, …)`.",
        )
    sources = local_sources(path)
    functions = executed_parts(sources)
    return job, Entry(path.resolve(), values_of(function, arguments), sources, functions, settings)


def _import_job_function(path: Path) -> Callable[..., Any]:
    if not path.is_file():
        here = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise BadJob(f"there is no job file {path}", remedy=nearest(path.name, here) if here else None)
    if path.suffix != ".py":
        raise BadJob(f"{path} is no Python file", remedy="A job file is a Python file with a function `job`.")
    resolved = path.resolve()
    name = JOB_MODULE + hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    loader = FreshLoader(name, str(resolved))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise BadJob(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    install_finder(path)
    require_unmixed(path)
    # Registered first, as by an import statement: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        _call(path, _IMPORT, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    function = getattr(module, "job", None)
    if not inspect.isfunction(function):
        functions = [name for name, item in vars(module).items() if inspect.isfunction(item)]
        listed = f" It has {', '.join(functions)}." if functions else ""
        raise BadJob(f"{path} has no function `job`.{listed}", remedy="Add `def job(…) -> stoker.Job:`.")
    return typing.cast("Callable[..., Any]", function)


def _call(path: Path, what: str, action: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises becomes a BadJob with the user's own line."""
    try:
        return action()
    except BadSetting as error:
        where = f"Set another, or change {_users_line(path, error)}."
        raise BadSetting(error.message, remedy=error.remedy or where) from error
    except StokerError:
        raise
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        shown = "" if error.text is None else f"\n    {error.text.strip()}"
        raise BadJob(f"{error.filename or path}{line}: {error.msg}{shown}") from error
    except (Exception, SystemExit) as error:
        when = "on import" if what == _IMPORT else f"while {what} ran"
        reason = f": {error}" if str(error) else ""
        remedy = "Run again with --debug for the whole traceback."
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            remedy = (
                f"Install {package} into this Python ({sys.executable} -m pip install …); put a module of "
                "your own into the job file's folder."
            )
        problem = f"{_users_line(path, error)} raised {type(error).__name__} {when}{reason}"
        raise BadJob(problem, remedy=remedy) from error


def _users_line(path: Path, error: BaseException) -> str:
    """The innermost line of the job file, or of a local module, in the traceback."""
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_in_folder(file, folder):
            return f"{path if file == path.resolve() else file}, line {frame.lineno}: `{frame.line}`"
    return str(path)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_settings(function: Callable[..., Any], settings: Mapping[str, str], where: str) -> dict[str, Any]:
    """Typed arguments of `function` from texts.

    Supported types: bool, int, float, str, Path, Literal, unions and optional ones, and lists, tuples and dicts of
    these, written as JSON. Without a type hint the default's type counts.

    Args:
        function: the job file's `job`.
        settings: text by parameter name.
        where: the job file's name, for errors.

    Raises:
        BadJob: a setting is unknown, missing, or of another type; with the nearest setting, or the expected type.
    """
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in _NAMED}
    for name in settings:
        if name not in parameters:
            raise BadJob(f"{where}: job() has no setting {name!r}. {nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in settings:
            raise BadJob(f"{where}: setting {name!r} has no default", remedy=f"Give it: --set {name}=VALUE")
    arguments: dict[str, Any] = {}
    for name, text in settings.items():
        expected = _type_of(parameters[name], function)
        try:
            arguments[name] = _of_text(text, expected)
        except ValueError:
            is_literal = typing.get_origin(expected) is Literal
            choices = [str(choice) for choice in typing.get_args(expected)] if is_literal else []
            hint = nearest(text, choices) if choices else f"wanted {_in_words(expected)}"
            raise BadJob(f"--set {name}={text}: {hint}") from None
    return arguments


def values_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, JSON]:
    """All settings of `function`, given or by default, as JSON.

    A default that cannot be typed on a command line is left out: it belongs to the job file's text.
    """
    parameters = inspect.signature(function).parameters.items()
    values = {name: p.default for name, p in parameters if p.kind in _NAMED} | dict(arguments)
    plain: dict[str, JSON] = {}
    for name, value in values.items():
        with contextlib.suppress(ValueError):
            plain[name] = _plain(value)
    return plain


def _type_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    hint, default = parameter.annotation, parameter.default
    if hint is not inspect.Parameter.empty:
        alone = types.SimpleNamespace(__annotations__={"it": hint})
        with contextlib.suppress(NameError, AttributeError, SyntaxError, TypeError):  # known to the type checker only
            return typing.get_type_hints(alone, globalns=getattr(function, "__globals__", {}))["it"]
    return str if default is inspect.Parameter.empty or default is None else type(default)


def _of_text(text: str, expected: Any) -> Any:
    """`text` as the type `expected`, or ValueError."""
    choices = typing.get_args(expected)
    if _is_union(expected):
        ordered = sorted(choices, key=lambda choice: choice is str)  # last, as any text is one
        return _first_that_fits(lambda choice: _of_text(text, choice), ordered)
    if typing.get_origin(expected) is Literal:
        return _lookup({str(choice): choice for choice in choices}, text)
    if expected is bool:
        return _lookup(_TRUTHS, text.lower())
    if expected is types.NoneType:
        return _lookup({"none": None, "null": None}, text.lower())
    if expected in (int, float, str) or (isinstance(expected, type) and issubclass(expected, Path)):
        return expected(text)
    return _of_json(json.loads(text), expected)


def _of_json(value: JSON, expected: Any) -> Any:
    """A JSON value as the type `expected`, or ValueError."""
    kind, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
    if expected is Any:
        return value
    if _is_union(expected):
        return _first_that_fits(lambda choice: _of_json(value, choice), arguments)
    if kind is Literal:
        return value if value in arguments else _refuse()
    if kind in (tuple, *_LISTS) and isinstance(value, list):
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            return tuple(_of_json(item, own) for item, own in zip(value, arguments, strict=True))
        items = [_of_json(item, arguments[0] if arguments else Any) for item in value]
        return tuple(items) if kind is tuple else items
    if kind in _DICTS and isinstance(value, dict):
        return {key: _of_json(item, (*arguments, Any, Any)[1]) for key, item in value.items()}
    if expected is float and type(value) is int:
        return float(value)
    if expected is Path and isinstance(value, str):
        return Path(value)
    return value if expected in _WORDS and type(value) is expected else _refuse()


def _first_that_fits(convert: Callable[[Any], Any], choices: collections.abc.Iterable[Any]) -> Any:
    for choice in choices:
        try:
            return convert(choice)
        except ValueError:
            continue
    return _refuse()


def _lookup(values: Mapping[str, Any], text: str) -> Any:
    return values[text] if text in values else _refuse()


def _refuse() -> Any:
    raise ValueError("of another type")


def _is_union(expected: Any) -> bool:
    return typing.get_origin(expected) in (typing.Union, types.UnionType)


def _in_words(expected: Any) -> str:
    if _is_union(expected):
        return " or ".join(_in_words(choice) for choice in typing.get_args(expected))
    if typing.get_origin(expected) is Literal:
        return " or ".join(map(str, typing.get_args(expected)))
    if typing.get_origin(expected) is None and isinstance(expected, type) and expected not in (list, tuple, dict):
        return _WORDS.get(expected, f"a {expected.__name__}, which cannot be given as text")
    return f"{expected.__name__ if isinstance(expected, type) else expected} written as JSON"


def _plain(value: Any) -> JSON:
    """A value as JSON, or ValueError if it could not be typed on a command line."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError("not a plain value")
