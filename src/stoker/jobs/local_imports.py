"""Local modules of a job file: found in its folder, forgotten when another job file is loaded, and part of its text.

Python keeps one module per name. Two job files in one process may each have a local `nets.py`, so what the first one
imported from its folder must be forgotten before the second one is loaded. An import that runs later, inside a
function, looks in the folder of the job file that was loaded last.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.errors import BadJob
from stoker.jobs.code_digest import is_installed


class FreshLoader(SourceFileLoader):
    """Load a module from its current text, without bytecode.

    Bytecode counts as fresh if the text has its size and its second of change: an edit within that second would be
    missed, and the digest of the text would not belong to the code that runs.
    """

    def path_stats(self, path: Any) -> Any:
        """Raise OSError: without a time of change, no bytecode is read or written."""
        raise OSError(f"no bytecode for {path}")


class FolderFinder(importlib.abc.MetaPathFinder):
    """Find modules in one folder before installed ones, as for a script that is run there.

    Attributes:
        found: names of the modules found so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of `fullname`, if it is in the folder or in a package found there."""
        if path is None and not is_installed(self.folder):
            spec = _spec_in(self.folder, fullname)
            if spec is not None and spec.loader is None and PathFinder.find_spec(fullname) is not None:
                return None  # a folder without __init__.py is a package only if nothing else is
        elif fullname.partition(".")[0] in self.found:
            spec = next(filter(None, (_spec_in(Path(entry), fullname) for entry in path or ())), None)
        else:
            return None
        if spec is not None:
            self.found.append(fullname)
        return spec


def install_finder(job_file: Path) -> None:
    """Find modules in the folder of `job_file` from now on; forget those from other job files' folders."""
    for finder in [f for f in sys.meta_path if isinstance(f, FolderFinder)]:
        sys.meta_path.remove(finder)
        for name in finder.found:
            sys.modules.pop(name, None)
    before_installed = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(before_installed, FolderFinder(job_file.resolve().parent))


def local_sources(job_file: Path) -> dict[str, str]:
    """Texts of the job file and of what it imports from its folder, by path relative to the folder.

    Imports are followed through the text, those inside functions too; modules imported by other means are found if
    they were imported since `install_finder`.
    """
    folder = job_file.resolve().parent
    texts: dict[Path, str] = {}
    waiting = [job_file.resolve()]
    for finder in sys.meta_path:
        if isinstance(finder, FolderFinder) and finder.folder == folder:
            origins = (getattr(sys.modules.get(name), "__file__", None) for name in finder.found)
            waiting += [Path(origin) for origin in origins if origin and origin.endswith(".py")]
    while waiting:
        file = waiting.pop()
        if file not in texts:
            texts[file] = _text_of(file)
            waiting += _imported_files(texts[file], file, folder)
    return {file.relative_to(folder).as_posix(): texts[file] for file in sorted(texts)}


def require_unmixed(job_file: Path) -> None:
    """Refuse a job file if the program has imported another module under the name of one of its local modules.

    Raises:
        BadJob: there is such a module, and its text differs.
    """
    folder = job_file.resolve().parent
    for name, text in local_sources(job_file).items():
        module = ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        origin = getattr(sys.modules.get(module), "__file__", None)
        if origin is None or module.partition(".")[0] in sys.stdlib_module_names:
            continue
        other = Path(origin).resolve()
        if other != folder / name and (not other.is_file() or _text_of(other) != text):
            raise BadJob(
                f"{job_file} imports {module} from {folder / name}, but this program has already imported {other}",
                remedy="Rename one of the two, or load the job file in a program of its own, such as `stoker train`.",
            )


def is_in_folder(file: Path, folder: Path) -> bool:
    """Whether `file` is the user's own: in or below `folder`, neither installed nor Stoker's."""
    own = Path(__file__).resolve().parents[1]
    is_inside = file.is_absolute() and file.is_relative_to(folder) and not file.is_relative_to(own)
    return is_inside and not is_installed(file.relative_to(folder))


def _spec_in(folder: Path, fullname: str) -> ModuleSpec | None:
    # A new finder each time: finders cache the folder's content.
    loaders = (FreshLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
    return FileFinder(str(folder), *loaders).find_spec(fullname)


def _imported_files(text: str, file: Path, folder: Path) -> Iterator[Path]:
    """Files in the folder that the statements of `text`, the content of `file`, import."""
    if is_installed(folder):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the import itself warns
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # imported within `try`, or not at all
        return
    package = file.relative_to(folder).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), folder)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                yield from _files_of([*module, alias.name], folder)


def _files_of(name: list[str], folder: Path) -> Iterator[Path]:
    """Files in the folder that importing the dotted `name` runs."""
    for depth in range(1, len(name) + 1):
        place = folder.joinpath(*name[:depth])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file() and is_in_folder(file, folder):
                yield file


def _text_of(file: Path) -> str:
    content = file.read_bytes()
    try:
        return importlib.util.decode_source(content)
    except (SyntaxError, UnicodeDecodeError):  # Python raises if it imports it
        return content.decode("utf-8", "replace")
