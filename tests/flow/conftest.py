"""Every test of a flow has a folder of its own to run in, with its own runs and cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test; runs are made in `runs` below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STOKER_RUNS", raising=False)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return tmp_path
