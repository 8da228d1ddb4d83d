"""`stoker ui`: what is wrong is said when it starts. The page itself: tests/web."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.cli import ui as command
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


def test_the_page_of_a_training_is_of_its_folder_and_of_no_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stoker train --ui`: of the run's own folder or the default one, whatever STOKER_RUNS and STOKER_POOL say."""
    started, ended = list[dict[str, str]](), list[str]()

    class Page:
        def __init__(self, arguments: Sequence[str], *, env: dict[str, str], **_: Any) -> None:
            assert list(arguments[1:]) == ["-m", "stoker", "ui", "--port", "0"]
            started.append(env)

        def terminate(self) -> None:
            ended.append("terminated")

        def wait(self) -> None:
            ended.append("gone")

    monkeypatch.setattr(subprocess, "Popen", Page)
    monkeypatch.setenv("STOKER_POOL", f"https://pool.example:8430#{'0' * 64}")
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path / "default"))
    monkeypatch.setenv("STOKER_CACHE", "kept")
    with command.local_page(False, tmp_path / "other" / "run"):
        assert started == []
    with pytest.raises(KeyboardInterrupt), command.local_page(True, tmp_path / "other" / "run"):
        raise KeyboardInterrupt
    with command.local_page(True, None):
        assert ended == ["terminated", "gone"]
    assert [Path(one["STOKER_RUNS"]).name for one in started] == ["other", "default"]
    assert {(one["STOKER_POOL"], one["STOKER_CACHE"]) for one in started} == {("", "kept")}
    assert ended == ["terminated", "gone"] * 2
