"""Nothing that comes by a socket or a file is unpickled: a pickle runs its writer's code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "stoker"

OWN_CHILDREN = {"store/child_process.py", "testing/ranks.py"}
"""Where a process and its own children talk over a pipe."""

UNPICKLING = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "check_tensor_meta",
    "_tensor_to_object",
    "dcp",
}
MODULES = {
    "pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "joblib",
    "torch.distributed.checkpoint",
    "torch.distributed.rpc",
}


def problems(path: Path) -> list[str]:
    """What in a file could unpickle."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        found += [name for name in names if name in MODULES]
        found += [name.rpartition(".")[2] for name in names if name.rpartition(".")[2] in UNPICKLING]
        if isinstance(node, ast.Attribute) and node.attr in UNPICKLING:
            found.append(node.attr)
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "load"
            and ast.unparse(node.func) in {"torch.load", "torch.export.load"}
        ):
            found.append(ast.unparse(node.func))
        if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "run_check"}:
            found += [node.arg] if not (isinstance(node.value, ast.Constant) and node.value.value is False) else []
    return found


@pytest.mark.slow
def test_nothing_from_outside_is_unpickled() -> None:
    """No object collective, no module that unpickles, anywhere but between a parent and its children."""
    files = {str(path.relative_to(SOURCE)): problems(path) for path in sorted(SOURCE.rglob("*.py"))}
    assert len(files) > 300
    assert {name: found for name, found in files.items() if found and name not in OWN_CHILDREN} == {}
    assert all(files[name] for name in OWN_CHILDREN)
