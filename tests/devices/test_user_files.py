from __future__ import annotations

from pathlib import Path

import pytest

from stoker.devices.catalogue import user_file


@pytest.fixture
def root(tmp_path) -> Path:
    """A configuration directory with two files."""
    (tmp_path / "stoker").mkdir()
    for name in ("prices.csv", "prices.json"):
        (tmp_path / "stoker" / name).write_text("")
    return tmp_path


def test_the_variable_comes_first(root):
    """A file that is named is the one, even if it is not there: its reader says so."""
    found = user_file("STOKER_PRICES", "prices.csv", environ={"STOKER_PRICES": "x.csv", "XDG_CONFIG_HOME": str(root)})
    assert found == Path("x.csv")


def test_the_first_of_the_names_that_is_there(root):
    """In the configuration directory, in the order of the names."""
    environ = {"XDG_CONFIG_HOME": str(root)}
    assert user_file("X", "prices.csv", "prices.json", environ=environ) == root / "stoker" / "prices.csv"
    assert user_file("X", "none.csv", "prices.json", environ=environ) == root / "stoker" / "prices.json"
    assert user_file("X", "none.csv", environ=environ) is None


def test_below_the_home_directory(root):
    """Where nothing else is said; a relative directory is ignored, as is a missing home."""
    (root / ".config").mkdir()
    (root / "stoker").rename(root / ".config" / "stoker")
    home = {"HOME": str(root), "XDG_CONFIG_HOME": "relative"}
    assert user_file("X", "prices.csv", environ=home) == root / ".config" / "stoker" / "prices.csv"
    assert user_file("X", "prices.csv", environ={}) is None
