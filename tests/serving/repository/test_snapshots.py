"""What a glance at a model's directory sees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stoker.serving.repository.discovery import settled_models, snapshot
from stoker.testing.tiny_models import tiny_artifact


def test_every_change_that_counts_is_seen(tmp_path: Path) -> None:
    """A new version, a file that is replaced, settings and a version that is gone change the snapshot."""
    artifact = tiny_artifact(tmp_path, name="digits")
    model = tmp_path / "digits"
    seen = [snapshot(model)]
    tiny_artifact(tmp_path, name="digits", seed=1)
    seen.append(snapshot(model))
    artifact.graph_path.write_bytes(b"another")
    seen.append(snapshot(model))
    (model / "service.json").write_text("{}")
    seen.append(snapshot(model))
    shutil.rmtree(model / "2")
    seen.append(snapshot(model))
    assert len(set(seen)) == len(seen)
    assert snapshot(model) == seen[-1]


def test_what_is_written_aside_is_not_seen(tmp_path: Path) -> None:
    """Hidden names and directories that are no versions change nothing, and neither does a model that is gone."""
    tiny_artifact(tmp_path, name="digits")
    model = tmp_path / "digits"
    before = snapshot(model)
    (model / ".writing-2-1-00000000").mkdir()
    (model / ".writing-2-1-00000000" / "model.onnx").write_bytes(b"half")
    (model / "notes").mkdir()
    (model / "notes" / "a.txt").write_text("a")
    assert snapshot(model) == before
    assert snapshot(tmp_path / "gone") == ()


def test_a_change_counts_once_it_rests_and_was_not_tried() -> None:
    """Two equal glances in a row, unlike the one that was last tried."""
    old, new = (("a", 1, 1, 1),), (("a", 2, 2, 1),)
    assert settled_models({"m": new}, {"m": old}, {"m": old}) == []
    assert settled_models({"m": new}, {"m": new}, {"m": old}) == ["m"]
    assert settled_models({"m": new}, {"m": new}, {"m": new}) == []
    assert settled_models({"m": new}, {}, {}) == []
    assert settled_models({"m": new}, {"m": new}, {}) == ["m"]


def test_links_within_a_version_are_not_followed(tmp_path: Path) -> None:
    """Two links to `.` make a tree without end; as links they are two entries."""
    artifact = tiny_artifact(tmp_path, name="digits")
    before = snapshot(tmp_path / "digits")
    for name in ("a", "b"):
        (artifact.path / name).symlink_to(".")
    assert len(snapshot(tmp_path / "digits")) == len(before) + 2
    (artifact.path / "c" / "d").mkdir(parents=True)
    (artifact.path / "c" / "d" / "up").symlink_to("../..")
    assert len(snapshot(tmp_path / "digits")) == len(before) + 3


def test_what_a_link_to_a_version_or_to_settings_leads_to_is_seen(tmp_path: Path) -> None:
    """Volumes of Kubernetes swap what a link points to."""
    artifact = tiny_artifact(tmp_path / "store", name="digits")
    model = tmp_path / "digits"
    model.mkdir()
    (model / "1").symlink_to(artifact.path)
    (tmp_path / "settings").write_text("{}")
    (model / "service.json").symlink_to(tmp_path / "settings")
    seen = [snapshot(model)]
    assert len(seen[0]) == 4
    (tmp_path / "settings").write_text("{ }")
    seen.append(snapshot(model))
    artifact.graph_path.write_bytes(b"another")
    seen.append(snapshot(model))
    assert len(set(seen)) == 3


def test_hidden_files_within_a_version_count(tmp_path: Path) -> None:
    """A version that is refused for one is tried again once it is gone."""
    artifact = tiny_artifact(tmp_path, name="digits")
    before = snapshot(tmp_path / "digits")
    (artifact.path / ".DS_Store").write_bytes(b"x")
    assert snapshot(tmp_path / "digits") != before


def test_a_model_of_very_many_files_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them are looked at than a bound."""
    tiny_artifact(tmp_path, name="digits")
    monkeypatch.setattr("stoker.serving.repository.discovery.MOST_FILES", 2)
    assert len(snapshot(tmp_path / "digits")) == 2
