"""Job files: a Python file with a function `job` whose parameters become settings on the command line."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import BadJob, BadSetting, StokerError, nearest
from stoker.jobs.job import Job
from stoker.jobs.local_imports import FreshLoader, is_beside, local_sources, look_beside, require_unmixed
from stoker.jobs.settings import parse_settings, values_of
from stoker.jobs.source import JOB_MODULE, executed_parts
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
    look_beside(path)
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
            f"{_users_line(path, error)} raised {type(error).__name__} {when}{said}",
            remedy=_remedy(error),
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
        if is_beside(file, folder):
            return f"{path if file == path.resolve() else file}, line {frame.lineno}: `{frame.line}`"
    return str(path)


def _article(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
