"""The access log."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.serving import access_log
from stoker.serving.access_log import AccessLog
from stoker.serving.service import AccessEntry
from tests.serving.waiting import until_on_threads

ONE = AccessEntry(protocol="http", method="GET", path="/v2", status=200, seconds=0.25)


def lines(path: Path) -> list[dict[str, object]]:
    """What is in a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_what_is_to_be_said(tmp_path: Path) -> None:
    """The time in UTC, and no empty fields."""
    log = AccessLog(tmp_path / "log", wall_clock=lambda: 86400.5)
    log(ONE)
    log.close()
    assert lines(tmp_path / "log") == [
        {
            "at": "1970-01-02T00:00:00.500+00:00",
            "protocol": "http",
            "method": "GET",
            "path": "/v2",
            "status": 200,
            "seconds": 0.25,
        }
    ]


def test_what_clients_make_long_is_cut(tmp_path: Path) -> None:
    """Ten thousand lines may wait for the disk, and an id may be as long as a body."""
    log = AccessLog(tmp_path / "log")
    log(replace(ONE, path="/" * 5000, id="i" * 5000, model="m" * 5000, version="1"))
    log.close()
    (line,) = lines(tmp_path / "log")
    assert [len(str(line[name])) for name in ("path", "id", "model", "version")] == [1000, 1000, 1000, 1]


def test_a_rotated_file_is_reopened(tmp_path: Path) -> None:
    """Lines from before go to the old file, those from afterwards to a new one of its name."""
    path = tmp_path / "log"
    log = AccessLog(path)
    log(ONE)
    until_on_threads(lambda: path.stat().st_size > 0)
    path.rename(tmp_path / "old")
    log.reopen()
    for _ in range(2):
        log(ONE)
    log.close()
    assert (len(lines(tmp_path / "old")), len(lines(path))) == (1, 2)


def test_where_no_new_file_can_be_opened_the_old_one_goes_on(tmp_path: Path) -> None:
    """A directory that is gone at the time of rotation loses no lines."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(folder / "log")
    folder.rename(tmp_path / "moved")
    log.reopen()
    log(ONE)
    log.close()
    assert len(lines(tmp_path / "moved" / "log")) == 1
    assert log.dropped == 1


def test_a_slow_disk_drops_lines_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound lines are dropped and counted; the call returns at once."""
    monkeypatch.setattr(access_log, "MOST_WAITING", 3)
    monkeypatch.setattr(AccessLog, "_write_all", lambda _self: None)
    log = AccessLog(tmp_path / "log")
    for _ in range(5):
        log(ONE)
    assert log.dropped == 2
    os.close(log._descriptor)


def test_a_full_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that the disk refuses are dropped, and later ones written."""
    path = tmp_path / "log"
    log, write, refusals = AccessLog(path), os.write, iter([OSError(28, "No space left on device")])

    def full(descriptor: int, content: bytes) -> int:
        for error in refusals:
            raise error
        return write(descriptor, content)

    monkeypatch.setattr(access_log.os, "write", full)
    log(ONE)
    until_on_threads(lambda: log.dropped == 1)
    for _ in range(2):
        log(ONE)
    log.close()
    assert (log.dropped, len(lines(path))) == (1, 2)


def test_a_pipe_that_is_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither logging nor rotating nor ending waits for the reader; what was not written is counted."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 65536)
    os.set_blocking(writer, True)
    monkeypatch.setattr(access_log.os, "dup", lambda _: writer)
    monkeypatch.setattr(access_log, "MOST_WAITING", 3)
    monkeypatch.setattr(access_log, "_CLOSING_S", 0.05)
    log = AccessLog(None)
    for _ in range(10):
        log(ONE)
    assert log.dropped >= 6
    log.reopen()
    log.close()
    assert log._thread.is_alive()  # it is still at its write
    os.close(reader)  # which now fails
    log.close()
    until_on_threads(lambda: not log._thread.is_alive())


def test_no_line_has_what_a_terminal_obeys(tmp_path: Path) -> None:
    """Paths and names come from clients: escapes of eight bits, and text that UTF-8 cannot hold, are written out."""
    log = AccessLog(tmp_path / "log")
    sent = "/\x1b[2J\x9b31m\x7f\ud800é"
    log(replace(ONE, path=sent))
    log.close()
    content = (tmp_path / "log").read_bytes()
    assert content.isascii()
    assert b"\x1b" not in content
    assert lines(tmp_path / "log")[0]["path"] == sent


def test_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a file, lines go where errors go."""
    log = AccessLog(None)
    log(ONE)
    log.reopen()
    log.close()
    assert json.loads(capfd.readouterr().err)["path"] == "/v2"


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """The path and the reason are named."""
    with pytest.raises(BadJob, match="nowhere/log cannot be written"):
        AccessLog(tmp_path / "nowhere" / "log")
