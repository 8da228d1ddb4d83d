from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.jobs.code_digest import executed_parts, reached_digest, source_digest
from stoker.jobs.local_imports import FreshLoader

NETS = """
import torch

class Net:
    size = 3

    def forward(self, x):
        return double(x)

def double(x):
    return 2 * x
"""
TRAIN = """
'''A job.'''
from nets import Net
RATE = 0.1

def loss(output, target):
    'Squared.'
    return (output - target) ** 2

def plot(history):
    return history

def job(lr: float = RATE):
    return Net(), loss, lr
"""
STATEMENTS, JOB, LOSS, PLOT = (
    "the statements of train.py",
    "function job in train.py",
    "function loss in train.py",
    "function plot in train.py",
)


def parts(train: str = TRAIN, nets: str = NETS) -> dict[str, str]:
    """What these two files execute."""
    return executed_parts({"train.py": train, "nets.py": nets})


def changed(train: str = TRAIN, nets: str = NETS) -> set[str]:
    """Names of the parts that differ from the files above."""
    before, now = parts(), parts(train, nets)
    return {name for name in before | now if before.get(name) != now.get(name)}


def test_the_parts_are_what_the_job_reaches() -> None:
    """Through other files; not what nothing names."""
    nets = {"class Net in nets.py", "function double in nets.py", "the statements of nets.py"}
    assert set(parts()) == {*nets, JOB, LOSS, STATEMENTS}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return (output - target) ** 2", "# the error\n    return ((output - target)\n            ** 2)"),
        ("'Squared.'", "'The squared error.'"),
        ("'''A job.'''", "'''Another text.'''"),
        ("    return history", "    print(history)"),
        ("def plot(history):\n    return history\n", ""),
        ("RATE = 0.1", "RATE = 0.1_0"),
        ("def job(", "class Unused(Net):\n    depth = 5\n\n\ndef job("),
        ("def job(", "if __name__ == '__main__':\n    print(plot([]))\n\ndef job("),
    ],
    ids=["comment", "docstring", "module docstring", "unused", "unused gone", "spelling", "unused class", "main"],
)
def test_what_is_not_executed_does_not_count(old: str, new: str) -> None:
    """Comments, formatting, docstrings, and functions and classes that nothing names."""
    assert old in TRAIN
    assert changed(TRAIN.replace(old, new)) == set()


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("** 2", "** 4", {LOSS}),
        ("RATE = 0.1", "RATE = 0.2", {STATEMENTS}),
        ("RATE = 0.1", "RATE = True", {STATEMENTS}),
        ("Net(), loss, lr", "Net(), plot, lr", {JOB, PLOT, LOSS}),
        ("Net(), loss, lr", "Net(), globals()['lo' + 'ss'], lr", {JOB, PLOT}),
        ("Net(), loss, lr", "Net(), getattr(nets, chosen), lr", {JOB, PLOT}),
        ("def plot(", "@register\ndef plot(", {PLOT, STATEMENTS}),
        ("def plot(history)", "def plot(history=seed(3))", {PLOT, STATEMENTS}),
        ("RATE = 0.1", "RATE = 0.1\nplot = None", {PLOT, STATEMENTS}),
        ("RATE = 0.1", "RATE = 0.1\nchosen = 'plot'", {PLOT, STATEMENTS}),
    ],
    ids=[
        "body",
        "constant",
        "type of a constant",
        "another one used",
        "computed name",
        "computed attribute",
        "registered",
        "executed default",
        "bound twice",
        "named by text",
    ],
)
def test_what_is_executed_counts_and_is_named(old: str, new: str, names: set[str]) -> None:
    """Every part that differs, and no other; where names are computed, all that could be meant."""
    assert old in TRAIN
    assert changed(TRAIN.replace(old, new, 1)) == names


def test_a_file_that_does_not_parse_counts_by_its_text() -> None:
    """Imported within `try`; what it would name is not known, so all counts."""
    assert "the text of nets.py" in parts(nets="class Net:")
    assert PLOT in parts(nets="class Net:")
    assert parts(nets="class Net:") != parts(nets="class Net: # ")


def test_a_class_that_registers_itself_counts() -> None:
    """Nothing names it, but its base keeps a list of what inherits from it."""
    base = "class Base:\n    def __init_subclass__(cls): found.append(cls)\nfound = []\n"
    text = base + "class A(Base):\n    size = 1\ndef job(): return found[-1], Base"
    assert "class A in a.py" in executed_parts({"a.py": text})


def load(folder: Path, text: str) -> ModuleType:
    """The module of that text."""
    path = folder / "own_losses.py"
    path.write_text(text)
    linecache.clearcache()
    loader = FreshLoader("own_losses", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("own_losses", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("def loss(a, b):\n    return a - b", "def loss(a, b):\n    'Text.'  # comment\n    return (a - b)"),
        ("loss = lambda a, b: a - b", "loss = lambda a, b: (a  -  b)"),
        (
            "class loss:\n    def __call__(self, a): return a",
            "class loss:\n    def __call__(self, a):\n        return a # ",
        ),
    ],
    ids=["function", "lambda", "class"],
)
def test_the_digest_of_a_function_is_of_what_it_does(tmp_path: Path, text: str, again: str) -> None:
    """Comments and spaces do not count."""
    changed = text.replace("return a", "return -a").replace(": a -", ": b +")
    first, second, other = (source_digest(load(tmp_path, version).loss) for version in (text, again, changed))
    assert first == second
    assert other != first


@pytest.mark.parametrize("text", ["def loss(a, b):\n    return a - b", "loss = lambda a, b: a - b"])
def test_a_digest_asks_no_other_module_for_its_file(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules import packages when they are asked for an attribute, and there are thousands."""
    asked: list[str] = []

    class Asked(ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "asked", Asked("asked"))
    assert source_digest(load(tmp_path, text).loss)
    assert asked == []


@pytest.mark.parametrize(
    "above",
    ["'''\nA text.\n'''\n\n", "def other():\n    return 0\n\n\n", "RATES = {\n    1: 2,\n\n}\n", "é = 'ééééééé'\n"],
    ids=["text", "function", "table", "letters"],
)
@pytest.mark.parametrize("text", ["\n\ndef loss(a, b):\n    return a - b\n", "\n\nloss = lambda a, b: a - b\n"])
def test_a_file_that_was_edited_since_its_import_still_has_a_digest(tmp_path: Path, text: str, above: str) -> None:
    """At its line is other code then, or half a text: it counts by its compiled code, and no other function's text."""
    module = load(tmp_path, text)
    file = Path(module.__file__ or "")
    before = source_digest(module.loss)
    file.write_text(above + text)
    edited = source_digest(module.loss)
    file.unlink()
    compiled = source_digest(module.loss)
    assert edited
    if module.loss.__name__ == "loss":
        assert edited in (before, compiled)


CELL = """
import functools
SCALE = 2

def halved(x):
    return x / SCALE

class Base:
    def run(self, x):
        return halved(x)

class Net(Base):
    @property
    def width(self):
        return inner()

def inner():
    return [helper(x) for x in range(3)]

def helper(x):
    return x

def unused():
    return 1

made = functools.partial(Net)
"""


def _reached(cell: str) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)  # noqa: S102 - as IPython does
    return reached_digest([names["made"]])


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("x / SCALE", "x // SCALE", True),
        ("SCALE = 2", "SCALE = 3", True),
        ("return x\n", "return -x\n", True),
        ("return 1", "return 2", False),
        ("def unused", "def other", False),
    ],
    ids=["a function of a base class", "a number", "within a comprehension", "what nothing reaches", "its name"],
)
def test_code_that_is_reached_by_name_counts(old: str, new: str, counts: bool) -> None:
    """However deep it is; what nothing reaches does not."""
    assert old in CELL
    assert (_reached(CELL.replace(old, new)) != _reached(CELL)) == counts
    assert _reached(CELL) == _reached(CELL)
