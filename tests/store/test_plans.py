"""Decisions kept in the cache: what comes back, and what does not."""

from __future__ import annotations

import os
import time

import pytest

from stoker.records import Coupling, Decision
from stoker.records.plan import KeptDecision
from stoker.store.record_caches import LONGEST_KEPT_S, RecordCache, plan_cache

KEPT = KeptDecision(
    decision=Decision(device="cpu", candidates=(), rejected=(), explanation=("a line",), took_s=1.5),
    coupling=Coupling(kind="batch_norm", group=32, causes=("bn",), evidence="known"),
    at="2026-11-21T12:00:00+00:00",
)


@pytest.fixture
def cache(tmp_path) -> RecordCache[KeptDecision]:
    """Empty, in a directory of its own."""
    return plan_cache(tmp_path)


def test_what_was_kept_comes_back_under_its_key_alone(cache) -> None:
    """The decision with its coupling, as it was."""
    assert cache.read("job") is None
    cache.write(KEPT, "job")
    assert cache.read("job") == KEPT
    assert cache.read("another job") is None


def test_an_old_decision_is_made_anew(cache) -> None:
    """A machine changes within a month."""
    cache.write(KEPT, "job")
    (path,) = cache.directory.iterdir()
    then = time.time() - LONGEST_KEPT_S - 60
    os.utime(path, (then, then))
    assert cache.read("job") is None


def test_a_damaged_file_is_passed_over(cache) -> None:
    """Half a file, or one of another version, costs the planning it would have saved, and no more."""
    cache.write(KEPT, "job")
    (path,) = cache.directory.iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert cache.read("job") is None


@pytest.mark.parametrize("theirs", ["owner", "mode"])
def test_what_another_user_put_there_is_not_believed(cache, monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    """How samples are coupled decides what is learned, and a cache may be shared."""
    cache.write(KEPT, "job")
    (path,) = cache.directory.iterdir()
    if theirs == "mode":
        path.chmod(0o666)
    else:
        os.chown(path, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr("os.getuid", lambda: 12345)
    assert cache.read("job") is None
