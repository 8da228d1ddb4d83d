"""What `import stoker` and the command line's start cost, counted in modules, and the names that are promised."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest

import stoker
from stoker import imports
from stoker.imports import collector_paused, older_objects_kept

# The public contract: names are added to it, and none of these goes away.
PROMISED = {
    "Adam",
    "AdamW",
    "Job",
    "Loss",
    "SGD",
    "data",
    "epochs",
    "holdout",
    "load",
    "log",
    "plan",
    "profile",
    "samples",
    "schedules",
    "seconds",
    "train",
    "transforms",
    "updates",
    "verify",
}

# What start-up must do without: each costs tens of milliseconds to seconds.
HEAVY = {"torch", "numpy", "plotly", "safetensors", "sympy", "jinja2"}

MOST_MODULES_OF_IMPORT = 70
MOST_MODULES_OF_HELP = 440  # Rich loads attrs where it is installed, and Typer pydantic


def _modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter loads for `code`, beyond those it starts with."""
    script = f"""
import sys
before = set(sys.modules)
{code}
import json
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def _packages(modules: set[str]) -> set[str]:
    """The top-level packages of `modules`."""
    return {name.partition(".")[0] for name in modules}


def _heaviest(modules: set[str]) -> list[tuple[int, str]]:
    """(number of modules, package), largest first: where a count that is too high comes from."""
    packages = [name.partition(".")[0] for name in modules]
    return sorted(((packages.count(package), package) for package in set(packages)), reverse=True)[:12]


def test_import_loads_nothing_but_the_standard_library() -> None:
    """`import stoker` touches no third-party package, least of all torch, and few modules altogether."""
    modules = _modules_after("import stoker")
    foreign = {package for package in _packages(modules) - set(sys.stdlib_module_names) if package[0] != "_"}
    assert foreign == {"stoker"}
    assert len(modules) <= MOST_MODULES_OF_IMPORT, _heaviest(modules)


@pytest.mark.parametrize(
    "command",
    [
        *("", "train", "plan", "lr-range"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("doctor", "verify", "report", "runs")),
    ],
)
def test_help_loads_nothing_heavy(command: str) -> None:
    """`stoker [COMMAND] --help` answers without torch, NumPy or plotly, and loads few modules."""
    modules = _modules_after(f"""
import runpy
sys.argv = ["stoker", *{command.split()!r}, "--help"]
try:
    runpy.run_module("stoker", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code, stop.code
""")
    assert "stoker.cli" in modules
    assert _packages(modules) & HEAVY == set()
    assert len(modules) <= MOST_MODULES_OF_HELP, _heaviest(modules)


def test_every_promised_name_is_exported() -> None:
    """The names of the public contract are in `stoker.__all__`."""
    assert set(stoker.__all__) >= PROMISED


def test_every_exported_name_resolves_and_is_listed() -> None:
    """Each name of `stoker.__all__` can be had, is there once, and shows up in `dir(stoker)`."""
    assert len(set(stoker.__all__)) == len(stoker.__all__)
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None, name
    assert set(stoker.__all__) <= set(dir(stoker))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="trane"):
        _ = stoker.trane  # type: ignore[attr-defined]


def test_a_study_opens_without_what_only_its_end_needs() -> None:
    """What mattered is computed once trials are finished, by a package that imports scikit-learn."""
    pytest.importorskip("optuna")
    modules = _modules_after("import stoker.tuning.study_database")
    assert "optuna" in modules
    assert _packages(modules) & (HEAVY - {"numpy"} | {"sklearn"}) == set()


@pytest.mark.slow
def test_the_verb_train_comes_without_what_only_its_report_needs() -> None:
    """The first update does not wait for Plotly and Jinja2."""
    code = "import json, sys, stoker; stoker.train; print(json.dumps(list(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    modules = json.loads(shown)
    assert "torch" in modules
    assert not {"plotly", "stoker.reporting.run_page"} & set(modules)


def test_a_name_that_is_loaded_already_leaves_the_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up again at each use, also in loops: the collector's counts must go on."""
    _ = stoker.train
    monkeypatch.setattr("stoker.api.collector_paused", lambda: 1 / 0)
    assert stoker.train is not None


class Node:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_the_collector_leaves_older_objects_alone_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after such a block within it; what is made within is found, and all else afterwards."""
    was_frozen = gc.get_freeze_count() > 0  # by the tests' set-up
    monkeypatch.setattr(imports, "_FROZEN_BY", set())
    gc.unfreeze()
    gc.disable()  # no collection but those asked for here
    try:
        old = weakref.ref(Node())
        with older_objects_kept():
            new = weakref.ref(Node())
            with older_objects_kept():
                gc.collect()
            gc.collect()
            assert new() is None
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()
        if was_frozen:
            gc.freeze()


def test_what_a_program_froze_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting visits every object, millions of them; it stays frozen, in blocks and after them."""
    counts = list[int]()
    monkeypatch.setattr(imports, "_FROZEN_BY", set())
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 10)
    monkeypatch.setattr(gc, "unfreeze", lambda: 1 / 0)
    for _ in range(3):
        with older_objects_kept(), collector_paused():
            _made = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    assert len(counts) == 1


def test_imports_pause_the_collector_and_lose_no_garbage() -> None:
    """Afterwards it is on again, what is there counts as old, and a full collection still finds what is unreachable."""
    with collector_paused():
        assert gc.get_threshold()[0] == 0
        with collector_paused():
            pass
        assert gc.get_threshold()[0] == 0
        gone = weakref.ref(Node())
        kept = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    assert gc.get_threshold()[0] > 0
    assert gc.get_count()[0] < len(kept)
    gc.collect()
    assert gone() is None
    try:
        with collector_paused():
            gc.disable()  # by what is imported, for good
        assert not gc.isenabled()
    finally:
        gc.enable()
