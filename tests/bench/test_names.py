"""Benchmarks run seldom: that each still imports, and names what Stoker has, is looked at here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stoker.__file__).parent
OURS = ("stoker", "bench", "tests")
MODULES = [path for path in sorted((ROOT / "bench").rglob("*.py")) if path.name not in {"__init__.py", "__main__.py"}]

# Peers (Keras, NNCF, transformers) take seconds to import: the names of these are looked at, that is all.
PEERS = tuple(ROOT / "bench" / folder for folder in ("train/contenders", "compress"))


def of(paths: list[Path]) -> pytest.MarkDecorator:
    """A test of each file, known by its path."""
    return pytest.mark.parametrize("path", paths, ids=[path.relative_to(ROOT).as_posix() for path in paths])


def member(thing: object, name: str) -> object:
    """What a module has under a name, a module below it included; raises AttributeError where there is nothing."""
    if isinstance(thing, types.ModuleType) and not hasattr(thing, name):
        whole = f"{thing.__name__}.{name}"
        if hasattr(thing, "__path__") and importlib.util.find_spec(whole) is not None:
            return importlib.import_module(whole)
    return getattr(thing, name)


def missing_names(source: str) -> Iterator[str]:
    """Names of Stoker that Python code imports or reaches through its modules, and that do not exist."""
    tree = ast.parse(source)
    modules: dict[str, object] = {}
    for module, name, known_as in _imports(tree):
        try:
            thing: object = importlib.import_module(module)
            modules[known_as or "stoker"] = member(thing, name) if name else thing if known_as else stoker
        except (AttributeError, ModuleNotFoundError) as problem:
            if not isinstance(problem, ModuleNotFoundError) or str(problem.name).startswith("stoker"):
                yield ".".join(filter(None, (module, name)))
    reached = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for whole in filter(re.compile(r"\w+(\.\w+)+").fullmatch, reached):
        first, *chain = whole.split(".")
        thing = modules.get(first)
        for name in chain:
            if not isinstance(thing, types.ModuleType):
                break
            try:
                thing = member(thing, name)
            except AttributeError:
                yield whole
                break


def _imports(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """Each import of Stoker: the module, the name in it (or none), and the name it is given (or none)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(one.name, "", one.asname) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(str(node.module), one.name, one.asname or one.name) for one in node.names]
        else:
            continue
        yield from (one for one in found if one[0].split(".")[0] == "stoker")


def missing_places(text: str) -> Iterator[str]:
    """Modules and files of the package, and names in them, that text has in backticks, and that do not exist."""
    for place in re.findall(r"`(?:src/stoker/|stoker\.)?([a-z]\w*(?:(?:\.\w+)+|(?:/\w+)+\.py))`", text):
        first, *rest = re.split(r"[./]", place.removesuffix(".py"))
        if (PACKAGE / first).is_dir() and rest != ["json"] and not _is_place(PACKAGE / first, rest):
            yield place


def _is_place(folder: Path, names: list[str]) -> bool:
    """Whether names lead to a module below a folder, or to what a module, or a package as a whole, speaks of."""
    for count, name in enumerate(names):
        module = folder / f"{name}.py"
        if module.exists() or not (folder / name).is_dir():
            spoken = module if module.exists() else folder / "__init__.py"
            rest = names[count + module.exists() :]
            return all(re.search(rf"\b{one}\b", spoken.read_text(encoding="utf-8")) for one in rest)
        folder /= name
    return True


@of([one for one in MODULES if not {*PEERS} & {*one.parents}])
def test_a_benchmark_imports(path: Path) -> None:
    """What it compares with may be missing here, but nothing of our own."""
    try:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] in OURS:
            raise
        pytest.skip(f"{problem.name} is not installed")


@of(MODULES)
def test_a_benchmark_uses_names_that_exist(path: Path) -> None:
    """In functions, too, which no import runs; and in what it says of itself."""
    source = path.read_text(encoding="utf-8")
    assert [*missing_names(source), *missing_places(source)] == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import stoker\ndef f():\n    return stoker.planning.expanded()", "stoker.planning.expanded"),
        ("def f():\n    from stoker.planning import expanded", "stoker.planning.expanded"),
        ("from stoker.planning import model as m\nm.memory.nothing.more", "m.memory.nothing.more"),
        ("from stoker.planning.model import memory\nmemory.nothing", "memory.nothing"),
        ("import stoker.nowhere", "stoker.nowhere"),
    ],
)
def test_a_missing_name_is_found(source: str, missing: str) -> None:
    """However it is reached."""
    assert missing in set(missing_names(source))


def test_what_exists_is_not_missing() -> None:
    """Public names, modules below packages, and attributes of what is no module."""
    assert not [
        *missing_names("import stoker\nfrom stoker.records import Plan\nstoker.zoo.GPT.x\nstoker.plan\nPlan.no")
    ]
    assert not [*missing_places("`planning.model.memory`, `training/loop.py`, `torch.nn`, `nn.Linear`")]
    assert [*missing_places("`planning.memory`, `stoker.training.lop`")] == ["planning.memory", "training.lop"]


@pytest.mark.parametrize("folder", sorted(one.name for one in PACKAGE.iterdir() if one.is_dir()))
def test_a_package_speaks_of_places_that_exist(folder: str) -> None:
    """Docstrings and comments name modules that are there."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (PACKAGE / folder).rglob("*.py")}
    assert [(name, place) for name, text in texts.items() for place in missing_places(text)] == []
