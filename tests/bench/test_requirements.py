"""What benchmarks install goes with what the project installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;]+)", re.MULTILINE)


def pinned(path: Path) -> dict[str, str]:
    """Versions by normalized name."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in _PINNED.findall(path.read_text())}


def installed_with_constraints() -> list[str]:
    """The files that `make` installs under the project's constraints."""
    return re.findall(r"-c constraints\.txt\b.*-r (bench/\S+)", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("name", installed_with_constraints())
def test_what_is_installed_under_constraints_keeps_to_them(name: str) -> None:
    """Pip refuses the whole file for one version that is another."""
    constraints, wanted = pinned(ROOT / "constraints.txt"), pinned(ROOT / name)
    assert wanted
    assert {name: version for name, version in wanted.items() if constraints.get(name, version) != version} == {}
