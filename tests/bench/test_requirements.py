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


def installed_with_constraints() -> list[Path]:
    """The files whose own words say that they are installed under the project's constraints."""
    return sorted(p for p in (ROOT / "bench").rglob("requirements*.txt") if "-c constraints.txt" in p.read_text())


@pytest.mark.parametrize("path", installed_with_constraints(), ids=lambda path: str(path.relative_to(ROOT / "bench")))
def test_what_is_installed_under_constraints_keeps_to_them(path: Path) -> None:
    """pip refuses the whole file for one version that is another."""
    constraints, wanted = pinned(ROOT / "constraints.txt"), pinned(path)
    assert wanted
    assert {name: version for name, version in wanted.items() if constraints.get(name, version) != version} == {}
