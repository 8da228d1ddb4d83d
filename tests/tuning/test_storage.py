"""The database of a study: made where it is not, and refused in words where it cannot be used."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stoker.errors import BadJob, BadRun, StokerError
from stoker.tuning import study_database
from stoker.tuning.study_database import open_storage, open_study


def test_a_study_is_made_and_found_again(tmp_path: Path) -> None:
    """In a file of its own."""
    made = open_study(open_storage("", tmp_path), "some", higher_is_better=True)
    made.set_user_attr("mark", 3)
    assert (tmp_path / "study.db").is_file()
    assert open_study(open_storage("", tmp_path), "some", higher_is_better=True).user_attrs == {"mark": 3}


@pytest.mark.parametrize(
    ("url", "kind"),
    [("no url", BadJob), ("nosuch://here/there", BadJob), ("sqlite:////no/such/folder/x.db", BadRun)],
)
def test_a_storage_that_cannot_be_had_is_refused(tmp_path: Path, url: str, kind: type[StokerError]) -> None:
    """A URL that is none, a database that is unknown, a folder that is not there."""
    with pytest.raises(kind) as error:
        open_storage(url, tmp_path)
    assert url in error.value.message
    assert error.value.remedy


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """It is named, and left as it is."""
    (tmp_path / "study.db").write_text("not a database at all, but long enough to be taken for one" * 40)
    with pytest.raises(BadRun, match="cannot be used"):
        open_storage("", tmp_path)


def test_a_study_on_a_network_file_system_has_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's shared memory does not reach another machine."""
    for is_network, expected in ((False, "wal"), (True, "delete")):
        place = tmp_path / expected
        place.mkdir()
        monkeypatch.setattr(study_database, "is_on_network", lambda _, answer=is_network: answer)
        open_study(open_storage("", place), "s", higher_is_better=True).ask()
        with closing(sqlite3.connect(place / study_database.FILE)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == (expected,)
