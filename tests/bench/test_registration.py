"""Results that say beforehand what will be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.forecast.registration import register, write
from stoker.records import digest


def test_what_will_be_measured_is_on_disk_with_its_digest(tmp_path: Path) -> None:
    """The file is there before there are results, and anybody can compute the digest again."""
    path = tmp_path / "results" / "one.json"
    register(path, "a test", "python -m nothing", {"plans": [1, 2]})
    written = json.loads(path.read_text())
    assert written["registered_digest"] == digest(written["registered"]) == digest({"plans": [1, 2]})
    assert written["machine"]["torch"]


def test_results_are_added_to_it(tmp_path: Path) -> None:
    """What was registered stays, and no half-written file is left."""
    path = tmp_path / "one.json"
    document = register(path, "a test", "python -m nothing", {"plans": [1, 2]})
    write(path, document | {"results": [3]})
    assert json.loads(path.read_text())["results"] == [3]
    assert [found.name for found in tmp_path.iterdir()] == ["one.json"]


def test_what_was_registered_cannot_be_changed_later(tmp_path: Path) -> None:
    """A forecast that is changed after the measurement is refused."""
    path = tmp_path / "one.json"
    document = register(path, "a test", "python -m nothing", {"plans": [1, 2]})
    document["registered"]["plans"].append(3)
    with pytest.raises(ValueError, match="has changed since"):
        write(path, document)
    assert json.loads(path.read_text())["registered"] == {"plans": [1, 2]}
