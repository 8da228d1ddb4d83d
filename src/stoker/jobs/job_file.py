"""Job files: a Python file with a function `job` whose parameters become settings on the command line.

Settings as typed on a command line, turned into the arguments of a job file's function by its type hints.
"""

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
from stoker.jobs.code_digest import JOB_MODULE, executed_parts
from stoker.jobs.job import Job
from stoker.jobs.local_imports import FreshLoader, install_finder, is_in_folder, local_sources, require_unmixed
from stoker.records import digest
from stoker.records.codec import JSON

_IMPORT = "import"


@dataclass(frozen=True)
class Entry:
    """Where a Job came from: its file, the local modules it imports, and its parameters' values.

    `settings` are the texts that gave the parameters. `sources` maps paths relative to the job file's folder to their
    text. `functions` are the digests of what of them is executed, part by part.
    """

    path: Path
    parameters: dict[str, JSON]
    sources: dict[str, str]
    functions: dict[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what is executed of the job file and the modules beside it."""
        return digest(self.functions)

    @property
    def text_digest(self) -> str:
        """SHA-256 (hex) of their texts, comments included."""
        return digest(self.sources)


def load_job(path: Path, settings: Mapping[str, str]) -> tuple[Job, Entry]:
    """The Job that the file's function `job` returns for these settings (texts, as typed on the command line).

    The file is code and runs in this process. It finds modules in its own folder; the working directory stays.

    Raises:
        BadJob: the file is absent, does not parse, raises, has no function `job`, or that returns something else; a
            setting is unknown or of the wrong type.
    """
    with contextlib.chdir("."):  # back to here, should the file change it
        function = _import_job_function(path)
        arguments = parse_settings(function, settings, path.name)
        job = _call(path, "job(…)", lambda: function(**arguments))
    if not isinstance(job, Job):
        raise BadJob(
            f"{path}: job(…) returned {_article(job)}, wanted a stoker.Job",
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
    module = _import_file(path)
    function = getattr(module, "job", None)
    if not inspect.isfunction(function):
        functions = [name for name, item in vars(module).items() if inspect.isfunction(item)]
        listed = f" It has {', '.join(functions)}." if functions else ""
        raise BadJob(f"{path} has no function `job`.{listed}", remedy="Add `def job(…) -> stoker.Job:`.")
    found: Callable[..., Any] = function
    return found


def _import_file(path: Path) -> types.ModuleType:
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
    return module


def _call(path: Path, what: str, action: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises becomes a BadJob that names the user's own line."""
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
        said = f": {error}" if str(error) else ""
        raise BadJob(
            f"{_users_line(path, error)} raised {type(error).__name__} {when}{said}", remedy=_remedy(error)
        ) from error


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"Install {error.name.partition('.')[0]} into this Python ({sys.executable} -m pip install …); a module of "
            "your own lies beside the job file."
        )
    return "Run again with --debug for the whole traceback."


def _users_line(path: Path, error: BaseException) -> str:
    """The innermost line of the job file, or of a module beside it, that the traceback passes through."""
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_in_folder(file, folder):
            return f"{path if file == path.resolve() else file}, line {frame.lineno}: `{frame.line}`"
    return str(path)


def _article(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_settings(function: Callable[..., Any], settings: Mapping[str, str], where: str) -> dict[str, Any]:
    """The typed arguments for `function` from texts.

    Types understood: bool, int, float, str, Path, Literal, unions and optional ones, and lists, tuples and dicts of
    these, written as JSON. Without a hint the default's type counts.

    Args:
        function: the job file's `job`.
        settings: text by parameter name.
        where: the job file's name, for errors.

    Raises:
        BadJob: a setting is unknown, missing, or of another type; it names the nearest setting, or what was wanted.
    """
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in _NAMED}
    for name in settings:
        if name not in parameters:
            raise BadJob(f"{where}: job() has no setting {name!r}. {nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in settings:
            raise BadJob(f"{where}: setting {name!r} has no default", remedy=f"Give it: --set {name}=VALUE")
    return {name: _converted(text, _type_of(parameters[name], function), name) for name, text in settings.items()}


def values_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, JSON]:
    """What every setting of `function` is, given or by default, as JSON.

    A default that could not be typed on a command line is left out: it belongs to the job file's text.
    """
    parameters = inspect.signature(function).parameters.items()
    values = {name: p.default for name, p in parameters if p.kind in _NAMED} | dict(arguments)
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _type_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    hint, default = parameter.annotation, parameter.default
    if hint is not inspect.Parameter.empty:
        alone = types.SimpleNamespace(__annotations__={"it": hint})
        try:
            return typing.get_type_hints(alone, globalns=getattr(function, "__globals__", {}))["it"]
        except (NameError, AttributeError, SyntaxError, TypeError):  # known to the type checker only
            pass
    return str if default is inspect.Parameter.empty or default is None else type(default)


def _converted(text: str, wanted: Any, name: str) -> Any:
    try:
        return _of_text(text, wanted)
    except ValueError:
        known = [str(choice) for choice in typing.get_args(wanted)] if typing.get_origin(wanted) is Literal else None
        hint = nearest(text, known) if known else f"wanted {_in_words(wanted)}"
        raise BadJob(f"--set {name}={text}: {hint}") from None


def _of_text(text: str, wanted: Any) -> Any:
    """`text` as the type `wanted`, or ValueError."""
    choices = typing.get_args(wanted)
    if _is_union(wanted):
        # Any text is a str: the other choices come first.
        return _first_that_fits(lambda one: _of_text(text, one), sorted(choices, key=lambda one: one is str))
    if typing.get_origin(wanted) is Literal:
        return _lookup({str(choice): choice for choice in choices}, text)
    if wanted is bool:
        return _lookup(_TRUTHS, text.lower())
    if wanted is types.NoneType:
        return _lookup({"none": None, "null": None}, text.lower())
    if wanted in (int, float, str) or (isinstance(wanted, type) and issubclass(wanted, Path)):
        return wanted(text)
    return _of_json(json.loads(text), wanted)


def _of_json(value: JSON, wanted: Any) -> Any:
    """A JSON value as the type `wanted`, or ValueError."""
    kind, arguments = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if wanted is Any:
        return value
    if _is_union(wanted):
        return _first_that_fits(lambda one: _of_json(value, one), arguments)
    if kind is Literal:
        return value if value in arguments else _refuse()
    if kind in (tuple, *_LISTS) and isinstance(value, list):
        return _of_list(value, tuple if kind is tuple else list, arguments)
    if kind in _DICTS and isinstance(value, dict):
        return {key: _of_json(item, (*arguments, Any, Any)[1]) for key, item in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    return value if wanted in _WORDS and type(value) is wanted else _refuse()


def _of_list(value: list[JSON], kind: Callable[[list[Any]], Any], arguments: tuple[Any, ...]) -> Any:
    if kind is not tuple or not arguments or arguments[-1] is Ellipsis:
        return kind([_of_json(item, arguments[0] if arguments else Any) for item in value])
    return kind([_of_json(item, one) for item, one in zip(value, arguments, strict=True)])


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


def _is_union(wanted: Any) -> bool:
    return typing.get_origin(wanted) in (typing.Union, types.UnionType)


def _in_words(wanted: Any) -> str:
    if _is_union(wanted):
        return " or ".join(_in_words(choice) for choice in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return " or ".join(map(str, typing.get_args(wanted)))
    if typing.get_origin(wanted) is None and isinstance(wanted, type) and wanted not in (list, tuple, dict):
        return _WORDS.get(wanted, f"a {wanted.__name__}, which cannot be given as text")
    return f"{wanted.__name__ if isinstance(wanted, type) else wanted} written as JSON"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Path)


def _plain(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
