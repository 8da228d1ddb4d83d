from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from stoker.errors import BadRun
from stoker.pool import events as on
from stoker.pool import log as log_module
from stoker.pool.events import canonical
from stoker.pool.log import EventLog, audit
from stoker.pool.state import State
from tests.pool.book import Book


def written(folder: Path, book: Book) -> Path:
    """The book's events in a log."""
    log = EventLog(folder / "log.db")
    for event in book.events:
        log.append(event)
    log.close()
    return log.path


def exported(folder: Path, book: Book) -> Path:
    """The book's events, one a line."""
    path = folder / "log.jsonl"
    path.write_bytes(b"".join(canonical(event.document()) + b"\n" for event in book.events))
    return path


def a_job() -> Book:
    """A pool in which a job ran, and was settled."""
    book = Book()
    book.finish(beats=3, blocks=2)
    book.pass_time(601)
    book.post(book.operator, on.Final(lease_id="job"))
    return book


def test_a_log_is_replayed_to_the_same_state(tmp_path: Path) -> None:
    """After a restart, balances, leases and records are what they were; and so they are for anyone with a copy."""
    book = a_job()
    log = EventLog(written(tmp_path, book))
    again, copy = log.replay(), State()
    log.close()
    found = audit(exported(tmp_path, book), state=copy, head=book.state.head)
    assert (found.problem, found.num_events) == ("", len(book.events))
    for state in (again, copy):
        assert state.accounts.balances == book.state.accounts.balances
        assert (state.leases, state.records, state.head) == (book.state.leases, book.state.records, book.state.head)


def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    """In an exported log the event that it is in is named: one bit of each of 300 bytes, drawn at random.

    When an event was received is the pool's word, which the hash in the next event seals: there that one may be named.
    """
    path = exported(tmp_path, a_job())
    content, draw = path.read_bytes(), random.Random(3)
    for place in draw.sample(range(len(content)), 300):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        event = content[:place].count(b"\n") + 1
        line_start = content.rfind(b"\n", 0, place) + 1
        is_time = content[line_start:place].rpartition(b'"')[0].endswith(b'"received_s')
        assert audit(path).bad_event in ((event, event + 1) if is_time else (event,)), f"byte {place}"


def test_one_flipped_bit_of_the_database_is_found(tmp_path: Path) -> None:
    """Or it changed nothing that is said: bytes that SQLite does not use are in the file too."""
    book = a_job()
    path, draw = written(tmp_path, book), random.Random(4)
    content = path.read_bytes()
    found = 0
    for place in draw.sample(range(len(content)), 200):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        state = State()
        result = audit(path, state=state)
        if result.problem:
            found += 1
            assert f"event {result.bad_event}" in result.problem or "after event" in result.problem
        else:
            assert (state.head, state.seq) == (book.state.head, book.state.seq)
    assert found > 50


def test_a_log_that_was_cut_short(tmp_path: Path) -> None:
    """Its beginning is a good log; only a receipt of what is missing shows it."""
    book = a_job()
    path = exported(tmp_path, book)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    assert not audit(path).problem
    assert "cut short" in audit(path, head=book.state.head).problem


def test_forged_events_are_named(tmp_path: Path) -> None:
    """An event that another key signed is found by its signature, though all hashes are right."""
    book = Book()
    event = book.event(book.operator, on.Deposited(account=book.agent.public, amount=10**9))
    forged = log_module.read_event({**event.document(), "signature": book.agent.sign(event.draft.message())})
    log_module.apply(book.state, forged)
    book.events.append(forged)
    found = audit(written(tmp_path, book))
    assert found.bad_event == len(book.events)
    assert "its signature is not of" in found.problem


def test_a_signature_has_one_spelling(tmp_path: Path) -> None:
    """Digits in upper case verify as well in most libraries; here they are a changed log, also in its last event."""
    path = exported(tmp_path, a_job())
    lines = path.read_text().splitlines(keepends=True)
    head, _, signature = lines[-1].partition('"signature":"')
    path.write_text("".join(lines[:-1]) + head + '"signature":"' + signature[:128].upper() + signature[128:])
    assert audit(path).bad_event == len(lines)


def test_a_damaged_log_is_not_served(tmp_path: Path) -> None:
    """The control plane stops with the number of the event, and changes nothing."""
    book = a_job()
    path = written(tmp_path, book)
    sql = sqlite3.connect(path)
    sql.executescript(
        "DROP TRIGGER no_update; UPDATE events SET document = replace(document, 'beat', 'boat') WHERE seq=9"
    )
    sql.close()
    log = EventLog(path)
    with pytest.raises(BadRun, match="event 9"):
        log.replay()
    log.close()


def test_the_log_only_grows(tmp_path: Path) -> None:
    """The database itself refuses to change or delete an event."""
    sql = sqlite3.connect(written(tmp_path, Book()))
    for statement in ("UPDATE events SET kind='x'", "DELETE FROM events", "UPDATE events SET seq=9"):
        with pytest.raises(sqlite3.Error):
            sql.execute(statement)
    sql.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second control plane on the same folder is refused; when the first has gone, it may."""
    log = EventLog(tmp_path / "log.db")
    with pytest.raises(BadRun, match="another process serves"):
        EventLog(tmp_path / "log.db")
    log.close()
    EventLog(tmp_path / "log.db").close()


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SQLite's log may be damaged, nothing is written."""
    monkeypatch.setattr(log_module, "is_on_network", lambda _: True)
    with pytest.raises(BadRun, match="network file system"):
        EventLog(tmp_path / "pool" / "log.db")
    assert not (tmp_path / "pool").exists()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """An event that cannot be written is refused with the reason, and the same one is taken once there is room."""
    book, log = a_job(), EventLog(tmp_path / "log.db")
    log._sql.execute("PRAGMA max_page_count=6")
    left = list(book.events)

    def fill() -> None:
        while left:
            log.append(left[0])
            del left[0]

    with pytest.raises(BadRun, match="full"):
        fill()
    assert 0 < len(left) < len(book.events)
    log._sql.execute("PRAGMA max_page_count=100000")
    fill()
    assert log.replay().head == book.state.head
    log.close()
