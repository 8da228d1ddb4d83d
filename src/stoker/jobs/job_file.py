"""Job files: a Python file with a function `job` whose parameters become settings on the command line."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.errors import BadJob, StokerError, nearest
from stoker.jobs.job import Job
from stoker.records.codec import JSON


@dataclass(frozen=True)
class Entry:
    """Where a Job came from: its file, the local modules it imports, and its parameters' values.

    `sources` maps paths relative to the job file's folder to their text; `digest` is their SHA-256 (hex).
    """

    path: Path
    parameters: dict[str, JSON]
    sources: dict[str, str]
    digest: str


def load_job(path: Path, settings: Mapping[str, str]) -> tuple[Job, Entry]:
    """The Job that the file's function `job` returns for these settings (texts, as typed on the command line).

    The file is code and runs in this process.

    Raises:
        BadJob: the file is absent, does not parse, raises, has no function `job`, or that returns something else; a
            setting is unknown or of the wrong type.
    """
    function = _import_job_function(path)
    arguments = parse_settings(function, settings, path.name)
    job = _call(path, "job(…)", lambda: function(**arguments))
    if not isinstance(job, Job):
        raise BadJob(
            f"{path}: job(…) returned {_article(job)}, wanted a stoker.Job",
            remedy="End the function with `return stoker.Job(model=…, data=…, …)`.",
        )
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    sources = local_sources(path)
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
    parameters = {name: _plain(value) for name, value in (defaults | arguments).items()}
    return job, Entry(path.resolve(), parameters, sources, digest)


def parse_settings(function: Callable[..., Any], settings: Mapping[str, str], where: str) -> dict[str, Any]:
    """The typed arguments for `function` from texts; see `load_job` for errors."""
    parameters = inspect.signature(function).parameters
    hints = _type_hints(function)
    for name in settings:
        if name not in parameters:
            raise BadJob(f"{where}: job() has no setting {name!r}. {nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in settings:
            raise BadJob(f"{where}: setting {name!r} has no default", remedy=f"Give it: --set {name}=VALUE")
    return {
        name: _convert(text, hints.get(name, _kind_of_default(parameters[name].default)), name)
        for name, text in settings.items()
    }


def local_sources(path: Path) -> dict[str, str]:
    """The job file and the imported modules that lie beside or below it: relative path to text."""
    folder = path.resolve().parent
    files = {path.resolve()}
    for name, module in list(sys.modules.items()):
        origin = Path(getattr(module, "__file__", None) or "")
        is_file = origin.suffix == ".py" and origin.is_absolute() and origin.is_file()  # some modules state a fancy
        if name != "__main__" and is_file and origin.resolve().is_relative_to(folder):
            files.add(origin.resolve())
    ours = Path(__file__).resolve().parents[1]
    environment = Path(sys.prefix).resolve()

    def is_local(file: Path) -> bool:
        is_installed = {"site-packages", "dist-packages"} & set(file.parts) or file.is_relative_to(environment)
        return file == path.resolve() or not (is_installed or file.is_relative_to(ours))

    kept = sorted(file for file in files if is_local(file))
    return {file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8") for file in kept}


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
    name = f"stoker_job_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise BadJob(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(resolved.parent) not in sys.path:
        sys.path.insert(0, str(resolved.parent))
    loader = spec.loader
    _call(path, "importing it", lambda: loader.exec_module(module))
    return module


def _call(path: Path, what: str, action: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises becomes a BadJob that names the user's own line."""
    try:
        return action()
    except StokerError:
        raise
    except SyntaxError as error:
        shown = (error.text or "").rstrip()
        raise BadJob(f"{error.filename or path}, line {error.lineno}: {error.msg}\n    {shown}") from error
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
        where = f"{path}, line {frames[-1].lineno}: `{frames[-1].line}`" if frames else str(path)
        raise BadJob(
            f"{where} raised {type(error).__name__} while {what} ran: {error}" if what != "importing it"
            else f"{where} raised {type(error).__name__} on import: {error}",
            remedy="Run again with --debug for the whole traceback.",
        ) from error  # fmt: skip


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a name known to the type checker only: the default's type stands in
        return {}


def _kind_of_default(default: Any) -> Any:
    return str if default is inspect.Parameter.empty or default is None else type(default)


def _convert(text: str, wanted: Any, name: str) -> Any:
    """`text` as the type `wanted`: bool, int, float, str, Literal, optional ones, or JSON for lists and tuples."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and types.NoneType in arguments:
            return None
        return _convert(text, next(a for a in arguments if a is not types.NoneType), name)
    if origin is Literal:
        if text in arguments:
            return text
        raise BadJob(f"--set {name}={text}: {nearest(text, map(str, arguments))}")
    if wanted is bool:
        if text.lower() in ("true", "false", "yes", "no", "1", "0"):
            return text.lower() in ("true", "yes", "1")
        raise BadJob(f"--set {name}={text}: wanted true or false")
    if wanted is str:
        return text
    try:
        if wanted in (int, float):
            return wanted(text)
        value = json.loads(text)
        return tuple(value) if (origin or wanted) is tuple else value
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(wanted, f"{wanted} written as JSON")
        raise BadJob(f"--set {name}={text}: wanted {kind}") from None


def _plain(value: Any) -> JSON:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _article(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
