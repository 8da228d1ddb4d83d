"""What a glance at a model's directory sees."""

from __future__ import annotations

import shutil
from pathlib import Path

from stoker.serving.repository.snapshots import settled, snapshot
from stoker.testing.models import tiny_artifact


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
    assert settled({"m": new}, {"m": old}, {"m": old}) == []
    assert settled({"m": new}, {"m": new}, {"m": old}) == ["m"]
    assert settled({"m": new}, {"m": new}, {"m": new}) == []
    assert settled({"m": new}, {}, {}) == []
    assert settled({"m": new}, {"m": new}, {}) == ["m"]
