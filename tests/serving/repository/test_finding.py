"""Which directories are models."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import BadArtifact
from stoker.serving.repository.finding import find_models
from stoker.testing.models import tiny_artifact


def test_a_place_is_a_model_or_a_directory_of_models(tmp_path: Path) -> None:
    """Models are named for their directories; what is hidden, no directory or without a whole version is not seen."""
    for name in ("words", "digits", ".hidden"):
        tiny_artifact(tmp_path, name=name)
    (tmp_path / "half" / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("no model")
    assert list(find_models([tmp_path])) == ["digits", "words"]
    assert find_models([tmp_path / "words"]) == {"words": tmp_path / "words"}
    assert list(find_models([tmp_path, tmp_path / "words"])) == ["digits", "words"]


def test_a_model_in_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker serve .` serves a model under the name of the directory, not as `.`."""
    tiny_artifact(tmp_path, name="digits")
    monkeypatch.chdir(tmp_path / "digits")
    assert list(find_models([Path()])) == ["digits"]


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    """Both places are named."""
    tiny_artifact(tmp_path / "a", name="digits")
    tiny_artifact(tmp_path / "b", name="digits")
    with pytest.raises(BadArtifact, match="are both named 'digits'"):
        find_models([tmp_path / "a", tmp_path / "b"])


def test_a_place_must_be_a_directory(tmp_path: Path) -> None:
    """A path that is not there says so."""
    with pytest.raises(BadArtifact, match="nowhere is not a directory"):
        find_models([tmp_path / "nowhere"])
