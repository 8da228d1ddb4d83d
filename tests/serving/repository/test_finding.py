"""Which directories are models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stoker.serving.repository import discovery
from stoker.serving.repository.discovery import find_models
from stoker.testing.tiny_models import tiny_artifact


def test_a_place_is_a_model_or_a_directory_of_models(tmp_path: Path) -> None:
    """Models are named for their directories; what is hidden, no directory or without a whole version is not seen."""
    for name in ("words", "digits", ".hidden"):
        tiny_artifact(tmp_path, name=name)
    (tmp_path / "half" / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("no model")
    assert list(find_models([tmp_path]).models) == ["digits", "words"]
    assert find_models([tmp_path / "words"]).models == {"words": tmp_path / "words"}
    assert list(find_models([tmp_path, tmp_path / "words"]).models) == ["digits", "words"]


def test_a_model_in_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker serve .` serves a model under the name of the directory, not as `.`."""
    tiny_artifact(tmp_path, name="digits")
    monkeypatch.chdir(tmp_path / "digits")
    assert list(find_models([Path()]).models) == ["digits"]


def test_two_models_of_one_name_are_a_fault(tmp_path: Path) -> None:
    """Both places are named, and the first one of them stays."""
    tiny_artifact(tmp_path / "a", name="digits")
    tiny_artifact(tmp_path / "b", name="digits")
    found = find_models([tmp_path / "a", tmp_path / "b"])
    assert "are both named 'digits'" in found.faults["digits"].message
    assert found.models == {"digits": tmp_path / "a" / "digits"}


def test_a_place_that_is_no_directory_is_a_fault_of_its_own(tmp_path: Path) -> None:
    """A path that is not there says so, and the others are looked at."""
    tiny_artifact(tmp_path, name="digits")
    found = find_models([tmp_path / "nowhere", tmp_path])
    assert "nowhere is not a directory" in found.faults[str(tmp_path / "nowhere")].message
    assert list(found.models) == ["digits"]


def test_a_sibling_that_cannot_be_read_is_told_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of another user; `lost+found` of a file system is no model, and not worth a word."""
    for name in ("digits", "private", "lost+found"):
        tiny_artifact(tmp_path, name=name)
    versions = discovery.artifacts.versions

    def forbidden(path: Path) -> tuple[int, ...]:
        if path.name in {"private", "lost+found"}:
            raise PermissionError(13, "Permission denied", str(path))
        return versions(path)

    monkeypatch.setattr(discovery.artifacts, "versions", forbidden)
    found = find_models([tmp_path])
    assert list(found.models) == ["digits"]
    assert found.problems == {"private": "its directory cannot be read: Permission denied"}


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    """It could not be written into any answer, nor into the metrics of the others."""
    tiny_artifact(tmp_path, name="digits")
    shutil.copytree(tmp_path / "digits", os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    found = find_models([tmp_path])
    assert list(found.models) == ["digits"]
    assert "not UTF-8" in found.problems["bad\\udcff"]
