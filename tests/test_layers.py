"""The house of docs/design.md, held by pytest alone as well as by `make lint`."""

from __future__ import annotations

import ast
import graphlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "stoker"

DOWN = "Imports go one way, down"
TORCH_FREE = "What plans, reports and serves never reaches torch, nor does the ground"
STANDARD_LIBRARY = "Records, units and errors stand on the standard library alone"


def linted(config: Path, *options: str, where: Path = ROOT, path: Path | None = None) -> tuple[int, str]:
    """Exit code and words of import-linter, in a process of its own.

    It configures logging, which closes every handler there is; absl's, which other tests may have loaded, closes the
    standard error that it was made with.
    """
    check = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", check, "--config", str(config), "--no-cache", "--no-logo", *options],
        cwd=where,
        env=os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_contracts_of_pyproject_hold() -> None:
    """Imports go one way, down, and nothing that must start fast reaches torch."""
    status, words = linted(ROOT / "pyproject.toml")
    assert status == 0, words


def test_imports_for_types_go_down_as_well(tmp_path: Path) -> None:
    """What is imported under TYPE_CHECKING, which `make lint` leaves out, keeps to the layers."""
    config = tmp_path / "pyproject.toml"
    left_out, counted = (f"exclude_type_checking_imports = {value}" for value in ("true", "false"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert left_out in text
    config.write_text(text.replace(left_out, counted), encoding="utf-8")
    status, words = linted(config, "--contract", "layers")
    assert status == 0, words


def test_no_modules_import_each_other() -> None:
    """Not even inside a function: what two modules need is in a third."""
    graph = grimp.build_graph("stoker", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the modules


@pytest.mark.parametrize(
    ("where", "line", "contract"),
    [
        ("planning/broken.py", "from stoker import training", DOWN),
        ("records/broken.py", "from stoker import store", DOWN),
        ("unplaced/__init__.py", "", DOWN),
        ("planning/model/broken.py", "def late() -> None:\n    import torch", TORCH_FREE),
        ("records/broken.py", "import numpy", STANDARD_LIBRARY),
    ],
)
def test_a_break_is_caught(tmp_path: Path, where: str, line: str, contract: str) -> None:
    """Each contract fails when a file that breaks it is added to a copy of the package."""
    copy = tmp_path / "stoker"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / where).parent.mkdir(exist_ok=True)
    (copy / where).write_text(line + "\n", encoding="utf-8")
    status, words = linted(ROOT / "pyproject.toml", where=tmp_path, path=tmp_path)
    assert status == 1, words
    assert f"{contract} BROKEN" in words


def test_records_import_only_the_standard_library() -> None:
    """A record can be read by any Python, with nothing installed: not one third-party import, whatever its name."""
    foreign = []
    for path in [*(PACKAGE / "records").rglob("*.py"), PACKAGE / "units.py", PACKAGE / "errors.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            known = {*sys.stdlib_module_names, "stoker"}
            foreign += [f"{path.name}:{node.lineno} {name}" for name in names if name.split(".")[0] not in known]
    assert foreign == []
