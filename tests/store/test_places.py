from __future__ import annotations

from pathlib import Path

import pytest

from stoker.store import cache_root, runs_root


def test_runs_are_made_in_the_working_directory_unless_told_otherwise() -> None:
    """`$STOKER_RUNS` comes first; an empty one counts as none."""
    assert runs_root({"STOKER_RUNS": "/data/runs"}) == Path("/data/runs")
    assert runs_root({"STOKER_RUNS": ""}) == runs_root({}) == Path("runs")


def test_the_cache_follows_the_xdg_specification() -> None:
    """`$STOKER_CACHE`, then an absolute `$XDG_CACHE_HOME`, then the home directory."""
    assert cache_root({"STOKER_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/stoker")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "stoker"


def test_a_user_without_a_home_has_a_cache_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container started with a bare user number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_root({}).name.startswith("stoker-cache-")
