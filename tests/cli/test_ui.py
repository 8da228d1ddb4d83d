"""`stoker ui`: what is wrong is said when it starts. The page itself: tests/web."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.web import ui


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is served instead of a page that would answer until a signal."""
    calls = list[Any]()

    def serve(folders: Sequence[Path], **options: Any) -> None:
        calls.append((folders, options))

    monkeypatch.setattr(ui, "serve_ui", serve)
    monkeypatch.delenv("STOKER_POOL", raising=False)
    return calls


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        ("https://pool.example:8430", "wanted https://HOST:PORT#KEY"),
        (f"http://pool.example:8430#{'0' * 64}", "has no TLS"),
    ],
)
def test_a_pool_that_cannot_be_asked_is_refused_at_the_start(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, pool: str, text: str
) -> None:
    """Named by the option or by STOKER_POOL: rather than by a sentence on one of the pages."""
    given = CliRunner().invoke(app, ["ui", "--pool", pool])
    monkeypatch.setenv("STOKER_POOL", pool)
    for result in (given, CliRunner().invoke(app, ["ui"])):
        assert (result.exit_code, served) == (2, [])
        assert text in " ".join(result.output.split())


def test_a_pool_with_its_key_is_shown(served: list[Any]) -> None:
    """The check takes nothing from addresses that are right."""
    address = f"https://pool.example:8430#{'0' * 64}"
    assert CliRunner().invoke(app, ["ui", "--pool", address]).exit_code == 0
    assert served[0][1]["pool"] is not None


def test_a_folder_that_is_not_there_is_said_and_a_file_is_refused(served: list[Any], tmp_path: Path) -> None:
    """A page may be opened before the first run; what is no folder never has one."""
    result = CliRunner().invoke(app, ["ui", str(tmp_path / "runz")])
    assert (result.exit_code, len(served)) == (0, 1)
    assert "there is no folder" in result.stderr
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["ui", str(tmp_path / "file")])
    assert (result.exit_code, len(served)) == (2, 1)
    assert "is no folder of runs" in " ".join(result.output.split())
