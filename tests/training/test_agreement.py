"""What processes tell each other between two updates; with several of them in `test_saving_together.py`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadRun, RunFailed
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.world import ALONE
from stoker.training import rank_messages
from stoker.training.rank_messages import (
    becomes_visible,
    decode_error,
    encode_error,
    gather_from_ranks,
    raise_first_error,
    raise_on_all_ranks,
    require_seen_by_each_rank,
    require_visible_to_all_ranks,
)


@pytest.mark.parametrize("kind", [RunFailed, BadRun, NotFinite])
def test_an_error_is_the_same_where_it_is_heard(kind: type[RunFailed]) -> None:
    """In class, words and remedy: recovery distinguishes a non-finite number from other failures by its class."""
    error = decode_error(encode_error(kind("a", remedy="b")))
    assert (type(error), error.message, error.remedy) == (kind, "a", "b")


def test_the_first_error_is_raised_and_without_any_nothing() -> None:
    """Everywhere the same one."""
    raise_first_error([None, None])
    with pytest.raises(BadRun, match="second"):
        raise_first_error([None, encode_error(BadRun("second")), encode_error(RunFailed("third"))])


def test_alone_there_is_nobody_to_ask() -> None:
    """One process agrees with itself."""
    assert gather_from_ranks(ALONE, 3) == [3]
    raise_on_all_ranks(ALONE, None)
    with pytest.raises(RunFailed, match="mine"):
        raise_on_all_ranks(ALONE, RunFailed("mine"))


def test_processes_that_do_not_see_are_named() -> None:
    """All of them, and the directory."""
    require_seen_by_each_rank(Path("d"), [True, True])
    with pytest.raises(BadRun, match=r"for all 4 processes: .* processes 1, 3 do not find") as one:
        require_seen_by_each_rank(Path("d"), [True, False, True, False])
    assert "disk that all machines share" in (one.value.remedy or "")


def test_what_comes_late_is_waited_for_a_while(tmp_path: Path, monkeypatch: Any) -> None:
    """A network file system may show it later; what never comes is not there."""
    monkeypatch.setattr(rank_messages, "APPEARS_S", 0.1)
    assert not becomes_visible(tmp_path / "never")
    monkeypatch.setattr(rank_messages, "APPEARS_S", 60.0)
    later = threading.Timer(0.1, (tmp_path / "late").touch)
    later.start()
    assert becomes_visible(tmp_path / "late")
    later.join()


def test_a_directory_is_left_as_it_was(tmp_path: Path) -> None:
    """Looking whether all see it leaves nothing; one that cannot be written to is reported."""
    require_visible_to_all_ranks(ALONE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunFailed, match="Cannot write a file that all processes look for"):
        require_visible_to_all_ranks(ALONE, tmp_path / "gone")
