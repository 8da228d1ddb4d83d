"""What benchmarks install goes with what the project installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import locking

ROOT = Path(__file__).parents[2]
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;]+)", re.MULTILINE)


def pinned(path: Path) -> dict[str, str]:
    """Versions by normalized name."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in _PINNED.findall(path.read_text())}


def installed_with_constraints() -> list[str]:
    """The files that `make` installs under the project's constraints, each once."""
    return sorted(set(re.findall(r"-c constraints\.txt\b.*-r (bench/\S+)", (ROOT / "Makefile").read_text())))


@pytest.mark.parametrize("name", installed_with_constraints())
def test_what_is_installed_under_constraints_keeps_to_them(name: str) -> None:
    """Pip refuses the whole file for one version that is another."""
    constraints, wanted = pinned(ROOT / "constraints.txt"), pinned(ROOT / name)
    assert wanted
    assert {name: version for name, version in wanted.items() if constraints.get(name, version) != version} == {}


def test_every_pin_has_a_hash() -> None:
    """The lock is of the versions that constraints.txt pins, all but torch's, and names no place it came from."""
    assert locking.problems() == []
    assert "://" not in locking.HASHES.read_text(encoding="utf-8")


def test_a_pin_without_its_hash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version raised in one file alone is named with both versions; so is a line without a hash."""
    lines = locking.HASHES.read_text(encoding="utf-8").replace("numpy==", "numpy==0.")
    (tmp_path / "hashes.txt").write_text(f"{lines}stray==1\n", encoding="utf-8")
    monkeypatch.setattr(locking, "HASHES", tmp_path / "hashes.txt")
    assert [problem.split(":")[0] for problem in locking.problems()] == ["'stray==1' is no pin with a hash", "numpy"]
